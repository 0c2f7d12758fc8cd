"""Which rows a query row sees (docs/numerics.md section 10), and where both stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from nearkv_hw.abi.numerics import POSITION_BITS
from torch import Tensor

Range = tuple[int, int]
Ranges = Sequence[Range] | Sequence[Sequence[Range]]
"""Row ranges (begin, end) of all sequences alike, or of each."""
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Asked:
    """What a caller says of visibility; see `decode_attention`."""

    visible: Tensor | None = None
    causal: bool = False
    window: int | None = None
    kept_rows: int = 0
    ranges: Ranges | None = None
    tree: Tensor | None = None
    pages: Tensor | None = None
    page_rows: int | None = None
    query_positions: Tensor | None = None
    row_positions: Tensor | None = None


@dataclass(frozen=True)
class Visibility:
    """The rows that each query row of a call sees, and where rows and query rows stand.

    Parameters
    ----------
    query : int64 [1 or B, T], positions of the query rows.
    rows : int64 [1 or B, R], positions of the rows.
    mask : bool [1 or B, 1 or T, R] of what is said row by row, or None.
    causal : no row after the query row is seen.
    window : rows that are seen up to the query row, or None for all.
    kept_rows : first rows that the window leaves visible.
    pages : bool [B, Hkv, pages], or None.
    page_rows : rows of a page.
    """

    query: Tensor
    rows: Tensor
    mask: Tensor | None
    causal: bool
    window: int | None
    kept_rows: int
    pages: Tensor | None
    page_rows: int

    def distances(self, begin: int, end: int) -> Tensor:
        """Position of each row from `begin` to `end` (excluded) less a query row's: [1 or B, T, rows]."""
        return self.rows[:, begin:end].unsqueeze(1) - self.query.unsqueeze(2)

    def of(self, begin: int, end: int) -> Tensor | None:
        """Rows `begin` to `end` that are seen, bool [1 or B, 1 or Hkv, 1 or T, rows]; None when all are."""
        seen = None if self.mask is None else self.mask[:, :, begin:end]
        if self.causal:
            distances = self.distances(begin, end)
            near = distances <= 0
            if self.window is not None:
                index = torch.arange(begin, end, device=distances.device)
                near = near & ((distances > -self.window) | (index < self.kept_rows))
            seen = near if seen is None else seen & near
        seen = None if seen is None else seen.unsqueeze(1)
        if self.pages is not None:
            page = torch.arange(begin, end, device=self.pages.device) // self.page_rows
            chosen = self.pages.index_select(2, page).unsqueeze(2)
            seen = chosen if seen is None else seen & chosen
        return seen


def checked_visibility(q: Tensor, rows: int, kv_heads: int, asked: Asked) -> Visibility:
    """The visibility of a call whose q is [B, Hq, D] or [B, T, Hq, D], over `rows` rows.

    ValueError or TypeError says what was given and what is allowed.
    """
    batch, query_rows = q.shape[0], q.shape[1] if q.dim() == 4 else 1
    query, held = _positions(q, rows, asked)
    masks = [
        None if asked.visible is None else _visible(asked.visible, batch, query_rows, rows),
        None if asked.ranges is None else _of_ranges(asked.ranges, batch, rows).to(q.device),
        None if asked.tree is None else _of_tree(asked.tree, batch, query_rows, rows),
    ]
    mask = None
    for given in masks:
        if given is not None:
            mask = given if mask is None else mask & given
    window, kept_rows = asked.window, asked.kept_rows
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ValueError(f"window counts rows, the query row's own included: at least 1, got {window!r}")
    if kept_rows < 0 or (kept_rows and window is None):
        raise ValueError(
            f"kept_rows are first rows that a window leaves visible; got {kept_rows} with window {window}"
        )
    pages = None if asked.pages is None else _pages(asked.pages, asked.page_rows, batch, kv_heads, rows)
    if asked.pages is None and asked.page_rows is not None:
        raise ValueError("page_rows needs pages")
    return Visibility(
        query, held, mask, asked.causal or window is not None, window, kept_rows, pages, asked.page_rows or 1
    )


