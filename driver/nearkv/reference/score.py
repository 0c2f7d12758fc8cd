"""From a dot product to a weight (docs/numerics.md sections 3, 4, 8 and 9), and the sink's weight."""

from __future__ import annotations

import math
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
    TANH_FRACTION_BITS,
    WEIGHT_BITS,
    WEIGHT_FRACTION_BITS,
)
from torch import Tensor

from nearkv.reference.alibi import biased
from nearkv.reference.binned import BIN_SHIFT, State, binned_sum, leading_bits, magnitude
from nearkv.reference.elements import ZERO_EXPONENT, Elements
from nearkv.reference.fixed import LOG2_E, fixed_point, float32_bits, float32_parts, is_finite
from nearkv.reference.softcap import capped


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


def score_factor(scale: float, k_scale: float = 1.0, *, softcap: float | None = None) -> int:
    """The float32 bits of the score's factor c: doubles, from left to right, then one rounding.

    c = scale * log2(e) * k_scale, and under a softcap scale / softcap * 2^6 * k_scale.

    Raises
    ------
    ValueError : when c is infinite or NaN, which no device accepts.
    """
    scaled = float(scale) * LOG2_E if softcap is None else float(scale) / float(softcap) * _ARGUMENT_SCALE
    product = scaled * float(k_scale)
    bits = float32_bits(product)
    if not is_finite(bits):
        raise ValueError(
            f"scale {scale} and K's scale {k_scale}{'' if softcap is None else f', softcap {softcap},'} give "
            f"the score factor {product}; it must be finite in float32"
        )
    return bits


_ARGUMENT_SCALE = 1 << (TANH_FRACTION_BITS - SCORE_FRACTION_BITS)


@dataclass(frozen=True)
class Change:
    """What becomes of scores before they are weighed.

    Parameters
    ----------
    softcap : float32 bits of C2, or None. With a cap, the factor is that of the argument U.
    slopes, distances : of `nearkv.reference.alibi.biased`, or both None; broadcast to [..., rows].
    """

    softcap: int | None = None
    slopes: Tensor | None = None
    distances: Tensor | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """The changed scores [..., rows]."""
        if self.softcap is not None:
            scores = capped(scores, self.softcap)
        if self.slopes is not None and self.distances is not None:
            scores = biased(scores, self.slopes, self.distances)
        return scores


def weigh(q: Elements, k: Elements, factor: Tensor, visible: Tensor | None, change: Change) -> Weights:
    """The weights of rows.

    Parameters
    ----------
    q, k : elements that broadcast to [..., rows, head_dim].
    factor : float32 codes of the score's factor c (int32), broadcasts to [..., rows].
    visible : bool, broadcasts to [..., rows], or None when all rows are.
    change : softcap and bias.
    """
    negative, significand, exponent = float32_parts(factor)
    scores = _scores(_dot(q, k), negative, significand, exponent)
    if q.nan is None and k.nan is None:
        query_nan = torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
        return _weights(change(scores), visible, query_nan)
    nan, up, down = _special_rows(q, k, negative, significand == 0)
    if change.softcap is None:
        nan, dropped = nan | up, down
    else:  # the cap makes numbers of infinities
        dropped = torch.zeros_like(nan)
        scores = scores.masked_fill(up, SCORE_LIMIT).masked_fill(down, -SCORE_LIMIT)
    if visible is not None:
        nan = nan & visible
        dropped = dropped | ~visible
    return _weights(change(scores), ~(dropped | nan), nan.any(-1))


def bounds(q: Elements, rows: Elements, factor: Tensor) -> Tensor:
    """S before softcap and bias of rows that bound others; NaN and infinities rank as the largest S.

    Parameters
    ----------
    q, rows : elements that broadcast to [..., rows, head_dim].
    factor : float32 codes of c (int32), broadcasts to [..., rows].
    """
    negative, significand, exponent = float32_parts(factor)
    scores = _scores(_dot(q, rows), negative, significand, exponent)
    if q.nan is None and rows.nan is None:
        return scores
    nan, up, down = _special_rows(q, rows, negative, significand == 0)
    return scores.masked_fill(nan | up, SCORE_LIMIT).masked_fill(down, -SCORE_LIMIT)


def sink_weights(sinks: Tensor) -> Weights:
    """The weight [..., 1] of each attention sink; float32 [...]."""
    negative, significand, exponent = float32_parts(sinks.view(torch.int32))
    fixed = fixed_point(significand * SINK_FACTOR, exponent + SINK_FACTOR_EXPONENT + SCORE_FRACTION_BITS)
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
    fixed = fixed_point(kept * significand, kept_exponent + exponent + SCORE_FRACTION_BITS)
    return torch.where(dot_negative ^ negative, -fixed, fixed)


def _special_rows(q: Elements, k: Elements, negative: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose score is NaN, +Inf and -Inf, as three planes."""
    q_nan, q_infinite = q.specials
    k_nan, k_infinite = k.specials
    nan = (q_nan | k_nan | (q_infinite & k.zero) | (q.zero & k_infinite)).any(-1)
    infinite = q_infinite | k_infinite
    minus = q.sign * k.sign < 0
    positive, minus = (infinite & ~minus).any(-1), (infinite & minus).any(-1)
    nan = nan | (positive & minus) | ((positive | minus) & zero)
    up, down = torch.where(negative, minus, positive), torch.where(negative, positive, minus)
    return nan, up & ~nan, down & ~nan


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
