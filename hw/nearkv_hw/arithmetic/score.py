"""The base-2 score of a dot product (docs/numerics.md, section 3): scaled, rounded to fixed point, saturated.

A sink takes the same way: its float32 is an integer times a power of two, and its factor is log2(e).
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import (
    BIN_BITS,
    DOT_KEPT_BITS,
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    SINK_FACTOR,
    SINK_FACTOR_EXPONENT,
)
from ..common.pipeline import later, split_product, stage
from ..common.trees import normalise_steps
from .binned import empty_top

FLOAT_BITS = 32
FLOAT_FRACTION_BITS = 23
FLOAT_BIAS = 127
FACTOR_BITS = FLOAT_FRACTION_BITS + 1
FACTOR_EXPONENT_BITS = 9
SCORE_BITS = SCORE_LIMIT.bit_length() + 1

DOT_TOP_BITS = 5
"""Bits of a dot product's top bin: -9 to 8, and `empty_top`."""
DOT_LIMB_BITS = 43
"""Bits of a dot product's limbs: 1,023 terms below 2^32, signed."""

_EXPONENT_BITS = 12


class Factor(data.Struct):
    """The score factor c: ±significand * 2^exponent, the significand's leading one at its top, or zero."""

    significand: unsigned(FACTOR_BITS)
    exponent: signed(FACTOR_EXPONENT_BITS)
    negative: 1


class DotProduct(data.Struct):
    """The binned dot product of one row and query, and what its special products were."""

    top: signed(DOT_TOP_BITS)
    high: signed(DOT_LIMB_BITS)
    low: signed(DOT_LIMB_BITS)
    nan: 1
    positive: 1  # a product is +Inf
    negative: 1  # a product is -Inf


class FactorDecoder(wiring.Component):
    """Normalises the float32 score factor, `latency_cycles` after it came.

    Infinities and NaN never reach a unit: a descriptor with one is refused.

    Members
    -------
    code : In : float32 bits.
    factor : Out(Factor).
    """

    latency_cycles = 1
    code: In(FLOAT_BITS)
    factor: Out(Factor)

    def elaborate(self, platform):
        m = Module()
        field = self.code[FLOAT_FRACTION_BITS:-1]
        raw = Signal(FACTOR_BITS)
        m.d.comb += raw.eq(Cat(self.code[:FLOAT_FRACTION_BITS], field.any()))
        significand, shift = normalise_steps(m, raw, (16, 8, 4, 2, 1), "factor")
        factor = Signal(Factor, reset_less=True)
        m.d.sync += [
            factor.significand.eq(significand),
            factor.exponent.eq(Mux(field == 0, 1, field) - (FLOAT_BIAS + FLOAT_FRACTION_BITS) - shift),
            factor.negative.eq(self.code[-1]),
        ]
        m.d.comb += self.factor.eq(factor)
        return m


