"""Codebooks of lut4: 16 fp16 numbers per KV head, found from rows, and rows as indices into them."""

from __future__ import annotations

import torch
from nearkv_hw.abi.formats import E8M0, LUT_ENTRIES
from torch import Tensor

from nearkv.errors import ArgumentError, DtypeError, ShapeError

from .blocks import block_peaks, spread
from .formats import RowFormat
from .rounding import decode, encode, encode_power, nan_code

_ROUNDS = 25
"""Rounds of Lloyd's algorithm; in one dimension and from quantiles few are needed."""


def find_codebook(rows: Tensor, form: RowFormat) -> Tensor:
    """The codebook that rows call for: Lloyd's algorithm in float64 over each head's elements, sorted.

    It begins at the quantiles (i + 1/2) / 16; each of 25 rounds moves every number to the mean of the
    elements that are nearest to it (ties to the lower), and one that has none stays. Where the format has
    scales, the elements are first divided by their block's largest magnitude. The result is rounded to fp16.

    Parameters
    ----------
    rows : float32, bfloat16 or float16 [..., kv_heads, dim], finite.
    form : the format, of lut4.

    Returns
    -------
    float16 [kv_heads, 16], rising.

    Raises
    ------
    ArgumentError : rows that are not finite, or none.
    """
    numbers = rows.detach().double()
    if not numbers.numel() or not bool(numbers.isfinite().all()):
        raise ArgumentError("rows tell a codebook where there are some and all are finite; give codebook")
    if form.scale is not None:
        peaks = spread(block_peaks(numbers, form.block or numbers.shape[-1]), form.block, numbers.shape[-1])
        numbers = numbers / peaks.masked_fill(peaks == 0, 1.0)
    by_head = numbers.transpose(-1, -2).reshape(-1, numbers.shape[-2]).T
    return torch.stack([_lloyd(elements.sort().values) for elements in by_head]).clamp(-65504, 65504).half()


def checked_codebook(codebook: Tensor, kv_heads: int) -> Tensor:
    """A codebook that was given, float16 [kv_heads, 16]; DtypeError or ShapeError for any other."""
    if not isinstance(codebook, Tensor) or codebook.dtype != torch.float16:
        kind = codebook.dtype if isinstance(codebook, Tensor) else type(codebook).__name__
        raise DtypeError(f"a codebook must be float16 [kv_heads, {LUT_ENTRIES}], not {kind}")
    if tuple(codebook.shape) != (kv_heads, LUT_ENTRIES):
        raise ShapeError(f"a codebook has shape {list(codebook.shape)}, must have {[kv_heads, LUT_ENTRIES]}")
    return codebook.detach()


def by_codebook(numbers: Tensor, form: RowFormat, codebook: Tensor) -> tuple[Tensor, Tensor | None]:
    """Indices of the nearest numbers (ties to the lower index), int64, and scale codes where there are any.

    A scale is the block's largest magnitude / the codebook's, rounded as for other formats; a block with a
    NaN or an infinity has a NaN for its scale, and without scales NaN is refused.
    """
    book = codebook.double().to(numbers.device)
    scales = None
    if form.scale_form is None:
        if bool(numbers.isnan().any()):
            raise ArgumentError("lut4 without scales has no NaN, and some of the values are NaN")
    else:
        size = form.block or numbers.shape[-1]
        peaks = block_peaks(numbers, size)
        undefined = ~peaks.isfinite()
        top = book.masked_fill(~book.isfinite(), 0.0).abs().amax(-1, keepdim=True)
        wanted = peaks.masked_fill(undefined, 0.0) / top.masked_fill(top == 0, 1.0)
        if form.scale_form is E8M0:
            power = 2.0 ** torch.log2(top.masked_fill(top == 0, 1.0)).floor()
            scales = encode_power(peaks.masked_fill(undefined, 0.0) / power)
        else:
            scales = encode(wanted, form.scale_form)[0]
        factors = spread(decode(scales, form.scale_form), form.block, numbers.shape[-1])
        scales = scales.masked_fill(undefined, nan_code(form.scale_form) or 0)
        nothing = spread(undefined, form.block, numbers.shape[-1]) | (factors == 0)
        numbers = numbers.masked_fill(nothing, 0.0) / factors.masked_fill(nothing, 1.0)
    ends = book.masked_fill(~book.isfinite(), 0.0)
    numbers = numbers.clamp(ends.amin(-1, keepdim=True), ends.amax(-1, keepdim=True))  # infinities, too
    far = (numbers.unsqueeze(-1) - book.unsqueeze(-2)).abs()
    return far.masked_fill(far.isnan(), torch.inf).argmin(-1), scales


def numbers_of(codes: Tensor, codebook: Tensor) -> Tensor:
    """The float64 numbers that codes [..., kv_heads, dim] stand for."""
    heads = torch.arange(codebook.shape[0], device=codes.device).unsqueeze(-1)
    return codebook.double().to(codes.device)[heads, codes.to(torch.int64)]


def _lloyd(elements: Tensor) -> Tensor:
    """16 numbers for sorted float64 elements."""
    count = len(elements)
    index = torch.arange(LUT_ENTRIES, dtype=torch.float64)
    book = elements[((index + 0.5) / LUT_ENTRIES * count).long().clamp(max=count - 1)].clone()
    sums = torch.cat([elements.new_zeros(1), elements.cumsum(0)])
    for _ in range(_ROUNDS):
        middles = (book[1:] + book[:-1]) / 2
        ends = torch.searchsorted(elements, middles, right=True)
        ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), count)])
        number = (ends[1:] - ends[:-1]).double()
        means = (sums[ends[1:]] - sums[ends[:-1]]) / number.clamp(min=1.0)
        book = torch.where(number > 0, means, book)
    return book
