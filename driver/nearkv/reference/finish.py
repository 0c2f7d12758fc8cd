"""From a partial result to numbers (docs/numerics.md section 6): the quotient, one rounding, log-sum-exp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from nearkv_hw.abi.formats import BF16, FP16
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

from nearkv.reference.binned import BIN_SHIFT, State, bit_length, leading_bits, magnitude
from nearkv.reference.fixed import FP32_EXPONENT_BIAS, FP32_FRACTION_BITS, float32_parts
from nearkv.reference.partial import Partial
from nearkv.reference.threads import threads_for


@dataclass(frozen=True)
class Target:
    """An output format.

    Parameters
    ----------
    storage : the integer type of its codes.
    bits, fraction_bits : of a code.
    exponent_bias : a code's unit has the exponent max(field, 1) - exponent_bias.
    nan : the one NaN that results are written with.
    """

    storage: torch.dtype
    bits: int
    fraction_bits: int
    exponent_bias: int
    nan: int

    @property
    def infinity(self) -> int:
        """The code of +Inf."""
        return ((1 << (self.bits - 1 - self.fraction_bits)) - 1) << self.fraction_bits


FP32_TARGET = Target(torch.int32, 32, FP32_FRACTION_BITS, FP32_EXPONENT_BIAS, NAN_FP32)
TARGETS: dict[torch.dtype, Target] = {
    torch.float32: FP32_TARGET,
    torch.bfloat16: Target(torch.int16, BF16.bits, BF16.fraction_bits, BF16.exponent_bias, NAN_BF16),
    torch.float16: Target(torch.int16, FP16.bits, FP16.fraction_bits, FP16.exponent_bias, NAN_FP16),
}


def finish(partial: Partial, out_dtype: torch.dtype = torch.float32, v_scale: Tensor | None = None) -> Tensor:
    """The attention result of a partial that holds all its rows.

    Parameters
    ----------
    partial : queries [..., q_heads] with lanes [..., q_heads, value_dim].
    out_dtype : torch.float32, torch.bfloat16 or torch.float16.
    v_scale : float32 [kv_heads], multiplies the float32 results of its query heads before they are made
        narrower.

    Returns
    -------
    Tensor [..., q_heads, value_dim] of `out_dtype`; +0 where no row had weight, NaN with the contract's bits.

    Raises
    ------
    ValueError, TypeError : for another out_dtype, or a v_scale that does not fit the heads.
    """
    target = output_target(out_dtype)
    with threads_for(partial.lane_flags.numel(), partial.lane_flags.device):
        return _finish(partial, target, v_scale).view(out_dtype)


def _finish(partial: Partial, target: Target, v_scale: Tensor | None) -> Tensor:
    """The codes of `finish`, in the target's storage type."""
    plus = partial.lane_flags & LANE_POSITIVE_INFINITY != 0
    minus = partial.lane_flags & LANE_NEGATIVE_INFINITY != 0
    nan = partial.query_nan.unsqueeze(-1) | (partial.lane_flags & LANE_NAN != 0) | (plus & minus)
    negative, significand, exponent = _quotient(partial)
    first = target if v_scale is None else FP32_TARGET
    code = _rounded(significand, exponent, first).masked_fill(plus | minus, first.infinity)
    negative = torch.where(plus | minus, minus, negative & (significand != 0))
    if v_scale is not None:
        factor = _per_query_head(v_scale, partial).view(torch.int32).to(torch.int64)
        size = factor & 0x7FFFFFFF
        infinite, zero = code == first.infinity, code == 0
        nan = nan | (size > first.infinity) | (infinite & (size == 0)) | (zero & (size == first.infinity))
        negative = negative ^ (factor < 0)
        code = _multiplied(code, size)
        if target is not first:
            code = _narrowed(code, target)
    # The sign bit is that of a two's complement number of the code's width.
    code = code - (negative.to(torch.int64) << (target.bits - 1))
    return code.masked_fill(nan, target.nan).to(target.storage)


def log_sum_exp(partial: Partial) -> Tensor:
    """The natural-base log-sum-exp of each query's scaled scores, float32 [..., q_heads].

    -Inf where no row had weight, NaN where the query's flag is set. It is worked out in double on the CPU,
    wherever the partial lies, because no device promises the bits of a logarithm.
    """
    state = partial.denominator
    on_cpu = State(state.top.cpu(), state.high.cpu(), state.low.cpu())
    significand, exponent = _denominator(on_cpu)
    result = significand.double().log() + exponent.double() * math.log(2)
    result = result.masked_fill(on_cpu.top == TOP_NONE, -math.inf)
    result = result.masked_fill(partial.query_nan.cpu(), math.nan)
    return result.to(torch.float32).to(state.top.device)


