"""Slots of received flits to messages and their data, in queues that credits protect."""

from operator import or_

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import (
    DATA_CODE,
    FLIT_HEADER,
    LINE_CHUNKS,
    MAX_MESSAGES,
    SLOT_BITS,
    SLOTS,
    Side,
    formats,
)
from ..abi.lines import LINE_BITS, LINE_BYTES
from ..common.buffer import Buffer
from ..common.queue import Queue
from ..common.trees import one_hot_select, reduce_tree
from ..structs import layout_of
from .lanes import LaneQueue
from .packer import DATA_KIND, HEADER_WIDTH, LINE, SENT
from .receiver import TAKEN
from .slots import chunk_of, rotated, slot_of, take

PLACES = {"req": 64, "rwd": 32, "ndr": 64, "drs": 64}
"""Messages of a kind that a receiver holds, as many as it gives credits for."""


def all_places(places=None):
    """The messages of each kind that a receiver holds; ValueError for what cannot be."""
    chosen = {**PLACES, **(places or {})}
    for name, count in chosen.items():
        if name not in PLACES or not isinstance(count, int) or count < 4 or count & (count - 1):
            raise ValueError(
                f"places must be powers of two of at least 4 for {', '.join(PLACES)}, not {name}={count!r}"
            )
    return chosen


