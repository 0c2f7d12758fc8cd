"""One attention call: what it was asked for, checked, and turned into jobs or into work for the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import OutputForm
from nearkv_sim.port import Operation

from . import host_attention
from .arguments import (
    Bounds,
    Rows,
    finite_scale,
    intervals,
    queries_of,
    row_bounds,
    sinks_of,
    visible_of,
    whole_number,
)
from .errors import ArgumentError, DtypeError
from .jobs import FORMS, Batch, Jobs, log_sum_exp_of, partial_of, values_of
from .reference import Partial, State, score_factor
from .rows import Context
from .rows import Rows as SeenRows
from .table import PageTable

Answer = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Partial


class Options(TypedDict, total=False):
    """What `KVCache.attend` takes besides sequences, layer and queries."""

    scale: float | None
    window: int | None
    rows: Rows | None
    visible: torch.Tensor | None
    sinks: torch.Tensor | None
    out_dtype: torch.dtype


class Call:
    """A call with all of its arguments checked against the sequences' lengths.

    Parameters
    ----------
    q : [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim].
    lengths : rows of each sequence, those included that the same program appends.
    kv_heads, head_dim, value_dim, dtype : of the cache.
    return_lse, partial, options : as `KVCache.attend` has them.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError : for anything that does not fit.
    """

    def __init__(
        self,
        q: torch.Tensor,
        lengths: Bounds,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        return_lse: bool = False,
        partial: bool = False,
        scale: float | None = None,
        window: int | None = None,
        rows: Rows | None = None,
        visible: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._q = queries_of(q, len(lengths), kv_heads, head_dim, dtype)
        self._lengths = lengths
        self._value_dim = value_dim
        self._return_lse = return_lse
        self._partial = partial
        self._scale = finite_scale(scale, head_dim)
        try:
            self._factor = score_factor(self._scale)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        self._sinks = sinks_of(sinks, q.shape[-2])
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in FORMS:
            raise DtypeError(f"out_dtype={out_dtype}: must be one of {', '.join(map(str, FORMS))}")
        if partial and (return_lse or out_dtype != torch.float32):
            raise ArgumentError("a partial has neither out_dtype nor log-sum-exp; give them to nearkv.finish")
        if rows is not None and visible is not None:
            raise ArgumentError("give rows or visible, not both")
        self._out_dtype = out_dtype
        if window is not None:
            whole_number("window", window, 1, 1 << 62)
        self._window, self._rows = window, rows
        self._query_rows = q.shape[1] if q.dim() == 4 else None
        self._visible = visible_of(visible, len(lengths), self._query_rows, lengths)
        self.bounds = self._bounds()

    def _bounds(self) -> tuple[Bounds, Bounds] | None:
        """The one range of rows of each sequence, or None when the call is for the host."""
        if self._query_rows not in (None, 1):
            row_bounds(self._lengths, self._window, self._rows)
            return None
        if self._visible is None:
            return row_bounds(self._lengths, self._window, self._rows)
        found = intervals(self._visible[:, 0])
        if found is None:
            return None
        begin, end = found
        if self._window is not None:
            begin = np.minimum(np.maximum(begin, self._lengths - self._window), end)
        return begin, end

    def on_device(self, jobs: Jobs, tables: npt.NDArray[np.uint64], before: Many[Operation] = ()) -> Answer:
        """Run the call, whose `bounds` are not None, on the page tables at these addresses."""
        assert self.bounds is not None
        q = self._q.squeeze(1) if self._query_rows else self._q
        batch = Batch(
            q=q,
            tables=tables,
            begin=self.bounds[0],
            end=self.bounds[1],
            factor=self._factor,
            sinks=self._sinks,
            form=OutputForm.PARTIAL if self._partial else FORMS[self._out_dtype],
            denominators=self._partial or self._return_lse,
        )
        finished = jobs.run(batch, before)
        if self._partial:
            return self._shaped_partial(partial_of(finished, self._value_dim))
        out = self._shaped(values_of(finished, self._value_dim, self._out_dtype))
        return (out, self._shaped(log_sum_exp_of(finished))) if self._return_lse else out

    def on_host(self, fetch: Callable[[list[SeenRows]], list[Context]]) -> Answer:
        """Work the call out from rows that `fetch` brings: of each sequence those that a query row sees."""
        seen = host_attention.seen(
            self._lengths, self._query_rows or 1, window=self._window, rows=self._rows, visible=self._visible
        )
        wanted = [np.flatnonzero(mask.any(axis=0)) for mask in seen]
        k, v, visible = host_attention.padded(fetch(wanted), wanted, seen)
        return host_attention.attend(
            self._q,
            k.to(self._q.device),
            v.to(self._q.device),
            scale=self._scale,
            visible=visible.to(self._q.device),
            sinks=None if self._sinks is None else self._sinks.to(self._q.device),
            out_dtype=self._out_dtype,
            return_lse=self._return_lse,
            partial=self._partial,
        )

    def _shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._q.device)
        return tensor.unsqueeze(1) if self._query_rows else tensor

    def _shaped_partial(self, partial: Partial) -> Partial:
        partial = partial.to(self._q.device)
        if not self._query_rows:
            return partial
        denominator, numerators = (
            State(*(plane.unsqueeze(1) for plane in (state.top, state.high, state.low)))
            for state in (partial.denominator, partial.numerators)
        )
        return Partial(
            denominator, numerators, partial.query_nan.unsqueeze(1), partial.lane_flags.unsqueeze(1)
        )


def table_addresses(tables: Many[PageTable]) -> npt.NDArray[np.uint64]:
    """Where the tables lie."""
    return np.array([table.address for table in tables], np.uint64)
