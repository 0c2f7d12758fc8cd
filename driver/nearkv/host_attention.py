"""Attention that the device does not do, on the host: `nearkv.reference` over rows that were read back."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.numerics import NAN_BF16, NAN_FP16, NAN_FP32

from .arguments import Bounds, row_bounds
from .arguments import Rows as Range
from .quantise.formats import CacheFormat, RowFormat
from .quantise.rows import Quantised, attention_arguments
from .reference import (
    Partial,
    decode_attention,
    finish,
    log_sum_exp,
    page_summaries,
    select_pages,
)
from .rows import Context, Rows

__all__ = ["HostRows", "finish", "log_sum_exp", "scaled", "seen"]

Tree = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Positions [batch, query_rows] and masks [batch, query_rows, query_rows]."""


def seen(
    lengths: Bounds,
    query_rows: int,
    *,
    window: int | None,
    kept_rows: int = 0,
    rows: Range | None,
    visible: npt.NDArray[np.bool_] | None,
    tree: Tree | None = None,
    released: Bounds | None = None,
) -> npt.NDArray[np.bool_]:
    """The rows that each query row sees, bool [batch, query_rows, rows]; the last query row is the last.
    `released` [batch, 2] are rows that nobody sees."""
    index = np.arange(int(lengths.max(initial=0)))
    first = (lengths - query_rows)[:, None]
    query = first + np.arange(query_rows) if tree is None else tree[0]
    held = np.broadcast_to(index, (len(lengths), len(index)))
    causal = (query_rows > 1 and tree is None) or window is not None
    mask = np.broadcast_to((index < lengths[:, None])[:, None], (len(lengths), query_rows, len(index))).copy()
    if tree is not None:
        own = np.clip(index - first, 0, query_rows - 1)
        last = index >= first
        held = np.where(last, np.take_along_axis(tree[0], own, axis=1), held)
        of_tree = np.take_along_axis(tree[1], np.broadcast_to(own[:, None], mask.shape), axis=2)
        mask &= of_tree | ~last[:, None]
    if causal:
        mask &= held[:, None] <= query[:, :, None]
    if window is not None:
        mask &= (held[:, None] > query[:, :, None] - window) | (index < kept_rows)
    if rows is not None:
        begin, end = row_bounds(lengths, None, rows)
        mask &= ((index >= begin[:, None]) & (index < end[:, None]))[:, None]
    if visible is not None:
        mask &= visible
    return without(mask, released)


def without(mask: npt.NDArray[np.bool_], released: Bounds | None) -> npt.NDArray[np.bool_]:
    """Of bool [batch, query_rows, rows] what is left where nobody sees the rows `released` [batch, 2]."""
    if released is None:
        return mask
    index = np.arange(mask.shape[2])
    gone = (index >= released[:, :1]) & (index < released[:, 1:])
    found: npt.NDArray[np.bool_] = mask & ~gone[:, None]
    return found


