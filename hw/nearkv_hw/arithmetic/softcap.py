"""Softcap (docs/numerics.md, section 8): a score becomes cap * tanh(score / cap), by a table of parabolas."""

from amaranth.hdl import Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import (
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    TANH_CURVE_BITS,
    TANH_FRACTION_BITS,
    TANH_OCTAVES,
    TANH_STEP_BITS,
    TANH_TABLE,
)
from ..common.pipeline import later, split_product, stage
from .score import FACTOR_BITS, SCORE_BITS, Factor

_TANH_BITS = TANH_FRACTION_BITS + 1
_SLOPE_BITS = max(b for _, b, _ in TANH_TABLE).bit_length() + 1
_CURVE_BITS = max(-c for _, _, c in TANH_TABLE).bit_length() + 1
_PRODUCT_BITS = _TANH_BITS + FACTOR_BITS
_RIGHT_BITS = _PRODUCT_BITS.bit_length()


class _Segment(data.Struct):
    value: unsigned(_TANH_BITS)
    slope: signed(_SLOPE_BITS)
    curve: signed(_CURVE_BITS)


class Softcap(wiring.Component):
    """Caps one score per cycle, `latency_cycles` after it came; never waits.

    Members
    -------
    score : In : U with 26 fraction bits where there is a cap, else S.
    capped : In : there is a cap.
    cap : In(Factor) : C2, `cap_cycles` after the score.
    capped_score : Out : S.

    Stages: magnitude; segment; its parabola; curve; slope; products; hyperbolic tangent; products; product;
    shift; rounding and sign.
    """

    latency_cycles = 11
    cap_cycles = 7
    score: In(signed(SCORE_BITS))
    capped: In(1)
    cap: In(Factor)
    capped_score: Out(signed(SCORE_BITS))

    def elaborate(self, platform):
        m = Module()

        # 1: magnitude
        magnitude = Signal(SCORE_LIMIT.bit_length(), reset_less=True)
        m.d.sync += magnitude.eq(Mux(self.score < 0, -self.score, self.score))

        # 2, 3: the segment's parabola, and the place in it
        index, place = Signal(8), Signal(TANH_STEP_BITS)
        for bits, k, first in reversed(TANH_OCTAVES):
            with m.If(magnitude[bits:] == 0):
                m.d.comb += [
                    index.eq(first + magnitude[k:bits]),
                    place.eq(magnitude[k - TANH_STEP_BITS : k]),
                ]
        m.submodules.table = table = memory.Memory(
            shape=_Segment,
            depth=len(TANH_TABLE),
            init=[{"value": t, "slope": b, "curve": c} for t, b, c in TANH_TABLE],
        )
        read = table.read_port()
        m.d.comb += read.addr.eq(index)
        segment = Signal(_Segment, reset_less=True)
        m.d.sync += segment.eq(read.data)
        place = later(m, place, 2)
        beyond = later(m, magnitude[TANH_OCTAVES[-1][0] :].any(), 2)

        # 4 to 7: value + (slope + curve * place) * place
        bent = Signal(signed(_CURVE_BITS + TANH_CURVE_BITS), reset_less=True)
        slope = Signal(signed(_SLOPE_BITS), reset_less=True)
        m.d.sync += [
            bent.eq(segment.curve * place[TANH_STEP_BITS - TANH_CURVE_BITS :]),
            slope.eq(stage(m, segment.slope) + ((bent + (1 << TANH_CURVE_BITS - 1)) >> TANH_CURVE_BITS)),
        ]
        rise = split_product(m, slope, later(m, place, 2))
        tanh = Signal(_TANH_BITS, reset_less=True)
        value = later(m, segment.value, 3)
        m.d.sync += tanh.eq(
            Mux(
                later(m, beyond, 3),
                1 << TANH_FRACTION_BITS,
                value + ((rise + (1 << TANH_STEP_BITS - 1)) >> TANH_STEP_BITS),
            )
        )

        # 8 to 10: times C2, with one bit below the score's unit
        product = stage(m, split_product(m, tanh, self.cap.significand))
        rights = Signal(_RIGHT_BITS, reset_less=True)
        wanted = TANH_FRACTION_BITS - SCORE_FRACTION_BITS - 1 - self.cap.exponent
        m.d.sync += rights.eq(Mux(wanted > _PRODUCT_BITS, _PRODUCT_BITS, wanted))
        right = stage(m, rights)
        shifted = Signal(_PRODUCT_BITS, reset_less=True)
        m.d.sync += shifted.eq(product >> right)

        # 11: to nearest, ties away from zero
        rounded = (shifted + 1) >> 1
        result = Signal(signed(SCORE_BITS), reset_less=True)
        plain = later(m, self.score, self.latency_cycles - 1)
        m.d.sync += result.eq(
            Mux(later(m, self.capped, self.latency_cycles - 1), Mux(plain < 0, -rounded, rounded), plain)
        )
        m.d.comb += self.capped_score.eq(result)
        return m
