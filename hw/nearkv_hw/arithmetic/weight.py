"""The weight of a score (docs/numerics.md, section 4): a power of two from a table, linear in between."""

from itertools import pairwise

from amaranth.hdl import Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import (
    EXP2_TABLE,
    SCORE_FRACTION_BITS,
    TABLE_FRACTION_BITS,
    TABLE_INDEX_BITS,
    TABLE_STEP_BITS,
    WEIGHT_BITS,
)
from ..common.pipeline import later
from .product import FACTOR_EXPONENT_BITS
from .score import SCORE_BITS

_VALUE_BITS = TABLE_FRACTION_BITS + 1
_STEPS = [after - before for before, after in pairwise(EXP2_TABLE)]
_STEP_BITS = max(_STEPS).bit_length()


class Weight(data.Struct):
    """significand / 2^17 * 2^exponent; the leading one is the top bit, or the significand is zero: no
    weight."""

    significand: unsigned(WEIGHT_BITS)
    exponent: signed(FACTOR_EXPONENT_BITS)


class _TableEntry(data.Struct):
    value: unsigned(_VALUE_BITS)
    step: unsigned(_STEP_BITS)


class WeightPipe(wiring.Component):
    """Weighs one score per cycle, `latency_cycles` after it came; never waits.

    Members
    -------
    score : In : S, 20 fraction bits.
    dropped : In : there is no weight, whatever the score.
    weight : Out(Weight).

    Stages: table; its output; product; sum.
    """

    latency_cycles = 4
    score: In(signed(SCORE_BITS))
    dropped: In(1)
    weight: Out(Weight)

    def elaborate(self, platform):
        m = Module()
        m.submodules.table = table = memory.Memory(
            shape=_TableEntry,
            depth=1 << TABLE_INDEX_BITS,
            init=[
                {"value": value, "step": step} for value, step in zip(EXP2_TABLE[:-1], _STEPS, strict=True)
            ],
        )
        read = table.read_port()
        m.d.comb += read.addr.eq(self.score[TABLE_STEP_BITS:SCORE_FRACTION_BITS])
        entry = Signal(_TableEntry, reset_less=True)
        m.d.sync += entry.eq(read.data)

        between = later(m, self.score[:TABLE_STEP_BITS], 2)
        rise = Signal(_STEP_BITS + TABLE_STEP_BITS, reset_less=True)
        value = later(m, entry.value, 1)
        weight = Signal(Weight, reset_less=True)
        rounding = TABLE_STEP_BITS + TABLE_FRACTION_BITS - (WEIGHT_BITS - 1)
        whole = (value << TABLE_STEP_BITS) + (rise + (1 << rounding - 1)) >> rounding
        m.d.sync += [
            rise.eq(entry.step * between),
            weight.significand.eq(
                Mux(
                    later(m, self.dropped, 3),
                    0,
                    Mux(whole[WEIGHT_BITS:].any(), (1 << WEIGHT_BITS) - 1, whole),
                )
            ),
            weight.exponent.eq(later(m, self.score[SCORE_FRACTION_BITS:], 3)),
        ]
        m.d.comb += self.weight.eq(weight)
        return m
