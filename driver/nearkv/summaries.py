"""Summaries of pages: the least and the largest K of each channel, kept up as rows are appended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.formats import BF16, FP16, Format
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import RowLayout
from nearkv_sim.port import Addresses, Lines

from .codec import rows_to_lines
from .heads import HeadTables
from .quantise.formats import CacheFormat
from .reference import page_summaries
from .rows import Context
from .table import PageTable

_NAN = {BF16.name: 0x7F80, FP16.name: 0x7C00}
"""Of a code's magnitude: what is above stands for NaN."""


class Summaries:
    """What a cache's pages say of their K rows.

    Parameters
    ----------
    layout, form : of the cache.
    heads : with the codebooks of its heads.
    """

    def __init__(self, layout: RowLayout, form: CacheFormat, heads: HeadTables) -> None:
        self._layout = layout
        self._form = form
        self._heads = heads
        self._format: Format = form.k.form if form.k.form.bits == 16 else BF16

    def added(
        self, table: PageTable, begin: int, k: torch.Tensor, scales: torch.Tensor | None, layer: int
    ) -> tuple[Addresses, Lines]:
        """The summaries of the pages that rows [rows, kv_heads, dim] from `begin` on lie in, as lines.

        What the first of these pages held before is in the table's mirror.
        """
        page_rows = self._layout.page_rows
        rows = k.shape[0]
        if not rows:
            return np.empty(0, np.uint64), np.empty((0, LINE_BYTES), np.uint8)
        head = begin % page_rows
        parts = [self._extremes(k[: page_rows - head], scales, slice(0, page_rows - head), layer)]
        parts += [
            self._extremes(k[at : at + page_rows], scales, slice(at, at + page_rows), layer)
            for at in range(page_rows - head, rows, page_rows)
        ]
        if head and table.extremes is not None:
            parts[0] = self._merged(table.extremes, parts[0])
        full = (begin + rows) % page_rows == 0
        table.next_extremes = None if full else parts[-1]
        first = begin // page_rows
        return self._lines(table, first, torch.stack(parts))

    def again(self, table: PageTable, left: Context, rows: int) -> tuple[Addresses, Lines]:
        """The summary of a page that was cut to these rows, `rows` being the context's."""
        scales = left.k_scales
        table.extremes = self._extremes(left.k, scales, slice(0, left.k.shape[0]), table.layer)
        return self._lines(table, rows // self._layout.page_rows, table.extremes[None])

    def _extremes(
        self, k: torch.Tensor, scales: torch.Tensor | None, rows: slice, layer: int
    ) -> torch.Tensor:
        """Least and largest of some rows of a page, int16 codes [2, kv_heads, head_dim]."""
        form = self._form.k
        options = (
            {}
            if scales is None
            else {"k_scales": scales[rows][None], "scale_block": form.block, "scale_format": form.scale}
        )
        found = page_summaries(
            k[None],
            page_rows=self._layout.page_rows,
            k_format=form.element,
            k_lut=self._heads.codebook("k", layer),
            **options,  # type: ignore[arg-type]
        )
        return torch.stack([found.least[0, 0], found.largest[0, 0]])

    def _merged(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The summary of both sets of rows; NaN where either has one."""
        keys = [_key(part) for part in (first, second)]
        least = torch.where(keys[0][0] <= keys[1][0], first[0], second[0])
        largest = torch.where(keys[0][1] >= keys[1][1], first[1], second[1])
        top = _NAN[self._format.name]
        for part in (first, second):
            nan = (part[0].to(torch.int64) & 0x7FFF) > top
            least, largest = torch.where(nan, part[0], least), torch.where(nan, part[1], largest)
        return torch.stack([least, largest])

    def _lines(self, table: PageTable, first: int, extremes: torch.Tensor) -> tuple[Addresses, Lines]:
        """Where summaries [pages, 2, kv_heads, head_dim] of pages from `first` on lie, and their lines."""
        layout = self._layout
        pages = table.page_addresses(first, first + len(extremes))
        lines = rows_to_lines(extremes.permute(2, 0, 1, 3), layout.summary_lines)
        step = np.arange(2 * layout.summary_lines, dtype=np.uint64) * np.uint64(LINE_BYTES)
        places: npt.NDArray[np.uint64] = (pages + np.uint64(layout.summary_offset))[..., None] + step
        return places.reshape(-1), lines.reshape(-1, LINE_BYTES)


def _key(codes: torch.Tensor) -> torch.Tensor:
    """Codes as integers in the order of their numbers, -0 below +0."""
    wide = codes.to(torch.int64)
    return torch.where(wide < 0, -1 - (wide & 0x7FFF), wide)
