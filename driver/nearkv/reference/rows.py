"""K and V rows as a caller gives them, codes with scales and codebooks: checked, and decoded when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from nearkv_hw.abi.formats import (
    LUT4,
    LUT_ENTRIES,
    LUT_FORMAT,
    LUT_SCALES,
    ROW_FORMATS,
    SCALE_BLOCKS,
    SCALE_FORMATS,
    SCALED_BITS,
    Format,
)
from torch import Tensor

from nearkv.reference.elements import VALUE_FORMATS, Elements, decode, scaled

Value = TypeVar("Value", int, str)
Blocks = int | tuple[int | None, int | None] | None
Names = str | tuple[str | None, str | None] | None
"""What K and V have alike, or a pair: K's and V's."""


@dataclass(frozen=True)
class Rows:
    """K or V: codes [batch, rows, kv_heads, dim] of a format, and what they need to be numbers.

    Parameters
    ----------
    codes : uint8 or int16.
    element : format of the codes.
    scales : codes [batch, rows, kv_heads, blocks], or None.
    scale : format of the scales, or None.
    block : elements that share a scale.
    lut : fp16 codes [kv_heads, LUT_ENTRIES] of a codebook, or None.
    """

    codes: Tensor
    element: Format
    scales: Tensor | None = None
    scale: Format | None = None
    block: int = 0
    lut: Tensor | None = None

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.codes.shape[3]

    def decode(self, begin: int, end: int) -> Elements:
        """Rows `begin` to `end` (excluded) as elements [batch, kv_heads, rows, dim], scales multiplied in."""
        codes = self.codes[:, begin:end].transpose(1, 2)
        if self.lut is None:
            elements = decode(codes, self.element)
        else:
            heads = torch.arange(codes.shape[1], device=codes.device).view(-1, 1, 1)
            index = codes.to(torch.int64) + heads * LUT_ENTRIES
            chosen = self.lut.reshape(-1).index_select(0, index.reshape(-1))
            elements = decode(chosen.view(codes.shape), LUT_FORMAT)
        if self.scales is None or self.scale is None:
            return elements
        return scaled(elements, decode(self.scales[:, begin:end].transpose(1, 2), self.scale), self.block)


def checked_rows(
    name: str,
    tensor: Tensor,
    element: str,
    *,
    scales: Tensor | None,
    block: int | None,
    scale_format: str | None,
    lut: Tensor | None,
) -> Rows:
    """K or V, checked in itself; ValueError or TypeError that says what was given and what is allowed."""
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [batch, rows, kv_heads, dim], got shape {tuple(tensor.shape)}")
    if element not in ROW_FORMATS:
        raise ValueError(f"{name}_format must be one of {', '.join(ROW_FORMATS)}, not {element!r}")
    own = VALUE_FORMATS.get(tensor.dtype)
    # The default "bf16" stands for "none given" where the tensor says itself that it is fp16.
    if own is not None and element not in (own, "bf16"):
        raise ValueError(f"{name} holds {tensor.dtype} values, which are {own}; {name}_format says {element}")
    form = ROW_FORMATS[own or element]
    codes = _codes(name, tensor, form)
    table = _checked_lut(name, lut, form, tensor.shape[2])
    if scales is None:
        return Rows(codes, form, lut=table)
    if form.bits > SCALED_BITS:
        raise ValueError(f"{name} is {form.name}; only formats of {SCALED_BITS} bits or fewer carry scales")
    dim = tensor.shape[3]
    if block is not None and block not in SCALE_BLOCKS:
        allowed = ", ".join(str(size) for size in SCALE_BLOCKS)
        raise ValueError(f"scale_block must be {allowed} or None for the whole row, not {block!r}")
    size = block or max(dim, 1)
    wanted = (*tensor.shape[:3], -(-dim // size))
    if tuple(scales.shape) != wanted:
        given = tuple(scales.shape)
        raise ValueError(f"{name}_scales must have shape {wanted} for blocks of {size}, got {given}")
    scale_name = scale_format or VALUE_FORMATS.get(scales.dtype)
    if scale_name not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {', '.join(SCALE_FORMATS)}, not {scale_name!r}")
    if form is LUT4 and scale_name not in LUT_SCALES:
        raise ValueError(f"scales of {form.name} must be {', '.join(LUT_SCALES)}, not {scale_name}")
    if scales.dtype in VALUE_FORMATS and VALUE_FORMATS[scales.dtype] != scale_name:
        raise ValueError(f"{name}_scales holds {scales.dtype} values; scale_format says {scale_name}")
    scale = SCALE_FORMATS[scale_name]
    return Rows(codes, form, _codes(f"{name}_scales", scales, scale), scale, size, table)


def pair(
    name: str, value: Value | tuple[Value | None, Value | None] | None
) -> tuple[Value | None, Value | None]:
    """K's and V's of what was given for both or as a pair."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one value or a pair, K's and V's, got {value!r}")
    return value


def _codes(name: str, tensor: Tensor, form: Format) -> Tensor:
    """A tensor's codes, of the type that the format is stored in."""
    if VALUE_FORMATS.get(tensor.dtype) == form.name:
        return tensor.detach().view(torch.int16)
    storage = torch.int16 if form.bits == 16 else torch.uint8
    if tensor.dtype != storage:
        values = next((f" or {dtype} values" for dtype, own in VALUE_FORMATS.items() if own == form.name), "")
        raise TypeError(f"{name} of format {form.name} must be {storage} codes{values}, got {tensor.dtype}")
    if form.bits < 8 and tensor.numel() and int(tensor.amax()) >> form.bits:
        raise ValueError(f"{name}: a code of {form.name} is below {1 << form.bits}, got {int(tensor.amax())}")
    return tensor


def _checked_lut(name: str, lut: Tensor | None, form: Format, kv_heads: int) -> Tensor | None:
    """A codebook's fp16 codes."""
    if form is not LUT4:
        if lut is not None:
            raise ValueError(f"{name}_lut belongs to {LUT4.name}; {name} is {form.name}")
        return None
    if lut is None:
        raise ValueError(f"{name} of format {form.name} needs {name}_lut [kv_heads, {LUT_ENTRIES}]")
    if tuple(lut.shape) != (kv_heads, LUT_ENTRIES):
        raise ValueError(f"{name}_lut must have shape {(kv_heads, LUT_ENTRIES)}, got {tuple(lut.shape)}")
    return _codes(f"{name}_lut", lut, LUT_FORMAT)
