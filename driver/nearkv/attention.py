"""One attention call: what it was asked for, checked, and turned into jobs or into work for the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import Feature, OutputForm
from nearkv_hw.abi.descriptor import MAX_CANDIDATES, MAX_GROUP, MAX_QUERY_ROWS
from nearkv_sim.port import Operation

from . import host_attention
from .arguments import (
    Bounds,
    Rows,
    base_2_slopes,
    finite_scale,
    intervals,
    per_head,
    placed,
    positions_of,
    queries_of,
    row_bounds,
    runs_of,
    sinks_of,
    tree_of,
    visible_of,
    whole_number,
)
from .batch import Batch, Sight
from .errors import ArgumentError, DtypeError
from .jobs import Jobs
from .quantise.formats import CacheFormat
from .reference import Partial, score_factor
from .reference.fixed import float32_bits
from .reference.softcap import softcap_bits
from .results import FORMS, Finished, log_sum_exp_of, partial_of, values_of
from .rows import Context
from .rows import Rows as SeenRows

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Partial
Answer = Result | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[Partial, torch.Tensor]
_MAX_RANGES = (1 << 16) - 1
PLAIN = (type(None), bool, int, float, torch.dtype)
"""Types of options that say all of what they say by their value."""


class Options(TypedDict, total=False):
    """What `KVCache.attend` takes besides sequences, layer and queries."""

    scale: float | None
    window: int | None
    kept_rows: int
    rows: Rows | None
    visible: torch.Tensor | None
    tree: torch.Tensor | None
    query_positions: torch.Tensor | None
    sinks: torch.Tensor | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Held:
    """What a call has to know of the cache and its layer.

    Members
    -------
    layer, kv_heads, head_dim, value_dim, page_rows : of the rows.
    form : how they are stored.
    dtype : of queries, or None for either.
    summaries : whether pages have them.
    features, units : of the device.
    k_scale, v_scale : float32 [kv_heads] of the layer, or None.
    k_lut, v_lut : codebooks of the layer, or None.
    """

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_rows: int
    form: CacheFormat
    dtype: torch.dtype | None
    summaries: bool
    features: Feature
    units: int
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_lut: torch.Tensor | None
    v_lut: torch.Tensor | None


class Call:
    """A call with all of its arguments checked against the sequences' lengths.

    Parameters
    ----------
    q : [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim].
    lengths : rows of each sequence, those included that the same program appends.
    held : the cache and its layer.
    released : the rows of each sequence that nobody sees, (begin, end), int64 [batch, 2].
    return_lse, partial, options : as `KVCache.attend` has them.

    Members
    -------
    on_units : whether the device's units can do it.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError : for anything that does not fit.
    """

    def __init__(
        self,
        q: torch.Tensor,
        lengths: Bounds,
        held: Held,
        *,
        released: Bounds,
        return_lse: bool = False,
        partial: bool = False,
        scale: float | None = None,
        window: int | None = None,
        kept_rows: int = 0,
        rows: Rows | None = None,
        visible: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
        query_positions: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        select_pages: int | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._held = held
        self._q = queries_of(q, len(lengths), held.kv_heads, held.head_dim, held.dtype)
        self._lengths = lengths
        self._released = released if (released[:, 0] < released[:, 1]).any() else None
        self._return_lse = return_lse
        self._partial = partial
        self._query_rows = q.shape[1] if q.dim() == 4 else 1
        self._scale = finite_scale(scale, held.head_dim)
        self._softcap = softcap
        self._factors, self._cap = self._score_factors()
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
        whole_number("kept_rows", kept_rows, 0, 1 << 62)
        if kept_rows and window is None:
            raise ArgumentError(f"kept_rows={kept_rows}: they are rows that a window leaves; give window")
        self._window, self._kept, self._rows = window, kept_rows, rows
        several = self._query_rows if q.dim() == 4 else None
        self._visible = visible_of(visible, len(lengths), several, lengths)
        self._tree = tree_of(tree, self._query_rows, lengths)
        self._placed = query_positions is not None and tree is None
        """Query rows stand where they are said to, and see what `visible` says, whatever the order."""
        if self._placed:
            placed(self._visible, self._query_rows, window)
        self._positions = positions_of(query_positions, self._query_rows, lengths)
        self._slopes = per_head("alibi_slopes", alibi_slopes, q.shape[-2])
        self._slope_bits = None if self._slopes is None else base_2_slopes(self._slopes)
        self._select = select_pages
        if select_pages is not None:
            whole_number("select_pages", select_pages, 1, (1 << 24) - 1)
            if not held.summaries:
                raise ArgumentError(
                    "select_pages needs a cache with summaries: kv_cache(..., summaries=True)"
                )
            if q.shape[-2] // held.kv_heads > MAX_GROUP or self._query_rows > MAX_QUERY_ROWS:
                raise ArgumentError(
                    f"a selection is one job's: at most {MAX_GROUP} query heads for a KV head and "
                    f"{MAX_QUERY_ROWS} query rows"
                )
        self._refuse()
        self._begin, self._end = row_bounds(lengths, None, rows)
        self._split = False
        self._sight = self._sight_of()

    def again(self, q: torch.Tensor, lengths: Bounds) -> Call:
        """The same call, whose options are `PLAIN`, with other queries over other lengths.

        Parameters
        ----------
        q : of the same shape and type.
        lengths : as many; no rows of these sequences, nor of the first call's, are released.

        Raises
        ------
        DtypeError : for queries without numbers.
        """
        held = self._held
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__)
        call._q = queries_of(q, len(lengths), held.kv_heads, held.head_dim, held.dtype)
        call._lengths, call._released = lengths, None
        call._begin, call._end = row_bounds(lengths, None, None)
        call._positions = positions_of(None, self._query_rows, lengths)
        if self._window is not None or self._query_rows > 1 or self._select is not None:
            call._sight = call._sight_of()
        return call

    @property
    def follows_lengths(self) -> bool:
        """Whether `first_row` and the lengths are all of a call for units that other lengths change, where
        options are `PLAIN` and nothing is released."""
        sight = self._sight
        if not self.on_units or sight is None or self._released is not None or self._query_rows > 1:
            return False
        return sight.positions is None and sight.ranges is None and not sight.select_pages

    @property
    def windowed(self) -> bool:
        """Whether it has a window."""
        return self._window is not None

    def first_row(self, length: int) -> int:
        """The first row that a sequence's query sees of so many."""
        return 0 if self._window is None else max(length - self._window, 0)

    @property
    def on_units(self) -> bool:
        """Whether the device's units can do it."""
        return self._held.units > 0 and self._sight is not None

    def on_device(self, jobs: Jobs, tables: npt.NDArray[np.uint64], before: Many[Operation] = ()) -> Answer:
        """Run the call, which is `on_units`, on the page tables at these addresses."""
        return self.answer(jobs.run(self.batch(tables), before))

    def batch(self, tables: npt.NDArray[np.uint64]) -> Batch:
        """The call, which is `on_units`, on the page tables at these addresses, as jobs."""
        assert self._sight is not None
        held = self._held
        q = self._q.unsqueeze(1) if self._q.dim() == 3 else self._q
        if self._split:
            q, tables = q.flatten(0, 1).unsqueeze(1), tables.repeat(self._query_rows)
        v_scale, wide = self._scale_of_results()
        bits = [0] * held.kv_heads
        if v_scale is not None and not wide:
            bits = [float32_bits(factor) for factor in v_scale.tolist()]
        dtype = torch.float32 if wide else self._out_dtype
        return Batch(
            q=q,
            layer=held.layer,
            tables=tables,
            begin=self._begin,
            end=self._end,
            factors=self._factors,
            output_scales=tuple(bits),
            sinks=self._sinks,
            form=OutputForm.PARTIAL if self._partial else FORMS[dtype],
            denominators=self._partial or self._return_lse,
            sight=self._sight,
            parts=self._query_rows if self._split else 1,
        )

    def _scale_of_results(self) -> tuple[torch.Tensor | None, bool]:
        """V's scale per head where results have it, and whether the host has to bring it in."""
        v_scale = None if self._partial else self._held.v_scale
        return v_scale, v_scale is not None and Feature.OUTPUT_SCALE not in self._held.features

    def answer(self, finished: Finished) -> Answer:
        """What the call returns, from what its jobs came to."""
        held = self._held
        v_scale, wide = self._scale_of_results()
        dtype = torch.float32 if wide else self._out_dtype
        pages = self._pages_of(finished)
        if self._partial:
            partial = self._shaped_partial(partial_of(finished, held.value_dim))
            return partial if pages is None else (partial, pages)
        out = values_of(finished, self._q.shape[:-1], held.value_dim, dtype)
        if wide and v_scale is not None:
            out = host_attention.scaled(out, v_scale, self._out_dtype)
        if not self._q.is_cpu:
            out = out.to(self._q.device)
        if self._return_lse:
            lse = self._shaped(log_sum_exp_of(finished))
            return (out, lse) if pages is None else (out, lse, pages)
        return out if pages is None else (out, pages)

    def on_host(self, fetch: Callable[[list[SeenRows]], list[Context]]) -> Answer:
        """Work the call out from rows that `fetch` brings: of each sequence those that a query row sees."""
        held, device = self._held, self._q.device
        seen = self._seen()
        if self._select is None:
            wanted = [np.flatnonzero(mask.any(axis=0)) for mask in seen]
        else:
            wanted = [np.arange(length) for length in self._lengths.tolist()]
        rows = host_attention.HostRows(held.form, held.k_scale, held.v_scale, held.k_lut, held.v_lut)
        stacked, visible = rows.padded(fetch(wanted), wanted, seen)
        options = {}
        if self._slopes is not None:
            options = self._host_positions(wanted, int(visible.shape[-1]))
        result, pages = rows.attend(
            self._q,
            stacked,
            visible,
            scale=self._scale,
            sinks=None if self._sinks is None else self._sinks.to(device),
            softcap=self._softcap,
            alibi_slopes=self._slopes,
            select_pages=self._select,
            page_rows=held.page_rows,
            lengths=self._lengths,
            value_dim=held.value_dim,
            **options,
        )
        found = () if pages is None else (pages,)
        if self._partial:
            return (result, *found) if found else result
        out = host_attention.finish(result, self._out_dtype, held.v_scale)
        if self._return_lse:
            return (out, host_attention.log_sum_exp(result), *found)
        return (out, *found) if found else out

    # What was asked for, as the device says it

    def _score_factors(self) -> tuple[tuple[int, ...], int]:
        """The score's factor of each KV head, and C2's float32 bits."""
        held = self._held
        scales = [1.0] * held.kv_heads if held.k_scale is None else held.k_scale.tolist()
        try:
            cap = 0 if self._softcap is None else softcap_bits(self._softcap)
            known: dict[float, int] = {}
            for factor in scales:
                if factor not in known:
                    known[factor] = score_factor(self._scale, factor, softcap=self._softcap)
            return tuple(known[factor] for factor in scales), cap
        except (ValueError, TypeError) as error:
            raise ArgumentError(str(error)) from error

    def _refuse(self) -> None:
        """Variants that the device has not; one without units leaves all of it to the host."""
        held = self._held
        if not held.units:
            return
        for name, given, feature in (
            ("softcap", self._softcap, Feature.SOFTCAP),
            ("alibi_slopes", self._slopes, Feature.ALIBI),
            ("tree", self._tree, Feature.TREE),
            ("select_pages", self._select, Feature.SELECTION),
        ):
            if given is not None and feature not in held.features:
                raise ArgumentError(f"this device has no {name}; leave it, or open one that has (model)")

    def _sight_of(self) -> Sight | None:
        """Who sees what, for jobs; None when the call is for the host. Narrows begin and end on its way."""
        features, lengths = self._held.features, self._lengths
        several = self._query_rows > 1 and self._tree is None
        visible = self._visible
        if visible is not None and self._released is not None:
            visible = host_attention.without(visible, self._released)
        if visible is not None and visible.shape[1] > 1:
            return self._split_sight()
        ranges: list[list[tuple[int, int]]] | None = None
        if visible is not None:
            found = intervals(visible[:, 0])
            if found is not None:
                self._begin, self._end = found
            else:
                ranges = [runs_of(row) for row in visible[:, 0]]
                if self._released is not None:  # there may be no table entries behind the last run
                    self._end = np.array([own[-1][1] if own else 0 for own in ranges], np.int64)
                    self._begin = np.minimum(self._begin, self._end)
        if self._released is not None and visible is None:
            ranges = self._around_released()
        if self._tree is not None and (self._end != lengths).any():
            # the query rows' own rows are the last before the range's end
            if ranges is None:
                pairs = zip(self._begin.tolist(), self._end.tolist(), strict=True)
                ranges = [[(begin, end)] if begin < end else [] for begin, end in pairs]
            self._end = lengths.copy()
        if self._window is not None and not several and self._tree is None and not self._kept:
            if ranges is None:
                self._begin = np.minimum(np.maximum(self._begin, lengths - self._window), self._end)
                windowed = False
            else:
                windowed = True
        else:
            windowed = self._window is not None
        if windowed and self._tree is not None and not self._kept and ranges is None:
            # what no query row's window reaches; devices do not look into trees for that
            first = self._positions.min(axis=1) - (self._window or 0) + 1
            own = lengths - self._query_rows
            self._begin = np.maximum(self._begin, np.minimum(first, own).clip(0))
        needed = Feature(0)
        needed |= Feature.RANGES if ranges is not None else Feature(0)
        selects = self._select is not None
        needed |= Feature.TREE_SELECTION if selects and self._tree is not None else Feature(0)
        needed |= Feature.QUERY_ROWS if self._query_rows > 1 or windowed else Feature(0)
        if needed & ~features or (ranges and max(map(len, ranges)) > _MAX_RANGES):
            return None
        if selects:
            self._check_candidates()
        causal = several or windowed
        window = min(self._window or 0, (1 << 24) - 1) if windowed else 0
        positioned = (causal or self._slopes is not None) and self._tree is None
        return Sight(
            causal=causal,
            window=window,
            kept=min(self._kept, (1 << 24) - 1) if window else 0,
            positions=self._positions[:, 0] if positioned else None,
            ranges=ranges,
            tree=None if self._tree is None else (self._positions, self._tree),
            softcap=self._cap,
            slopes=self._slope_bits,
            select_pages=self._select or 0,
        )

    def _check_candidates(self) -> None:
        """A device selects from so many pages at most: their bounds are kept on chip."""
        page_rows = self._held.page_rows
        most = int((-(-self._end // page_rows) - self._begin // page_rows).max(initial=0))
        if most > MAX_CANDIDATES:
            raise ArgumentError(
                f"select_pages: there are {most} pages of {page_rows} rows to select from, and a device "
                f"selects from at most {MAX_CANDIDATES}; use a cache with larger pages (page_rows=)"
            )

    def _around_released(self) -> list[list[tuple[int, int]]] | None:
        """The rows of the range that were not released: as the range where they are one run, else as runs."""
        assert self._released is not None
        first = self._lengths - self._query_rows
        if self._window is not None and not self._kept and self._tree is None:
            self._begin = np.minimum(np.maximum(self._begin, first - self._window + 1), self._end)
        runs = []
        for begin, end, gone, back in zip(
            self._begin.tolist(), self._end.tolist(), *self._released.T.tolist(), strict=True
        ):
            parts = [(begin, end)] if gone == back else [(begin, min(end, gone)), (max(begin, back), end)]
            runs.append([part for part in parts if part[0] < part[1]])
        if max(map(len, runs)) > 1:
            return runs
        self._begin = np.array([own[0][0] if own else 0 for own in runs], np.int64)
        self._end = np.array([own[0][1] if own else 0 for own in runs], np.int64)
        return None

    def _split_sight(self) -> Sight | None:
        """Every query row as a job of its own, over the runs of rows that it sees."""
        tree = self._tree is not None and self._slopes is not None
        if self._select is not None or tree or Feature.RANGES not in self._held.features:
            return None
        ranges = [runs_of(mask) for of_sequence in self._seen() for mask in of_sequence]
        if max(map(len, ranges), default=0) > _MAX_RANGES:
            return None
        self._split = True
        self._begin = np.array([own[0][0] if own else 0 for own in ranges], np.int64)
        self._end = np.array([own[-1][1] if own else 0 for own in ranges], np.int64)
        return Sight(
            positions=self._positions.reshape(-1) if self._slopes is not None else None,
            ranges=ranges,
            softcap=self._cap,
            slopes=self._slope_bits,
        )

    def _seen(self) -> npt.NDArray[np.bool_]:
        if self._placed and self._visible is not None:
            return host_attention.without(self._visible, self._released)
        return host_attention.seen(
            self._lengths,
            self._query_rows,
            window=self._window,
            kept_rows=self._kept,
            rows=self._rows,
            visible=self._visible,
            tree=None if self._tree is None else (self._positions, self._tree),
            released=self._released,
        )

    def _host_positions(self, wanted: list[SeenRows], rows: int) -> dict[str, torch.Tensor]:
        """Positions of query rows and of the rows that were fetched, for the reference."""
        shift = max(0, int((self._query_rows - self._lengths).max(initial=0)))
        held = np.zeros((len(wanted), rows), np.int64)
        for index, (own, length) in enumerate(zip(wanted, self._lengths.tolist(), strict=True)):
            at = own.copy()
            if self._tree is not None:
                last = own >= length - self._query_rows
                at[last] = self._positions[index, own[last] - (length - self._query_rows)]
            held[index, : len(own)] = at
        query = self._positions
        one = self._q.dim() == 3
        return {
            "query_positions": torch.from_numpy((query[:, 0] if one else query) + shift).to(self._q.device),
            "row_positions": torch.from_numpy(held + shift).to(self._q.device),
        }

    def _pages_of(self, finished: Finished) -> torch.Tensor | None:
        """The selected pages, bool [batch, kv_heads, pages]."""
        if finished.selected is None:
            return None
        pages = -(-int(self._lengths.max(initial=0)) // self._held.page_rows)
        found = torch.zeros(len(self._lengths), self._held.kv_heads, pages, dtype=torch.bool)
        for index, one in enumerate(finished.selected):
            for head, numbers in enumerate(one):
                found[index, head, numbers] = True
        return found

    def _shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is said of queries [batch * query_rows, q_heads, ...], as q has them, beside q."""
        tensor = tensor.to(self._q.device)
        return tensor.view(*self._q.shape[:2], *tensor.shape[1:]) if self._q.dim() == 4 else tensor

    def _shaped_partial(self, partial: Partial) -> Partial:
        partial = partial.to(self._q.device)
        return partial if self._q.dim() == 3 else partial.reshaped(tuple(self._q.shape[:2]))
