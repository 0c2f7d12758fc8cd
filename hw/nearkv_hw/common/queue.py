"""A first-in first-out queue between two streams."""

from amaranth.hdl import Module, Shape
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out


class Queue(wiring.Component):
    """Queue of items of any shape, with registered output.

    Parameters
    ----------
    shape : payload's shape.
    depth : items it holds, at least 1.

    Members
    -------
    i : In(stream) : items in; not ready when full.
    o : Out(stream) : items out, in order.
    level : Out(range(depth + 1)) : items held.

    Latency is 2 cycles when empty (`latency_cycles`), throughput one item per cycle. There is no path from
    o.ready to i.ready.
    """

    latency_cycles = 2

    def __init__(self, *, shape, depth):
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth must be a positive integer, not {depth!r}")
        self.shape = shape
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.fifo = fifo = SyncFIFOBuffered(width=Shape.cast(self.shape).width, depth=self.depth)
        m.d.comb += [
            fifo.w_data.eq(self.i.payload),
            fifo.w_en.eq(self.i.valid),
            self.i.ready.eq(fifo.w_rdy),
            self.o.payload.eq(fifo.r_data),
            self.o.valid.eq(fifo.r_rdy),
            fifo.r_en.eq(self.o.ready),
            self.level.eq(fifo.level),
        ]
        return m
