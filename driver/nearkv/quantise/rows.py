"""Rows of numbers to codes and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nearkv_hw.abi.formats import E8M0, Format
from torch import Tensor

from nearkv.errors import ArgumentError, DtypeError, ShapeError
from nearkv.reference.threads import threads_for

from .blocks import block_peaks, spread
from .codebooks import by_codebook, checked_codebook, find_codebook, numbers_of
from .formats import RowFormat, Rule
from .llama import q4_0, q8_0
from .rounding import decode, encode, encode_power, largest, nan_code

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP32 = Format("fp32", 0, 32, 8, 23, 150, infinities=True)


@dataclass(frozen=True)
class Quantised:
    """Rows as a cache stores them.

    Parameters
    ----------
    format : how.
    codes : uint8 (formats of 8 bits and fewer, one a byte) or int16 [..., kv_heads, dim].
    scales : codes [..., kv_heads, blocks], uint8 or int16, or None.
    head_scale : float32 [kv_heads], or None.
    saturated : elements whose magnitude was beyond what the format has, and is now its largest.
    codebook : float16 [kv_heads, 16], the numbers that codes of lut4 stand for, or None.
    """

    format: RowFormat
    codes: Tensor
    scales: Tensor | None
    head_scale: Tensor | None
    saturated: int
    codebook: Tensor | None = None

    def values(self) -> Tensor:
        """The numbers that the codes stand for, exactly: float64 [..., kv_heads, dim]."""
        if self.codebook is None:
            found = decode(self.codes, self.format.form)
        else:
            found = numbers_of(self.codes, self.codebook)
        scale_form = self.format.scale_form
        if self.scales is not None and scale_form is not None:
            dim = self.codes.shape[-1]
            scales = decode(self.scales, scale_form)
            found = found * scales.repeat_interleave(self.format.block or max(dim, 1), dim=-1)[..., :dim]
        if self.head_scale is not None:
            found = found * self.head_scale.double().unsqueeze(-1)
        return found


def quantise(
    rows: Tensor, form: RowFormat, *, head_scale: Tensor | None = None, codebook: Tensor | None = None
) -> Quantised:
    """Store rows in a format.

    A block with a NaN or an infinity gets a NaN for its scale. Without scales along the row, infinities
    saturate and NaN stays NaN. A scale that rounds to zero has elements of zero.

    Parameters
    ----------
    rows : float32, bfloat16 or float16 [..., kv_heads, dim].
    form : the format, with the rule.
    head_scale : float32 [kv_heads] where the format has a scale per head, or None: the scale that these rows
        call for. Rows that are added later need the same one.
    codebook : float16 [kv_heads, 16] where the format is lut4, or None: what `codebook` finds for these rows.

    Returns
    -------
    Codes, scales, and how many elements saturated.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError : rows or head_scale that do not fit, a NaN in a format that has
        none, and, where the scale per head is to be found, rows that are not finite.
    """
    _check_rows(rows)
    with threads_for(rows.numel(), rows.device):
        return _quantised(rows, form, head_scale, codebook)


def _quantised(
    rows: Tensor, form: RowFormat, head_scale: Tensor | None, codebook: Tensor | None
) -> Quantised:
    numbers = rows.detach().double()
    if form.form.codebook:
        if head_scale is not None:
            raise ArgumentError(f"{form.element} has no scale per head, so head_scale must be None")
        book = find_codebook(rows, form) if codebook is None else checked_codebook(codebook, rows.shape[-2])
        codes, scales = by_codebook(numbers, form, book)
        stored = None if scales is None or form.scale_form is None else _stored(scales, form.scale_form)
        return Quantised(form, codes.to(torch.uint8), stored, None, 0, book)
    if codebook is not None:
        raise ArgumentError(f"a codebook belongs to lut4, not to {form.element}")
    if form.rule is not Rule.NEAREST:
        return _by_llama(rows.detach().float(), form)
    scales, heads = None, None
    if form.head_scale:
        heads = _head_scale(numbers, form) if head_scale is None else _checked_head_scale(head_scale, rows)
        numbers = numbers / heads.double().unsqueeze(-1) if form.scale is None else numbers
    elif head_scale is not None:
        raise ArgumentError(f"{form.element} has no scale per head here, so head_scale must be None")
    if form.scale_form is None:
        codes, saturated = encode(numbers, form.form)
    else:
        scales, codes, saturated = _scaled(numbers, form, form.scale_form, heads)
        scales = _stored(scales, form.scale_form)
    return Quantised(form, _stored(codes, form.form), scales, heads, int(saturated.sum()))


def attention_arguments(k: Quantised, v: Quantised | None = None) -> dict[str, Any]:
    """Keywords of `nearkv.reference.decode_attention` for rows [batch, rows, kv_heads, dim] in these formats.

    Parameters
    ----------
    k : of K.
    v : of V, or None where V is the first elements of the K row.

    Returns
    -------
    k, v and what says how they are stored; k_scale and v_scale where formats have a scale per head.
    """
    found: dict[str, Any] = {"k": k.codes, "k_format": k.format.element, "k_scale": k.head_scale}
    found |= {"k_lut": k.codebook, "v_lut": None if v is None else v.codebook}
    found |= {"v": None, "v_scale": k.head_scale} if v is None else {"v": v.codes, "v_scale": v.head_scale}
    if v is not None:
        found["v_format"] = v.format.element
    scaled = {"k": k, "v": v}
    scaled = {name: rows for name, rows in scaled.items() if rows is not None and rows.scales is not None}
    found |= {f"{name}_scales": rows.scales for name, rows in scaled.items() if rows is not None}
    if scaled:
        both = (k, v or k)
        found["scale_block"] = tuple(rows.format.block for rows in both)
        found["scale_format"] = tuple(rows.format.scale for rows in both)
    return {name: value for name, value in found.items() if value is not None or name == "v"}


def _scaled(
    numbers: Tensor, form: RowFormat, scale_form: Format, heads: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale codes, element codes and what saturated, of float64 rows."""
    dim = numbers.shape[-1]
    per_head = 1.0 if heads is None else heads.double().unsqueeze(-1)
    peaks = block_peaks(numbers, form.block or max(dim, 1))
    undefined = ~peaks.isfinite()
    peaks = peaks.masked_fill(undefined, 0.0) / per_head
    if scale_form is E8M0:
        whole = 2.0 ** _floor_log2(largest(form.form))
        codes, cut = encode_power(peaks / whole), torch.zeros_like(undefined)
    else:
        codes, cut = encode(peaks / largest(form.form), scale_form)
    # The product is exact (11 and 24 bits); no quotient of such numbers is so near a tie that it becomes one.
    scales = spread(decode(codes, scale_form) * per_head, form.block, dim)
    lost = spread(undefined, form.block, dim)
    nothing = lost | (scales == 0)
    quotients = numbers.masked_fill(nothing, 0.0) / scales.masked_fill(nothing, 1.0)
    elements, saturated = encode(quotients, form.form)
    nan = nan_code(scale_form)
    return (
        codes.masked_fill(undefined, nan or 0),
        elements,
        saturated | (spread(cut, form.block, dim) & ~lost),
    )


