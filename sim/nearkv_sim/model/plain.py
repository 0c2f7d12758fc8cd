"""Jobs with nothing wrong, checked and walked together; any other job goes through `walker`, which knows why.

What costs a job a hundred small steps of Python costs all jobs of a doorbell as many steps over arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Opcode
from nearkv_hw.abi.descriptor import ATTEND
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.memory import ENTRIES_PER_LINE, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from nearkv_hw.abi.numerics import MAX_ROWS

from ..columns import column, number
from ..port import Lines
from . import timing
from .attention import Work
from .counters import Counters
from .memory import LineIndices, Mask, Memory
from .walker import Job, Refusal, check, opcode_of, pages_of, sink_lines

_ADDRESSES = ("table", "queries", "result", "sinks")
_OWN = ("tag", *_ADDRESSES, "row_begin", "row_end", "kv_head")
"""Fields of a descriptor in which jobs of one kind may differ."""
_KIND_BITS = (1 << ATTEND.width) - 1 - sum(((1 << ATTEND[n].width) - 1) << ATTEND.offset(n) for n in _OWN)
_KIND_WORDS = np.frombuffer(_KIND_BITS.to_bytes(ATTEND.width // 8, "little"), "<u8")
_KINDS_KEPT = 256
_OFFSET = np.uint64(LINE_BYTES - 1)


class Kind:
    """What good descriptors say that differ in addresses, rows and KV head alone.

    Members
    -------
    job : one of them.
    passes : query heads of each pass.
    runs : lines at its addresses: the table's header, queries, result, and sinks if there are any.
    row_lines, query_lines, result_lines : lines of a row, K and V, of a query, and of a query head's result.
    """

    def __init__(self, job: Job, config: DeviceConfig) -> None:
        shape = job.shape
        self.job = job
        self.passes = tuple(timing.passes_of(config, shape.group))
        self.row_lines = shape.k_lines + shape.v_lines
        self.query_lines = shape.k_lines
        self.result_lines = shape.result.lines
        runs = [1, shape.group * self.query_lines, shape.group * self.result_lines]
        reads = [1, shape.group * self.query_lines, 0]
        if job.sink_line is not None:
            runs.append(sink_lines(shape.group))
            reads.append(len(self.passes))  # a line for each
        self.runs = np.array(runs)
        self.reads = np.array(reads)

    def work(self, lines: npt.NDArray[np.float64], count: int = 1) -> timing.Work:
        """What so many jobs ask of the device, with `lines` of each pass in each slice."""
        return timing.Work(
            passes=self.passes,
            lines=lines,
            query_lines=self.query_lines,
            result_lines=self.result_lines,
            value_dim=self.job.shape.value_dim,
            count=count,
        )


@dataclass(frozen=True)
class Plain:
    """Good jobs of a kind.

    Members
    -------
    kind : theirs.
    members : which descriptors they are, rising.
    work : what the kernel is given.
    results : first line of each one's result.
    lines : K and V lines of a pass in each slice, [jobs, slices].
    """

    kind: Kind
    members: npt.NDArray[np.intp]
    work: list[Work]
    results: list[int]
    lines: npt.NDArray[np.int64]


class PlainJobs:
    """Finds the jobs of a batch that have nothing wrong; their reads and lines are counted here.

    Left out, too, are jobs that are good but rare: without rows, or with queries, entries or results in two
    extents, and all jobs where the memory has inverted bits.

    Parameters
    ----------
    config, memory, counters : the device's.
    """

    def __init__(self, config: DeviceConfig, memory: Memory, counters: Counters) -> None:
        self._config = config
        self._memory = memory
        self._counters = counters
        self._kind = lru_cache(_KINDS_KEPT)(self._kind_of)

    def find(self, descriptors: Lines, tenant: int) -> list[Plain]:
        """The good jobs among descriptors [n, 64], kind by kind."""
        if not self._memory.intact:
            return []
        keys = descriptors.view("<u8") & _KIND_WORDS
        if (keys == keys[0]).all():
            kinds = [(keys[0], np.arange(len(keys)))]
        else:
            some, kind = np.unique(keys, axis=0, return_inverse=True)
            kinds = [(key, np.flatnonzero(kind.reshape(-1) == n)) for n, key in enumerate(some)]
        found = []
        for key, members in kinds:
            known = self._kind(key.tobytes())
            plain = self._together(known, descriptors[members], members, tenant) if known else None
            if plain:
                found.append(plain)
        return found

    def _kind_of(self, descriptor: bytes) -> Kind | None:
        """The kind of good descriptors, given by one without addresses and rows."""
        fields = ATTEND.unpack(descriptor)
        try:
            if opcode_of(fields, descriptor) is not Opcode.ATTEND:
                return None
            return Kind(check(fields, 0, self._config), self._config)
        except Refusal:
            return None

    def _together(
        self, kind: Kind, descriptors: Lines, members: npt.NDArray[np.intp], tenant: int
    ) -> Plain | None:
        """Those jobs of a kind that are good. One that is not is left out as soon as that is known."""

        def those(good: Mask) -> Plain | None:
            return self._together(kind, descriptors[good], members[good], tenant)

        memory, log2, count = self._memory, kind.job.page_rows_log2, len(members)
        if not count:
            return None
        names = _ADDRESSES[: len(kind.runs)]
        addresses = np.stack([column(ATTEND, name, descriptors) for name in names], axis=1)
        first = (addresses >> np.uint64(LINE_SHIFT)).astype(np.int64)
        good = (memory.allowed_runs(first, kind.runs, tenant) & (addresses & _OFFSET == 0)).all(axis=1)
        if not good.all():
            return those(good)

        tables = first[:, 0]
        header = memory.lines[tables]
        entries, kv_head = number(TABLE, "entries", header), number(ATTEND, "kv_head", descriptors)
        begin, end = number(ATTEND, "row_begin", descriptors), number(ATTEND, "row_end", descriptors)
        room = np.minimum(number(TABLE, "committed_rows", header), entries << log2)
        good = (column(TABLE, "magic", header) == TABLE_MAGIC) & (
            column(TABLE, "version", header) == LAYOUT_VERSION
        )
        good &= kv_head < column(TABLE, "heads", header)
        good &= (begin < end) & (end <= np.minimum(room, MAX_ROWS))
        if not good.all():
            return those(good)

        first_page, last_page = begin >> log2, end - 1 >> log2
        head = tables + 1 + kv_head * -(-entries // ENTRIES_PER_LINE)
        entry_line = head + first_page // ENTRIES_PER_LINE
        entry_lines = head + last_page // ENTRIES_PER_LINE + 1 - entry_line
        good = memory.allowed_runs(entry_line, entry_lines, tenant)
        if not good.all():
            return those(good)

        pages_of_job = last_page - first_page + 1
        ends = np.cumsum(pages_of_job)
        starts = ends - pages_of_job
        job = np.repeat(np.arange(count), pages_of_job)
        word = np.arange(ends[-1]) + (head * ENTRIES_PER_LINE + first_page - starts)[job]
        pages, fine = pages_of(memory.words[word])
        fine &= memory.allowed_runs(pages, kind.row_lines << log2, tenant)
        if not fine.all():
            good = np.ones(count, np.bool_)
            good[job[~fine]] = False
            return those(good)

        slices = self._config.slices
        of_page = memory.channels_of(pages)
        rows = np.bincount(job * slices + of_page, minlength=count * slices).reshape(count, slices) << log2
        each, not_seen = np.arange(count), (1 << log2) - 1
        rows[each, of_page[starts]] -= begin & not_seen
        rows[each, of_page[ends - 1]] -= -end & not_seen
        lines = rows * kind.row_lines
        self._count(kind, first, entry_line, entry_lines, lines)

        results = first[:, 2].tolist()
        numbers = (begin, end, kv_head, *first[:, [0, 1, -1]].T)
        work: list[Work] = []
        for (row_begin, row_end, head_, table, queries, sinks), result, start, stop in zip(
            zip(*(n.tolist() for n in numbers), strict=True),
            results,
            starts.tolist(),
            ends.tolist(),
            strict=True,
        ):
            one = Job(
                tenant=tenant,
                shape=kind.job.shape,
                factor=kind.job.factor,
                row_begin=row_begin,
                row_end=row_end,
                page_rows_log2=log2,
                kv_head=head_,
                table_line=table,
                query_line=queries,
                result_line=result,
                sink_line=None if kind.job.sink_line is None else sinks,
            )
            work.append((one, pages[start:stop]))
        return Plain(kind, members, work, results, lines)

    def _count(
        self,
        kind: Kind,
        first: LineIndices,
        entry_line: LineIndices,
        entry_lines: LineIndices,
        lines: npt.NDArray[np.int64],
    ) -> None:
        """Count what jobs read through the fabric and what their units take."""
        count, slices, counters = len(lines), self._config.slices, self._counters.channels
        channels = self._memory.channels_of(np.concatenate([first.reshape(-1), entry_line]))
        reads = np.concatenate([np.tile(kind.reads, count), entry_lines])
        # as doubles, which hold the counts exactly
        counters["fabric_reads"] += np.bincount(channels, reads, slices).astype(np.int64)
        streamed = lines.sum(axis=0) * len(kind.passes)
        counters["unit_lines"] += streamed
        counters["unit_busy"] += streamed
        counters["partial_beats"] += count * sum(
            timing.partial_beats(self._config, queries, kind.job.shape.value_dim) for queries in kind.passes
        )
