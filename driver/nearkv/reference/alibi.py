"""ALiBi (docs/numerics.md section 9): a bias in proportion to the distance of row and query row."""

from __future__ import annotations

import torch
from nearkv_hw.abi.numerics import SCORE_FRACTION_BITS, SCORE_LIMIT
from torch import Tensor

from nearkv.reference.fixed import LOG2_E, fixed_point, float32_bits, float32_parts, is_finite


def alibi_bits(slope: float) -> int:
    """The float32 bits of a slope in base 2, slope * log2(e).

    Raises
    ------
    ValueError : when that is infinite or NaN, which no device accepts.
    """
    bits = float32_bits(float(slope) * LOG2_E)
    if not is_finite(bits):
        raise ValueError(f"an ALiBi slope times log2(e) must be finite in float32, got the slope {slope}")
    return bits


def biased(scores: Tensor, slopes: Tensor, distances: Tensor) -> Tensor:
    """Scores with the bias slope * distance, saturated; all of shapes that broadcast.

    Parameters
    ----------
    scores : S, int64.
    slopes : codes of `alibi_bits`.
    distances : position of the row less that of the query row, int64, of 23 bits and a sign.
    """
    negative, significand, exponent = float32_parts(slopes)
    bias = fixed_point(significand * distances.abs(), exponent + SCORE_FRACTION_BITS)
    bias = torch.where(negative ^ (distances < 0), -bias, bias)
    return (scores + bias).clamp(-SCORE_LIMIT, SCORE_LIMIT)
