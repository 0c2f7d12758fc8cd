"""One lane on its way from a binned sum to an output code."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from ..abi.numerics import BIN_BITS, NUMERATOR_KEPT_BITS, TOP_BITS
from ..arithmetic.reciprocal import QUOTIENT_BITS
from ..arithmetic.rounding import EXPONENT_BITS, Outcome, Round
from ..interfaces import LanePartial
from .normalise import SHIFT_BITS, Normalise

_HALF = 16
_FAR = 31
"""Bins between numerator and denominator beyond which every format overflows or rounds to zero."""


class Divisor(data.Struct):
    """What a query's lanes are divided by."""

    reciprocal: QUOTIENT_BITS
    top: signed(TOP_BITS)
    shift: SHIFT_BITS
    some: 1
    nan: 1


class FinishLane(wiring.Component):
    """Normalises a lane's sum, multiplies it by the reciprocal and rounds the product.

    Members
    -------
    step : In(12) : bit k loads the registers of stage k.
    lane : In(LanePartial) : taken with step[0].
    divisor : In(Divisor) : taken with step[5].
    early_form, late_form : In(OutputForm) : the lane's form, valid with step[9] and with step[11].
    code : Out(32) : the code, low bits first; bits beyond the format are zero.
    significand, shift, some, top : the normalised sum after stage 4, for the denominators that pass through.

    Latency is 12 cycles (`latency_cycles`), throughput one lane per cycle.
    """

    multiply_cycles = 3
    latency_cycles = Normalise.latency_cycles + multiply_cycles + Round.latency_cycles

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "lane": In(LanePartial),
                "divisor": In(Divisor),
                "early_form": In(OutputForm),
                "late_form": In(OutputForm),
                "code": Out(32),
                "significand": Out(NUMERATOR_KEPT_BITS),
                "shift": Out(SHIFT_BITS),
                "some": Out(1),
                "top": Out(signed(TOP_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.normalise = normalise = Normalise()
        m.submodules.round = rounding = Round()
        first = normalise.latency_cycles
        m.d.comb += [
            normalise.step.eq(self.step[:first]),
            normalise.state.eq(self.lane.state),
            self.significand.eq(normalise.significand),
            self.shift.eq(normalise.shift),
            self.some.eq(normalise.some),
            self.top.eq(normalise.top),
            rounding.step.eq(self.step[first + self.multiply_cycles :]),
            rounding.early_form.eq(self.early_form),
            rounding.late_form.eq(self.late_form),
            self.code.eq(rounding.code),
        ]

        flags = [Signal(3, name=f"flags_{k}", reset_less=True) for k in range(first)]
        for k in range(first):
            with m.If(self.step[k]):
                m.d.sync += flags[k].eq(flags[k - 1] if k else self.lane.flags)

        self._specials(m, normalise, flags[-1], rounding)
        self._product(m, normalise, rounding)
        self._exponent(m, normalise, rounding)
        return m

    def _specials(self, m, normalise, flags, rounding):
        outcome = Signal(Outcome)
        negative = Signal()
        infinities = LANE_POSITIVE_INFINITY | LANE_NEGATIVE_INFINITY
        m.d.comb += negative.eq(normalise.negative)
        with m.If(self.divisor.nan | (flags & LANE_NAN).any() | ((flags & infinities) == infinities)):
            m.d.comb += outcome.eq(Outcome.NAN)
        with m.Elif((flags & infinities).any()):
            m.d.comb += [outcome.eq(Outcome.INFINITY), negative.eq((flags & LANE_NEGATIVE_INFINITY).any())]
        with m.Elif(~self.divisor.some | ~normalise.significand[-1]):
            m.d.comb += [outcome.eq(Outcome.ZERO), negative.eq(0)]
        with m.Else():
            m.d.comb += outcome.eq(Outcome.NUMBER)
        for k in range(self.multiply_cycles):
            outcome_k = Signal(Outcome, name=f"outcome_{k}", reset_less=True)
            negative_k = Signal(name=f"negative_{k}", reset_less=True)
            with m.If(self.step[normalise.latency_cycles + k]):
                m.d.sync += [outcome_k.eq(outcome), negative_k.eq(negative)]
            outcome, negative = outcome_k, negative_k
        m.d.comb += [rounding.outcome.eq(outcome), rounding.negative.eq(negative)]

    def _product(self, m, normalise, rounding):
        a, r = normalise.significand, self.divisor.reciprocal
        first = normalise.latency_cycles
        parts = {}
        with m.If(self.step[first]):
            for i in range(2):
                for j in range(2):
                    a_part = a[i * _HALF : (i + 1) * _HALF]
                    r_part = r[j * _HALF : (j + 1) * _HALF]
                    part = Signal(len(a_part) + len(r_part), name=f"part_{i}{j}", reset_less=True)
                    m.d.sync += part.eq(a_part * r_part)
                    parts[i, j] = part
        middle = Signal(2 * _HALF + 1, reset_less=True)
        outer = Signal(len(rounding.product), reset_less=True)
        with m.If(self.step[first + 1]):
            m.d.sync += [
                middle.eq(parts[0, 1] + parts[1, 0]),
                outer.eq(Cat(parts[0, 0], parts[1, 1])),
            ]
        product = Signal.like(rounding.product, name="product", reset_less=True)
        with m.If(self.step[first + 2]):
            m.d.sync += product.eq(Cat(outer[:_HALF], outer[_HALF:] + middle))
        m.d.comb += rounding.product.eq(product)

    def _exponent(self, m, normalise, rounding):
        """The weight of the product's bit 61: the lane is a * r * 2^(xa - xl - 61)."""
        first = normalise.latency_cycles
        bins = Signal(signed(TOP_BITS + 1), reset_less=True)
        shifts = Signal(signed(SHIFT_BITS + 1), reset_less=True)
        with m.If(self.step[first]):
            m.d.sync += [
                bins.eq(normalise.top - self.divisor.top),
                shifts.eq(self.divisor.shift - normalise.shift),
            ]
        near = Signal(signed(_FAR.bit_length() + 1), reset_less=True)
        shifts_1 = Signal.like(shifts)
        with m.If(self.step[first + 1]):
            m.d.sync += [
                shifts_1.eq(shifts),
                near.eq(Mux(bins > _FAR, _FAR, Mux(bins < -_FAR, -_FAR, bins))),
            ]
        exponent = Signal(signed(EXPONENT_BITS), reset_less=True)
        with m.If(self.step[first + 2]):
            m.d.sync += exponent.eq((near << (BIN_BITS.bit_length() - 1)) + shifts_1)
        m.d.comb += rounding.exponent.eq(exponent)
