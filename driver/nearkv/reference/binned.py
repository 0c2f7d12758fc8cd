"""The binned sum (docs/numerics.md section 2): states, sums of many terms, merges, what a state stands for.

A sum needs no merges: under the top bin T of all its terms, a term contributes a = floor(m * 2^(e - W*(T-1)))
as the limbs a >> W and a mod 2^W with its sign. A term one bin lower has a < 2^W and leaves H alone, one
further below has a = 0, which is what moving it down bin by bin would have made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from nearkv_hw.abi.numerics import BIN_BITS, TOP_NONE
from torch import Tensor

from nearkv.reference.elements import is_zero_exponent

BIN_SHIFT = BIN_BITS.bit_length() - 1
"""A bin is an exponent without this many low bits."""
LIMB_MASK = (1 << BIN_BITS) - 1


@dataclass(frozen=True)
class State:
    """States of binned sums: (high * 2^32 + low) * 2^(32 * (top - 1)), all int64 tensors of one shape.

    Parameters
    ----------
    top : top bin, `TOP_NONE` for an empty state (whose limbs are zero).
    high, low : the limbs, signed, uncarried.
    """

    top: Tensor
    high: Tensor
    low: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...] | torch.Size, device: torch.device | str = "cpu") -> State:
        """The identity of `merge_states`, in every place of `shape`."""
        zero = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(torch.full_like(zero, TOP_NONE), zero, zero.clone())

    @classmethod
    def from_planes(cls, top: Any, high: Any, low: Any) -> State:
        """States from planes of any integer type, tensors or arrays; ValueError when their shapes differ."""
        planes = [torch.as_tensor(plane).to(torch.int64) for plane in (top, high, low)]
        if len({plane.shape for plane in planes}) > 1:
            shapes = ", ".join(str(tuple(plane.shape)) for plane in planes)
            raise ValueError(f"the planes of a state must have one shape, got {shapes}")
        return cls(*planes)


def binned_sum(significand: Tensor, exponent: Tensor, sign: Tensor | None, *, width: int, dim: int) -> State:
    """The binned sum over one dimension of the terms sign * significand * 2^exponent.

    Parameters
    ----------
    significand : int64, each 0 or a number of `width` or `width - 1` bits.
    exponent : int64, at or below half of `ZERO_EXPONENT` where the significand is 0.
    sign : int64, +1 or -1, or None when all terms are positive.
    width : bits of the largest significand, at most 62.
    dim : the dimension that is summed; of size 0 it gives the empty state.
    """
    if significand.shape[dim] == 0:
        shape = list(significand.shape)
        del shape[dim]
        return State.empty(torch.Size(shape), significand.device)
    leading = ((significand >> (width - 1)) + exponent).amax(dim, keepdim=True) + (width - 2)
    top = leading >> BIN_SHIFT
    place = exponent - ((top - 1) << BIN_SHIFT)
    # A left shift may run through bit 63; the limbs below read the 64 bits as unsigned, so nothing is lost.
    aligned = significand << place.clamp(min=0)
    aligned >>= (-place).clamp_(0, 63)
    high, low = (aligned >> BIN_BITS) & LIMB_MASK, aligned & LIMB_MASK
    if sign is not None:
        high *= sign
        low *= sign
    top = top.masked_fill(is_zero_exponent(leading), TOP_NONE)
    return State(top.squeeze(dim), high.sum(dim), low.sum(dim))


def merge_states(first: State, second: State) -> State:
    """The state of both sums together: associative, commutative, with the empty state as identity."""
    top = torch.maximum(first.top, second.top)
    first_high, first_low = _moved_to(first, top)
    second_high, second_low = _moved_to(second, top)
    return State(top, first_high + second_high, first_low + second_low)


def _moved_to(state: State, top: Tensor) -> tuple[Tensor, Tensor]:
    """A state's limbs under a top bin that is not below its own."""
    same, next_lower = state.top == top, state.top == top - 1
    return state.high * same, state.low * same + state.high * next_lower


def magnitude(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """A state's value as (negative, high, low): its magnitude is high * 2^32 + low with 0 <= low < 2^32."""
    negative = state.high + (state.low >> BIN_BITS) < 0
    sign = 1 - 2 * negative.to(torch.int64)
    low = state.low * sign
    return negative, state.high * sign + (low >> BIN_BITS), low & LIMB_MASK


def leading_bits(high: Tensor, low: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` (at most 32) highest bits of high * 2^32 + low, and how many were dropped below them."""
    dropped = bit_length((high << (BIN_BITS - count)) | (low >> count))
    kept_high = (high << (BIN_BITS - dropped).clamp(min=0)) >> (dropped - BIN_BITS).clamp(min=0)
    return kept_high | (low >> dropped), dropped


def bit_length(value: Tensor) -> Tensor:
    """Bits of non-negative int64 numbers, by comparison with the powers of two."""
    return torch.bucketize(value.contiguous(), _powers(value.device), right=True)


@lru_cache(maxsize=16)
def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(63)], dtype=torch.int64, device=device)