def _by_llama(rows: Tensor, form: RowFormat) -> Quantised:
    quantiser = q8_0 if form.rule is Rule.Q8_0 else q4_0
    scale_form, block = form.scale_form, form.block
    assert scale_form is not None
    assert block is not None
    dim = rows.shape[-1]
    undefined = ~block_peaks(rows, block).isfinite()
    lost = spread(undefined, block, dim)
    scales, codes, saturated = quantiser(rows.masked_fill(lost, 0.0), block)
    stored, cut = encode(scales.double(), scale_form)
    stored = stored.masked_fill(undefined, nan_code(scale_form) or 0)
    saturated = saturated | spread(cut, block, dim)
    codes = codes & ((1 << form.form.bits) - 1)
    return Quantised(form, _stored(codes, form.form), _stored(stored, scale_form), None, int(saturated.sum()))


def _head_scale(numbers: Tensor, form: RowFormat) -> Tensor:
    """The float32 per head that brings its largest magnitude to the format's largest; 1 where all is zero."""
    heads = numbers.shape[-2]
    peaks = numbers.abs().transpose(-1, -2).reshape(-1, heads)
    peak = peaks.amax(0) if peaks.shape[0] else numbers.new_zeros(heads)
    if not bool(peak.isfinite().all()):
        raise ArgumentError("rows with NaN or infinities tell no scale per head; give head_scale")
    top = largest(form.form) * (largest(form.scale_form) if form.scale_form else 1.0)
    found = encode(peak / top, _FP32)[0].to(torch.int32).view(torch.float32)
    return found.masked_fill(found == 0, 1.0)


def _checked_head_scale(head_scale: Tensor, rows: Tensor) -> Tensor:
    if head_scale.dtype != torch.float32:
        raise DtypeError(f"head_scale must be float32 [kv_heads], not {head_scale.dtype}")
    if tuple(head_scale.shape) != (rows.shape[-2],):
        raise ShapeError(f"head_scale has shape {list(head_scale.shape)}, must have [{rows.shape[-2]}]")
    if not bool((head_scale.isfinite() & (head_scale > 0)).all()):
        raise ArgumentError(f"head_scale must be finite and above 0, got {head_scale.tolist()}")
    return head_scale.detach().to(rows.device)


def _check_rows(rows: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.dtype not in FLOATS:
        kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise DtypeError(f"rows must be a tensor of float32, bfloat16 or float16, not {kind}")
    if rows.dim() < 2 or rows.shape[-1] == 0:
        raise ShapeError(f"rows have shape {list(rows.shape)}, must have [..., kv_heads, dim] with dim >= 1")


def _stored(codes: Tensor, form: Format) -> Tensor:
    """Codes from 0 as the type that a format is stored in."""
    if form.bits == 16:
        return (codes - ((codes >> 15) << 16)).to(torch.int16)
    return codes.to(torch.uint8)


def _floor_log2(number: float) -> int:
    return int(number).bit_length() - 1
