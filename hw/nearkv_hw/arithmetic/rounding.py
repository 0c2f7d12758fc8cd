"""Rounding of an exact product to an output code, once, to nearest even (docs/numerics.md section 6)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import enum, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import BF16, FP16, Format, OutputForm
from ..abi.numerics import NAN_BF16, NAN_FP16, NAN_FP32, NUMERATOR_KEPT_BITS
from .reciprocal import QUOTIENT_BITS

PRODUCT_BITS = NUMERATOR_KEPT_BITS + QUOTIENT_BITS - 1
"""Bits of a * r, whose leading one is the highest bit or the one below."""
EXPONENT_BITS = 12
"""Bits of a product's exponent, saturated: what lies beyond overflows or rounds to zero in every format."""

FP32 = Format("fp32", 0, 32, 8, 23, 150, infinities=True)
_FORMATS = {
    OutputForm.FP32: (FP32, NAN_FP32),
    OutputForm.BF16: (BF16, NAN_BF16),
    OutputForm.FP16: (FP16, NAN_FP16),
}
_KEPT_BITS = FP32.significand_bits + 1
"""The widest significand and a guard bit."""


class Outcome(enum.Enum, shape=2):
    """What a lane turned out to be."""

    NUMBER = 0
    ZERO = 1
    INFINITY = 2
    NAN = 3


class Round(wiring.Component):
    """Rounds product * 2^(exponent - 61) to fp32, bf16 or fp16.

    Nearest even, subnormals kept, overflow to Inf.

    Members
    -------
    step : In(4) : bit k loads the registers of stage k.
    product : In(62) : when the outcome is NUMBER, its highest bit or the one below must be set, unless
        `exponent` is at most that of the format's least normal number.
    exponent : In(signed(12)) : the weight of the product's highest bit, -2047 or more; taken with `product`.
    negative : In(1), outcome : In(Outcome) : taken with `product` as well. Zero keeps its sign,
        NaN loses it.
    early_form : In(OutputForm) : the form, valid with step[1].
    late_form : In(OutputForm) : the form, valid with step[3].
    code : Out(32) : the code, low bits first; bits beyond the format are zero.

    Latency is 4 cycles (`latency_cycles`), throughput one per cycle. `OutputForm.PARTIAL` has no codes.
    """

    latency_cycles = 4

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "product": In(PRODUCT_BITS),
                "exponent": In(signed(EXPONENT_BITS)),
                "negative": In(1),
                "outcome": In(Outcome),
                "early_form": In(OutputForm),
                "late_form": In(OutputForm),
                "code": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        negative = [Signal(name=f"negative_{k}", reset_less=True) for k in range(3)]
        outcome = [Signal(Outcome, name=f"outcome_{k}", reset_less=True) for k in range(3)]
        for k in range(3):
            with m.If(self.step[k]):
                m.d.sync += [
                    negative[k].eq(negative[k - 1] if k else self.negative),
                    outcome[k].eq(outcome[k - 1] if k else self.outcome),
                ]

        # Stage 0: the leading one to the top.
        kept = Signal(_KEPT_BITS, reset_less=True)
        lost = Signal(reset_less=True)
        exponent = Signal(signed(EXPONENT_BITS), reset_less=True)
        highest = self.product[-1]
        with m.If(self.step[0]):
            m.d.sync += [
                kept.eq(Mux(highest, self.product[-_KEPT_BITS:], self.product[-_KEPT_BITS - 1 : -1])),
                lost.eq(self.product[: -_KEPT_BITS - 1].any() | (highest & self.product[-_KEPT_BITS - 1])),
                exponent.eq(self.exponent - ~highest),
            ]

        # Stage 1: how far right the significand must go: to its place in the format, and further when
        # subnormal.
        shift = Signal(range(32), reset_less=True)
        field = Signal(8, reset_less=True)
        overflow = Signal(reset_less=True)
        kept_1 = Signal.like(kept)
        lost_1 = Signal.like(lost)
        with m.If(self.step[1]):
            m.d.sync += [kept_1.eq(kept), lost_1.eq(lost)]
            with m.Switch(self.early_form):
                for form, (kind, _) in _FORMATS.items():
                    bias = kind.exponent_bias - kind.fraction_bits
                    place = FP32.fraction_bits - kind.fraction_bits
                    with m.Case(form):
                        deficit = Signal(signed(EXPONENT_BITS + 1), name=f"deficit_{kind.name}")
                        biased = Signal(signed(EXPONENT_BITS + 1), name=f"biased_{kind.name}")
                        m.d.comb += [
                            biased.eq(exponent + bias),
                            deficit.eq(place + 1 - bias - exponent),
                        ]
                        m.d.sync += [
                            field.eq(biased),
                            overflow.eq(biased >= (1 << kind.exponent_bits) - 1),
                        ]
                        with m.If(deficit <= place):
                            m.d.sync += shift.eq(place)
                        with m.Elif(deficit >= 31):
                            m.d.sync += shift.eq(31)
                        with m.Else():
                            m.d.sync += shift.eq(deficit)

        # Stage 2: the shift, whatever falls out noted.
        value, fallen = kept_1, lost_1
        for bit in reversed(range(len(shift))):
            by = 1 << bit
            moved = Signal(_KEPT_BITS, name=f"moved_{by}")
            noted = Signal(name=f"noted_{by}")
            m.d.comb += [
                moved.eq(Mux(shift[bit], value >> by, value)),
                noted.eq(fallen | (shift[bit] & value[:by].any())),
            ]
            value, fallen = moved, noted
        guard = Signal(reset_less=True)
        sticky = Signal(reset_less=True)
        significand = Signal(_KEPT_BITS - 1, reset_less=True)
        field_2 = Signal.like(field)
        overflow_2 = Signal.like(overflow)
        with m.If(self.step[2]):
            m.d.sync += [
                guard.eq(value[0]),
                sticky.eq(fallen),
                significand.eq(value[1:]),
                field_2.eq(field),
                overflow_2.eq(overflow),
            ]

        # Stage 3: a carry out of the fraction goes into the exponent field, where it is right. A significand
        # without its hidden bit is subnormal: field zero.
        code = Signal(32, reset_less=True)
        m.d.comb += self.code.eq(code)
        up = guard & (sticky | significand[0])
        with m.If(self.step[3]):
            with m.Switch(self.late_form):
                for form, (kind, nan) in _FORMATS.items():
                    magnitude_bits = kind.exponent_bits + kind.fraction_bits
                    infinity = Const(((1 << kind.exponent_bits) - 1) << kind.fraction_bits, magnitude_bits)
                    with m.Case(form):
                        hidden = significand[kind.fraction_bits]
                        plain = Signal(magnitude_bits, name=f"plain_{kind.name}")
                        magnitude = Signal(magnitude_bits, name=f"magnitude_{kind.name}")
                        m.d.comb += [
                            plain.eq(
                                Cat(
                                    significand[: kind.fraction_bits],
                                    Mux(hidden, field_2[: kind.exponent_bits], 0),
                                )
                            ),
                            magnitude.eq(plain + up),
                        ]
                        with m.Switch(outcome[2]):
                            with m.Case(Outcome.NAN):
                                m.d.sync += code.eq(nan)
                            with m.Case(Outcome.INFINITY):
                                m.d.sync += code.eq(Cat(infinity, negative[2]))
                            with m.Case(Outcome.ZERO):
                                m.d.sync += code.eq(Cat(Const(0, magnitude_bits), negative[2]))
                            with m.Default():
                                m.d.sync += code.eq(Cat(Mux(overflow_2, infinity, magnitude), negative[2]))
        return m
