"""From sums to numbers (docs/numerics.md, section 6), for the model device in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.abi.numerics import (
    DENOMINATOR_BITS,
    NAN_BF16,
    NAN_FP16,
    NAN_FP32,
    NUMERATOR_KEPT_BITS,
    RECIPROCAL_BITS,
    TOP_NONE,
)
from torch import Tensor

from .contract import Partial, bit_length, decode_factor, truncate


def finish(partial: Partial, form: OutputForm, output_scale: int = 0) -> Tensor:
    """Final results (section 6): output codes, int64 [jobs, queries, lanes].

    `output_scale` are float32 bits, 0 for none.
    """
    if output_scale:
        return _narrowed(_multiplied(finish(partial, OutputForm.FP32), output_scale), form)
    negative, a, a_exponent = truncate(partial.numerators, NUMERATOR_KEPT_BITS)
    _, weight, exponent = truncate(partial.denominator, DENOMINATOR_BITS)
    empty = partial.denominator.top == TOP_NONE
    short = torch.where(empty, 0, DENOMINATOR_BITS - bit_length(weight))
    weight = torch.where(empty, 1 << DENOMINATOR_BITS - 1, weight << short)
    reciprocal = (1 << RECIPROCAL_BITS) // weight
    magnitude = a * reciprocal[..., None]
    scale = a_exponent - (exponent - short)[..., None] - RECIPROCAL_BITS
    shape = _OUTPUTS[form]
    code = _round_float(magnitude, scale, shape)
    sign = 1 << shape.bits - 1
    code = torch.where(negative & (magnitude != 0), code | sign, code)

    positive_infinity = partial.lane_flags & LANE_POSITIVE_INFINITY != 0
    negative_infinity = partial.lane_flags & LANE_NEGATIVE_INFINITY != 0
    code = torch.where(positive_infinity, shape.infinity, code)
    code = torch.where(negative_infinity, shape.infinity | sign, code)
    nan = partial.query_nan[..., None] | (partial.lane_flags & LANE_NAN != 0)
    return torch.where(nan | (positive_infinity & negative_infinity), shape.nan, code)


@dataclass(frozen=True)
class _Output:
    """An output format: bits, bits of its fraction, exponent of its least normal number, code of its NaN."""

    bits: int
    fraction_bits: int
    least_exponent: int
    nan: int

    @property
    def infinity(self) -> int:
        return ((1 << self.bits - 1) - 1) >> self.fraction_bits << self.fraction_bits


_OUTPUTS = {
    OutputForm.FP32: _Output(32, 23, -126, NAN_FP32),
    OutputForm.BF16: _Output(16, 7, -126, NAN_BF16),
    OutputForm.FP16: _Output(16, 10, -14, NAN_FP16),
}


def _multiplied(codes: Tensor, factor: int) -> Tensor:
    """float32 codes times a float32, in one IEEE multiplication, as codes."""
    significand, exponent, negative = decode_factor(codes)
    other, other_exponent, other_negative = decode_factor(torch.tensor(factor))
    product = significand * other
    short = (_PRODUCT_BITS - bit_length(product)).clamp(min=0)
    shape = _OUTPUTS[OutputForm.FP32]
    found = _round_float(product << short, exponent + other_exponent - short, shape)
    infinite, nan = codes & 0x7FFFFFFF == shape.infinity, codes & 0x7FFFFFFF > shape.infinity
    size = factor & 0x7FFFFFFF
    if size > shape.infinity:
        nan = torch.ones_like(nan)
    elif size == shape.infinity:
        nan = nan | (codes & 0x7FFFFFFF == 0)
        infinite = torch.ones_like(infinite)
    elif size == 0:
        nan = nan | infinite
    found = torch.where(infinite, shape.infinity, found)
    found = torch.where(negative ^ other_negative, found | 1 << 31, found)
    return torch.where(nan, shape.nan, found)


_PRODUCT_BITS = 62


def _narrowed(codes: Tensor, form: OutputForm) -> Tensor:
    """float32 codes as those of an output format."""
    if form is OutputForm.FP32:
        return codes
    significand, exponent, negative = decode_factor(codes)
    wide, shape = _OUTPUTS[OutputForm.FP32], _OUTPUTS[form]
    size = codes & 0x7FFFFFFF
    found = _round_float(significand << 32, exponent - 32, shape)
    found = torch.where(size == wide.infinity, shape.infinity, found)
    found = torch.where(negative, found | 1 << shape.bits - 1, found)
    return torch.where(size > wide.infinity, shape.nan, found)


def _round_float(magnitude: Tensor, exponent: Tensor, shape: _Output) -> Tensor:
    """The code of magnitude * 2^exponent, rounded to nearest even; magnitude is 0 or in 2^30 ... 2^62."""
    leading = bit_length(magnitude) - 1 + exponent
    step = leading.clamp(min=shape.least_exponent)
    shift = (step - shape.fraction_bits - exponent).clamp(1, 63)
    one = torch.ones_like(shift)
    kept, rest, half = magnitude >> shift, magnitude & ((one << shift) - 1), one << (shift - 1)
    kept += ((rest > half) | ((rest == half) & (kept & 1 == 1))).long()
    # the hidden bit, and a carry out of the fraction, move the exponent field up by themselves
    code = ((step.clamp(max=1 << 10) - shape.least_exponent) << shape.fraction_bits) + kept
    return torch.where(magnitude == 0, 0, code.clamp(max=shape.infinity))
