"""Softcap (docs/numerics.md section 8): the score C2 * tanh(U), from its argument U."""

from __future__ import annotations

from functools import lru_cache

import torch
from nearkv_hw.abi.numerics import (
    SCORE_FRACTION_BITS,
    SOFTCAP_LIMIT,
    TANH_CURVE_BITS,
    TANH_FRACTION_BITS,
    TANH_OCTAVES,
    TANH_STEP_BITS,
    TANH_TABLE,
)
from torch import Tensor

from nearkv.reference.fixed import LOG2_E, fixed_point, float32_bits, float32_parts


def softcap_bits(softcap: float) -> int:
    """The float32 bits of C2 = softcap * log2(e).

    Raises
    ------
    ValueError : when the cap is not positive, or C2 is zero or above 1,024.
    """
    bits = float32_bits(float(softcap) * LOG2_E)
    # The bits of positive numbers are in their order, and those of all others are above them.
    if not 0 < bits <= SOFTCAP_LIMIT:
        raise ValueError(f"softcap must be above 0 and at most 709.78 (1,024 / log2(e)), got {softcap}")
    return bits


def capped(argument: Tensor, softcap: int) -> Tensor:
    """Scores under a softcap.

    Parameters
    ----------
    argument : U, int64 with `TANH_FRACTION_BITS` fraction bits.
    softcap : float32 bits of C2.

    Returns
    -------
    S, int64 of the argument's shape.
    """
    _, significand, exponent = float32_parts(torch.tensor(softcap, device=argument.device))
    tanh = _tanh(argument.abs())
    fixed = fixed_point(tanh * significand, exponent + (SCORE_FRACTION_BITS - TANH_FRACTION_BITS))
    return torch.where(argument < 0, -fixed, fixed)


def _tanh(argument: Tensor) -> Tensor:
    """2^26 * tanh of arguments that are not negative."""
    k = torch.full_like(argument, TANH_OCTAVES[-1][1])
    first = torch.full_like(argument, TANH_OCTAVES[-1][2])
    for bits, octave_k, octave_first in reversed(TANH_OCTAVES[:-1]):
        inside = argument < 1 << bits
        k, first = k.masked_fill(inside, octave_k), first.masked_fill(inside, octave_first)
    one = argument >> TANH_OCTAVES[-1][0] != 0
    index = (first + (argument >> k)).masked_fill(one, 0).reshape(-1)
    t, b, c = (plane.index_select(0, index).view(argument.shape) for plane in _table(argument.device))
    step = (argument >> (k - TANH_STEP_BITS)) & ((1 << TANH_STEP_BITS) - 1)
    slope = b + _rounded(c * (step >> (TANH_STEP_BITS - TANH_CURVE_BITS)), TANH_CURVE_BITS)
    tanh = t + _rounded(slope * step, TANH_STEP_BITS)
    return tanh.masked_fill(one, 1 << TANH_FRACTION_BITS)


def _rounded(value: Tensor, bits: int) -> Tensor:
    """value / 2^bits to the nearest integer, ties up."""
    return (value + (1 << (bits - 1))) >> bits


@lru_cache(maxsize=16)
def _table(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The columns t, b and c."""
    t, b, c = torch.tensor(TANH_TABLE, dtype=torch.int64, device=device).unbind(1)
    return t.contiguous(), b.contiguous(), c.contiguous()
