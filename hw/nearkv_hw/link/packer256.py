"""Messages and their data to the beats of 256-byte flits."""

from operator import add

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import LINE_CHUNKS, SLOT_BITS, SLOTS, Side
from ..abi.flits256 import (
    BEAT_BITS,
    BEATS,
    CREDIT_BITS,
    CREDIT_CODES,
    CREDIT_NAMES,
    FORMAT,
    FORMAT_BITS,
    GROUP_MESSAGES,
    H_AT,
    LAST_SLOT,
    MAX_H_BACKLOG,
    MESSAGES,
    PHY_BITS,
    kinds,
    message_slots,
)
from ..common.buffer import Buffer
from ..common.trees import reduce_tree
from .credits import CreditPool, credit_members, told_of
from .lanes import LaneQueue
from .lines import Chunks
from .packer import CREDIT_OF, SENT
from .slots import converted
from .stages import finds_room, stage

CREDITS_256 = data.StructLayout(dict.fromkeys(CREDIT_NAMES, CREDIT_BITS))
"""The three credit fields of a flit, zero where it returns none."""
FLUSH_CYCLES = 24
"""Cycles that credits wait for messages to go with, until a flit is sent for them."""
_MOST = {"req": 2, "rwd": 1, "ndr": 3, "drs": 3}
"""Messages of a kind in a beat."""


