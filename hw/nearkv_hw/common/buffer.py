"""A buffer of a few items that cuts the paths between two streams, in both directions."""

from amaranth.hdl import Module, Shape, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out


class Buffer(wiring.Component):
    """Buffer of a few items of any shape in a small memory that is read without a clock edge.

    Wide items are cheap here, in silicon (distributed memory) and in simulation (a line is copied once, and
    only in cycles in which an item comes); for more than some 16 items `Queue` is smaller.

    Parameters
    ----------
    shape : payload's shape.
    depth : items it holds, at least 2; two keep the full rate.
    early : whether `i.valid` is known late, as after a check; then `early` lets the payload be stored before.

    Members
    -------
    i : In(stream) : items in; not ready when full.
    early : In(1) : with every `i.valid`, and perhaps without: the payload may be an item.
    o : Out(stream) : items out, in order.

    Latency is 1 cycle (`latency_cycles`), throughput one item per cycle. No path from o.ready to i.ready.
    """

    latency_cycles = 1

    def __init__(self, *, shape, depth=2, early=False):
        if not isinstance(depth, int) or depth < 2:
            raise ValueError(f"depth must be an integer of at least 2, not {depth!r}")
        self.shape = shape
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                **({"early": In(1)} if early else {}),
                "o": Out(stream.Signature(shape)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.storage = storage = Memory(shape=Shape.cast(self.shape).width, depth=self.depth, init=[])
        write, read = storage.write_port(), storage.read_port(domain="comb")
        level = Signal(range(self.depth + 1))
        comes, goes = self.i.valid & self.i.ready, self.o.valid & self.o.ready
        m.d.comb += [
            self.i.ready.eq(level != self.depth),
            self.o.valid.eq(level != 0),
            write.en.eq(getattr(self, "early", self.i.valid) & self.i.ready),
            write.data.eq(self.i.payload),
            self.o.payload.eq(read.data),
        ]
        for moves, port in ((comes, write), (goes, read)):
            place = Signal(range(self.depth))
            m.d.comb += port.addr.eq(place)
            with m.If(moves):
                m.d.sync += place.eq(place + 1)
                with m.If(place == self.depth - 1):
                    m.d.sync += place.eq(0)
        with m.If(comes & ~goes):
            m.d.sync += level.eq(level + 1)
        with m.If(goes & ~comes):
            m.d.sync += level.eq(level - 1)
        return m
