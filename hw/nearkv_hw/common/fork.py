"""One stream to several."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out


class Fork(wiring.Component):
    """Hands each item to a chosen set of consumers, each of which takes it in its own time.

    Parameters
    ----------
    shape : payload's shape.
    outputs : consumers, at least 1.
    interval_cycles : 1, or 2 where items come no faster: then there is no path from o.ready to i.ready.

    Members
    -------
    i : In(stream) : `payload`, and `to` with one bit per consumer; an item for nobody vanishes.
    o : Out(stream).array(outputs) : the items that each consumer was chosen for, in order.

    Latency is 1 cycle, throughput one item per `interval_cycles`. An item is taken when the last consumer
    takes the one before, or in the cycle after.
    """

    latency_cycles = 1

    def __init__(self, *, shape, outputs, interval_cycles=1):
        if not isinstance(outputs, int) or outputs < 1:
            raise ValueError(f"outputs must be a positive integer, not {outputs!r}")
        if interval_cycles not in (1, 2):
            raise ValueError(f"interval_cycles must be 1 or 2, not {interval_cycles!r}")
        self.shape = shape
        self.interval_cycles = interval_cycles
        self.outputs = outputs
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout({"to": outputs, "payload": shape}))),
                "o": Out(stream.Signature(shape)).array(outputs),
            }
        )

    def elaborate(self, platform):
        m = Module()
        item = Signal(self.shape, reset_less=True)
        pending = Signal(self.outputs)
        left = Signal(self.outputs)
        m.d.comb += [
            left.eq(pending & ~Cat(o.ready for o in self.o)),
            self.i.ready.eq((left if self.interval_cycles == 1 else pending) == 0),
        ]
        for n, o in enumerate(self.o):
            m.d.comb += [o.valid.eq(pending[n]), o.payload.eq(item)]
        m.d.sync += pending.eq(left)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [pending.eq(self.i.payload.to), item.eq(self.i.payload.payload)]
        return m
