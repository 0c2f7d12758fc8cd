"""Constants and table of the numerics contract (docs/numerics.md), shared by every implementation."""

from __future__ import annotations

from math import isqrt

CONTRACT_VERSION = 3

BIN_BITS = 32
"""W: the width of a bin; bin and offset are bit fields of an exponent."""
TOP_BITS = 20
"""Bits of a state's top bin T, signed."""
LIMB_BITS = 56
"""Bits of a state's limbs H and L, signed."""
TOP_NONE = -(1 << 31)
"""The int32 that stands for an empty state's top bin wherever a state leaves the device."""
MAX_ROWS = (1 << 23) - 1
"""Rows of one context that the limbs have room for."""

SCORE_FRACTION_BITS = 20
"""Fraction bits of the base-2 score S."""
SCORE_LIMIT = (1 << 43) - 1
"""The magnitude at which S saturates."""
DOT_KEPT_BITS = 32
"""Bits of the dot product's magnitude that the score keeps (trunc_32)."""

TABLE_INDEX_BITS = 8
TABLE_STEP_BITS = SCORE_FRACTION_BITS - TABLE_INDEX_BITS
TABLE_FRACTION_BITS = 21
WEIGHT_BITS = 18
"""Bits of a weight's significand p; the weight is p * 2^(n - 17)."""
WEIGHT_FRACTION_BITS = WEIGHT_BITS - 1

SINK_FACTOR = 12102203
SINK_FACTOR_EXPONENT = -23
"""log2(e) as the contract has it for sinks: SINK_FACTOR * 2^SINK_FACTOR_EXPONENT."""

SOFTCAP_LIMIT = 0x44800000
"""float32 bits of 1,024, the largest C2 = cap * log2(e)."""
TANH_FRACTION_BITS = 26
"""Fraction bits of the argument U that a score is under a softcap, and of its hyperbolic tangent."""
TANH_STEP_BITS = 20
"""Bits of the place within a segment of `TANH_TABLE`."""
TANH_CURVE_BITS = 16
"""Bits of that place which the table's c is multiplied with."""
TANH_OCTAVES: tuple[tuple[int, int, int], ...] = ((27, 20, 0), (28, 21, 64), (29, 23, 160), (30, 24, 192))
"""(bits, k, first): an argument below 2^bits is in segment first + (argument >> k); beyond them tanh is 1."""

POSITION_BITS = 23
"""Bits of a row's position, and of the distance between two."""

NUMERATOR_KEPT_BITS = 31
DENOMINATOR_BITS = 31
RECIPROCAL_BITS = 61
"""r = floor(2^RECIPROCAL_BITS / l) for a denominator l of exactly DENOMINATOR_BITS bits."""

NAN_FP32 = 0x7FC00000
NAN_BF16 = 0x7FC0
NAN_FP16 = 0x7E00


def _exp2_entry(index: int) -> int:
    """The integer nearest to 2^(21 + index/256), by integer roots: no float unit is trusted with it."""
    guard = 160
    power = 1 << guard + TABLE_FRACTION_BITS + (index >> TABLE_INDEX_BITS)
    root = 2 << guard
    for bit in reversed(range(TABLE_INDEX_BITS)):
        root = isqrt(root << guard)  # 2^(1/2), 2^(1/4), ..., 2^(1/256)
        if index >> bit & 1:
            power = power * root >> guard
    return (power + (1 << guard - 1)) >> guard


EXP2_TABLE: tuple[int, ...] = tuple(_exp2_entry(i) for i in range((1 << TABLE_INDEX_BITS) + 1))
"""t[i] = nearest integer to 2^(21 + i/256), i = 0 ... 256."""


def _tanh_nodes(per_unit: int, count: int) -> list[int]:
    """The integers nearest to 2^26 * tanh(i / per_unit), i = 0 ... count - 1, by integers alone."""
    guard = 160
    step, term = 0, 1 << guard  # e^(-2 / per_unit) by its series
    for order in range(1, 60):
        step += term
        term = -term * 2 // (per_unit * order)
    nodes, power = [], 1 << guard
    for _ in range(count):
        tanh = (((1 << guard) - power) << guard) // ((1 << guard) + power)
        nodes.append((tanh + (1 << guard - TANH_FRACTION_BITS - 1)) >> guard - TANH_FRACTION_BITS)
        power = power * step >> guard
    return nodes


def _tanh_table() -> tuple[tuple[int, int, int], ...]:
    """(t, b, c) of each segment: the parabola t + b s + c s^2 through its ends, 0 and 1, and its middle."""
    half_shift = TANH_STEP_BITS - 1  # the finest segments' halves are the nodes
    nodes = _tanh_nodes(1 << TANH_FRACTION_BITS - half_shift, (1 << TANH_OCTAVES[-1][0] - half_shift) + 1)
    table, start = [], 0
    for bits, k, _ in TANH_OCTAVES:
        width = 1 << k - half_shift
        while start < 1 << bits - half_shift:
            t, middle, end = (nodes[start + at] for at in (0, width // 2, width))
            table.append((t, 4 * middle - 3 * t - end, 2 * (t - 2 * middle + end)))
            start += width
    return tuple(table)


TANH_TABLE: tuple[tuple[int, int, int], ...] = _tanh_table()
"""(t, b, c) of 256 segments of 2^26 * tanh: near s of a segment, 0 <= s < 1, it is t + (b + c s) s."""
