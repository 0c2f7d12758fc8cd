"""A first-in first-out queue between two streams."""

from amaranth.hdl import Module, Mux, Shape, Signal, Value
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

    Latency when empty is `latency_cycles`: 1 up to depth 2, else 2. Throughput is one item per cycle from
    depth 2 on, one in two cycles with depth 1. There is no path from o.ready to i.ready.
    """

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

    @property
    def latency_cycles(self):
        """Cycles from the transfer of an item into the empty queue to its first offer."""
        return 1 if self.depth <= 2 else 2

    def elaborate(self, platform):
        return self._registers() if self.depth <= 2 else self._buffer()

    def _registers(self):
        """The output register, and with depth 2 a spare one for what comes while the output waits."""
        m = Module()
        spare = Signal(Shape.cast(self.shape).width, reset_less=True)
        spared = Signal()
        payload = Signal(self.shape, reset_less=True)
        offered = Signal()
        m.d.comb += [
            self.o.payload.eq(payload),
            self.o.valid.eq(offered),
            self.i.ready.eq(~spared if self.depth == 2 else ~offered),
            self.level.eq(offered + spared),
        ]
        waits = offered & ~self.o.ready
        arrives = self.i.valid & self.i.ready
        with m.If(~waits):
            m.d.sync += [
                Value.cast(payload).eq(Mux(spared, spare, self.i.payload)),
                offered.eq(spared | arrives),
                spared.eq(0),
            ]
        with m.Elif(arrives):
            m.d.sync += [spare.eq(self.i.payload), spared.eq(1)]
        return m

    def _buffer(self):
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
