"""ALiBi (docs/numerics.md, section 9): the bias of a score, and their sum."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import SCORE_FRACTION_BITS, SCORE_LIMIT
from ..common.pipeline import later, split_product, stage
from .score import SCORE_BITS, Factor

DISTANCE_BITS = 26
"""Bits of the distance of two positions, signed."""
_LIMIT_BITS = SCORE_LIMIT.bit_length()
_UP = _LIMIT_BITS + 1
"""Bits that a product is shifted left ahead, so that what follows is a shift right."""


class Bias(wiring.Component):
    """Adds one bias to a score per cycle; never waits.

    Members
    -------
    distance : In : the row's position minus the query row's.
    slope : In(Factor) : the query head's, zero for no bias.
    score : In : S, `score_cycles` after the distance.
    biased : Out : S with the bias, saturated, one cycle later.

    Stages: magnitude; products; product; shift; rounding; sum.
    """

    score_cycles = 5
    latency_cycles = score_cycles + 1
    distance: In(signed(DISTANCE_BITS))
    slope: In(Factor)
    score: In(signed(SCORE_BITS))
    biased: Out(signed(SCORE_BITS))

    def elaborate(self, platform):
        m = Module()

        # 1: magnitude, and the shift that leaves one bit below the score's unit
        magnitude = stage(m, Mux(self.distance < 0, -self.distance, self.distance), shape=DISTANCE_BITS)
        negative = stage(m, (self.distance < 0) ^ self.slope.negative)
        factor = stage(m, self.slope.significand)
        right = stage(m, _UP - 1 - SCORE_FRACTION_BITS - self.slope.exponent, shape=signed(11))

        # 2, 3: product, from multiplications that fit an 18-bit multiplier
        product = stage(m, split_product(m, magnitude, factor))

        # 4: shift; what would have to go further left is larger than every score
        right = later(m, right, 2)
        wide = Cat(Const(0, _UP), product)
        gone = right >= len(wide)
        shifted = stage(m, Mux(gone, 0, wide >> right[: len(wide).bit_length()]))
        huge = stage(m, product.any() & (right < 0))

        # 5: to nearest, ties away from zero, saturated; a negative one is inverted, and one more in the sum
        negative = later(m, negative, 3)
        rounded = (shifted + 1) >> 1
        over = huge | (rounded >> _LIMIT_BITS).any()
        magnitude = Mux(over, SCORE_LIMIT, rounded)[:_LIMIT_BITS]
        bias = stage(m, Cat(magnitude, Const(0, 1)) ^ negative.replicate(SCORE_BITS)).as_signed()

        # 6: sum, saturated at -SCORE_LIMIT and SCORE_LIMIT, which its first two bits tell but for one number
        total = Signal(signed(SCORE_BITS + 1))
        carried = Cat(Const(1, 1), self.score).as_signed() + Cat(stage(m, negative), bias).as_signed()
        m.d.comb += total.eq(carried >> 1)
        sign, large = total[-1], total[-1] ^ total[-2]
        lowest = sign & ~total[:_LIMIT_BITS].any()
        limited = Cat((large & ~sign).replicate(_LIMIT_BITS), sign) | Mux(large, 0, total[:SCORE_BITS])
        m.d.comb += self.biased.eq(stage(m, (limited | large | lowest).as_signed(), shape=signed(SCORE_BITS)))
        return m