def output_target(out_dtype: torch.dtype) -> Target:
    """The format of an output type; TypeError when there is none."""
    if out_dtype not in TARGETS:
        allowed = ", ".join(str(dtype) for dtype in TARGETS)
        raise TypeError(f"out_dtype must be one of {allowed}, not {out_dtype}")
    return TARGETS[out_dtype]


def _quotient(partial: Partial) -> tuple[Tensor, Tensor, Tensor]:
    """The lanes before rounding as (negative, significand, exponent), significand 0 for a zero sum."""
    divisor, divisor_exponent = _denominator(partial.denominator)
    reciprocal = torch.full_like(divisor, 1 << RECIPROCAL_BITS).div(divisor, rounding_mode="floor")
    # An empty denominator finishes as +0.
    reciprocal = reciprocal.masked_fill(partial.denominator.top == TOP_NONE, 0).unsqueeze(-1)
    negative, high, low = magnitude(partial.numerators)
    kept, dropped = leading_bits(high, low, NUMERATOR_KEPT_BITS)
    kept_exponent = ((partial.numerators.top - 1) << BIN_SHIFT) + dropped
    return negative, kept * reciprocal, kept_exponent - divisor_exponent.unsqueeze(-1) - RECIPROCAL_BITS


def _denominator(state: State) -> tuple[Tensor, Tensor]:
    """Λ as a significand of exactly 31 bits and its exponent; 2^30 stands in for an empty one."""
    _, high, low = magnitude(state)
    kept, dropped = leading_bits(high, low, DENOMINATOR_BITS)
    missing = DENOMINATOR_BITS - bit_length(kept)
    significand = (kept << missing).masked_fill(state.top == TOP_NONE, 1 << (DENOMINATOR_BITS - 1))
    return significand, ((state.top - 1) << BIN_SHIFT) + dropped - missing


def _rounded(significand: Tensor, exponent: Tensor, target: Target) -> Tensor:
    """The code, without sign, nearest to significand * 2^exponent; the significand has 62 bits or fewer.

    Ties go to even, subnormals are kept, overflow is Inf.
    """
    lowest = 1 - target.exponent_bias
    unit = (exponent + bit_length(significand) - 1 - target.fraction_bits).clamp(min=lowest)
    drop = unit - exponent
    right, left = drop.clamp(0, 63), (-drop).clamp(0, 62)
    kept = significand >> right
    rest = significand - (kept << right)
    # Half of the unit in units of the lowest bit; where nothing is dropped the rest is 0, below any half.
    half = torch.ones_like(right) << (right.clamp(min=1) - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    # A kept leading one adds one to the exponent field, and so does a carry of the rounding.
    code = ((unit - lowest) << target.fraction_bits) + (kept << left)
    return code.clamp(max=target.infinity).masked_fill(significand == 0, 0)


def _multiplied(first: Tensor, second: Tensor) -> Tensor:
    """The product of two float32 codes without signs as IEEE 754 rounds it; NaN results are the caller's."""
    _, first_significand, first_exponent = float32_parts(first)
    _, second_significand, second_exponent = float32_parts(second)
    product = _rounded(first_significand * second_significand, first_exponent + second_exponent, FP32_TARGET)
    infinity = FP32_TARGET.infinity
    return product.masked_fill((first == infinity) | (second == infinity), infinity)


def _narrowed(code: Tensor, target: Target) -> Tensor:
    """A float32 code without sign, converted to a narrower format."""
    _, significand, exponent = float32_parts(code)
    return _rounded(significand, exponent, target).masked_fill(code == FP32_TARGET.infinity, target.infinity)


def _per_query_head(v_scale: Tensor, partial: Partial) -> Tensor:
    """v_scale [kv_heads] as [q_heads, 1]."""
    q_heads, device = partial.query_nan.shape[-1], partial.query_nan.device
    if v_scale.dtype != torch.float32 or v_scale.dim() != 1:
        raise TypeError(
            f"v_scale must be float32 [kv_heads], not {v_scale.dtype} of shape {tuple(v_scale.shape)}"
        )
    if v_scale.shape[0] == 0 or q_heads % v_scale.shape[0]:
        raise ValueError(
            f"v_scale has {v_scale.shape[0]} KV heads, which do not divide {q_heads} query heads"
        )
    if v_scale.device != device:
        raise ValueError(f"v_scale is on {v_scale.device}, the partial on {device}")
    return v_scale.repeat_interleave(q_heads // v_scale.shape[0]).unsqueeze(-1)
