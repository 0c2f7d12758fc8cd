"""Slots for answers: given out and emptied in order, filled in any order."""

from functools import reduce
from operator import xor

from amaranth.hdl import Cat, Module, Mux, Shape, Signal
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
        head, tail = Signal(bits + 1), Signal(bits)  # above the head's bits: its lap, even or odd
        used, room = Signal(range(self.depth + 1)), Signal(init=1)
        leaves = self.o.valid & self.o.ready
        m.d.comb += [self.room.eq(room), self.slot.eq(tail)]
        with m.If(self.take):
            m.d.sync += tail.eq(tail + 1)
        with m.If(self.take & ~leaves):
            m.d.sync += [used.eq(used + 1), room.eq(used != self.depth - 1)]
        with m.Elif(leaves & ~self.take):
            m.d.sync += [used.eq(used - 1), room.eq(1)]

        # A slot's bit turns over when it is filled; so it is the lap's until then, and the other one after.
        fills = [(self.arrive, self.arrive_slot), *((mark.valid, mark.slot) for mark in self.marks)]
        turned = Signal(self.depth)
        m.d.sync += turned.eq(reduce(xor, (Mux(valid, 1 << slot, 0) for valid, slot in fills), turned))

        def filled_next(place):
            """Whether the slot at `place` is filled in the next cycle."""
            slot, lap = place[:bits], place[bits]
            now = Cat(valid & (filled_slot == slot) for valid, filled_slot in fills).any()
            return (turned.bit_select(slot, 1) ^ lap) | now

        filled, pop, after = Signal(), Signal(), Signal.like(head)  # of the slot at the head
        m.d.comb += after.eq(head + 1)
        m.d.sync += filled.eq(Mux(pop, filled_next(after), filled_next(head)))
        with m.If(pop):
            m.d.sync += head.eq(after)

        m.submodules.store = store = memory.Memory(
            shape=Shape.cast(self.shape).width, depth=self.depth, init=[]
        )
        write = store.write_port()
        m.d.comb += [
            write.en.eq(self.arrive),
            write.addr.eq(self.arrive_slot),
            write.data.eq(self.arrived),
        ]
        self._elaborate_offer(m, store, head[:bits], filled, pop)
        return m

    def _elaborate_offer(self, m, store, head, filled, pop):
        """Contents leave a memory that is read with a clock edge."""
        read, valid, slot = store.read_port(), Signal(), Signal.like(head, reset_less=True)
        m.d.comb += [
            pop.eq(filled & (~valid | self.o.ready)),
            read.addr.eq(head),
            read.en.eq(pop),
            self.o.valid.eq(valid),
            self.o.payload.data.eq(read.data),
            self.o.payload.slot.eq(slot),
        ]
        with m.If(pop):
            m.d.sync += [valid.eq(1), slot.eq(head)]
        with m.Elif(self.o.ready):
            m.d.sync += valid.eq(0)


class SmallReorder(Reorder):
    """A `Reorder` for few slots, whose contents lie in a memory that is read without a clock edge.

    Parameters and members are those of `Reorder`; what arrives is offered a cycle earlier.
    """

    latency_cycles = 1

    def _elaborate_offer(self, m, store, head, filled, pop):
        read = store.read_port(domain="comb")
        m.d.comb += [
            pop.eq(filled & self.o.ready),
            read.addr.eq(head),
            self.o.valid.eq(filled),
            self.o.payload.data.eq(read.data),
            self.o.payload.slot.eq(head),
        ]
