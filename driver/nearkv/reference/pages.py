"""Page summaries and the selection of pages (docs/numerics.md section 13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nearkv_hw.abi.formats import BF16, FP16, Format
from nearkv_hw.abi.numerics import NAN_BF16, NAN_FP16, SCORE_LIMIT
from torch import Tensor

from nearkv.reference.arguments import score_factors
from nearkv.reference.binned import bit_length
from nearkv.reference.elements import VALUE_FORMATS, Elements, decode
from nearkv.reference.rows import Blocks, Names, checked_rows, pair
from nearkv.reference.score import bounds
from nearkv.reference.softcap import softcap_bits
from nearkv.reference.threads import threads_for

_NAN = {BF16: NAN_BF16, FP16: NAN_FP16}
_SIGN = 1 << 15
_NOT_A_CANDIDATE, _NEWEST = -(1 << 44), 1 << 44
"""Beyond all bounds, on either side."""


@dataclass(frozen=True)
class PageSummaries:
    """The least and the largest K element of each page and channel.

    Parameters
    ----------
    least, largest : int16 codes [batch, pages, kv_heads, head_dim] of `format`; NaN where a page has one.
    format : that of K where it has 16 bits, else bf16.
    page_rows : rows of a page.
    """

    least: Tensor
    largest: Tensor
    format: Format
    page_rows: int


@dataclass(frozen=True)
class PageSelection:
    """The pages that a job attends to.

    Parameters
    ----------
    pages : bool [batch, kv_heads, pages], for `decode_attention`.
    bounds : int64 [batch, kv_heads, pages], the largest bound of the job's query rows and heads.
    page_rows : rows of a page.
    """

    pages: Tensor
    bounds: Tensor
    page_rows: int

    def numbers(self) -> list[list[list[int]]]:
        """The numbers of the selected pages, ascending, by sequence and KV head."""
        return [[head.nonzero().flatten().tolist() for head in one] for one in self.pages]


def page_summaries(
    k: Tensor,
    *,
    page_rows: int,
    k_format: str = "bf16",
    k_scales: Tensor | None = None,
    k_lut: Tensor | None = None,
    scale_block: Blocks = None,
    scale_format: Names = None,
) -> PageSummaries:
    """Summarise K by pages of `page_rows` rows, the last of which may be short.

    Parameters
    ----------
    k, k_format, k_scales, k_lut, scale_block, scale_format : as in `decode_attention`.
    page_rows : at least 1.

    Returns
    -------
    Summaries [batch, pages, kv_heads, head_dim]. Numbers that their format does not hold are rounded outward:
    the least down, the largest up.

    Raises
    ------
    ValueError, TypeError : as in `decode_attention`, and for page_rows below 1.
    """
    if page_rows < 1:
        raise ValueError(f"page_rows must be at least 1, got {page_rows}")
    rows = checked_rows(
        "k",
        k,
        k_format,
        scales=k_scales,
        block=pair("scale_block", scale_block)[0],
        scale_format=pair("scale_format", scale_format)[0],
        lut=k_lut,
    )
    form = rows.element if rows.element.name in VALUE_FORMATS.values() else BF16
    least, largest = [], []
    with threads_for(k.numel(), k.device):
        for begin in range(0, k.shape[1], page_rows):
            low, high, nan = _keys(rows.decode(begin, min(begin + page_rows, k.shape[1])), form)
            unknown = nan.any(-2)
            least.append(_codes(low.amin(-2), unknown, form))
            largest.append(_codes(high.amax(-2), unknown, form))
    if not least:
        none = torch.zeros(k.shape[0], 0, *k.shape[2:], dtype=torch.int16, device=k.device)
        return PageSummaries(none, none, form, page_rows)
    return PageSummaries(torch.stack(least, 1), torch.stack(largest, 1), form, page_rows)


def select_pages(
    q: Tensor,
    summaries: PageSummaries,
    *,
    scale: float,
    count: int,
    k_scale: Tensor | None = None,
    softcap: float | None = None,
    candidates: Tensor | None = None,
) -> PageSelection:
    """The `count` pages of each sequence and KV head whose rows may score highest, and always the newest.

    Parameters
    ----------
    q : bfloat16 or float16 [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim], as in
        `decode_attention`, as are `scale`, `k_scale` and `softcap`.
    count : pages to select, at least 1, the newest among them; all candidates when there are no more.
    candidates : bool [batch, pages], pages that may be selected (those with a visible row); all when not
        given.

    Returns
    -------
    The selection.

    Raises
    ------
    ValueError, TypeError : for arguments that do not fit.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, for the newest page is always selected, got {count}")
    batch, pages, kv_heads, head_dim = summaries.least.shape
    if q.dtype not in VALUE_FORMATS:
        raise TypeError(f"q must be bfloat16 or float16, not {q.dtype}")
    rows = q if q.dim() == 4 else q.unsqueeze(1)
    if rows.dim() != 4 or rows.shape[0] != batch or rows.shape[3] != head_dim or rows.shape[2] % kv_heads:
        raise ValueError(
            f"q of shape {tuple(q.shape)} does not fit summaries of batch {batch}, {kv_heads} KV heads and "
            f"head_dim {head_dim}"
        )
    may = torch.ones(batch, pages, dtype=torch.bool, device=q.device) if candidates is None else candidates
    if may.dtype != torch.bool or tuple(may.shape) != (batch, pages):
        raise ValueError(f"candidates must be bool {(batch, pages)}, got {may.dtype} {tuple(may.shape)}")
    if softcap is not None:
        softcap_bits(softcap)
    factors = score_factors(scale, k_scale, softcap, kv_heads).to(q.device)
    with threads_for(rows[..., 0].numel() * pages * head_dim, q.device):
        found = _bounds(rows, summaries, factors)
    order = found.masked_fill(~may.unsqueeze(1), _NOT_A_CANDIDATE)
    if pages:
        index = torch.arange(pages, device=q.device)
        newest = index.where(may, -1).amax(-1, keepdim=True)
        order = order.masked_fill((index == newest).unsqueeze(1), _NEWEST)
    # A stable sort keeps pages of one bound in the order of their numbers.
    ranked = order.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, ranked, True)
    return PageSelection(chosen & may.unsqueeze(1), found, summaries.page_rows)


