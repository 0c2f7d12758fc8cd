"""Messages and their data to the slots of flits."""

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR
from ..abi.flits import (
    DATA_CODE,
    FLIT_BITS,
    FLIT_HEADER,
    HEADER_BITS,
    LINE_CHUNKS,
    MAX_MESSAGES,
    MAX_ROLLOVER,
    SLOT_BITS,
    SLOTS,
    Side,
    formats,
)
from ..endpoint.messages import DRS, NDR, REQ, RWD
from ..structs import layout_of
from .credits import CreditPool, credit_members, told_of
from .lanes import LaneQueue
from .lines import Chunks
from .slots import put
from .stages import stage

SENT = {Side.HOST: {"req": REQ, "rwd": RWD}, Side.DEVICE: {"ndr": NDR, "drs": DRS}}
"""Streams of messages that a side sends."""
HEADER_WIDTH = {"req": M2S_REQ.width, "rwd": M2S_RWD.width, "ndr": S2M_NDR.width, "drs": S2M_DRS.width}
DATA_KIND = {Side.HOST: "rwd", Side.DEVICE: "drs"}
CREDIT_NAMES = ("req", "data", "rsp")
CREDITS = data.StructLayout(dict.fromkeys(CREDIT_NAMES, 4))
"""The three credit fields of a flit, zero where it has none."""
CREDIT_OF = {"req": "req", "rwd": "data", "ndr": "rsp", "drs": "data"}
MAX_PENDING = MAX_ROLLOVER + LINE_CHUNKS * MAX_MESSAGES["drs"]
_MAX_ADDED = LINE_CHUNKS * MAX_MESSAGES["drs"]


