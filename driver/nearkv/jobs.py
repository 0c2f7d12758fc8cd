"""Attention jobs of one cache: from query tensors to descriptors, and from result lines to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import LINE_BYTES, Opcode, OutputForm, Status
from nearkv_hw.abi.descriptor import ATTEND, DESCRIPTOR_VERSION, FLAG_SINKS, MAX_GROUP
from nearkv_hw.abi.lines import lines_of
from nearkv_hw.abi.memory import (
    DENOMINATOR,
    QUERY_NAN,
    ResultLayout,
    RowLayout,
)
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Lines, Operation, Read, Write

from .arguments import Bounds
from .codec import FORMATS, record_line, rows_to_lines, span
from .errors import DeviceError
from .reference import Partial, log_sum_exp
from .ring import Completions
from .stats import AttentionTotals
from .tenant import Tenant

FORMS: dict[torch.dtype, OutputForm] = {
    torch.float32: OutputForm.FP32,
    torch.bfloat16: OutputForm.BF16,
    torch.float16: OutputForm.FP16,
}
_PLANS_KEPT = 16


@dataclass(frozen=True)
class Batch:
    """One attention call: q [batch, q_heads, head_dim] over a row range of a page table each.

    Members
    -------
    q : of the cache's type.
    tables : device addresses of the page tables' headers, uint64 [batch].
    begin, end : the row ranges.
    factor : the float32 bits of the contract's c.
    sinks : float32 [q_heads], or None.
    form : what the device writes.
    denominators : whether the denominators are wanted too.
    """

    q: torch.Tensor
    tables: npt.NDArray[np.uint64]
    begin: Bounds
    end: Bounds
    factor: int
    sinks: torch.Tensor | None
    form: OutputForm
    denominators: bool


@dataclass(frozen=True)
class Finished:
    """Result lines [batch, q_heads, lines, 64], the last one the denominator's if wanted; completions."""

    lines: npt.NDArray[np.uint8]
    completions: Completions


@dataclass(frozen=True)
class _Plan:
    """Where the queries and results of a call lie.

    Members
    -------
    queries, results : device addresses of each job's, [batch, jobs of a sequence].
    query_places, result_places : host addresses of all their lines, those of results that are wanted.
    wanted : device addresses of the latter.
    row_lines : K and V lines that a row of each sequence makes the device stream, every pass counted.
    moves : of the tenant, when this was so.
    """

    queries: npt.NDArray[np.uint64]
    results: npt.NDArray[np.uint64]
    query_places: Addresses
    result_places: Addresses
    wanted: Addresses
    row_lines: int
    moves: int


