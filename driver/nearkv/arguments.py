"""What calls may be given: every check that can be made before the device is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.descriptor import MAX_QUERY_ROWS
from nearkv_hw.abi.numerics import POSITION_BITS

from .codec import FORMATS
from .errors import ArgumentError, DtypeError, ShapeError
from .reference.alibi import alibi_bits

Chosen = TypeVar("Chosen")
Bounds = npt.NDArray[np.int64]
"""One row index per sequence of a batch."""
Rows = tuple[int, int] | Many[tuple[int, int]]
"""A range of rows, or one per sequence."""


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value`, when it is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ArgumentError(f"{name}={value!r}: must be an integer from {low} to {high}")
    return int(value)


def one_of(name: str, value: str, known: Mapping[str, Chosen]) -> Chosen:
    """What `value` names."""
    if value not in known:
        raise ArgumentError(f"{name}={value!r}: there are {', '.join(known)}")
    return known[value]


def dense(name: str, tensor: object, shape: tuple[int | str, ...]) -> torch.Tensor:
    """`tensor`, when it is a dense tensor of the shape; names stand for any size."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
    given = tensor.shape
    if len(given) != len(shape) or any(
        w != g and not isinstance(w, str) for g, w in zip(given, shape, strict=True)
    ):
        raise ShapeError(f"{name} has shape {list(given)}, must have [{', '.join(map(str, shape))}]")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "a meta tensor" if tensor.is_meta else str(tensor.layout)
        raise DtypeError(f"{name} is {kind}, must be a dense tensor with data")
    return tensor


