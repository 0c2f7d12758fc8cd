"""Slots for answers: given out and emptied in order, filled in any order."""

from functools import reduce
from operator import or_

from amaranth.hdl import Module, Mux, Shape, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2


class Reorder(wiring.Component):
    """Gives out slots, and offers what filled them in the order in which they were given out.

    Parameters
    ----------
    shape : what fills a slot.
    depth : slots, a power of two from 2 to 256.
    marks : ports that fill a slot with no data; what is offered of such a slot has no meaning.

    Members
    -------
    room : Out(1), slot : Out, take : In(1) : a slot is free; which; it is taken in this cycle.
    arrive : In(1), arrive_slot : In, arrived : In(shape) : fill a slot.
    marks : In({valid, slot}) x marks : fill a slot with no data.
    o : Out(stream({data: shape, slot})) : the contents, in order, each with its slot.

    From arrival to offer `latency_cycles`, one arrival and one offer per cycle. A slot is free again when its
    content was taken from `o`. There is no path from o.ready to room.
    """

    latency_cycles = 2

    def __init__(self, *, shape, depth, marks=0):
        if not isinstance(depth, int) or not 2 <= depth <= 256 or depth & (depth - 1):
            raise ValueError(f"depth must be a power of two from 2 to 256, not {depth!r}")
        self.shape = shape
        self.depth = depth
        bits = ceil_log2(depth)
        super().__init__(
            {
                "room": Out(1),
                "slot": Out(bits),
                "take": In(1),
                "arrive": In(1),
                "arrive_slot": In(bits),
                "arrived": In(shape),
                "marks": In(data.StructLayout({"valid": 1, "slot": bits})).array(marks),
                "o": Out(stream.Signature(data.StructLayout({"data": shape, "slot": bits}))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(self.depth)
        m.submodules.store = store = memory.Memory(
            shape=Shape.cast(self.shape).width, depth=self.depth, init=[]
        )
        write = store.write_port()
        head, tail = Signal(bits), Signal(bits)
        used, room = Signal(bits + 1), Signal(init=1)
        filled, now_filled = Signal(self.depth), Signal(self.depth)
        valid, pop, leaves = Signal(), Signal(), Signal()
        slot = Signal(bits, reset_less=True)

        fills = [(self.arrive, self.arrive_slot), *((mark.valid, mark.slot) for mark in self.marks)]
        set_mask = reduce(or_, (Mux(en, 1 << at, 0) for en, at in fills))
        if self.latency_cycles == 1:
            read, readable = store.read_port(domain="comb"), now_filled
            m.d.comb += read.addr.eq(slot)
        else:
            read, readable = store.read_port(), filled
            m.d.comb += [read.addr.eq(head), read.en.eq(pop)]
        m.d.comb += [
            self.room.eq(room),
            self.slot.eq(tail),
            write.en.eq(self.arrive),
            write.addr.eq(self.arrive_slot),
            write.data.eq(self.arrived),
            now_filled.eq(filled | set_mask),
            pop.eq(readable.bit_select(head, 1) & (~valid | self.o.ready)),
            leaves.eq(valid & self.o.ready),
            self.o.valid.eq(valid),
            self.o.payload.data.eq(read.data),
            self.o.payload.slot.eq(slot),
        ]
        m.d.sync += filled.eq(now_filled & ~Mux(pop, 1 << head, 0))
        with m.If(self.take):
            m.d.sync += tail.eq(tail + 1)
        with m.If(pop):
            m.d.sync += [head.eq(head + 1), valid.eq(1), slot.eq(head)]
        with m.Elif(self.o.ready):
            m.d.sync += valid.eq(0)
        with m.If(self.take & ~leaves):
            m.d.sync += [used.eq(used + 1), room.eq(used != self.depth - 1)]
        with m.Elif(leaves & ~self.take):
            m.d.sync += [used.eq(used - 1), room.eq(1)]
        return m


class SmallReorder(Reorder):
    """A `Reorder` for few slots, whose contents lie in a memory that is read without a clock edge.

    Parameters and members are those of `Reorder`; what arrives is offered a cycle earlier.
    """

    latency_cycles = 1