@dataclass(frozen=True)
class HostRows:
    """How rows that were read back become numbers.

    Members
    -------
    form : the cache's format.
    k_scale, v_scale, k_lut, v_lut : scales and codebooks of the layer's heads, or None.
    """

    form: CacheFormat
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_lut: torch.Tensor | None
    v_lut: torch.Tensor | None

    def padded(
        self, contexts: Many[Context], rows: Many[Rows], seen: npt.NDArray[np.bool_]
    ) -> tuple[Context, torch.Tensor]:
        """Contexts of some rows as one batch, shorter ones filled up with zeros that nobody sees.

        Parameters
        ----------
        contexts : the rows of each sequence.
        rows : which rows of the sequence they are.
        seen : bool [batch, query_rows, rows], over all rows.

        Returns
        -------
        All as one context [batch, rows, kv_heads, ...], and who sees what, bool [batch, query_rows, rows].
        """
        longest = max((len(indices) for indices in rows), default=0)

        def stacked(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
            own = [part for part in parts if part is not None]
            if not own:
                return None
            pad = torch.nn.functional.pad
            return torch.stack([pad(part, (0, 0, 0, 0, 0, longest - part.shape[0])) for part in own])

        k, k_scales, v, v_scales = (
            stacked(list(parts)) for parts in zip(*(context.areas for context in contexts), strict=True)
        )
        assert k is not None
        visible = np.zeros((*seen.shape[:2], longest), np.bool_)
        for index, indices in enumerate(rows):
            visible[index, :, : len(indices)] = seen[index][:, indices]
        return Context(k, v, k_scales, v_scales), torch.from_numpy(visible)

    def arguments(self, rows: Context) -> dict[str, Any]:
        """Keywords of `decode_attention` for rows [batch, rows, kv_heads, ...], but for v_scale."""

        def quantised(
            form: RowFormat,
            codes: torch.Tensor,
            scales: torch.Tensor | None,
            heads: torch.Tensor | None,
            book: torch.Tensor | None,
        ) -> Quantised:
            return Quantised(form, codes, scales, heads, 0, book)

        k = quantised(self.form.k, rows.k, rows.k_scales, self.k_scale, self.k_lut)
        v = None
        if self.form.v is not None and rows.v is not None:
            v = quantised(self.form.v, rows.v, rows.v_scales, self.v_scale, self.v_lut)
        found = attention_arguments(k, v)
        found.pop("v_scale", None)
        return found

    def attend(
        self,
        q: torch.Tensor,
        rows: Context,
        visible: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None,
        softcap: float | None,
        alibi_slopes: torch.Tensor | None,
        select_pages: int | None,
        page_rows: int,
        lengths: Bounds,
        value_dim: int,
        **positions: torch.Tensor,
    ) -> tuple[Partial, torch.Tensor | None]:
        """The contract's partial of q over rows of a batch, visible [batch, query_rows, rows], and the pages
        that were selected."""
        arguments = self.arguments(rows)
        pages = None
        if select_pages is not None:
            pages = self._selected(q, arguments, visible, scale, softcap, select_pages, page_rows, lengths)
        moved: dict[str, Any] = {
            name: value.to(q.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        if self.form.v is None:
            moved["value_dim"] = value_dim
        if pages is not None:
            moved |= {"pages": pages.to(q.device), "page_rows": page_rows}
        moved |= positions
        moved |= {
            "visible": (visible[:, 0] if q.dim() == 3 else visible).to(q.device),
            "sinks": sinks,
            "softcap": softcap,
            "alibi_slopes": None if alibi_slopes is None else alibi_slopes.to(q.device),
        }
        k, v = moved.pop("k"), moved.pop("v")
        attend = attention_on(q.device)
        return attend(q, k, v, scale=scale, partial=True, **moved), pages

    def _selected(
        self,
        q: torch.Tensor,
        arguments: dict[str, Any],
        visible: torch.Tensor,
        scale: float,
        softcap: float | None,
        count: int,
        page_rows: int,
        lengths: Bounds,
    ) -> torch.Tensor:
        """The pages that are selected, bool [batch, kv_heads, pages]."""
        k = arguments["k"]
        pages = -(-k.shape[1] // page_rows)
        found = torch.zeros(k.shape[0], k.shape[2], pages, dtype=torch.bool)
        for index, length in enumerate(lengths.tolist()):
            own = slice(index, index + 1)
            given: dict[str, Any] = {"k_format": arguments["k_format"], "k_lut": arguments.get("k_lut")}
            if "k_scales" in arguments:
                given["k_scales"] = arguments["k_scales"][own, :length]
                given |= {name: arguments[name] for name in ("scale_block", "scale_format")}
            summaries = page_summaries(k[own, :length], page_rows=page_rows, **given)
            shown = visible[own].any(1)[:, :length]
            count_own = summaries.least.shape[1]
            shown = torch.nn.functional.pad(shown, (0, count_own * page_rows - length))
            selection = select_pages(
                q[own].cpu(),
                summaries,
                scale=scale,
                count=count,
                k_scale=self.k_scale,
                softcap=softcap,
                candidates=shown.view(1, count_own, page_rows).any(-1),
            )
            found[own, :, :count_own] = selection.pages
        return found


def attention_on(device: torch.device) -> Callable[..., Any]:
    """What works attention out there, with the same bits: the Triton kernel on a GPU, where Triton is."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from .gpu import decode_attention as kernel  # late: Triton takes its time

        return kernel
    return decode_attention


def scaled(values: torch.Tensor, v_scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """float32 results [queries, q_heads, value_dim] times their heads' scales, in another type."""
    group = values.shape[-2] // len(v_scale)
    found = (values * v_scale.repeat_interleave(group)[:, None]).to(out_dtype)
    kind = torch.int32 if out_dtype == torch.float32 else torch.int16
    nan = {torch.float32: NAN_FP32, torch.bfloat16: NAN_BF16, torch.float16: NAN_FP16}[out_dtype]
    return found.view(kind).masked_fill(found.isnan(), nan).view(out_dtype)