def queries_of(q: Any, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """`q`, when it is [batch, (query_rows,) q_heads, head_dim] and fits the KV heads.

    Its type is the cache's, or where that is None either of the two that queries may have.
    """
    several = isinstance(q, torch.Tensor) and q.dim() == 4
    queries = dense("q", q, (batch, *(["query_rows"] if several else []), "q_heads", head_dim))
    if queries.dtype not in ((dtype,) if dtype else FORMATS):
        if dtype is None:
            raise DtypeError(f"q is {queries.dtype}, must be {' or '.join(map(str, FORMATS))}")
        raise DtypeError(
            f"q is {queries.dtype}, the cache holds {FORMATS[dtype].name}; convert with q.to({dtype})"
        )
    q_heads = queries.shape[-2]
    if q_heads == 0 or q_heads % kv_heads:
        raise ShapeError(f"q has {q_heads} heads, must have a multiple of the cache's {kv_heads} KV heads")
    if several and queries.shape[1] == 0:
        raise ShapeError("q has no query rows, must have at least 1")
    return queries


def sinks_of(sinks: Any, q_heads: int) -> torch.Tensor | None:
    """Sinks as float32 [q_heads] on the CPU, or None."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or sinks.dtype not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        kind = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise DtypeError(f"sinks must be a tensor of float32 (or bfloat16, float16), not {kind}")
    if tuple(sinks.shape) != (q_heads,):
        raise ShapeError(f"sinks have shape {list(sinks.shape)}, must have [{q_heads}]: one per query head")
    return sinks.detach().cpu().to(torch.float32).contiguous()


def finite_scale(scale: Any, head_dim: int) -> float:
    """The score's scale, 1/sqrt(head_dim) when none is given."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"scale={scale!r}: must be a number that a float can hold") from error
    if not math.isfinite(value):
        raise ArgumentError(f"scale={value}: must be finite")
    return value


def row_bounds(lengths: Bounds, window: int | None, rows: Rows | None) -> tuple[Bounds, Bounds]:
    """The range of rows that each sequence's last query row sees, as (begin, end) arrays."""
    begin, end = np.zeros_like(lengths), lengths.copy()
    if rows is not None:
        pairs = _pairs_of(rows, len(lengths))
        begin, end = pairs[:, 0].copy(), pairs[:, 1].copy()
        if (begin < 0).any() or (begin > end).any() or (end > lengths).any():
            raise ArgumentError(
                f"rows={rows!r}: must keep 0 <= begin <= end <= length, lengths are {lengths.tolist()}"
            )
    if window is not None:
        whole_number("window", window, 1, 1 << 62)
        begin = np.minimum(np.maximum(begin, lengths - window), end)
    return begin, end


def _pairs_of(rows: Rows, batch: int) -> npt.NDArray[np.int64]:
    """The (begin, end) of each sequence [batch, 2]; whole numbers only, nothing is rounded or repeated."""
    try:
        given = np.asarray(rows)
    except (TypeError, ValueError):
        given = np.empty(0, np.object_)
    if given.dtype.kind not in "iu" or given.shape not in ((2,), (batch, 2)):
        raise ShapeError(
            f"rows={rows!r}: must be (begin, end), or one pair for each of {batch} sequences, "
            "of integers of 64 bits"
        )
    return np.broadcast_to(given.astype(np.int64), (batch, 2))


def visible_of(
    visible: Any, batch: int, query_rows: int | None, lengths: Bounds
) -> npt.NDArray[np.bool_] | None:
    """`visible` as bool [batch, query_rows or 1, rows], or None.

    Columns are the rows of the longest sequence; those beyond a shorter one must be False.
    """
    if visible is None:
        return None
    rows = int(lengths.max(initial=0))
    shapes = [(batch, rows)] if query_rows is None else [(batch, rows), (batch, query_rows, rows)]
    if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, torch.Tensor) else type(visible).__name__
        raise DtypeError(f"visible must be a bool tensor, not {kind}")
    if tuple(visible.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(
            f"visible has shape {list(visible.shape)}, must have {allowed}: a column per committed row"
        )
    mask: npt.NDArray[np.bool_] = visible.detach().cpu().numpy()
    mask = mask[:, None] if mask.ndim == 2 else mask
    beyond = np.arange(rows) >= lengths[:, None, None]
    if (mask & beyond).any():
        raise ArgumentError(
            f"visible names rows that some sequence does not have; lengths are {lengths.tolist()}"
        )
    return mask


def intervals(mask: npt.NDArray[np.bool_]) -> tuple[Bounds, Bounds] | None:
    """The (begin, end) of the True columns [batch, rows], or None when some row's are not one interval."""
    count = mask.sum(1)
    if mask.shape[1] == 0:
        return count.astype(np.int64), count.astype(np.int64)
    begin = mask.argmax(1)
    end = np.where(count > 0, mask.shape[1] - mask[:, ::-1].argmax(1), begin)
    if (end - begin != count).any():
        return None
    return begin.astype(np.int64), end.astype(np.int64)


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The (begin, end) of the runs of True in a row of columns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


def tree_of(tree: Any, query_rows: int, lengths: Bounds) -> npt.NDArray[np.bool_] | None:
    """`tree` as bool [batch, query_rows, query_rows], or None."""
    if tree is None:
        return None
    batch = len(lengths)
    if not isinstance(tree, torch.Tensor) or tree.dtype != torch.bool:
        kind = tree.dtype if isinstance(tree, torch.Tensor) else type(tree).__name__
        raise DtypeError(f"tree must be a bool tensor, not {kind}")
    shapes = [(query_rows, query_rows), (batch, query_rows, query_rows)]
    if tuple(tree.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(
            f"tree has shape {list(tree.shape)}, must have {allowed}: query rows among each other"
        )
    if query_rows > MAX_QUERY_ROWS:
        raise ArgumentError(f"a tree has at most {MAX_QUERY_ROWS} query rows, got {query_rows}")
    if (lengths < query_rows).any():
        raise ArgumentError(
            f"a tree's query rows are the last rows of their sequences: {query_rows} of lengths "
            f"{lengths.tolist()}"
        )
    mask: npt.NDArray[np.bool_] = tree.detach().cpu().numpy()
    return np.broadcast_to(mask, shapes[1])


def positions_of(positions: Any, query_rows: int, lengths: Bounds) -> npt.NDArray[np.int64]:
    """Positions of the query rows [batch, query_rows]: those of the last rows where none are given."""
    shapes = [(query_rows,), (len(lengths), query_rows)]
    if positions is None:
        return (lengths - query_rows)[:, None] + np.arange(query_rows)
    if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int64, torch.int32):
        kind = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise DtypeError(f"query_positions must be an int64 tensor, not {kind}")
    if tuple(positions.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ShapeError(f"query_positions have shape {list(positions.shape)}, must have {allowed}")
    found = positions.detach().cpu().numpy().astype(np.int64)
    if found.size and not 0 <= found.min() <= found.max() < 1 << POSITION_BITS:
        raise ArgumentError(
            f"query_positions must be 0 to {(1 << POSITION_BITS) - 1}, got {found.min()} to {found.max()}"
        )
    return np.broadcast_to(found, shapes[1])


def placed(
    visible: npt.NDArray[np.bool_] | None, query_rows: int, window: int | None
) -> npt.NDArray[np.bool_]:
    """`visible` where it is all that says what query rows see, which stand somewhere else than at the end."""
    if visible is None or visible.shape[1] != query_rows or window is not None:
        raise ArgumentError(
            "query_positions go with a tree, or with visible for each query row and no window; without "
            "either query rows are the last rows"
        )
    return visible


def slopes_of(slopes: Any, q_heads: int) -> torch.Tensor | None:
    """ALiBi slopes as float32 [q_heads] on the CPU, or None."""
    found = per_head("alibi_slopes", slopes, q_heads)
    if found is not None:
        base_2_slopes(found)
    return found


def base_2_slopes(slopes: torch.Tensor) -> npt.NDArray[np.uint32]:
    """float32 bits of slopes of scores of base 2; ArgumentError for what is no slope."""
    try:
        return np.array([alibi_bits(slope) for slope in slopes.tolist()], np.uint32)
    except ValueError as error:
        raise ArgumentError(str(error)) from error


def per_head(name: str, values: Any, q_heads: int) -> torch.Tensor | None:
    """float32 [q_heads] on the CPU, or None."""
    if values is None:
        return None
    if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise DtypeError(f"{name} must be a float32 tensor, not {kind}")
    if tuple(values.shape) != (q_heads,):
        raise ShapeError(f"{name} have shape {list(values.shape)}, must have [{q_heads}]: one per query head")
    return values.detach().cpu()
