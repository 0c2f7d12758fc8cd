"""Positions of query rows and rows: what distances are between (docs/numerics.md section 9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nearkv_hw.abi.numerics import POSITION_BITS
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Positions:
    """Where query rows and rows stand in their sequences.

    Parameters
    ----------
    query : int64 [1 or B, T].
    rows : int64 [1 or B, rows].
    """

    query: Tensor
    rows: Tensor

    def distances(self, begin: int, end: int) -> Tensor:
        """Position of each row from `begin` to `end` (excluded) less a query row's: [1 or B, T, rows]."""
        return self.rows[:, begin:end].unsqueeze(1) - self.query.unsqueeze(2)


def checked_positions(
    q: Tensor, rows: int, query_positions: Tensor | None, row_positions: Tensor | None
) -> Positions:
    """The positions of a call whose q is [B, Hq, D] or [B, T, Hq, D].

    Without any, a row's position is its index, and the last query row's that of the last row. ValueError or
    TypeError says what was given and what is allowed.
    """
    batch, query_rows = q.shape[0], q.shape[1] if q.dim() == 4 else 1
    if query_positions is None:
        if row_positions is not None:
            raise ValueError("row_positions need query_positions: nothing says where the query rows stand")
        query = torch.arange(rows - query_rows, rows, device=q.device)
    else:
        one_row = ((batch,),) if q.dim() == 3 else ()
        query = _checked("query_positions", query_positions, one_row or ((query_rows,), (batch, query_rows)))
        query = query.reshape(batch, 1) if one_row else query
    held = (
        torch.arange(rows, device=q.device)
        if row_positions is None
        else _checked("row_positions", row_positions, ((rows,), (batch, rows)))
    )
    return Positions(*(plane if plane.dim() == 2 else plane.unsqueeze(0) for plane in (query, held)))


def _checked(name: str, positions: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
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