class Unpacker(wiring.Component):
    """Takes messages out of slots, puts lines together from chunks, and joins headers with their lines.

    Parameters
    ----------
    side : whose receiver.
    places : messages of each kind that it holds; powers of two of at least 4.

    Members
    -------
    i : In(stream(TAKEN), always_ready) : protocol and all-data flits in sequence.
    ndr, drs (host) or req, rwd (device) : Out(stream) : messages, in the order of their kind.
    {kind}_freed : Out(1) : a place of that kind is free again.
    overflow : Out(1) : a message came for which there was no place.

    Latency is `latency_cycles` from a flit to its messages, `data_latency_cycles` to those whose line ends in
    it. Throughput is a flit per cycle, and a message of each kind per cycle.
    """

    latency_cycles = 3
    data_latency_cycles = 5

    def __init__(self, *, side, places=None):
        if not isinstance(side, Side):
            raise TypeError(f"side must be a Side, not {side!r}")
        self.side = side
        self.sender = Side.HOST if side is Side.DEVICE else Side.DEVICE
        self.places = all_places(places)
        super().__init__(
            {
                "i": In(stream.Signature(TAKEN, always_ready=True)),
                **{name: Out(stream.Signature(shape)) for name, shape in SENT[self.sender].items()},
                **{f"{name}_freed": Out(1) for name in SENT[self.sender]},
                "overflow": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        kind = DATA_KIND[self.sender]
        overflows = []
        line_valid, line = self._lines(m)
        for name in SENT[self.sender]:
            queue = self._messages(m, name)
            overflows.append(queue.level + queue.push > self.places[name])
            out = Buffer(shape=SENT[self.sender][name])
            m.submodules[f"{name}_out"] = out
            wiring.connect(m, out.o, wiring.flipped(getattr(self, name)))
            there = queue.level != 0
            if name == kind:
                m.submodules.lines = lines = Queue(shape=LINE, depth=self.places[name])
                m.d.comb += [lines.i.valid.eq(line_valid), Value.cast(lines.i.payload).eq(Value.cast(line))]
                overflows.append(line_valid & ~lines.i.ready)
                there = there & lines.o.valid
                m.d.comb += [
                    Value.cast(out.i.payload.header).eq(queue.o[0]),
                    out.i.payload.data.eq(lines.o.payload.data),
                    lines.o.ready.eq(out.i.valid & out.i.ready),
                ]
                if name == "rwd":
                    m.d.comb += out.i.payload.enable.eq(lines.o.payload.enable)
            else:
                m.d.comb += Value.cast(out.i.payload).eq(queue.o[0])
            m.d.comb += [
                out.i.valid.eq(there),
                queue.pop.eq(out.i.valid & out.i.ready),
                getattr(self, f"{name}_freed").eq(queue.pop),
            ]
        m.d.sync += self.overflow.eq(self.overflow | reduce_tree(overflows, or_))
        return m

    def _messages(self, m, name):
        """The queue of one kind of messages, filled from a flit in two steps."""
        flit = self.i.payload.flit
        header = Signal(layout_of(FLIT_HEADER), name=f"{name}_flit_header")
        m.d.comb += header.as_value().eq(flit[: FLIT_HEADER.width])
        most, width = MAX_MESSAGES[name], HEADER_WIDTH[name]
        found = []  # (it is there, message) in their order
        for n in range(SLOTS):
            of_slot = {}
            for slot_format in formats(self.sender)[min(n, 1)]:
                chosen = Signal(name=f"{name}_slot{n}_{slot_format.name}")
                m.d.comb += chosen.eq(header[f"slot{n}"] == slot_format.code)
                places = [place for place in slot_format.places if place.kind == name]
                for index, place in enumerate(places):
                    of_slot.setdefault(index, []).append((chosen, take(slot_of(flit, n), place)))
            for index, choices in sorted(of_slot.items()):
                message = Signal(width, name=f"{name}_slot{n}_{index}")
                m.d.comb += message.eq(one_hot_select(*zip(*choices, strict=True)))
                found.append((message[0], message))
        valid = self.i.valid & ~self.i.payload.all_data
        queue = m.submodules[f"{name}_queue"] = LaneQueue(shape=width, depth=self.places[name], pushes=most)
        count = Signal(range(most + 1), name=f"{name}_count")
        m.d.sync += count.eq(0)
        messages = [Signal(width, name=f"{name}_new{n}", reset_less=True) for n in range(most)]
        left = [there for there, _ in found]
        firsts = []
        for n in range(most):
            first = Signal(len(found), name=f"{name}_first{n}")
            taken, chosen = left[0], [left[0]]
            for bit in left[1:]:
                chosen.append(bit & ~taken)
                taken = taken | bit
            m.d.comb += first.eq(Cat(chosen))
            left = [bit & ~one for bit, one in zip(left, first, strict=True)]
            firsts.append(first)
        with m.If(valid):
            m.d.sync += [
                count.eq(reduce_tree([first.any() for first in firsts], lambda a, b: a + b)),
                *(
                    message.eq(one_hot_select(list(first), [bits for _, bits in found]))
                    for message, first in zip(messages, firsts, strict=True)
                ),
            ]
        m.d.comb += [
            queue.push.eq(count),
            *(Value.cast(queue.i[n]).eq(message) for n, message in enumerate(messages)),
        ]
        return queue

    def _lines(self, m):
        """(a line is whole, the line), three steps behind the flit."""
        plan = self.i.payload
        header = Signal(layout_of(FLIT_HEADER), name="data_flit_header")
        m.d.comb += header.as_value().eq(plan.flit[: FLIT_HEADER.width])
        slots = [chunk_of(plan.flit, n) for n in range(SLOTS)]
        holds = [header[f"slot{n}"] == DATA_CODE for n in range(1, SLOTS)]
        # Chunks of a flit with a header: those of slots 1 to 3 that hold data, in their order.
        first = Mux(holds[0], slots[1], Mux(holds[1], slots[2], slots[3]))
        second = Mux(holds[0] & holds[1], slots[2], slots[3])
        chunks = [Signal(SLOT_BITS, name=f"chunk{n}", reset_less=True) for n in range(SLOTS)]
        kept = Signal(
            data.StructLayout(
                {
                    name: TAKEN[name].shape
                    for name in ("position", "count", "ends", "whole", "enables", "enables_at")
                }
            ),
            reset_less=True,
        )
        there = Signal()
        m.d.sync += there.eq(self.i.valid)
        with m.If(self.i.valid):
            m.d.sync += [
                *(kept[name].eq(plan[name]) for name, _ in kept.shape()),
                chunks[0].eq(Mux(plan.all_data, slots[0], first)),
                chunks[1].eq(Mux(plan.all_data, slots[1], second)),
                chunks[2].eq(Mux(plan.all_data, slots[2], slots[3])),
                chunks[3].eq(slots[3]),
            ]
        # Byte enables out of them, and each to its place in its line.
        enable = Signal(LINE_BYTES)
        with m.Switch(kept.enables_at):
            for n, chunk in enumerate(chunks):
                with m.Case(n):
                    m.d.comb += enable.eq(chunk[:LINE_BYTES])
        if self.side is Side.DEVICE:
            chunks = [
                Mux(kept.enables & (kept.enables_at <= n), chunks[min(n + 1, SLOTS - 1)], chunks[n])
                for n in range(SLOTS)
            ]
        line, line_valid = Signal(LINE), Signal()
        m.d.sync += line_valid.eq(there & kept.ends)
        with m.If(there & kept.ends):
            m.d.sync += line.enable.eq(Mux(kept.enables, enable, ~0))
        turn = Signal(2)  # from chunks to lanes
        m.d.comb += turn.eq(-kept.position)
        lanes = rotated(m, chunks, turn, "chunks")
        for lane, comes in enumerate(lanes):
            part = slice(lane * SLOT_BITS, (lane + 1) * SLOT_BITS)
            index = Signal(2, name=f"chunk_of_lane{lane}")
            held = Signal(SLOT_BITS, name=f"lane{lane}_held", reset_less=True)
            m.d.comb += index.eq(lane - kept.position)
            with m.If(there & (index < kept.count)):
                m.d.sync += held.eq(comes)
            with m.If(there & kept.ends):
                m.d.sync += line.data[part].eq(Mux(kept.whole | (kept.position > lane), held, comes))
        return line_valid, line


assert LINE_BITS == LINE_CHUNKS * SLOT_BITS
