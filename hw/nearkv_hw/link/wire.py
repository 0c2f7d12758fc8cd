"""The physical layer between two link layers, as far as they can tell: time, rate, errors, retraining."""

from fractions import Fraction

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..common.delay import Delay
from .receiver import WIRE_BITS

NOISE = data.StructLayout({"flip": 1, "flip_at": range(WIRE_BITS), "drop": 1, "repeat": 1})
"""What happens to the flit that passes in this cycle: a bit is wrong, it is lost, it comes twice."""
_STEP_BITS = 12


class Wire(wiring.Component):
    """One direction of the physical layer; a model, not for silicon.

    It carries flits of 68-byte mode, or beats of longer ones. Flits have no numbers of their own in 68-byte
    mode, so it is the physical layer that notices one lost or repeated, by its framing. It then carries
    nothing until it has retrained.

    Parameters
    ----------
    latency_cycles : from a flit's transfer to its arrival, 2 or more.
    flits_per_cycle : what it carries at most, above 0 and up to 1.
    width : bits of a flit.
    checked : the highest bit is no bit of the flit: it says that the physical layer's CRC found it damaged,
        as every wrong bit here is one that the FEC before it could not put right.

    Members
    -------
    i : In(stream(width)) : flits. While not `up` they are lost.
    o : Out(stream(width), always_ready) : flits that arrive.
    up : In(1) : both ends are trained. Low for `latency_cycles` at least, so that what was under way is lost.
    noise : In(NOISE).
    failed : Out(1) : framing was lost; until not `up`.
    """

    def __init__(self, *, latency_cycles=4, flits_per_cycle=Fraction(1), width=WIRE_BITS, checked=False):
        if not isinstance(latency_cycles, int) or latency_cycles < 2:
            raise ValueError(f"latency_cycles must be an integer of at least 2, not {latency_cycles!r}")
        if not 0 < flits_per_cycle <= 1:
            raise ValueError(f"flits_per_cycle must be above 0 and at most 1, not {flits_per_cycle!r}")
        self.latency_cycles = latency_cycles
        self.flits_per_cycle = Fraction(flits_per_cycle)
        self.width = width
        self.checked = checked
        super().__init__(
            {
                "i": In(stream.Signature(self.width)),
                "o": Out(stream.Signature(self.width, always_ready=True)),
                "up": In(1),
                "noise": In(NOISE),
                "failed": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        item = data.StructLayout({"flit": self.width, "broken": 1})
        m.submodules.line = line = Delay(shape=item, cycles=self.latency_cycles)
        again = Signal()  # the physical layer sees the same flit once more
        whole = 1 << _STEP_BITS
        step = round(self.flits_per_cycle * whole)
        saved = Signal(range(2 * whole), init=whole)
        passes = Signal()
        bits = self.width - self.checked
        flipped = self.i.payload[:bits] ^ ((self.noise.flip << self.noise.flip_at) & ((1 << bits) - 1))
        m.d.comb += [
            self.i.ready.eq((saved >= whole) & ~again),
            passes.eq(self.i.valid & self.i.ready),
            line.i.valid.eq(self.up & (passes | again)),
            line.i.payload.flit.eq(
                Cat(flipped[:bits], self.i.payload[-1] | self.noise.flip) if self.checked else flipped
            ),
            line.i.payload.broken.eq(self.noise.drop | again),
            self.o.valid.eq(line.o.valid & ~line.o.payload.broken & ~self.failed & self.up),
            self.o.payload.eq(line.o.payload.flit),
        ]
        later = saved + step - Mux(passes, whole, 0)
        m.d.sync += [
            saved.eq(Mux(later > 2 * whole - 1, 2 * whole - 1, later)),
            again.eq(passes & self.noise.repeat & ~self.noise.drop),
        ]
        with m.If(~self.up):
            m.d.sync += self.failed.eq(0)
        with m.Elif(line.o.valid & line.o.payload.broken):
            m.d.sync += self.failed.eq(1)
        return m