class Jobs:
    """Makes and runs the jobs of a cache.

    Parameters
    ----------
    tenant : whose memory it is.
    layout : of the cache's rows.
    dtype : of its elements and queries.
    kv_heads : of each layer.
    totals : where completions are counted.
    """

    def __init__(
        self, tenant: Tenant, layout: RowLayout, dtype: torch.dtype, kv_heads: int, totals: AttentionTotals
    ) -> None:
        self._tenant = tenant
        self._layout = layout
        self._format = FORMATS[dtype].code
        self._kv_heads = kv_heads
        self._totals = totals
        self._plans: dict[tuple[int, int, OutputForm, bool], _Plan] = {}
        self._templates: dict[tuple[int, int, bool, OutputForm], Lines] = {}

    def run(self, batch: Batch, before: Many[Operation] = ()) -> Finished:
        """Run a batch in one program, after `before`.

        Raises
        ------
        DeviceError : when a job ends with a status other than OK.
        """
        tenant, layout = self._tenant, self._layout
        count, q_heads = batch.q.shape[0], batch.q.shape[1]
        plan = self._plan(count, q_heads, batch.form, batch.denominators)
        query_lines = rows_to_lines(batch.q, layout.k_lines).reshape(-1, LINE_BYTES)
        program = [*before, Write(plan.query_places, query_lines)]
        template = self._template(q_heads, batch.factor, batch.sinks is not None, batch.form)
        jobs = np.repeat(template[None], count, axis=0)
        column(ATTEND, "table", jobs)[:] = batch.tables[:, None]
        column(ATTEND, "queries", jobs)[:] = plan.queries
        column(ATTEND, "result", jobs)[:] = plan.results
        column(ATTEND, "row_begin", jobs)[:] = batch.begin[:, None]
        column(ATTEND, "row_end", jobs)[:] = batch.end[:, None]
        if batch.sinks is not None:
            group = q_heads // self._kv_heads
            sink_lines = self._sink_lines(batch.sinks, group, self._parts(group))
            sinks = tenant.staging("sinks", sink_lines.size)
            program.append(
                tenant.write(span(sinks, sink_lines.size // LINE_BYTES), sink_lines.reshape(-1, LINE_BYTES))
            )
            column(ATTEND, "sinks", jobs)[:] = sinks + np.arange(len(template)) * sink_lines.shape[1]

        rows = int((batch.end - batch.begin).sum())
        completions, reads = tenant.ring.run(
            jobs.reshape(-1, LINE_BYTES),
            before=program,
            after=[Read(plan.result_places)],
            streamed_lines=rows * plan.row_lines,
        )
        self._totals.add(completions)
        self._raise_failed(completions, template)
        self._totals.add_products(rows * q_heads, layout.head_dim, layout.value_dim)
        lines = tenant.checked(reads[-1], plan.wanted)
        return Finished(lines.reshape(count, q_heads, -1, LINE_BYTES), completions)

    def _plan(self, count: int, q_heads: int, form: OutputForm, denominators: bool) -> _Plan:
        """Where a call's queries and results lie: kept, because calls of one shape follow each other."""
        key = (count, q_heads, form, denominators)
        plan = self._plans.get(key)
        if plan is None or plan.moves != self._tenant.moves:
            while len(self._plans) >= _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = self._new_plan(*key)
        return plan

    def _new_plan(self, count: int, q_heads: int, form: OutputForm, denominators: bool) -> _Plan:
        tenant, layout = self._tenant, self._layout
        group = q_heads // self._kv_heads
        parts = self._parts(group)
        result_layout = ResultLayout(layout.value_dim, form)
        query_bytes, result_bytes = layout.k_lines * LINE_BYTES, result_layout.lines * LINE_BYTES
        # each job has its queries and results in another slice, so that none has all of the traffic
        shape, heads = (count, self._kv_heads, len(parts)), min(group, MAX_GROUP)
        queries, results = (
            tenant.scattered(name, math.prod(shape), heads * size).reshape(shape)
            for name, size in (("queries", query_bytes), ("results", result_bytes))
        )
        wanted = _lines_of(results, parts, result_layout.lines)
        if not denominators:
            wanted = wanted.reshape(-1, result_layout.lines)[:, :-1]
        wanted = wanted.reshape(-1)
        passes = -(-heads // tenant.config.queries) * len(parts)
        return _Plan(
            queries=queries.reshape(count, -1),
            results=results.reshape(count, -1),
            query_places=tenant.hosts(_lines_of(queries, parts, layout.k_lines).reshape(-1)),
            result_places=tenant.hosts(wanted),
            wanted=wanted,
            row_lines=self._kv_heads * passes * (layout.k_lines + layout.v_lines),
            moves=tenant.moves,
        )

    def _parts(self, group: int) -> list[int]:
        """The query heads of one KV head's jobs: it is one job, unless the group is very large."""
        return [min(MAX_GROUP, group - first) for first in range(0, group, MAX_GROUP)]

    def _template(self, q_heads: int, factor: int, sinks: bool, form: OutputForm) -> Lines:
        """One sequence's descriptors without addresses and ranges: kept, because packing takes its time."""
        key = (q_heads, factor, sinks, form)
        if key not in self._templates:
            group = q_heads // self._kv_heads
            lines = [
                record_line(
                    ATTEND,
                    version=DESCRIPTOR_VERSION,
                    opcode=Opcode.ATTEND,
                    flags=FLAG_SINKS if sinks else 0,
                    score_factor=factor,
                    head_dim=self._layout.head_dim,
                    value_dim=self._layout.value_dim,
                    group=part,
                    query_rows=1,
                    page_rows_log2=self._layout.page_rows.bit_length() - 1,
                    k_format=self._format,
                    v_format=self._format,
                    query_format=self._format,
                    output_form=form,
                    kv_head=kv_head,
                )
                for kv_head in range(self._kv_heads)
                for part in self._parts(group)
            ]
            self._templates[key] = np.concatenate(lines)
        return self._templates[key]

    def _sink_lines(self, sinks: torch.Tensor, group: int, parts: list[int]) -> npt.NDArray[np.uint8]:
        """The sinks of one sequence's jobs [jobs, bytes], each job's in lines of its own."""
        values = sinks.numpy().reshape(self._kv_heads, group)
        padded = np.zeros(
            (self._kv_heads, len(parts), lines_of(4 * max(parts)) * LINE_BYTES // 4), np.float32
        )
        for index, part in enumerate(parts):
            padded[:, index, :part] = values[:, index * MAX_GROUP : index * MAX_GROUP + part]
        return padded.view(np.uint8).reshape(self._kv_heads * len(parts), -1)

    def _raise_failed(self, completions: Completions, template: Lines) -> None:
        failed = completions.failed
        if not failed.size:
            return
        first = int(failed[0])
        sequence, job = divmod(first, len(template))
        status, detail = Status(int(completions.status[first])), int(completions.detail[first])
        where = (
            f"sequence {sequence} of the batch, KV head {ATTEND.unpack(template[job].tobytes())['kv_head']}"
        )
        raise DeviceError(
            f"{len(failed)} of {len(completions.status)} jobs failed; "
            f"the first ({where}) with {status.name}, {_DETAILS.get(status, 'detail')} {detail}",
            status=status,
            tag=int(completions.tag[first]),
            detail=detail,
        )


_DETAILS = {
    Status.BAD_PAGE: "page",
    Status.PAGE_DENIED: "page",
    Status.POISON: "in the table, the queries or page",
}
"""What a record's detail is, by status."""


def values_of(finished: Finished, value_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Results [batch, q_heads, value_dim] of a finished form."""
    lines = finished.lines[:, :, : ResultLayout(value_dim, FORMS[dtype]).planes[0]]
    kind = np.float32 if dtype == torch.float32 else np.int16
    lanes = np.ascontiguousarray(lines).reshape(*lines.shape[:2], -1).view(kind)[..., :value_dim]
    return torch.from_numpy(lanes.copy()).view(dtype)


def log_sum_exp_of(finished: Finished) -> torch.Tensor:
    """Natural-base log-sum-exp, float32 [batch, q_heads], from the denominator lines."""
    denominator, query_nan = _denominators(finished)
    none = np.zeros((*query_nan.shape, 0), np.int64)
    return log_sum_exp(Partial.from_planes(denominator, (none, none, none), query_nan))


def partial_of(finished: Finished, value_dim: int) -> Partial:
    """Partials of queries [batch, q_heads] from result planes."""
    planes = []
    begin = 0
    for lines, kind in zip(
        ResultLayout(value_dim, OutputForm.PARTIAL).planes, ("<i4", "<i8", "<i8", "u1"), strict=True
    ):
        plane = np.ascontiguousarray(finished.lines[:, :, begin : begin + lines])
        planes.append(plane.reshape(*plane.shape[:2], -1).view(kind)[..., :value_dim].copy())
        begin += lines
    denominator, query_nan = _denominators(finished)
    return Partial.from_planes(denominator, (planes[0], planes[1], planes[2]), query_nan, planes[3])


def _denominators(
    finished: Finished,
) -> tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]:
    lines = np.ascontiguousarray(finished.lines[:, :, -1])
    top, high, low = (column(DENOMINATOR, name, lines).copy() for name in ("top", "high", "low"))
    return (top, high, low), column(DENOMINATOR, "flags", lines) & QUERY_NAN != 0


def _lines_of(areas: npt.NDArray[np.uint64], parts: list[int], lines: int) -> npt.NDArray[np.uint64]:
    """The addresses of the lines of every query head, [batch, kv_heads, group * lines].

    Parameters
    ----------
    areas : address of each job's area, [batch, kv_heads, parts].
    parts : query heads of each part.
    lines : of a query head, one head's after the other's.
    """
    return np.concatenate(
        [
            areas[:, :, part, None] + np.arange(heads * lines, dtype=np.uint64) * np.uint64(LINE_BYTES)
            for part, heads in enumerate(parts)
        ],
        axis=-1,
    )
