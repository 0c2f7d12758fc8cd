"""Constants and table of the numerics contract (docs/numerics.md), shared by every implementation."""

from __future__ import annotations

from math import isqrt

CONTRACT_VERSION = 1

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
