"""float32 numbers: taken apart, multiplied, and converted to an output format, as IEEE 754 has it."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..common.trees import normalise_steps
from .rounding import FP32, PRODUCT_BITS, Outcome, Round

FACTOR_BITS = FP32.significand_bits
_STAGE_SHIFTS = ((16, 8), (4, 2, 1))
_HALF = FACTOR_BITS // 2


class Float32(data.Struct):
    """A float32 apart: a number's magnitude is significand / 2^23 * 2^exponent, its top bit the leading one.

    Significand and exponent mean nothing for other outcomes.
    """

    significand: unsigned(FACTOR_BITS)
    exponent: signed(9)  # of 2^-149 to 2^127
    negative: 1
    outcome: Outcome


class Unpack(wiring.Component):
    """Takes a float32 apart and shifts a subnormal's leading one to the top.

    Members
    -------
    step : In(2) : bit k loads the registers of stage k.
    code : In(32) : taken with step[0].
    o : Out(Float32).

    Latency is 2 cycles (`latency_cycles`), throughput one per cycle.
    """

    latency_cycles = len(_STAGE_SHIFTS)

    def __init__(self):
        super().__init__({"step": In(self.latency_cycles), "code": In(32), "o": Out(Float32)})

    def elaborate(self, platform):
        m = Module()
        fraction = self.code[: FP32.fraction_bits]
        field = self.code[FP32.fraction_bits : -1]
        now = Signal(Float32)
        m.d.comb += [
            now.significand.eq(Cat(fraction, field.any())),
            now.exponent.eq(_exponent(field)),
            now.negative.eq(self.code[-1]),
        ]
        with m.If(field.all()):
            m.d.comb += now.outcome.eq(Mux(fraction.any(), Outcome.NAN, Outcome.INFINITY))
        with m.Elif(~self.code[:-1].any()):
            m.d.comb += now.outcome.eq(Outcome.ZERO)
        for k, shifts in enumerate(_STAGE_SHIFTS):
            significand, shift = normalise_steps(m, now.significand, shifts, f"stage_{k}")
            register = Signal(Float32, name=f"stage_{k}", reset_less=True)
            with m.If(self.step[k]):
                m.d.sync += [
                    register.eq(now),
                    register.significand.eq(significand),
                    register.exponent.eq(now.exponent - shift),
                ]
            now = register
        m.d.comb += self.o.eq(now)
        return m


class Multiply(wiring.Component):
    """The product of two float32, rounded once to float32: nearest even, subnormals kept, overflow to Inf.

    Members
    -------
    step : In(6) : bit k loads the registers of stage k.
    a, b : In(Float32) : taken with step[0].
    code : Out(32) : the product; every NaN is 7fc00000.

    Latency is 6 cycles (`latency_cycles`), throughput one per cycle.
    """

    latency_cycles = 2 + Round.latency_cycles

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "a": In(Float32),
                "b": In(Float32),
                "code": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.round = rounding = Round()
        a, b = self.a, self.b

        def either(outcome):
            return (a.outcome == outcome) | (b.outcome == outcome)

        outcome = Signal(Outcome)
        with m.If(either(Outcome.NAN) | (either(Outcome.INFINITY) & either(Outcome.ZERO))):
            m.d.comb += outcome.eq(Outcome.NAN)
        with m.Elif(either(Outcome.INFINITY)):
            m.d.comb += outcome.eq(Outcome.INFINITY)
        with m.Elif(either(Outcome.ZERO)):
            m.d.comb += outcome.eq(Outcome.ZERO)

        halves = [(side.significand[:_HALF], side.significand[_HALF:]) for side in (a, b)]
        parts = [Signal(2 * _HALF, name=f"part_{i}{j}", reset_less=True) for i in range(2) for j in range(2)]
        exponent = Signal(signed(10), reset_less=True)
        product = Signal(4 * _HALF, reset_less=True)
        stages = [Signal(Outcome, name=f"outcome_{k}", reset_less=True) for k in range(2)]
        negative = [Signal(name=f"negative_{k}", reset_less=True) for k in range(2)]
        exponent_1 = Signal.like(exponent)
        with m.If(self.step[0]):
            m.d.sync += [part.eq(x * y) for part, (x, y) in zip(parts, _pairs(*halves), strict=True)]
            m.d.sync += [
                exponent.eq(a.exponent + b.exponent + 1),  # of the product's highest bit
                stages[0].eq(outcome),
                negative[0].eq(a.negative ^ b.negative),
            ]
        with m.If(self.step[1]):
            m.d.sync += [
                product.eq(Cat(parts[0], parts[3]) + ((parts[1] + parts[2]) << _HALF)),
                exponent_1.eq(exponent),
                stages[1].eq(stages[0]),
                negative[1].eq(negative[0]),
            ]
        m.d.comb += [
            rounding.step.eq(self.step[2:]),
            rounding.product.eq(Cat(Const(0, PRODUCT_BITS - len(product)), product)),
            rounding.exponent.eq(exponent_1),
            rounding.outcome.eq(stages[1]),
            rounding.negative.eq(negative[1]),
            rounding.early_form.eq(OutputForm.FP32),
            rounding.late_form.eq(OutputForm.FP32),
            self.code.eq(rounding.code),
        ]
        return m


class Convert(wiring.Component):
    """A float32 rounded to fp32 (no change), bf16 or fp16: nearest even, subnormals kept, overflow to Inf.

    Members
    -------
    step : In(4) : bit k loads the registers of stage k.
    code : In(32) : taken with step[0].
    early_form, late_form : In(OutputForm) : the format, valid with step[1] and with step[3].
    o : Out(32) : the code, low bits first; bits beyond the format are zero.

    Latency is 4 cycles (`latency_cycles`), throughput one per cycle.
    """

    latency_cycles = Round.latency_cycles

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "code": In(32),
                "early_form": In(OutputForm),
                "late_form": In(OutputForm),
                "o": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.round = rounding = Round()
        fraction = self.code[: FP32.fraction_bits]
        field = self.code[FP32.fraction_bits : -1]
        # A subnormal, whose leading one may be anywhere, has the place that the format's unit gives it in
        # fp32 and bf16, and is far below the unit of fp16; zero is one of them.
        m.d.comb += [
            rounding.step.eq(self.step),
            rounding.product.eq(Cat(Const(0, PRODUCT_BITS - FACTOR_BITS), fraction, field.any())),
            rounding.exponent.eq(_exponent(field)),
            rounding.negative.eq(self.code[-1]),
            rounding.early_form.eq(self.early_form),
            rounding.late_form.eq(self.late_form),
            self.o.eq(rounding.code),
        ]
        with m.If(field.all()):
            m.d.comb += rounding.outcome.eq(Mux(fraction.any(), Outcome.NAN, Outcome.INFINITY))
        return m


def is_special(code):
    """Whether a float32 is NaN or infinite."""
    return code[FP32.fraction_bits : -1].all()


def _exponent(field):
    """The exponent of a significand's top bit."""
    return Mux(field.any(), field, 1) - (FP32.exponent_bias - FP32.fraction_bits)


def _pairs(first, second):
    """Every part of one with every part of the other, lowest first."""
    return [(x, y) for x in first for y in second]
