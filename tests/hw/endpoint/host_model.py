"""Golden model of the endpoint's decoding, and a host that sends messages and receives answers."""

from nearkv_hw.abi import cxl
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.owner import OWNER_BYTES
from nearkv_hw.abi.window import WINDOW_BYTES
from nearkv_hw.endpoint.messages import DRS, NDR, REQ, RWD
from nearkv_sim.cocotb.streams import StreamSink, StreamSource

ALL = (1 << LINE_BYTES) - 1


class Host:
    """The host's four streams; those of one `port` where the design has several."""

    def __init__(self, dut, idle=0.0, backpressure=0.0, port=None):
        which = "" if port is None else f"_{port}"
        self.req = StreamSource(dut, f"m2s_req{which}", shape=REQ, idle=idle)
        self.rwd = StreamSource(dut, f"m2s_rwd{which}", shape=RWD, idle=idle)
        self.ndr = StreamSink(dut, f"s2m_ndr{which}", shape=NDR, backpressure=backpressure)
        self.drs = StreamSink(dut, f"s2m_drs{which}", shape=DRS, backpressure=backpressure)

    async def read(self, line, tag=0):
        """The answer to a MemRd."""
        self.req.send([req(cxl.M2SReqOp.MEM_RD, line, tag)])
        (answer,) = await self.drs.receive()
        return answer

    async def write(self, line, data, tag=0):
        """The completion of a MemWr."""
        self.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, line, data, tag)])
        (answer,) = await self.ndr.receive()
        return answer

    def arrived(self, reqs, rwds):
        """All messages that were sent, in order of arrival; ties as `Arrivals` has them."""
        order, with_data_first = [], False
        req_cycles = dict(zip(self.req.cycles, reqs, strict=True))
        rwd_cycles = dict(zip(self.rwd.cycles, rwds, strict=True))
        for cycle in sorted(req_cycles | rwd_cycles):
            now = [m for m in (req_cycles.get(cycle), rwd_cycles.get(cycle)) if m and valid(m)]
            if len(now) == 2:
                now = now[::-1] if with_data_first else now
                with_data_first = not with_data_first
            order += now
        return order


def req(opcode, line, tag=0, **more):
    """An M2S Req message to host address 64 * line."""
    return {"valid": 1, "opcode": int(opcode), "address": line, "tag": tag, **more}


def rwd(opcode, line, data, tag=0, enable=ALL, **more):
    """An M2S RwD message to host address 64 * line."""
    header = {"valid": 1, "opcode": int(opcode), "address": line, "tag": tag, **more}
    return {"header": header, "enable": enable, "data": data}


def valid(message):
    """Whether the message's valid bit is set."""
    return message.get("header", message)["valid"]


def place(message, capacity_lines, apertures):
    """("memory" or "window" or "outside", tenant, line) of a message's address."""
    line = message.get("header", message)["address"]
    tenant, offset = divmod(line, 2 * capacity_lines)
    if tenant >= apertures:
        return "outside", 0, 0
    if offset < capacity_lines:
        return "memory", tenant, offset
    behind = 0 if tenant else OWNER_BYTES  # the owner's page
    if offset - capacity_lines < (WINDOW_BYTES + behind) // LINE_BYTES:
        return "window", tenant, offset - capacity_lines
    return "outside", tenant, 0


def kind(message):
    """What a message's opcode asks for: "read", "write", "none" (no answer), "complete", "refuse"."""
    if "header" in message:
        return "write" if message["header"]["opcode"] in (1, 2) else "complete"
    names = {1: "read", 2: "read", 3: "none", 4: "none", 8: "none", 12: "none", 5: "refuse", 6: "refuse"}
    return names.get(message["opcode"], "complete")


def unsupported(message):
    """Whether the device counts the message as one that it does not have."""
    return kind(message) not in ("read", "write") and not (
        "header" not in message and message["opcode"] in (0, 8, 9, 10)
    )


def answer(message, fault=0, data=0):
    """What the host sees: ("ndr" or "drs", tag, ld_id, opcode, poison, data); None for no answer.

    `fault` and `data` are the memory's or window's answer; for an access outside, fault 3.
    """
    header = message.get("header", message)
    what, common = kind(message), (header["tag"], header.get("ld_id", 0))
    if what == "none":
        return None
    if what in ("write", "complete"):
        return ("ndr", *common, 0, 0, 0)
    nxm = what == "refuse" or fault in (1, 3)
    return ("drs", *common, int(nxm), int(fault == 2 and not nxm), 0 if nxm else data)


def seen(ndrs, drss):
    """Answers as `answer` has them; checks what must be the same in all."""
    for header in [*ndrs, *(drs["header"] for drs in drss)]:
        assert (header["valid"], header["meta_field"], header["meta_value"]) == (1, 3, 0)
        assert header.get("reserved", 0) == 0
    return [
        *(("ndr", n["tag"], n["ld_id"], n["opcode"], 0, 0) for n in ndrs),
        *(
            ("drs", h["tag"], h["ld_id"], h["opcode"], h["poison"], drs["data"])
            for drs in drss
            for h in [drs["header"]]
        ),
    ]