class Packer(wiring.Component):
    """Fills flits, one per cycle, by the rules of section 4.2.5.

    More than three chunks owed make an all-data flit. Else slots from 1 on have the chunks owed; then comes
    what fits of headers, the data header last, and behind it its data. Without a data header left over slots
    stay empty.

    - M2S: of Req and RwD one lies in slot 0 (H5, H4). A second Req lies in the first slot that the chunks
      owed leave (G4), or an RwD does (G5). With three chunks owed there is room for one header: each in turn.
    - S2M: one DRS and one NDR share slot 0 (H3), two NDR (H4) or two DRS (H5) have it; with more of both
      the NDR have it and the DRS lie in the first slot that the chunks owed leave (G6, or G4 for one).

    Parameters
    ----------
    side : whose messages.
    multi_data : the other end takes slots with several data headers (H5 and G6).
    depth : messages of a kind that wait for a flit; a power of two of at least 8.

    Members
    -------
    req, rwd (host) or ndr, drs (device) : In(stream) : messages.
    credits : In(CREDITS) : credit fields of a flit that was received in this cycle.
    data_allowed : In(1) : a flit may have a data header.
    wants : Out(1) : there is something to send.
    rolls : Out(1) : the next flit is an all-data flit.
    rolls_after : Out(1) : so is the one behind the flit that would be taken now.
    take : In(1) : the next flit is sent. Only with `wants`.
    flit : Out(512) : the flit taken `latency_cycles` ago, without ak and credits.
    all_data : Out(1) : that flit has no header.
    {kind}_left : Out, stalled : Out(1) : as in `credits.told_of`.

    Throughput is a flit per cycle, and a message of each kind per cycle from its stream.
    """

    latency_cycles = 2

    def __init__(self, *, side, multi_data=True, depth=8):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        if not isinstance(depth, int) or depth < 8 or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two of at least 8, not {depth!r}")
        self.side = side
        self.multi_data = multi_data
        self.depth = depth
        super().__init__(
            {
                **{name: In(stream.Signature(shape)) for name, shape in SENT[side].items()},
                "credits": In(CREDITS),
                "data_allowed": In(1),
                "wants": Out(1),
                "rolls": Out(1),
                "rolls_after": Out(1),
                "take": In(1),
                "flit": Out(FLIT_BITS),
                "all_data": Out(1),
                **credit_members(SENT[side]),
            }
        )

    def elaborate(self, platform):
        m = Module()
        pending = Signal(range(MAX_PENDING + 1))
        queues = self._queues(m)
        choice = self._m2s(m, queues, pending) if self.side is Side.HOST else self._s2m(m, queues, pending)
        all_data = Signal()
        count, later = Signal(range(LINE_CHUNKS + 1)), Signal(range(MAX_PENDING + 1))
        with m.If(all_data):
            m.d.comb += count.eq(SLOTS)
        with m.Elif(choice.data_in_h):
            m.d.comb += count.eq(SLOTS - 1)
        with m.Elif(choice.data_in_g):
            m.d.comb += count.eq(SLOTS - 2)
        with m.Else():
            m.d.comb += count.eq(pending)
        added = Mux(all_data, 0, choice.added)
        m.d.comb += [
            all_data.eq(pending > MAX_ROLLOVER),
            later.eq(pending + added - count),
            self.wants.eq(choice.some | (pending != 0)),
            self.rolls.eq(all_data),
            self.rolls_after.eq(later > MAX_ROLLOVER),
        ]
        with m.If(self.take):
            m.d.sync += pending.eq(later)
        told_of(m, self, queues)
        for name, (queue, pool) in queues.items():
            pops = Mux(self.take & ~all_data, choice.pops[name], 0)
            m.d.comb += [queue.pop.eq(pops), pool.spent.eq(pops)]
        self._assemble(m, choice, pending, count, all_data)
        return m

    def _queues(self, m):
        """For each kind its headers and its credits; lines of data go to `self._lines`."""
        queues = {}
        kind = DATA_KIND[self.side]
        lines = m.submodules.lines = Chunks(enables=self.side is Side.HOST, depth=self.depth)
        self._lines = lines
        for name in SENT[self.side]:
            messages = getattr(self, name)
            most = MAX_MESSAGES[name]
            # with a header its line's "there are byte enables"
            width = HEADER_WIDTH[name] + (name == "rwd")
            queue = m.submodules[f"{name}_headers"] = LaneQueue(shape=width, depth=self.depth, window=most)
            pool = m.submodules[f"{name}_credits"] = CreditPool(most=most)
            room = queue.level != self.depth
            if name == kind:
                room = room & (lines.level != self.depth)
                header = Value.cast(messages.payload.header)
                m.d.comb += [
                    lines.line.data.eq(messages.payload.data),
                    lines.push.eq(messages.valid & messages.ready),
                ]
                if name == "rwd":
                    m.d.comb += lines.line.enable.eq(messages.payload.enable)
                    header = Cat(header, ~messages.payload.enable.all())
            else:
                header = Value.cast(messages.payload)
            m.d.comb += [
                messages.ready.eq(room),
                Value.cast(queue.i[0]).eq(header),
                queue.push.eq(messages.valid & messages.ready),
                pool.code.eq(self.credits[CREDIT_OF[name]]),
            ]
            queues[name] = queue, pool
        return queues

    @staticmethod
    def _least(queue, pool, count):
        """Whether at least `count` messages can be sent."""
        return (queue.level >= count) & (pool.available >= count)

    def _m2s(self, m, queues, pending):
        (req, req_pool), (rwd, rwd_pool) = queues["req"], queues["rwd"]
        choice = _Choice(("req", "rwd"))
        h4, h5 = formats(self.side)[0]
        g4, g5 = formats(self.side)[1]
        one, two = self._least(req, req_pool, 1), self._least(req, req_pool, 2)
        write = self._least(rwd, rwd_pool, 1) & self.data_allowed
        room, write_first = pending < MAX_ROLLOVER, Signal()
        write_in_g, write_in_h, req_in_h, req_in_g = (Signal(name=n) for n in ("wg", "wh", "rh", "rg"))
        header = Value.cast(rwd.o[0])
        m.d.comb += [
            write_in_g.eq(write & one & room),
            write_in_h.eq(write & ~write_in_g & (~one | write_first)),
            req_in_h.eq(one & ~write_in_h),
            req_in_g.eq(two & req_in_h & ~write & room),
            choice.some.eq(write | one),
            choice.data_in_h.eq(write_in_h),
            choice.data_in_g.eq(write_in_g),
            choice.g.eq(write_in_g | req_in_g),
            choice.be.eq((write_in_h | write_in_g) & header[-1]),
            choice.added.eq(Mux(write_in_h | write_in_g, LINE_CHUNKS + header[-1], 0)),
            choice.pops["req"].eq(req_in_h + req_in_g),
            choice.pops["rwd"].eq(write_in_h | write_in_g),
            choice.h_code.eq(Mux(write_in_h, h4.code, h5.code)),
            choice.g_code.eq(Mux(write_in_g, g5.code, g4.code)),
        ]
        choice.empty_code = g4.code
        with m.If(self.take & one & write & ~self.rolls):
            m.d.sync += write_first.eq(~write_in_h & ~write_in_g)
        reqs = [Value.cast(req.o[n]) for n in range(2)]
        m.d.comb += [
            choice.h_bits.eq(
                Mux(
                    write_in_h, put(m, h4, [header]), put(m, h5, [reqs[0] & req_in_h.replicate(len(reqs[0]))])
                )
            ),
            choice.g_bits.eq(Mux(write_in_g, put(m, g5, [header]), put(m, g4, [reqs[1]]))),
        ]
        return choice

    def _s2m(self, m, queues, pending):
        (ndr, ndr_pool), (drs, drs_pool) = queues["ndr"], queues["drs"]
        choice = _Choice(("ndr", "drs"))
        _, h3, h4, h5 = formats(self.side)[0]
        g4, g5, g6 = formats(self.side)[1]
        n1, n2 = (Signal(name=f"ndr_{n}") for n in (1, 2))
        d1, d2, d3 = (Signal(name=f"drs_{n}") for n in (1, 2, 3))
        for n, signal in enumerate((n1, n2), 1):
            m.d.comb += signal.eq(self._least(ndr, ndr_pool, n))
        for n, signal in enumerate((d1, d2, d3), 1):
            several = self.multi_data or n == 1
            m.d.comb += signal.eq(self._least(drs, drs_pool, n) & self.data_allowed if several else 0)
        in_g, in_h, pair = Signal(), Signal(), Signal()
        m.d.comb += [
            in_g.eq((pending < MAX_ROLLOVER) & n1 & (d2 | (n2 & d1))),
            in_h.eq(d1 & ~in_g),
            pair.eq(in_h & d2 & ~n1),
            choice.some.eq(n1 | d1),
            choice.data_in_h.eq(in_h),
            choice.data_in_g.eq(in_g),
            choice.g.eq(in_g),
            choice.pops["ndr"].eq(Mux(in_h, n1 & ~pair, n1 + n2)),
            choice.pops["drs"].eq(Mux(in_g, d1 + d2 + d3, in_h + pair)),
            choice.added.eq(choice.pops["drs"] << 2),
            choice.h_code.eq(Mux(in_h, Mux(pair, h5.code, h3.code), h4.code)),
            choice.g_code.eq(Mux(d2, g6.code, g4.code)),
        ]
        choice.empty_code = g5.code

        def only(queue, n, there):
            message = Value.cast(queue.o[n])
            return message & there.replicate(len(message))

        m.d.comb += [
            choice.h_bits.eq(
                Mux(
                    in_h,
                    Mux(
                        pair,
                        put(m, h5, [only(drs, 0, d1), only(drs, 1, d2)]),
                        put(m, h3, [only(drs, 0, d1), only(ndr, 0, n1)]),
                    ),
                    put(m, h4, [only(ndr, 0, n1), only(ndr, 1, n2)]),
                )
            ),
            # G4 with one DRS and no NDR is G6 with one.
            choice.g_bits.eq(put(m, g6, [only(drs, n, there) for n, there in enumerate((d1, d2, d3))])),
        ]
        return choice

    def _assemble(self, m, choice, pending, count, all_data):
        """Two steps behind the decision: chunks in line, then slots."""
        plan = {
            "count": count,
            "all_data": all_data,
            "gap": Mux(choice.g & ~all_data, pending + 1, 0)[:2],  # the slot that has a header
            "data": Mux(choice.data_in_h, SLOTS - 1, pending)[:2],  # slots from 1 on that have data
            "rest": choice.data_in_g,  # and those behind the gap
            "h_bits": choice.h_bits[: SLOT_BITS - HEADER_BITS],
            "g_bits": choice.g_bits,
            "h_code": choice.h_code,
            "g_code": choice.g_code,
            "be": choice.be,
            "sz": choice.data_in_h | choice.data_in_g,
        }
        taken, first = stage(m, self.take, plan, "first")
        lines = self._lines
        m.d.comb += lines.count.eq(Mux(taken, first["count"], 0))
        later = {name: first[name] for name in (*_SLOT_NAMES, "all_data")}
        later |= {f"chunk{n}": lines.chunks[n] for n in range(SLOTS)}
        _, second = stage(m, taken, later, "second")
        self._slots(m, second, choice.empty_code)

    def _slots(self, m, plan, empty_code):
        """The flit of a plan and its chunks."""
        chunks = [plan[f"chunk{n}"] for n in range(SLOTS)]
        header = Signal(layout_of(FLIT_HEADER))
        m.d.comb += [
            self.all_data.eq(plan["all_data"]),
            header.be.eq(plan["be"]),
            header.sz.eq(plan["sz"]),
            header.slot0.eq(plan["h_code"]),
        ]
        slots = []
        for n in range(1, SLOTS):
            slot, code = Signal(SLOT_BITS, name=f"slot{n}"), header[f"slot{n}"]
            behind = (plan["gap"] != 0) & (plan["gap"] < n)
            with m.If(plan["gap"] == n):
                m.d.comb += [slot.eq(plan["g_bits"]), code.eq(plan["g_code"])]
            with m.Elif(Mux(behind, plan["rest"], plan["data"] >= n)):
                m.d.comb += [slot.eq(Mux(behind, chunks[max(n - 2, 0)], chunks[n - 1])), code.eq(DATA_CODE)]
            with m.Else():
                m.d.comb += code.eq(empty_code)
            slots.append(slot)
        m.d.comb += self.flit.eq(
            Mux(plan["all_data"], Cat(chunks), Cat(header.as_value(), plan["h_bits"], slots))
        )


_SLOT_NAMES = ("gap", "data", "rest", "h_bits", "g_bits", "h_code", "g_code", "be", "sz")


class _Choice:
    """What a flit with a header has beside the chunks owed."""

    def __init__(self, kinds):
        self.some = Signal(name="some")
        self.data_in_h, self.data_in_g = Signal(name="data_in_h"), Signal(name="data_in_g")
        self.g = Signal(name="header_in_g")
        self.be = Signal(name="be")
        self.added = Signal(range(_MAX_ADDED + 1), name="added")
        self.pops = {kind: Signal(range(MAX_MESSAGES[kind] + 1), name=f"pop_{kind}") for kind in kinds}
        self.h_bits, self.g_bits = Signal(SLOT_BITS, name="h_bits"), Signal(SLOT_BITS, name="g_bits")
        self.h_code, self.g_code = Signal(3, name="h_code"), Signal(3, name="g_code")
        self.empty_code = 0
