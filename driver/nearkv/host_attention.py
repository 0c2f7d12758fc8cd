"""Attention that the device does not do, on the host: `nearkv.reference` over rows that were read back."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from .arguments import Bounds, row_bounds
from .arguments import Rows as Range
from .reference import Partial, decode_attention, finish, log_sum_exp
from .rows import Context, Rows


def seen(
    lengths: Bounds,
    query_rows: int,
    *,
    window: int | None,
    rows: Range | None,
    visible: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.bool_]:
    """The rows that each query row sees, bool [batch, query_rows, rows]; the last query row is the last."""
    index = np.arange(int(lengths.max(initial=0)))
    mask = np.empty((len(lengths), query_rows, len(index)), np.bool_)
    for row in range(query_rows):
        own = np.maximum(lengths - (query_rows - 1 - row), 0)
        begin, end = row_bounds(own, window, None)
        mask[:, row] = (index >= begin[:, None]) & (index < end[:, None])
    if rows is not None:
        begin, end = row_bounds(lengths, None, rows)
        mask &= ((index >= begin[:, None]) & (index < end[:, None]))[:, None]
    if visible is not None:
        mask &= visible
    return mask


def padded(
    contexts: Many[Context], rows: Many[Rows], seen: npt.NDArray[np.bool_]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contexts of some rows as one batch, shorter ones filled up with zeros that nobody sees.

    Parameters
    ----------
    contexts : (k, v) [rows, kv_heads, dim] of each sequence.
    rows : which rows of the sequence they are.
    seen : bool [batch, query_rows, rows], over all rows.

    Returns
    -------
    k and v [batch, rows, kv_heads, dim], and who sees what of them, bool [batch, query_rows, rows].
    """
    longest = max((len(indices) for indices in rows), default=0)
    k, v = (
        torch.stack(
            [torch.nn.functional.pad(c[part], (0, 0, 0, 0, 0, longest - c[part].shape[0])) for c in contexts]
        )
        for part in (0, 1)
    )
    visible = np.zeros((*seen.shape[:2], longest), np.bool_)
    for index, indices in enumerate(rows):
        visible[index, :, : len(indices)] = seen[index][:, indices]
    return k, v, torch.from_numpy(visible)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    out_dtype: torch.dtype,
    return_lse: bool,
    partial: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Partial:
    """The contract's attention of q over padded contexts; visible [batch, query_rows, rows]."""
    if q.dim() == 3:
        visible = visible[:, 0]
    result = decode_attention(q, k, v, scale=scale, visible=visible, sinks=sinks, partial=True)
    if partial:
        return result
    out = finish(result, out_dtype)
    return (out, log_sum_exp(result)) if return_lse else out
