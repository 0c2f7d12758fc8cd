"""Attention jobs of one cache: from query tensors to descriptors, and from result lines to tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import LINE_BYTES, Opcode, OutputForm, Status
from nearkv_hw.abi.descriptor import (
    ATTEND,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    MAX_GROUP,
    MAX_QUERY_ROWS,
    OPTION_CODEBOOK,
    OPTION_LATENT,
    OPTION_SUMMARIES,
    TREE_ROW_BYTES,
    WORD_BYTES,
)
from nearkv_hw.abi.lines import LINE_SHIFT, lines_of
from nearkv_hw.abi.memory import ResultLayout, RowLayout
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Lines, Operation, Read, ReadResult, Write

from .batch import Batch
from .codec import FORMATS, record_line, rows_to_lines, span
from .errors import DeviceError
from .heads import HeadTables
from .results import Finished
from .ring import Completions, Ticket
from .stats import AttentionTotals
from .tenant import Tenant

_PLANS_KEPT = 64
_READY_KEPT = 64
_NONE = np.empty(0, np.uint64)
"""No addresses."""


@dataclass(frozen=True)
class Plan:
    """Where the queries and results of a call lie.

    Members
    -------
    batch, query_rows, q_heads : of the call.
    queries, results : device addresses of each job's, [batch, jobs of a sequence].
    query_places : host addresses of all lines of queries.
    results_read : reads the lines of results that are wanted.
    wanted : their device addresses.
    row_lines : K and V lines that a row of each sequence makes the device stream, every pass counted.
    moves : of the tenant, when this was so.
    """

    batch: int
    query_rows: int
    q_heads: int
    queries: npt.NDArray[np.uint64]
    results: npt.NDArray[np.uint64]
    query_places: Addresses
    results_read: Read
    wanted: Addresses
    row_lines: int
    moves: int


@dataclass(frozen=True)
class Prepared:
    """What batches of one kind have in common: all but tables, row ranges and lists.

    Members
    -------
    plan : where queries and results lie.
    descriptors, extensions : [batch, jobs of a sequence, 64], queries and results named in them.
    """

    plan: Plan
    descriptors: Lines
    extensions: Lines | None


@dataclass(slots=True)
class _Posting:
    """A batch as it is posted.

    Members
    -------
    plan : where its queries and results lie.
    descriptors, extensions : the lines of their slots, [n, 64].
    program : what comes before them.
    reads : what brings the results.
    selected : device addresses of the lines that tell which pages were selected.
    rows : that all jobs of a KV head have.
    """

    plan: Plan
    descriptors: Lines
    extensions: Lines | None
    program: list[Operation]
    reads: list[Read]
    selected: Addresses
    rows: int


@dataclass(frozen=True)
class Posted:
    """A batch that is under way: what was posted, and the lane of its areas."""

    batch: Batch
    posting: _Posting
    ticket: Ticket
    lane: int


class Jobs:
    """Makes and runs the jobs of a cache.

    Parameters
    ----------
    tenant : whose memory it is.
    layout : of the cache's rows.
    heads : scales and codebooks of the cache's heads.
    kv_heads : of each layer.
    totals : where completions are counted.
    """

    def __init__(
        self, tenant: Tenant, layout: RowLayout, heads: HeadTables, kv_heads: int, totals: AttentionTotals
    ) -> None:
        self._tenant = tenant
        self._layout = layout
        self._heads = heads
        self._kv_heads = kv_heads
        self._totals = totals
        self._plans: dict[tuple[int, int, int, OutputForm, bool, int], Plan] = {}
        self._ready: dict[tuple[Any, ...], Prepared] = {}
        self._storage = _storage_fields(layout)

    def run(self, batch: Batch, before: Many[Operation] = ()) -> Finished:
        """Run a batch in one program, after `before`.

        Raises
        ------
        DeviceError : when a job ends with a status other than OK.
        """
        posting = self._tenant.with_memory(lambda: self._posting(batch, before, 0))
        return self._carry_out(batch, posting)

    def run_prepared(
        self, batch: Batch, prepared: Prepared, descriptors: Lines, before: list[Operation], rows: int
    ) -> Finished:
        """Run a batch that was prepared, in one program.

        Parameters
        ----------
        batch : one of the kind, over the same tables.
        descriptors : its own, [n, 64], with tables and row ranges.
        before : what comes before them, the queries' lines included.
        rows : that all jobs of a KV head have.

        Raises
        ------
        DeviceError : when a job ends with a status other than OK.
        """
        plan, extensions = prepared.plan, prepared.extensions
        if extensions is not None:
            extensions = extensions.reshape(-1, LINE_BYTES)
        posting = _Posting(plan, descriptors, extensions, before, [plan.results_read], _NONE, rows)
        return self._carry_out(batch, posting)

    def _carry_out(self, batch: Batch, posting: _Posting) -> Finished:
        completions, reads = self._tenant.ring.run(
            posting.descriptors,
            extensions=posting.extensions,
            before=posting.program,
            after=posting.reads,
            streamed_lines=posting.rows * posting.plan.row_lines,
        )
        return self._finished(batch, posting, completions, reads)

    def post(self, batch: Batch, before: Many[Operation] = ()) -> Posted:
        """Post a batch, and do not wait for it.

        Raises
        ------
        What `CommandRing.post` raises.
        """
        lane = self._tenant.take_lane()
        try:
            posting = self._tenant.with_memory(lambda: self._posting(batch, before, lane))
            ticket = self._tenant.ring.post(
                posting.descriptors,
                extensions=posting.extensions,
                before=posting.program,
                streamed_lines=posting.rows * posting.plan.row_lines,
            )
        except BaseException:
            self._tenant.give_lane(lane)
            raise
        return Posted(batch, posting, ticket, lane)

    def finish(self, posted: Posted) -> Finished:
        """Wait for a batch that was posted, once; errors as `run` has them."""
        completions, reads = self._tenant.ring.wait(posted.ticket, posted.posting.reads)
        self._tenant.give_lane(posted.lane)
        return self._finished(posted.batch, posted.posting, completions, reads)

    def is_complete(self, posted: Posted) -> bool:
        """Whether the device has done a batch, without waiting for it."""
        return self._tenant.ring.is_complete(posted.ticket)

    def _posting(self, batch: Batch, before: Many[Operation], lane: int) -> _Posting:
        """A batch as descriptors, with areas of its lane."""
        tenant, layout = self._tenant, self._layout
        ready = self.prepare(batch, lane)
        plan = ready.plan
        query_lines = rows_to_lines(batch.q, layout.query_lines).reshape(-1, LINE_BYTES)
        program = [*before, Write(plan.query_places, query_lines)]
        jobs = ready.descriptors.copy()
        column(ATTEND, "table", jobs)[:] = batch.tables[:, None]
        column(ATTEND, "row_begin", jobs)[:] = batch.begin[:, None]
        column(ATTEND, "row_end", jobs)[:] = batch.end[:, None]
        if batch.sinks is not None:
            sinks = self._by_job(_of_lane("sinks", lane), batch.sinks.numpy(), batch.q.shape[1], program)
            column(ATTEND, "sinks", jobs)[:] = sinks
        extensions = None
        selected = _NONE
        if ready.extensions is not None:
            extensions = ready.extensions.copy()
            selected = self._extend(batch, extensions, program, lane)
        return _Posting(
            plan=plan,
            descriptors=jobs.reshape(-1, LINE_BYTES),
            extensions=None if extensions is None else extensions.reshape(-1, LINE_BYTES),
            program=program,
            reads=[plan.results_read, *([Read(tenant.hosts(selected))] if len(selected) else [])],
            selected=selected,
            rows=int(np.add.reduce(batch.end - batch.begin)),
        )

    def _finished(
        self, batch: Batch, posting: _Posting, completions: Completions, reads: list[ReadResult]
    ) -> Finished:
        """What a batch came to; DeviceError when a job failed."""
        tenant, layout, plan, selected = self._tenant, self._layout, posting.plan, posting.selected
        self._totals.add(completions)
        if not completions.ok:
            self._raise_failed(completions, posting.descriptors, batch)
        self._totals.add_products(
            posting.rows * plan.query_rows * plan.q_heads, layout.head_dim, layout.value_dim
        )
        chosen = None
        if len(selected):
            words = tenant.checked(reads[-1], selected).reshape(plan.batch, self._kv_heads, -1).view("<u4")
            chosen = [[head[1 : 1 + head[0]].tolist() for head in one] for one in words]
        lines = tenant.checked(reads[0], plan.wanted)
        queries = plan.batch * plan.query_rows
        return Finished(lines.reshape(queries, plan.q_heads, -1, LINE_BYTES), completions, chosen)

    def _extend(self, batch: Batch, extensions: Lines, program: list[Operation], lane: int) -> Addresses:
        """Fill in what differs from job to job, with the lists in memory; the lines of selected pages."""
        sight, (count, query_rows) = batch.sight, batch.q.shape[:2]
        steps = np.array([first for first, _ in self._row_parts(query_rows)], np.int64)
        parts = len(self._parts(batch.q.shape[2] // self._kv_heads))
        if sight.positions is not None and sight.tree is None:
            first = np.tile(steps, self._kv_heads * parts)[None] + sight.positions[:, None]
            _put("first_position", extensions, first)
        if sight.ranges is not None:
            _put("range_count", extensions, np.array([[len(own)] for own in sight.ranges]))
            _put(
                "ranges",
                extensions,
                self._lists(_of_lane("ranges", lane), [_words(own) for own in sight.ranges], program),
            )
        if sight.tree is not None:
            trees = [_tree(positions, mask) for positions, mask in zip(*sight.tree, strict=True)]
            _put("tree", extensions, self._lists(_of_lane("trees", lane), trees, program))
        if sight.slopes is not None:
            _put(
                "slopes",
                extensions,
                self._by_job(_of_lane("slopes", lane), sight.slopes, query_rows, program) >> LINE_SHIFT,
            )
        if self._heads.codebooks:
            books = [self._heads.codebook_line(batch.layer, head) for head in range(self._kv_heads)]
            of_job = np.repeat(np.array(books, np.int64), extensions.shape[1] // self._kv_heads)
            _put("codebooks", extensions, of_job[None])
        if not sight.select_pages:
            return _NONE
        pages = int(batch.end.max(initial=0)) // self._layout.page_rows + 1
        lines = lines_of((1 + min(sight.select_pages, pages)) * WORD_BYTES)
        jobs = count * extensions.shape[1]
        base = self._tenant.staging(_of_lane("selected", lane), jobs * lines * LINE_BYTES)
        first = (base >> LINE_SHIFT) + np.arange(jobs) * lines
        _put("selected", extensions, first.reshape(count, -1))
        return span(base, jobs * lines)

    def _lists(
        self, name: str, lists: Many[npt.NDArray[np.uint8]], program: list[Operation]
    ) -> npt.NDArray[np.int64]:
        """Put a list for each sequence into memory: their lines' addresses / 64, [batch, 1]."""
        sizes = [max(lines_of(len(one)), 1) for one in lists]
        data = np.zeros((sum(sizes), LINE_BYTES), np.uint8)
        first = np.cumsum([0, *sizes[:-1]])
        for begin, one in zip(first.tolist(), lists, strict=True):
            data[begin:].reshape(-1)[: len(one)] = one
        base = self._tenant.staging(name, data.size)
        program.append(self._tenant.write(span(base, len(data)), data))
        found: npt.NDArray[np.int64] = ((base >> LINE_SHIFT) + first)[:, None]
        return found

    def _by_job(
        self, name: str, values: npt.NDArray[Any], query_rows: int, program: list[Operation]
    ) -> npt.NDArray[np.int64]:
        """Put 32 bits for each query head into memory, a job's in lines of its own: addresses [1, jobs]."""
        parts = self._parts(len(values) // self._kv_heads)
        lines = self._head_lines(values, parts)
        base = self._tenant.staging(name, lines.size)
        program.append(
            self._tenant.write(span(base, lines.size // LINE_BYTES), lines.reshape(-1, LINE_BYTES))
        )
        of_part: npt.NDArray[np.int64] = base + np.arange(len(lines)) * lines.shape[1]
        return of_part.repeat(len(self._row_parts(query_rows)))[None]

    def _plan(
        self, count: int, query_rows: int, q_heads: int, form: OutputForm, denominators: bool, lane: int
    ) -> Plan:
        """Where a call's queries and results lie: kept, because calls of one shape follow each other."""
        key = (count, query_rows, q_heads, form, denominators, lane)
        plan = self._plans.get(key)
        if plan is None or plan.moves != self._tenant.moves:
            while len(self._plans) >= _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = self._new_plan(*key)
        return plan

    def _new_plan(
        self, count: int, query_rows: int, q_heads: int, form: OutputForm, denominators: bool, lane: int
    ) -> Plan:
        tenant, layout = self._tenant, self._layout
        group = q_heads // self._kv_heads
        parts, row_parts = self._parts(group), self._row_parts(query_rows)
        result_layout = ResultLayout(layout.value_dim, form)
        query_bytes, result_bytes = layout.query_lines * LINE_BYTES, result_layout.lines * LINE_BYTES
        # each job has its queries and results in another slice, so that none has all of the traffic
        shape = (count, self._kv_heads, len(parts), len(row_parts))
        heads, rows = min(group, MAX_GROUP), min(query_rows, MAX_QUERY_ROWS)
        queries, results = (
            tenant.scattered(name, math.prod(shape), heads * rows * size, lane).reshape(shape)
            for name, size in (("queries", query_bytes), ("results", result_bytes))
        )
        wanted = _lines_of(results, parts, query_rows, result_layout.lines)
        if not denominators:
            wanted = wanted.reshape(-1, result_layout.lines)[:, :-1]
        wanted = wanted.reshape(-1)
        passes = -(-heads * rows // tenant.config.queries) * len(parts) * len(row_parts)
        return Plan(
            batch=count,
            query_rows=query_rows,
            q_heads=q_heads,
            queries=queries.reshape(count, -1),
            results=results.reshape(count, -1),
            query_places=tenant.hosts(_lines_of(queries, parts, query_rows, layout.query_lines).reshape(-1)),
            results_read=Read(tenant.hosts(wanted)),
            wanted=wanted,
            row_lines=self._kv_heads * passes * max(lines_of(layout.row_bytes), 1),
            moves=tenant.moves,
        )

    def _parts(self, group: int) -> list[int]:
        """The query heads of one KV head's jobs: it is one job, unless the group is very large."""
        return [min(MAX_GROUP, group - first) for first in range(0, group, MAX_GROUP)]

    def _row_parts(self, query_rows: int) -> list[tuple[int, int]]:
        """First query row and query rows of each of a KV head's jobs; one, unless there are very many."""
        return [
            (first, min(MAX_QUERY_ROWS, query_rows - first)) for first in range(0, query_rows, MAX_QUERY_ROWS)
        ]

    def prepare(self, batch: Batch, lane: int = 0) -> Prepared:
        """A batch's descriptors but for tables, row ranges and lists, and their second lines where they have
        any: kept, because packing takes its time."""
        sight, q = batch.sight, batch.q
        alike = (sight.options, sight.window, sight.kept, sight.softcap, sight.select_pages)
        of_batch = (batch.factors, batch.output_scales, batch.sinks is None, batch.form, batch.denominators)
        key = (q.shape, q.dtype, lane, of_batch, alike)
        ready = self._ready.get(key)
        if ready is None or ready.plan.moves != self._tenant.moves:
            while len(self._ready) >= _READY_KEPT:
                del self._ready[next(iter(self._ready))]
            ready = self._ready[key] = self._new_ready(batch, lane)
        return ready

    def _new_ready(self, batch: Batch, lane: int) -> Prepared:
        count, query_rows, q_heads = batch.q.shape[:3]
        plan = self._plan(count, query_rows, q_heads, batch.form, batch.denominators, lane)
        template, second = self._new_template(batch)
        jobs = np.repeat(template[None], count, axis=0)
        column(ATTEND, "queries", jobs)[:] = plan.queries
        column(ATTEND, "result", jobs)[:] = plan.results
        return Prepared(plan, jobs, None if second is None else np.repeat(second[None], count, axis=0))

    def _new_template(self, batch: Batch) -> tuple[Lines, Lines | None]:
        layout, sight, (_, query_rows, q_heads) = self._layout, batch.sight, batch.q.shape[:3]
        more = {
            **self._storage,
            "options": self._storage["options"] | sight.options,
            "window": sight.window,
            "kept": sight.kept,
            "softcap": sight.softcap,
            "select_pages": sight.select_pages,
        }
        extended = any(more.values()) or query_rows > 1
        flags = (FLAG_SINKS if batch.sinks is not None else 0) | (FLAG_EXTENDED if extended else 0)
        stored = layout.row_fields
        lines = [
            record_line(
                ATTEND,
                version=DESCRIPTOR_VERSION,
                opcode=Opcode.ATTEND,
                flags=flags,
                score_factor=batch.factors[kv_head],
                output_scale=batch.output_scales[kv_head],
                head_dim=layout.head_dim,
                value_dim=layout.value_dim,
                group=part,
                query_rows=rows,
                page_rows_log2=layout.page_rows.bit_length() - 1,
                k_format=stored["k_format"],
                v_format=stored["v_format"],
                query_format=FORMATS[batch.q.dtype].code,
                output_form=batch.form,
                kv_head=kv_head,
            )
            for kv_head in range(self._kv_heads)
            for part in self._parts(q_heads // self._kv_heads)
            for _, rows in self._row_parts(query_rows)
        ]
        second = record_line(EXTENSION, **more).repeat(len(lines), axis=0) if extended else None
        return np.concatenate(lines), second

    def _head_lines(self, values: npt.NDArray[Any], parts: list[int]) -> npt.NDArray[np.uint8]:
        """32 bits for each query head, as the lines of one sequence's jobs [kv_heads * parts, bytes]."""
        by_head = values.view(np.uint32).reshape(self._kv_heads, -1)
        padded = np.zeros(
            (self._kv_heads, len(parts), lines_of(WORD_BYTES * max(parts)) * LINE_BYTES // WORD_BYTES),
            np.uint32,
        )
        for index, part in enumerate(parts):
            padded[:, index, :part] = by_head[:, index * MAX_GROUP : index * MAX_GROUP + part]
        return padded.view(np.uint8).reshape(self._kv_heads * len(parts), -1)

    def _raise_failed(self, completions: Completions, descriptors: Lines, batch: Batch) -> NoReturn:
        failed = completions.failed
        if np.isin(completions.of("status")[failed], _OF_STRANGERS).any():
            self._tenant.raise_if_reset()
        first = int(failed[0])
        sequence = first // (len(descriptors) // len(batch.tables)) // batch.parts
        status, detail = Status(int(completions.of("status")[first])), int(completions.of("detail")[first])
        kv_head = ATTEND.unpack(descriptors[first].tobytes())["kv_head"]
        where = f"sequence {sequence} of the batch, KV head {kv_head}"
        raise DeviceError(
            f"{len(failed)} of {len(completions)} jobs failed; "
            f"the first ({where}) with {status.name}, {_DETAILS.get(status, 'detail')} {detail}",
            status=status,
            tag=int(completions.of("tag")[first]),
            detail=detail,
            sequence=sequence,
        )


_OF_STRANGERS = (Status.DENIED, Status.PAGE_DENIED, Status.RESULT_DENIED, Status.BAD_TABLE)
"""What jobs end with where a tenant owns nothing of what it has."""
_DETAILS = {
    Status.BAD_PAGE: "page",
    Status.PAGE_DENIED: "page",
    Status.POISON: "in the table, the queries or page",
}
"""What a record's detail is, by status."""


def _of_lane(name: str, lane: int) -> str:
    """The name of a lane's area."""
    return f"{name} {lane}" if lane else name


def _lines_of(
    areas: npt.NDArray[np.uint64], parts: list[int], query_rows: int, lines: int
) -> npt.NDArray[np.uint64]:
    """The addresses of the lines of every query, [batch, query_rows, kv_heads, group, lines].

    Parameters
    ----------
    areas : address of each job's area, [batch, kv_heads, parts, row parts].
    parts : query heads of each part.
    lines : of a query; the heads of a job's query row follow each other, and its query rows do.
    """
    head, row = np.arange(sum(parts)), np.arange(query_rows)
    part, row_part = head // MAX_GROUP, row // MAX_QUERY_ROWS
    size = np.array(parts, np.int64)[part]
    index = (row % MAX_QUERY_ROWS)[:, None] * size + head % MAX_GROUP
    of_query = areas[:, :, part[None], row_part[:, None]].swapaxes(1, 2)
    step = index[:, None].astype(np.uint64) * np.uint64(lines * LINE_BYTES)
    found: npt.NDArray[np.uint64] = (of_query + step)[..., None] + np.arange(
        lines, dtype=np.uint64
    ) * np.uint64(LINE_BYTES)
    return found


def _storage_fields(layout: RowLayout) -> dict[str, int]:
    """What the extension says of how rows are stored."""
    books = layout.k.element.codebook or layout.value.element.codebook
    options = (OPTION_LATENT if layout.latent else 0) | (OPTION_SUMMARIES if layout.summaries else 0)
    stored = {name: code for name, code in layout.row_fields.items() if not name.endswith("_format")}
    return {"options": options | (OPTION_CODEBOOK if books else 0), **stored}


def _put(name: str, lines: Lines, values: npt.NDArray[np.int64]) -> None:
    """Set a field of extensions [batch, jobs, 64], which is zero in them, to values that broadcast."""
    word, shift = divmod(EXTENSION.offset(name), 64)
    mask = np.int64((1 << EXTENSION[name].width) - 1)
    lines.view("<u8")[..., word] |= (values & mask).astype(np.uint64) << np.uint64(shift)


def _words(ranges: Many[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    return np.array(ranges, "<u4").reshape(-1).view(np.uint8)


def _tree(positions: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """A tree as it lies in memory."""
    rows = len(positions)
    begin = lines_of(rows * WORD_BYTES) * LINE_BYTES
    data = np.zeros(begin + rows * TREE_ROW_BYTES, np.uint8)
    data[: rows * WORD_BYTES] = positions.astype("<u4").view(np.uint8)
    bits = np.packbits(mask, axis=1, bitorder="little")
    data[begin:].reshape(rows, TREE_ROW_BYTES)[:, : bits.shape[1]] = bits
    return data