def _bounds(q: Tensor, summaries: PageSummaries, factors: Tensor) -> Tensor:
    """The largest bound over query rows and heads, int64 [B, Hkv, pages]."""
    batch, query_rows, q_heads, head_dim = q.shape
    pages, kv_heads = summaries.least.shape[1:3]
    codes = q.detach().view(torch.int16).transpose(1, 2)
    codes = codes.reshape(batch, kv_heads, q_heads // kv_heads * query_rows, 1, head_dim)
    factor = factors.view(kv_heads, 1, 1)
    up = ((codes < 0) ^ (factor < 0).unsqueeze(-1)).logical_not()
    least, largest = (x.transpose(1, 2).unsqueeze(2) for x in (summaries.least, summaries.largest))
    if not pages or not codes.shape[2]:
        return torch.full((batch, kv_heads, pages), -SCORE_LIMIT, dtype=torch.int64, device=q.device)
    form = BF16 if q.dtype == torch.bfloat16 else FP16
    return bounds(decode(codes, form), decode(largest.where(up, least), summaries.format), factor).amax(2)


def _keys(elements: Elements, form: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers rounded down and up to a format of 16 bits, as integers in their order, and which are NaN.

    A key is a code without its sign, and less than zero by one more for what is negative: -0 is below +0.
    """
    nan, infinite = elements.specials
    lowest = 1 - form.exponent_bias
    exponent = elements.exponent.masked_fill(elements.significand == 0, lowest)
    unit = (exponent + bit_length(elements.significand) - 1 - form.fraction_bits).clamp(min=lowest)
    right, left = (unit - exponent).clamp(0, 62), (exponent - unit).clamp(0, 62)
    inward = elements.significand >> right
    outward = inward + (inward << right != elements.significand)
    top = ((1 << form.exponent_bits) - 1) << form.fraction_bits
    field = (unit - lowest) << form.fraction_bits
    inward = (field + (inward << left)).clamp(max=top - 1).masked_fill(infinite, top)
    outward = (field + (outward << left)).clamp(max=top).masked_fill(infinite, top)
    negative = elements.sign < 0
    return torch.where(negative, -1 - outward, inward), torch.where(negative, -1 - inward, outward), nan


def _codes(keys: Tensor, nan: Tensor, form: Format) -> Tensor:
    """The int16 codes [B, Hkv, D] of keys."""
    codes = torch.where(keys < 0, (-1 - keys) - _SIGN, keys)
    return codes.masked_fill(nan, _NAN[form]).to(torch.int16)
