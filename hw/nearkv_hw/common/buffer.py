"""A two-item buffer that cuts the paths between two streams, in both directions."""

from amaranth.hdl import Module, Shape
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out


class Buffer(wiring.Component):
    """Buffer of a few items of any shape in a small memory that is read without a clock edge.

    Wide items are cheap here, in silicon (distributed memory) and in simulation (a line is copied once, and
    only in cycles in which an item comes); for more than some 16 items `Queue` is smaller.

    Parameters
    ----------
    shape : payload's shape.
    depth : items it holds, at least 2; two keep the full rate.

    Members
    -------
    i : In(stream) : items in; not ready when full.
    o : Out(stream) : items out, in order.

    Latency is 1 cycle (`latency_cycles`), throughput one item per cycle. No path from o.ready to i.ready.
    """

    latency_cycles = 1

    def __init__(self, *, shape, depth=2):
        if not isinstance(depth, int) or depth < 2:
            raise ValueError(f"depth must be an integer of at least 2, not {depth!r}")
        self.shape = shape
        self.depth = depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.fifo = fifo = SyncFIFO(width=Shape.cast(self.shape).width, depth=self.depth)
        m.d.comb += [
            fifo.w_data.eq(self.i.payload),
            fifo.w_en.eq(self.i.valid),
            self.i.ready.eq(fifo.w_rdy),
            self.o.payload.eq(fifo.r_data),
            self.o.valid.eq(fifo.r_rdy),
            fifo.r_en.eq(self.o.ready),
        ]
        return m