class Packer256(wiring.Component):
    """Fills flits beat by beat, by the rules of section 4.3.

    Slots behind slot 0 have the chunks owed, then headers, the data header last and behind it its data.
    Slot 0 has no data but headers: of S2M one or two DRS, or NDR if there are none; of M2S a Req or an RwD,
    each in turn. Of a beat's other slots one at most has messages without data, and one more a data header or
    a second Req; where only one of both fits, each comes in turn.

    No beat has more than half of what two beats may have of Req, RwD and NDR; DRS are counted. Slot 0 takes a
    single DRS when three chunks are owed: with two the chunks owed would end with the third beat, and three
    headers in the last would leave none to the next flit's slot 0.

    Parameters
    ----------
    side : whose messages.
    depth : messages of a kind that wait for a flit; a power of two of at least 8.

    Members
    -------
    req, rwd (host) or ndr, drs (device) : In(stream) : messages.
    credits : In(CREDITS_256) : credit fields of a flit that was received in this cycle.
    owed : In(CREDITS_256) : the fields that return the most. some_owed : In(1) : there are credits.
    credits_taken : Out(1) : they are in this flit.
    o : Out(stream(512)) : beats, four for a flit; the physical layer's header, CRC and FEC are zero.
    {kind}_left : Out, stalled : Out(1) : as in `credits.told_of`.

    Latency is `latency_cycles` from a message to `o`, where a flit begins with it. Throughput is a beat per
    cycle, and a message of each kind per cycle from its stream.
    """

    latency_cycles = 4

    def __init__(self, *, side, depth=8):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        if not isinstance(depth, int) or depth < 8 or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two of at least 8, not {depth!r}")
        self.side = side
        self.depth = depth
        super().__init__(
            {
                **{name: In(stream.Signature(shape)) for name, shape in SENT[side].items()},
                "credits": In(CREDITS_256),
                "owed": In(CREDITS_256),
                "some_owed": In(1),
                "credits_taken": Out(1),
                "o": Out(stream.Signature(BEAT_BITS)),
                **credit_members(SENT[side]),
            }
        )

    def elaborate(self, platform):
        m = Module()
        queues = self._queues(m)
        beat = Signal(range(BEATS))
        pending = Signal(range(MAX_H_BACKLOG + LINE_CHUNKS * 2 + 1))
        slots = Signal(range(SLOTS + 1))
        m.d.comb += slots.eq(SLOTS - (beat == 0) - (beat == BEATS - 1))
        choice = (self._m2s if self.side is Side.HOST else self._s2m)(m, queues, beat == 0, pending, slots)
        waited = Signal(range(FLUSH_CYCLES + 1))
        go, wanted = Signal(), Signal()
        m.d.comb += [
            wanted.eq((beat != 0) | choice.some | (pending != 0) | (waited == FLUSH_CYCLES)),
            go.eq(self._room(m, go) & wanted),
            self.credits_taken.eq(go & (beat == BEATS - 1)),
        ]
        with m.If(self.credits_taken | ~self.some_owed):
            m.d.sync += waited.eq(0)
        with m.Elif(waited != FLUSH_CYCLES):
            m.d.sync += waited.eq(waited + 1)

        # With a data header in slot 0 more is owed than the beat has slots.
        h_data = choice.h_added != 0
        first = Signal(range(SLOTS + 1))  # slots with data before headers
        rest, count = Signal(range(SLOTS + 1)), Signal(range(SLOTS + 1))
        m.d.comb += [
            choice.room.eq(Cat(pending < slots, pending + 1 < slots) & (~h_data).replicate(2)),
            first.eq(Mux(h_data | (pending >= slots), slots, pending)),
            rest.eq(Mux(choice.b_data, slots - first - choice.has_a - 1, 0)),
            count.eq(first + rest),
        ]
        with m.If(go):
            m.d.sync += [beat.eq(beat + 1), pending.eq(pending + choice.h_added + choice.g_added - count)]
        choice.step(m, go)
        told_of(m, self, queues)
        for name, (queue, pool) in queues.items():
            pops = Mux(go, choice.pops[name], 0)
            m.d.comb += [queue.pop.eq(pops), pool.spent.eq(pops)]
        self._assemble(m, go, choice, beat, count, first)
        return m

    def _queues(self, m):
        """For each kind its headers and its credits; lines of data go to `self._lines`."""
        queues = {}
        lines = m.submodules.lines = self._lines = Chunks(enables=self.side is Side.HOST, depth=self.depth)
        for name in kinds(self.side):
            messages = getattr(self, name)
            with_data = name in ("rwd", "drs")
            header = Value.cast(messages.payload.header if with_data else messages.payload)
            room = Signal(name=f"{name}_room")
            if name == "rwd":
                header = Cat(header, ~messages.payload.enable.all())
                m.d.comb += lines.line.enable.eq(messages.payload.enable)
            most = _MOST[name]
            queue = LaneQueue(shape=len(header), depth=self.depth, window=most)
            pool = CreditPool(most=most, codes=CREDIT_CODES[name])
            m.submodules[f"{name}_headers"], m.submodules[f"{name}_credits"] = queue, pool
            pushes = messages.valid & room
            m.d.comb += [
                room.eq(queue.level != self.depth),
                messages.ready.eq(room),
                Value.cast(queue.i[0]).eq(header),
                queue.push.eq(pushes),
                pool.code.eq(self.credits[CREDIT_OF[name]]),
            ]
            if with_data:
                m.d.comb += [
                    room.eq((queue.level != self.depth) & (lines.level != self.depth)),
                    lines.line.data.eq(messages.payload.data),
                    lines.push.eq(pushes),
                ]
            queues[name] = queue, pool
        return queues

    def _room(self, m, go):
        """Whether a beat that is decided on now finds a place at the output."""
        depth = self.latency_cycles + 1
        m.submodules.out = self._out = out = Buffer(shape=BEAT_BITS, depth=depth)
        wiring.connect(m, out.o, wiring.flipped(self.o))
        return finds_room(m, self.o, depth=depth, goes=go)

    @staticmethod
    def _least(m, queue, pool, most):
        """For each count up to `most` whether as many messages can be sent."""
        least = Signal(most)
        m.d.comb += least.eq(
            Cat((queue.level >= count) & (pool.available >= count) for count in range(1, most + 1))
        )
        return least

    def _m2s(self, m, queues, begins, pending, slots):
        (req, req_pool), (rwd, rwd_pool) = queues["req"], queues["rwd"]
        choice = _Choice(("req", "rwd"))
        reqs, write = self._least(m, req, req_pool, 2), self._least(m, rwd, rwd_pool, 1)
        line = LINE_CHUNKS + Value.cast(rwd.o[0])[-1]
        h_write, h_req, b_write, b_req, write_first = (
            Signal(name=name) for name in ("h_write", "h_req", "b_write", "b_req", "write_first")
        )
        m.d.comb += [
            choice.some.eq(write | reqs[0]),
            h_write.eq(begins & write & (pending <= MAX_H_BACKLOG) & (~reqs[0] | write_first)),
            h_req.eq(begins & reqs[0] & ~h_write),
            choice.h_added.eq(Mux(h_write, line, 0)),
            choice.has_a.eq(
                choice.room[0]
                & Mux(h_req, reqs[1], reqs[0])
                & ~(write & ~h_write & ~choice.room[1] & write_first)
            ),
            b_write.eq(write & ~h_write & Mux(choice.has_a, choice.room[1], choice.room[0])),
            b_req.eq(choice.has_a & choice.room[1] & ~b_write & ~h_req & reqs[1]),
            choice.has_b.eq(b_write | b_req),
            choice.b_data.eq(b_write),
            choice.g_added.eq(Mux(b_write, line, 0)),
            choice.pops["req"].eq(h_req + choice.has_a + b_req),
            choice.pops["rwd"].eq(h_write | b_write),
        ]
        choice.remember(write_first, write & ~h_write & ~b_write)
        choice.empty = FORMAT["req"]
        a_req = Mux(h_req, Value.cast(req.o[1]), Value.cast(req.o[0]))
        m.d.comb += [
            choice.h.eq(
                Mux(
                    h_write,
                    _slot(H_AT, "rwd", [(rwd.o[0], h_write)]),
                    _slot(H_AT, "req", [(req.o[0], h_req)]),
                )
            ),
            choice.a.eq(_slot(FORMAT_BITS, "req", [(a_req, 1)])),
            choice.b.eq(
                Mux(
                    b_write,
                    _slot(FORMAT_BITS, "rwd", [(rwd.o[0], 1)]),
                    _slot(FORMAT_BITS, "req", [(req.o[1], 1)]),
                )
            ),
        ]
        return choice

    def _s2m(self, m, queues, begins, pending, slots):
        (ndr, ndr_pool), (drs, drs_pool) = queues["ndr"], queues["drs"]
        choice = _Choice(("ndr", "drs"))
        ndrs, waiting = self._least(m, ndr, ndr_pool, 3), self._least(m, drs, drs_pool, 3)
        before, lines = (
            Signal(range(GROUP_MESSAGES["drs"] + 1)),
            Signal(3),
        )  # of the last beat; of this, at most
        h_drs, h_ndr, b_drs = Signal(2), Signal(2), Signal(3)
        drs_first = Signal()
        m.d.comb += [
            lines.eq(waiting & Cat(before < 3 - n for n in range(3))),
            choice.some.eq(ndrs[0] | waiting[0]),
            h_drs[0].eq(begins & lines[0] & (pending <= MAX_H_BACKLOG)),
            h_drs[1].eq(h_drs[0] & lines[1] & (pending != SLOTS - 1)),
            h_ndr.eq(ndrs[:2] & (begins & ~h_drs[0]).replicate(2)),
            choice.h_added.eq((h_drs[0] + h_drs[1]) << 2),
            choice.has_a.eq(choice.room[0] & ndrs[0] & ~h_ndr[0] & ~(lines[0] & ~choice.room[1] & drs_first)),
            b_drs.eq(lines & (~h_drs[0] & Mux(choice.has_a, choice.room[1], choice.room[0])).replicate(3)),
            choice.has_b.eq(b_drs[0]),
            choice.b_data.eq(b_drs[0]),
            choice.g_added.eq(_count(b_drs) << 2),
            choice.pops["ndr"].eq(Mux(choice.has_a, _count(ndrs), _count(h_ndr))),
            choice.pops["drs"].eq(_count(h_drs) + _count(b_drs)),
        ]
        choice.remember(before, choice.pops["drs"])
        choice.remember(drs_first, lines[0] & ~h_drs[0] & ~b_drs[0])
        choice.empty = FORMAT["ndr"]
        m.d.comb += [
            choice.h.eq(
                Mux(
                    h_drs[0],
                    _slot(H_AT, "drs", list(zip(drs.o, h_drs, strict=False))),
                    _slot(H_AT, "ndr", list(zip(ndr.o, h_ndr, strict=False))),
                )
            ),
            choice.a.eq(_slot(FORMAT_BITS, "ndr", list(zip(ndr.o, ndrs, strict=True)))),
            choice.b.eq(_slot(FORMAT_BITS, "drs", list(zip(drs.o, b_drs, strict=True)))),
        ]
        return choice

    def _assemble(self, m, go, choice, beat, count, first):
        """Three steps behind the decision: chunks in line, slots, the output."""
        plan = {
            "count": count,
            "first": first,
            "begins": beat == 0,
            "ends": beat == BEATS - 1,
            "has_a": choice.has_a,
            "has_b": choice.has_b,
            "b_data": choice.b_data,
            "h": choice.h,
            "a": choice.a,
            "b": choice.b,
            "credits": Value.cast(self.owed),
        }
        taken, plan = stage(m, go, plan, "first")
        m.d.comb += self._lines.count.eq(Mux(taken, plan.pop("count"), 0))
        plan |= {f"chunk{n}": self._lines.chunks[n] for n in range(SLOTS)}
        there, plan = stage(m, taken, plan, "second")
        chunks = [plan[f"chunk{n}"] for n in range(SLOTS)]
        filled = []
        a_at = plan["first"]
        b_at = Signal(range(SLOTS + 2))
        m.d.comb += b_at.eq(plan["first"] + plan["has_a"])
        for n in range(SLOTS):
            slot = Signal(SLOT_BITS, name=f"filled{n}")
            with m.If(plan["first"] > n):
                m.d.comb += slot.eq(chunks[n])
            with m.Elif(plan["has_a"] & (a_at == n)):
                m.d.comb += slot.eq(plan["a"])
            with m.Elif(plan["has_b"] & (b_at == n)):
                m.d.comb += slot.eq(plan["b"])
            with m.Elif(plan["b_data"] & (b_at < n)):
                m.d.comb += slot.eq(Mux(plan["has_a"], chunks[max(n - 2, 0)], chunks[max(n - 1, 0)]))
            with m.Else():
                m.d.comb += slot.eq(choice.empty)
            filled.append(slot)
        last = Mux(plan["ends"], plan["credits"], filled[LAST_SLOT])
        m.d.comb += [
            self._out.i.valid.eq(there),
            self._out.i.payload.eq(
                Mux(plan["begins"], Cat(plan["h"], filled[: SLOTS - 1]), Cat(filled[:LAST_SLOT], last))
            ),
        ]


