"""float32 codes taken apart, and their products as integers in fixed point."""

from __future__ import annotations

import struct

import torch
from nearkv_hw.abi.numerics import SCORE_LIMIT
from torch import Tensor

LOG2_E = 1.4426950408889634
"""The double nearest to log2(e), written out so that no mathematics library has a say in it."""
FP32_FRACTION_BITS = 23
FP32_EXPONENT_BIAS = 150
"""A float32's significand has the exponent max(field, 1) - 150."""
_FP32_FIELD_MASK = 0xFF


def float32_bits(number: float) -> int:
    """The bits of the float32 nearest to a double, ties to even; those of an infinity beyond its range."""
    try:
        return int.from_bytes(struct.pack("<f", number), "little")
    except OverflowError:
        sign = 1 << 31 if number < 0 else 0
        return sign | _FP32_FIELD_MASK << FP32_FRACTION_BITS


def is_finite(bits: int) -> bool:
    """Whether float32 bits are those of a number."""
    return bits >> FP32_FRACTION_BITS & _FP32_FIELD_MASK != _FP32_FIELD_MASK


def float32_parts(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 codes as (negative, significand, exponent); infinities and NaN look like numbers."""
    codes = codes.to(torch.int64)
    field = (codes >> FP32_FRACTION_BITS) & _FP32_FIELD_MASK
    fraction = codes & ((1 << FP32_FRACTION_BITS) - 1)
    hidden = field.clamp(max=1) << FP32_FRACTION_BITS
    return (codes >> 31) & 1 == 1, fraction + hidden, field.clamp(min=1) - FP32_EXPONENT_BIAS


def fixed_point(product: Tensor, exponent: Tensor) -> Tensor:
    """The integer nearest to product * 2^exponent (ties away), at most `SCORE_LIMIT`; product < 2^57."""
    left = exponent.clamp(0, 43)
    right = (-exponent).clamp(0, 60)
    half = (1 << right) >> 1
    rounded = (product + half) >> right
    # `left` stops at 43, where nothing but zero fits any more, so a larger shift makes no other result.
    return torch.where(rounded <= SCORE_LIMIT >> left, rounded << left, SCORE_LIMIT)
