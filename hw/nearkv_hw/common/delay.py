"""A stream of items, all later by the same number of cycles."""

from amaranth.hdl import Cat, Module, Mux, Shape, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out


class Delay(wiring.Component):
    """Delay line that nothing can stop. Items lie still in a memory; nothing is copied in cycles without an
    item.

    Parameters
    ----------
    shape : payload's shape.
    cycles : the delay, 0 or more.

    Members
    -------
    i : In(stream, always_ready) : items in.
    o : Out(stream, always_ready) : the same items, `cycles` cycles later.

    Latency is `cycles` (`latency_cycles`), throughput one item per cycle.
    """

    def __init__(self, *, shape, cycles):
        if not isinstance(cycles, int) or cycles < 0:
            raise ValueError(f"cycles must be a non-negative integer, not {cycles!r}")
        self.shape = shape
        self.latency_cycles = cycles
        super().__init__(
            {
                "i": In(stream.Signature(shape, always_ready=True)),
                "o": Out(stream.Signature(shape, always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        cycles = self.latency_cycles
        if cycles < 2:
            valid, payload = self.i.valid, self.i.payload
            for _ in range(cycles):
                later_valid, later = Signal(), Signal.like(payload, reset_less=True)
                m.d.sync += later_valid.eq(valid)
                with m.If(valid):
                    m.d.sync += later.eq(payload)
                valid, payload = later_valid, later
            m.d.comb += [self.o.valid.eq(valid), self.o.payload.eq(payload)]
            return m
        under_way = Signal(cycles)
        m.d.sync += under_way.eq(Cat(self.i.valid, under_way))
        m.submodules.items = items = Memory(shape=Shape.cast(self.shape).width, depth=cycles, init=[])
        write, read = items.write_port(), items.read_port()
        following = Signal(range(cycles), init=1)
        m.d.sync += [write.addr.eq(following), following.eq(Mux(following == cycles - 1, 0, following + 1))]
        m.d.comb += [
            write.en.eq(self.i.valid),
            write.data.eq(self.i.payload),
            read.addr.eq(following),  # written `cycles` - 1 cycles ago
            read.en.eq(under_way[cycles - 2]),
            self.o.valid.eq(under_way[cycles - 1]),
            self.o.payload.eq(read.data),
        ]
        return m