class _Choice:
    """What a beat has beside the chunks owed: messages in slot 0 (h), one more slot (a), and a last (b)."""

    def __init__(self, kinds):
        self.some = Signal(name="some")
        self.h, self.a, self.b = (Signal(SLOT_BITS, name=name) for name in ("h", "a", "b"))
        self.has_a, self.has_b, self.b_data = (Signal(name=name) for name in ("has_a", "has_b", "b_data"))
        self.h_added = Signal(range(2 * LINE_CHUNKS + 1), name="h_added")
        self.g_added = Signal(range(3 * LINE_CHUNKS + 1), name="g_added")
        self.room = Signal(2, name="room")  # for one header, for two
        self.pops = {kind: Signal(range(4), name=f"pop_{kind}") for kind in kinds}
        self.empty = 0
        self._remembered = []

    def remember(self, register, value):
        """A register takes its value with every beat."""
        self._remembered.append(register.eq(value))

    def step(self, m, go):
        with m.If(go):
            m.d.sync += self._remembered


def _slot(at, kind, messages):
    """A slot of a kind's format; messages are (as devices have them, whether they are there)."""
    bits = []
    for message, there in messages:
        message = Value.cast(message)
        given = {"trailer": message[-1]} if kind == "rwd" else {}
        whole = converted(message, *MESSAGES[kind], **given)
        bits.append(whole & Value.cast(there).replicate(len(whole)))
    return Cat(Const(0, at - FORMAT_BITS), Const(FORMAT[kind], FORMAT_BITS), bits)


def _count(bits):
    return reduce_tree(list(bits), add)


assert PHY_BITS + FORMAT_BITS == H_AT
assert all(0 < message_slots(beat) <= SLOTS for beat in range(BEATS))