class ScorePipe(wiring.Component):
    """Scores one dot product or one sink per cycle, `latency_cycles` after it came; never waits.

    Members
    -------
    dot : In(DotProduct) : the dot product.
    factor : In(Factor) : the score factor.
    capped : In : the score goes to a softcap, where an infinite one is a number.
    is_sink : In : score `sink` instead of `dot`.
    sink : In : float32 bits.
    score : Out : S, 20 fraction bits; for a softcap U, 26 fraction bits, by the factor that is for that.
    dropped : Out : the row or the sink has no weight.
    nan : Out : the query's result is NaN.

    Stages: special cases and 74-bit value; magnitude; three of normalisation; partial products; product;
    shift; rounding; sign.
    """

    latency_cycles = 10
    dot: In(DotProduct)
    factor: In(Factor)
    capped: In(1)
    is_sink: In(1)
    sink: In(FLOAT_BITS)
    score: Out(signed(SCORE_BITS))
    dropped: Out(1)
    nan: Out(1)

    def elaborate(self, platform):
        m = Module()
        # 1: the value as high * 2^32 + low with 0 <= low < 2^32, the exponent of its unit, specials
        dot, factor, sink = self.dot, self.factor, self.sink
        sink_field = sink[FLOAT_FRACTION_BITS:-1]
        sink_special = sink_field.all()
        sink_nan = sink_special & (sink[:FLOAT_FRACTION_BITS].any() | ~sink[-1])
        factor_zero = ~factor.significand[-1]
        infinite = dot.positive | dot.negative
        up = Mux(factor.negative, dot.negative, dot.positive)
        undefined = dot.nan | (dot.positive & dot.negative) | (infinite & factor_zero)
        high_bits = DOT_LIMB_BITS + 1
        empty = dot.top == empty_top(DOT_TOP_BITS)
        high = stage(
            m, Mux(self.is_sink | empty, 0, dot.high + (dot.low >> BIN_BITS)), shape=signed(high_bits)
        )
        low = stage(
            m,
            Mux(
                self.is_sink,
                Cat(sink[:FLOAT_FRACTION_BITS], sink_field.any()),
                Mux(empty, 0, dot.low[:BIN_BITS]),
            ),
            shape=BIN_BITS,
        )
        unit = stage(
            m,
            Mux(
                self.is_sink,
                Mux(sink_field == 0, 1, sink_field) - (FLOAT_BIAS + FLOAT_FRACTION_BITS),
                (dot.top - 1) << BIN_BITS.bit_length() - 1,
            ),
            shape=signed(_EXPONENT_BITS),
        )
        chosen = Signal(Factor)
        m.d.comb += chosen.eq(factor)
        with m.If(self.is_sink):
            m.d.comb += [
                chosen.significand.eq(SINK_FACTOR),
                chosen.exponent.eq(SINK_FACTOR_EXPONENT),
                chosen.negative.eq(sink[-1]),
            ]
        multiplier = later(m, stage(m, chosen.significand), 4)
        multiplier_exponent = stage(m, chosen.exponent)
        factor_negative = stage(m, chosen.negative)
        nan = later(
            m,
            stage(
                m,
                Mux(
                    self.is_sink,
                    sink_nan,
                    undefined | (infinite & up & ~self.capped),
                ),
            ),
            9,
        )
        limited = infinite & ~undefined & self.capped
        dropped = later(m, stage(m, Mux(self.is_sink, sink_special, dot.nan | (infinite & ~limited))), 9)
        limited = stage(m, limited & ~self.is_sink)
        limited_negative = stage(m, ~up)

        # 2: magnitude
        minus = high[-1]
        borrow = low == 0
        magnitude_high = stage(
            m, (high ^ minus.replicate(high_bits)) + (minus & borrow), shape=unsigned(high_bits)
        )
        magnitude_low = stage(m, Mux(minus, -low, low), shape=BIN_BITS)
        negative = later(m, stage(m, Mux(limited, limited_negative, minus ^ factor_negative)), 7)
        limited = later(m, limited, 7)
        exponent = stage(m, unit + multiplier_exponent, shape=signed(_EXPONENT_BITS))

        # 3, 4, 5: the top 32 bits from the leading one on. A magnitude of 42 bits or fewer fits the window
        # whole; of a larger one the window has the top 64 bits, more than are kept.
        window_bits = 2 * BIN_BITS
        drop = BIN_BITS + high_bits - window_bits
        fits = magnitude_high[drop:] == 0
        window = Signal(window_bits)
        pad = window_bits - BIN_BITS - drop
        m.d.comb += window.eq(
            Mux(
                fits,
                Cat(Const(0, pad), magnitude_low, magnitude_high[:drop]),
                Cat(magnitude_low[drop:], magnitude_high),
            )
        )
        window = stage(m, window)
        exponent = stage(m, exponent + Mux(fits, -pad, drop), shape=signed(_EXPONENT_BITS))
        coarse, coarse_shift = normalise_steps(m, window, (32, 16), "window")
        coarse = stage(m, coarse[BIN_BITS // 2 :])
        shift = stage(m, coarse_shift)
        fine, fine_shift = normalise_steps(m, coarse, (8, 4, 2, 1), "coarse")
        kept = stage(m, fine[-DOT_KEPT_BITS:])
        shift = stage(m, shift | fine_shift)
        # right shift that leaves one bit below the score's unit, for rounding
        right = stage(
            m,
            shift - later(m, exponent, 2) - (1 + SCORE_FRACTION_BITS + BIN_BITS),
            shape=signed(_EXPONENT_BITS),
        )

        # 6, 7: product, from multiplications that fit an 18-bit multiplier
        product_bits = DOT_KEPT_BITS + FACTOR_BITS
        product = stage(m, split_product(m, kept, multiplier))
        # A shift below `least` leaves more than the largest score, one of all bits nothing.
        least = product_bits - 1 - SCORE_LIMIT.bit_length() - 1
        huge = stage(m, right < least)
        gone = stage(m, right >= product_bits)
        amount = stage(m, right[: product_bits.bit_length()])

        # 8: shift
        some = product[-2:].any()
        shifted = stage(m, Mux(some & ~gone, product >> amount, 0), shape=product_bits - least)
        huge = stage(m, some & huge)

        # 9: round to nearest, ties away from zero, and saturate
        rounded = (shifted + 1) >> 1
        over = huge | limited | (rounded >> SCORE_LIMIT.bit_length()).any()
        magnitude = stage(m, Mux(over, SCORE_LIMIT, rounded), shape=SCORE_LIMIT.bit_length())

        # 10: sign
        score = stage(m, Mux(negative, -magnitude, magnitude), shape=signed(SCORE_BITS))
        m.d.comb += [self.score.eq(score), self.nan.eq(nan), self.dropped.eq(dropped)]
        return m
