"""Element codes to sign, significand and exponent (docs/numerics.md section 1), for whole tensors.

Every format is decoded through a table of all its codes, which is filled from `nearkv_hw.abi.formats`.
Significands come out normalised: their leading one is always bit `width - 1`, subnormals included, so that
later stages know where a product's leading one can be without looking for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from nearkv_hw.abi.formats import Format, Special
from torch import Tensor

VALUE_FORMATS: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Torch types whose values the reference takes as they are, and the format that their bits have."""

ZERO_EXPONENT = -(1 << 28)
"""The exponent that zeros carry: so low that a product with a zero in it never holds the leading one of a
sum, and that `is_zero_exponent` tells it from true exponents after those of weights and scales were added."""


def is_zero_exponent(exponent: Tensor) -> Tensor:
    """Whether an exponent, or the largest of several, is one that only zeros have."""
    return exponent < ZERO_EXPONENT // 2


@dataclass(frozen=True)
class Elements:
    """Decoded elements: sign * significand * 2^exponent, all tensors of one shape.

    Parameters
    ----------
    sign : int64, +1 or -1.
    significand : int64, 0 or a number of exactly `width` bits (0 for NaN and infinities too).
    exponent : int64, of the significand's lowest bit; at or near `ZERO_EXPONENT` where the significand is 0.
    width : bits of a significand.
    nan, infinite : bool, or None where the tensor holds nothing but numbers.
    """

    sign: Tensor
    significand: Tensor
    exponent: Tensor
    width: int
    nan: Tensor | None = None
    infinite: Tensor | None = None

    @property
    def specials(self) -> tuple[Tensor, Tensor]:
        """The nan and infinite planes, all false where the elements have none."""
        if self.nan is not None and self.infinite is not None:
            return self.nan, self.infinite
        none = torch.zeros_like(self.significand, dtype=torch.bool)
        return none, none

    @property
    def zero(self) -> Tensor:
        """Which elements are the number zero."""
        nan, infinite = self.specials
        return (self.significand == 0) & ~nan & ~infinite

    def first(self, count: int) -> Elements:
        """The first `count` of the last dimension."""
        return Elements(
            self.sign[..., :count],
            self.significand[..., :count],
            self.exponent[..., :count],
            self.width,
            None if self.nan is None else self.nan[..., :count],
            None if self.infinite is None else self.infinite[..., :count],
        )

    def unsqueeze(self, dim: int) -> Elements:
        """The same elements with a dimension of size one put in."""
        return Elements(
            self.sign.unsqueeze(dim),
            self.significand.unsqueeze(dim),
            self.exponent.unsqueeze(dim),
            self.width,
            None if self.nan is None else self.nan.unsqueeze(dim),
            None if self.infinite is None else self.infinite.unsqueeze(dim),
        )


def decode(codes: Tensor, element: Format) -> Elements:
    """Decode a tensor of codes.

    Parameters
    ----------
    codes : uint8 (formats of 8 bits and fewer) or int16 (bit patterns of 16), any shape.
    element : an element or scale format.
    """
    index = codes.reshape(-1).to(torch.int64) & ((1 << element.bits) - 1)
    packed = decoding_table(element, codes.device).index_select(0, index).view(codes.shape)
    sign = 1 - (packed & SIGN)
    significand = (packed >> SIGNIFICAND_AT) & ((1 << element.significand_bits) - 1)
    exponent = packed >> EXPONENT_AT
    special = packed & (NAN | INFINITY)
    if not bool(special.any()):
        return Elements(sign, significand, exponent, element.significand_bits)
    return Elements(
        sign, significand, exponent, element.significand_bits, special == NAN, special == INFINITY
    )


def scaled(elements: Elements, scales: Elements, block: int) -> Elements:
    """The exact products of elements [..., dim] and their blocks' scales [..., blocks]."""
    dim = elements.significand.shape[-1]

    def spread(plane: Tensor) -> Tensor:
        return plane.repeat_interleave(block, dim=-1)[..., :dim]

    width = elements.width + scales.width
    significand = elements.significand * spread(scales.significand)
    # The leading one of a product of two normalised significands is in one of two places: make it the upper.
    missing = 1 - (significand >> (width - 1))
    significand = significand << missing
    exponent = elements.exponent + spread(scales.exponent) - missing
    sign = elements.sign * spread(scales.sign)
    if elements.nan is None and scales.nan is None:
        return Elements(sign, significand, exponent, width)
    nan, infinite = elements.specials
    scale_nan, scale_infinite = (spread(plane) for plane in scales.specials)
    undefined = (infinite & spread(scales.zero)) | (elements.zero & scale_infinite)
    nan = nan | scale_nan | undefined
    return Elements(sign, significand, exponent, width, nan, (infinite | scale_infinite) & ~nan)


# The fields of a table entry, one int64: two bits of special, the sign where `1 - x` makes +1 or -1 of it,
# the significand and, up to the top, the exponent.
INFINITY, SIGN, NAN = 1 << 0, 1 << 1, 1 << 2
SIGNIFICAND_AT = 4
EXPONENT_AT = 16


@lru_cache(maxsize=64)
def decoding_table(element: Format, device: torch.device) -> Tensor:
    """What all codes of a format decode to, on a device: int64 [codes], the fields above packed."""
    if device.type != "cpu":
        return decoding_table(element, torch.device("cpu")).to(device)
    return torch.tensor([_entry(element, code) for code in range(1 << element.bits)], dtype=torch.int64)


def _entry(element: Format, code: int) -> int:
    decoded = element.decode(code)
    entry = SIGN if decoded.sign else 0
    if decoded.special is not None:
        entry |= NAN if decoded.special is Special.NAN else INFINITY
    if decoded.significand == 0:
        return entry | ZERO_EXPONENT << EXPONENT_AT
    lift = element.significand_bits - decoded.significand.bit_length()
    return entry | (decoded.significand << lift) << SIGNIFICAND_AT | (decoded.exponent - lift) << EXPONENT_AT
