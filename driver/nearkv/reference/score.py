"""From a dot product to a weight (docs/numerics.md sections 3 and 4), and the sink's weight."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from nearkv_hw.abi.numerics import (
    DOT_KEPT_BITS,
    EXP2_TABLE,
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    SINK_FACTOR,
    SINK_FACTOR_EXPONENT,
    TABLE_FRACTION_BITS,
    TABLE_STEP_BITS,
    WEIGHT_BITS,
    WEIGHT_FRACTION_BITS,
)
from torch import Tensor

from nearkv.reference.binned import BIN_SHIFT, State, binned_sum, leading_bits, magnitude
from nearkv.reference.elements import ZERO_EXPONENT, Elements

LOG2_E = 1.4426950408889634
"""The double nearest to log2(e), written out so that no mathematics library has a say in it."""
FP32_FRACTION_BITS = 23
FP32_EXPONENT_BIAS = 150
"""A float32's significand has the exponent max(field, 1) - 150."""
_FP32_FIELD_MASK = 0xFF


@dataclass(frozen=True)
class Weights:
    """Softmax weights significand * 2^exponent, int64 [..., rows]; a row without a weight has significand 0.

    Parameters
    ----------
    significand : 0 or a number of 18 bits.
    exponent : of its lowest bit; `ZERO_EXPONENT` where the significand is 0.
    query_nan : bool [...], queries whose scores make their result NaN.
    """

    significand: Tensor
    exponent: Tensor
    query_nan: Tensor

    def sum(self) -> State:
        """The denominator's state over the rows."""
        return binned_sum(self.significand, self.exponent, None, width=WEIGHT_BITS, dim=-1)


def score_factor(scale: float, k_scale: float = 1.0) -> int:
    """The float32 bits of the score's factor c = scale * log2(e) * k_scale: doubles, then one rounding.

    Raises
    ------
    ValueError : when c is infinite or NaN, which no device accepts.
    """
    product = float(scale) * LOG2_E * float(k_scale)
    try:
        bits = int.from_bytes(struct.pack("<f", product), "little")
    except OverflowError:
        bits = _FP32_FIELD_MASK << FP32_FRACTION_BITS
    if bits >> FP32_FRACTION_BITS & _FP32_FIELD_MASK == _FP32_FIELD_MASK:
        raise ValueError(
            f"scale {scale} and K's scale {k_scale} give the score factor {product}; "
            "it must be finite in float32"
        )
    return bits


