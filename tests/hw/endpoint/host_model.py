"""Golden model of the endpoint's decoding, a host that sends messages and receives answers, and a memory."""

import cocotb
from nearkv_hw.abi import cxl
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.owner import OWNER_BYTES
from nearkv_hw.abi.window import WINDOW_BYTES
from nearkv_hw.endpoint.messages import DRS, NDR, REQ, RWD
from nearkv_hw.interfaces import FabricRequest, FabricResponse
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles

ALL = (1 << LINE_BYTES) - 1


class Host:
    """The host's four streams; those of one `port` where the design has several."""

    def __init__(self, dut, idle=0.0, backpressure=0.0, port=None):
        self._with_data_first = False
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
        """All messages whose cycles there are, in order of arrival; ties as `Arrivals` has them."""
        order = []
        req_cycles = dict(zip(self.req.cycles, reqs, strict=True))
        rwd_cycles = dict(zip(self.rwd.cycles, rwds, strict=True))
        for cycle in sorted(req_cycles | rwd_cycles):
            now = [m for m in (req_cycles.get(cycle), rwd_cycles.get(cycle)) if m and valid(m)]
            if len(now) == 2:
                now = now[::-1] if self._with_data_first else now
                self._with_data_first = not self._with_data_first
            order += now
        return order


class Responder:
    """Memory or window: answers with faults and data of all kinds, in any order."""

    def __init__(self, dut, name, rng, idle=0.0, backpressure=0.0):
        self.source = StreamSource(dut, f"{name}_response", shape=FabricResponse, idle=idle)
        self.sink = StreamSink(dut, f"{name}_request", shape=FabricRequest, backpressure=backpressure)
        self.requests, self.answers = [], []
        self.holding = False
        self._rng = rng
        self._dut = dut
        cocotb.start_soon(self._run())

    async def _run(self):
        waiting = []
        while True:
            await cycles(self._dut, 1)
            for request in await self.sink.receive(len(self.sink)):
                self.requests.append(request)
                read = not request["write"]
                fault = self._rng.choice([0, 0, 0, 1, 2, 3]) if read else self._rng.choice([0, 0, 1, 3])
                data = self._rng.getrandbits(512) if fault in (0, 2) and read else 0
                self.answers.append((fault, data))
                waiting.append({"id": request["id"], "write": request["write"], "fault": fault, "data": data})
            if waiting and not self.holding and self._rng.random() < 0.5:
                self.source.send([waiting.pop(self._rng.randrange(len(waiting)))])


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


def place(message, capacity_lines, apertures, logical_devices=1):
    """("memory" or "window" or "outside", tenant, line) of a message's address and, with several logical
    devices, its LD-ID."""
    header = message.get("header", message)
    tenant, offset = divmod(header["address"], 2 * capacity_lines)
    if tenant >= apertures:
        return "outside", 0, 0
    if logical_devices > 1:
        part = offset * logical_devices // capacity_lines if offset < capacity_lines else None
        if header["ld_id"] != tenant * logical_devices // apertures or part not in (None, header["ld_id"]):
            return "outside", tenant, 0
    if offset < capacity_lines:
        return "memory", tenant, offset
    behind = 0 if tenant else OWNER_BYTES  # the owner's page
    if offset - capacity_lines < (WINDOW_BYTES + behind) // LINE_BYTES:
        return "window", tenant, offset - capacity_lines
    return "outside", tenant, 0


def request_of(message, tenant, line):
    """The access that a message becomes; fields without meaning left out."""
    header = message.get("header", message)
    request = {
        "line": line,
        "tenant": tenant,
        "id": header["tag"] | header["ld_id"] << 16,
        "write": int("header" in message),
    }
    if "header" in message:
        enable = message["enable"] if header["opcode"] == cxl.M2SRwDOp.MEM_WR_PTL else ALL
        request |= {"poison": header["poison"], "enable": enable, "data": message["data"]}
    return request


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