def _positions(q: Tensor, rows: int, asked: Asked) -> tuple[Tensor, Tensor]:
    """Positions of query rows [1 or B, T] and of rows [1 or B, R]."""
    batch, query_rows = q.shape[0], q.shape[1] if q.dim() == 4 else 1
    if asked.query_positions is None:
        if asked.row_positions is not None:
            raise ValueError("row_positions need query_positions: nothing says where the query rows stand")
        query = torch.arange(rows - query_rows, rows, device=q.device).unsqueeze(0)
    elif q.dim() == 3:
        query = _checked("query_positions", asked.query_positions, (batch,)).unsqueeze(1)
    else:
        query = _checked("query_positions", asked.query_positions, (query_rows,), (batch, query_rows))
        query = query.reshape(-1, query_rows) if query.dim() == 1 else query
    if asked.row_positions is not None:
        if asked.tree is not None:
            raise ValueError("the rows of a tree stand where its query rows do; give row_positions or tree")
        held = _checked("row_positions", asked.row_positions, (rows,), (batch, rows))
        return query, held.unsqueeze(0) if held.dim() == 1 else held
    held = torch.arange(rows, device=q.device).unsqueeze(0)
    if asked.tree is not None and query_rows <= rows:
        before = held[:, : rows - query_rows].expand(query.shape[0], -1)
        held = torch.cat([before, query], dim=1)
    return query, held


def _checked(name: str, positions: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """Positions that a caller gave, as int64."""
    if positions.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int64 or int32, got {positions.dtype}")
    if tuple(positions.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(positions.shape)}")
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < 1 << POSITION_BITS:
        low, high = int(positions.min()), int(positions.max())
        raise ValueError(f"{name} must be from 0 to {(1 << POSITION_BITS) - 1}, got {low} to {high}")
    return positions.to(torch.int64)


def _visible(visible: Tensor, batch: int, query_rows: int, rows: int) -> Tensor:
    """`visible` as [B, 1 or T, rows]."""
    if visible.dtype != torch.bool:
        raise TypeError(f"visible must be bool (True = attend), got {visible.dtype}")
    shape = tuple(visible.shape)
    if shape == (batch, rows):
        return visible.unsqueeze(1)
    if shape == (batch, query_rows, rows):
        return visible
    allowed = f"{(batch, rows)} or {(batch, query_rows, rows)}"
    raise ValueError(f"visible must be [batch, rows] or [batch, query_rows, rows], {allowed}, got {shape}")


def _of_ranges(ranges: Ranges, batch: int, rows: int) -> Tensor:
    """The union of row ranges, bool [1 or B, 1, rows] on the CPU."""
    alike = all(isinstance(entry, tuple) and isinstance(entry[0], int) for entry in ranges)
    per_sequence = cast("Sequence[Sequence[Range]]", [ranges] if alike else ranges)
    if not alike and len(ranges) != batch:
        raise ValueError(f"ranges are of {len(ranges)} sequences, the batch has {batch}")
    mask = torch.zeros(len(per_sequence), 1, rows, dtype=torch.bool)
    for sequence, own in enumerate(per_sequence):
        for begin, end in own:
            if not 0 <= begin <= end <= rows:
                raise ValueError(f"a range must keep 0 <= begin <= end <= {rows}, got ({begin}, {end})")
            mask[sequence, 0, begin:end] = True
    return mask


def _of_tree(tree: Tensor, batch: int, query_rows: int, rows: int) -> Tensor:
    """A mask among the last rows as one of all rows, bool [1 or B, T, rows]."""
    if tree.dtype != torch.bool:
        raise TypeError(f"tree must be bool (True = attend), got {tree.dtype}")
    if tuple(tree.shape) not in ((query_rows, query_rows), (batch, query_rows, query_rows)):
        raise ValueError(
            "tree must be [query_rows, query_rows] or [batch, query_rows, query_rows] "
            f"for {query_rows} query rows and batch {batch}, got {tuple(tree.shape)}"
        )
    if query_rows > rows:
        raise ValueError(f"a tree is among the last rows: {query_rows} query rows are more than {rows} rows")
    own = tree if tree.dim() == 3 else tree.unsqueeze(0)
    return torch.nn.functional.pad(own, (rows - query_rows, 0), value=True)


def _pages(pages: Tensor, page_rows: int | None, batch: int, kv_heads: int, rows: int) -> Tensor:
    """Selected pages, bool [B, Hkv, pages]."""
    if page_rows is None or page_rows < 1:
        raise ValueError(f"pages need page_rows, at least 1, got {page_rows}")
    if pages.dtype != torch.bool:
        raise TypeError(f"pages must be bool (True = attend), got {pages.dtype}")
    wanted = (batch, kv_heads, -(-rows // page_rows))
    if tuple(pages.shape) != wanted:
        raise ValueError(f"pages must be [batch, kv_heads, pages] = {wanted}, got {tuple(pages.shape)}")
    return pages