def float32_parts(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 codes as (negative, significand, exponent); infinities and NaN look like numbers."""
    codes = codes.to(torch.int64)
    field = (codes >> FP32_FRACTION_BITS) & _FP32_FIELD_MASK
    fraction = codes & ((1 << FP32_FRACTION_BITS) - 1)
    hidden = field.clamp(max=1) << FP32_FRACTION_BITS
    return (codes >> 31) & 1 == 1, fraction + hidden, field.clamp(min=1) - FP32_EXPONENT_BIAS


def weigh(q: Elements, k: Elements, factor: Tensor, visible: Tensor | None) -> Weights:
    """The weights of rows.

    Parameters
    ----------
    q, k : elements that broadcast to [..., rows, head_dim].
    factor : float32 codes of the score's factor c (int32), broadcasts to [..., rows].
    visible : bool, broadcasts to [..., rows], or None when all rows are.
    """
    negative, significand, exponent = float32_parts(factor)
    scores = _scores(_dot(q, k), negative, significand, exponent)
    if q.nan is None and k.nan is None:
        query_nan = torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
        return _weights(scores, visible, query_nan)
    dropped, nan = _special_rows(q, k, negative, significand == 0)
    if visible is not None:
        nan = nan & visible
        dropped = dropped | ~visible
    return _weights(scores, ~(dropped | nan), nan.any(-1))


def sink_weights(sinks: Tensor) -> Weights:
    """The weight [..., 1] of each attention sink; float32 [...]."""
    negative, significand, exponent = float32_parts(sinks.view(torch.int32))
    fixed = _fixed_point(significand * SINK_FACTOR, exponent + SINK_FACTOR_EXPONENT + SCORE_FRACTION_BITS)
    scores = torch.where(negative, -fixed, fixed).unsqueeze(-1)
    query_nan = sinks.isnan() | (sinks == math.inf)
    present = sinks.isfinite().unsqueeze(-1)
    return _weights(scores, present, query_nan)


def _dot(q: Elements, k: Elements) -> State:
    """The binned sum over the head dimension of the exact products."""
    return binned_sum(
        q.significand * k.significand,
        q.exponent + k.exponent,
        q.sign * k.sign,
        width=q.width + k.width,
        dim=-1,
    )


def _scores(dot: State, negative: Tensor, significand: Tensor, exponent: Tensor) -> Tensor:
    """S: the base-2 score in fixed point, rounded to nearest (ties away from zero), saturated."""
    dot_negative, high, low = magnitude(dot)
    kept, dropped = leading_bits(high, low, DOT_KEPT_BITS)
    kept_exponent = ((dot.top - 1) << BIN_SHIFT) + dropped
    fixed = _fixed_point(kept * significand, kept_exponent + exponent + SCORE_FRACTION_BITS)
    return torch.where(dot_negative ^ negative, -fixed, fixed)


def _fixed_point(product: Tensor, exponent: Tensor) -> Tensor:
    """The integer nearest to product * 2^exponent (ties away), at most `SCORE_LIMIT`; product < 2^57."""
    left = exponent.clamp(0, 43)
    right = (-exponent).clamp(0, 60)
    half = (1 << right) >> 1
    rounded = (product + half) >> right
    # `left` stops at 43, where nothing but zero fits any more, so a larger shift makes no other result.
    return torch.where(rounded <= SCORE_LIMIT >> left, rounded << left, SCORE_LIMIT)


def _special_rows(q: Elements, k: Elements, negative: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that an infinity drops, and rows that make their query NaN."""
    q_nan, q_infinite = q.specials
    k_nan, k_infinite = k.specials
    nan = (q_nan | k_nan | (q_infinite & k.zero) | (q.zero & k_infinite)).any(-1)
    infinite = q_infinite | k_infinite
    minus = q.sign * k.sign < 0
    positive, minus = (infinite & ~minus).any(-1), (infinite & minus).any(-1)
    up = torch.where(negative, minus, positive)
    nan = nan | (positive & minus) | ((positive | minus) & zero) | up
    return (positive | minus) & ~nan, nan


def _weights(scores: Tensor, present: Tensor | None, query_nan: Tensor) -> Weights:
    """The table's interpolated power of two of each score, and nothing for rows that are not there."""
    fraction = scores & ((1 << SCORE_FRACTION_BITS) - 1)
    index, step = fraction >> TABLE_STEP_BITS, fraction & ((1 << TABLE_STEP_BITS) - 1)
    table, rise = _exp2_tables(scores.device)
    index = index.reshape(-1)
    base, slope = (t.index_select(0, index).view(scores.shape) for t in (table, rise))
    cut = TABLE_STEP_BITS + TABLE_FRACTION_BITS - WEIGHT_FRACTION_BITS
    power = ((base << TABLE_STEP_BITS) + slope * step + (1 << cut - 1)) >> cut
    significand = power.clamp(max=(1 << WEIGHT_BITS) - 1)
    exponent = (scores >> SCORE_FRACTION_BITS) - WEIGHT_FRACTION_BITS
    if present is not None:
        significand = torch.where(present, significand, 0)
        exponent = torch.where(present, exponent, ZERO_EXPONENT)
    return Weights(significand, exponent, query_nan)


@lru_cache(maxsize=16)
def _exp2_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The table t and its steps t[i + 1] - t[i]."""
    table = torch.tensor(EXP2_TABLE, dtype=torch.int64, device=device)
    return table, table.diff()
