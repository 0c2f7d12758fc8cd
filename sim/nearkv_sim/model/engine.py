"""The command path: descriptors are taken from a ring, done in order, and answered by completion records."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from nearkv_hw.abi import DeviceConfig, Feature, Opcode, Status
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, COMPLETION
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.owner import Violation

from ..columns import column
from ..port import Lines
from . import timing
from .attention import Work
from .counters import Counters
from .job import Job, Refusal, check, opcode_of
from .kernels import Attend
from .lists import see
from .memory import LineIndices, Memory
from .native import Native
from .plain import Kind, Plain, PlainJobs
from .segments import Segments, lines_of, segments, spoilt
from .selection import candidates, select, selected_lines, summary_fault
from .walker import admit, read_queries, walk
from .window import CommandWindow

_TIMES_KEPT = 4096
FEATURES = Feature.all()
"""What this device has beyond plain jobs."""


class _Batch:
    """Descriptors that are worked together, and what their completion records will say.

    Members
    -------
    descriptors, extensions : the first and the second lines of their slots, [n, 64].
    status, detail, passes, lines, cycles : of each one's record; `lines` and `cycles` in full.
    plain : the jobs that are done together.
    alone : what the others asked of the memory and the units, those that came so far, by their index.
    good : of these, the jobs with which nothing has gone wrong so far.
    selected : the lines that tell which pages jobs selected.
    """

    def __init__(self, descriptors: Lines, extensions: Lines, start_cycles: float) -> None:
        count = len(descriptors)
        self.descriptors = descriptors
        self.extensions = extensions
        self.status = np.full(count, Status.OK, np.uint8)
        self.detail = np.zeros(count, np.uint64)
        self.passes = np.zeros(count, np.uint16)
        self.lines = np.zeros(count, np.int64)
        self.cycles = np.full(count, round(start_cycles), np.int64)
        self.plain: list[Plain] = []
        self.alone: dict[int, timing.Work] = {}
        self.good: dict[int, Work] = {}
        self.selected: dict[int, Lines] = {}

    def refuse(self, index: int, refusal: Refusal) -> None:
        """How one of them ends."""
        self.status[index], self.detail[index] = refusal.status, refusal.detail


class Engine:
    """Does what command windows ask for.

    Parameters
    ----------
    config, counters : the device's.
    attend : what computes jobs.
    features : what it has beyond plain jobs.

    Members
    -------
    memory : the device's memory.
    """

    def __init__(
        self, config: DeviceConfig, counters: Counters, attend: Attend, features: Feature = FEATURES
    ) -> None:
        self.memory = Memory(config, counters)
        self._config = config
        self._features = features
        self._counters = counters
        self._attend = attend
        self._plain = None
        if isinstance(attend, Native):
            self._plain = PlainJobs(config, self.memory, counters, attend, features)
        self._start_cycles = timing.start_cycles(config)
        self._cycles_alike = lru_cache(_TIMES_KEPT)(self._work_out_cycles_alike)

    def serve(self, window: CommandWindow) -> None:
        """Do everything that is posted in a window's ring.

        Attention jobs between two claims, releases or NOPs read memory as it was before the first of them
        wrote.
        """
        first, descriptors, extensions = window.fetch()
        fences = [
            index
            for index in np.flatnonzero(column(ATTEND, "opcode", descriptors) != Opcode.ATTEND).tolist()
            if _is_fence(descriptors[index].tobytes())
        ]
        ends = [*fences, len(descriptors)]
        for begin, end in zip([0, *fences], ends, strict=True):
            if begin < end:
                these = slice(begin, end)
                batch = _Batch(descriptors[these], extensions[these], self._start_cycles)
                self._run(batch, window.aperture, fenced=begin in fences)
                window.complete(first + begin, self._records(batch, first + begin))

    def _run(self, batch: _Batch, tenant: int, *, fenced: bool) -> None:
        """Do a batch; where it is fenced its first descriptor is a claim, release or NOP."""
        left = np.ones(len(batch.descriptors), np.bool_)
        if fenced:
            self._pass_fence(batch, tenant)
            left[0] = False
        if self._plain:
            batch.plain = self._plain.do(batch.descriptors, batch.extensions, tenant)
        for plain in batch.plain:
            left[plain.members] = False
        for index in np.flatnonzero(left).tolist():
            descriptor = batch.descriptors[index].tobytes()
            fields = ATTEND.unpack(descriptor)
            try:
                opcode_of(fields, descriptor, self._features)
                self._begin(batch, index, fields, tenant)
            except Refusal as refusal:
                batch.refuse(index, refusal)
        self._finish(batch)

    def _pass_fence(self, batch: _Batch, tenant: int) -> None:
        descriptor = batch.descriptors[0].tobytes()
        opcode = Opcode(int(column(ATTEND, "opcode", batch.descriptors)[0]))
        if opcode is not Opcode.NOP:
            try:
                batch.detail[0] = self._own(opcode, CLAIM.unpack(descriptor), tenant)
            except Refusal as refusal:
                batch.refuse(0, refusal)

    def _begin(self, batch: _Batch, index: int, fields: dict[str, int], tenant: int) -> None:
        """Check and walk a job; what it streams is counted here, what it computes comes later."""
        extension = batch.extensions[index].tobytes()
        job = check(fields, tenant, self._config, self._features, extension)
        passes = timing.passes_of(self._config, job.shape.queries)
        entries = admit(job, self.memory)
        needed = list_fault = None
        if job.asked is not None:
            seen, list_fault = see(job, job.asked, self.memory)
            job = replace(job, seen=seen)
            if job.rows:
                needed = np.zeros((job.row_end - 1 >> job.page_rows_log2) + 1 - job.first_page, np.bool_)
                needed[segments(job).pages - job.first_page] = True
        queries = read_queries(job, passes, self.memory)
        found = walk(job, entries, self.memory, needed)
        if job.asked is not None and job.asked.select_pages:
            assert job.seen is not None
            numbers = candidates(job, job.asked, job.seen)
            numbers = numbers[numbers < job.first_page + len(found.pages)]
            self._stream_summaries(batch, index, job, passes, found.pages[numbers - job.first_page])
            # Bounds come before everything else, of the first pass's queries, then of the others'.
            bad = [Refusal(status) for status in queries if status is not Status.OK]
            fault = Refusal(queries[0]) if queries[0] is not Status.OK else None
            fault = fault or summary_fault(job, numbers, found.pages, self.memory)
            if fault := fault or found.fault or list_fault or next(iter(bad), None):
                raise fault
            job, chosen = select(job, job.asked, job.seen, numbers, found.pages, self.memory)
            batch.selected[index] = selected_lines(chosen)
        parts = segments(job)
        parts = parts.where(parts.pages < job.first_page + len(found.pages))
        first_lines = found.pages[parts.pages - job.first_page]
        self._stream(batch, index, job, passes, parts, first_lines)
        fault = self._first_fault(job, passes, queries, found.fault or list_fault, parts, first_lines)
        if fault:
            raise fault
        batch.good[index] = job, found.pages

    def _first_fault(
        self,
        job: Job,
        passes: list[int],
        queries: list[Status],
        walk_fault: Refusal | None,
        parts: Segments,
        first_lines: LineIndices,
    ) -> Refusal | None:
        """Pass by pass: its queries and their lists, its pages, its ranges and entries, and then its results.

        The pages are those before the first range or entry at fault, so that the lowest page at fault is
        told; all are the same for every pass. A result that cannot be written is found when it is
        written, unless the queries of a later pass cannot be read.
        """
        if queries[0] is not Status.OK:
            return Refusal(queries[0])
        allowed = self.memory.allowed(first_lines, job.tenant)
        faults = np.flatnonzero(
            ~allowed | spoilt(job, parts, first_lines, len(passes), self.memory) & allowed
        )
        if len(faults):
            first = int(faults[0])
            status = Status.POISON if allowed[first] else Status.PAGE_DENIED
            return Refusal(status, int(parts.pages[first]))
        if walk_fault:
            return walk_fault
        bad = next((n for n, status in enumerate(queries) if status is not Status.OK), None)
        if bad is None:
            return None
        before = job.result_line + np.arange(sum(passes[:bad]) * job.shape.result.lines)
        writable = self.memory.allowed(before, job.tenant).all()
        return Refusal(queries[bad] if writable else Status.RESULT_DENIED)

    def _stream(
        self,
        batch: _Batch,
        index: int,
        job: Job,
        passes: list[int],
        parts: Segments,
        first_lines: LineIndices,
    ) -> None:
        """Count the lines of a job's rows, in pages with these first lines, and note its work."""
        config, counters = self._config, self._counters
        lines = lines_of(job, parts) * len(passes)
        self._refuse(first_lines, lines, job.tenant)
        # as doubles, which hold the counts of 2^23 rows exactly
        streamed = np.bincount(self.memory.channels_of(first_lines), lines, config.slices).astype(np.int64)
        counters.stream(streamed)
        for queries in passes:
            counters.channels["partial_beats"] += timing.partial_beats(config, queries, job.shape.value_dim)
        batch.passes[index] = len(passes)
        batch.lines[index] += lines.sum()
        batch.alone[index] = Kind(job, config).work(streamed / len(passes))

    def _stream_summaries(
        self, batch: _Batch, index: int, job: Job, passes: list[int], first_lines: LineIndices
    ) -> None:
        """Count the lines of the summaries that a selection reads, in passes of their own."""
        config, counters = self._config, self._counters
        lines = np.full(len(first_lines), 2 * job.layout.summary_lines * len(passes))
        self._refuse(first_lines, lines, job.tenant)
        channels = self.memory.channels_of(first_lines)
        counters.stream(np.bincount(channels, lines, config.slices).astype(np.int64))
        for queries in passes:
            counters.channels["partial_beats"] += timing.partial_beats(config, queries, 1)
        batch.passes[index] = len(passes)
        batch.lines[index] += lines.sum()

    def _refuse(self, first_lines: LineIndices, lines: LineIndices, tenant: int) -> None:
        """Count and log the lines of pages, with these first ones, that units are refused."""
        denied = ~self.memory.allowed(first_lines, tenant)
        kind = Violation.READ if self._config.placement is Placement.FABRIC else Violation.UNIT_READ
        self.memory.refuse(first_lines[denied], tenant, kind, lines[denied])

    def _own(self, opcode: Opcode, fields: dict[str, int], tenant: int) -> int:
        """Do a claim or a release; the detail of its record."""
        first, count = fields["first_extent"], fields["extent_count"]
        own = self._config.extents_of(tenant)
        if count == 0 or first < own.start or first + count > own.stop:
            raise Refusal(Status.BAD_EXTENT)
        if opcode is Opcode.RELEASE_EXTENTS:
            return self.memory.release(first, count, tenant)
        status, detail = self.memory.claim(first, count, tenant)
        if status is not Status.OK:
            raise Refusal(status, detail)
        return detail

    def _finish(self, batch: _Batch) -> None:
        """Compute the other good jobs, write all results in order, and count what the batch came to."""
        places: dict[int, int] = {}
        results: dict[int, Lines] = {}
        if batch.good:
            computed = self._attend(list(batch.good.values()), self.memory)
            results.update(zip(batch.good, computed, strict=True))
        for plain in batch.plain:
            results.update(zip(plain.members.tolist(), plain.results, strict=True))
            places.update(zip(plain.members.tolist(), plain.result_lines.tolist(), strict=True))
        for index in sorted(results):
            if index in places:
                self.memory.write_run(places[index], results[index])
            elif not self._write(batch.good[index][0], results[index], batch.selected.get(index)):
                batch.status[index] = Status.RESULT_DENIED
        self._count_cycles(batch)
        self._counters.device["jobs"] += len(batch.status)
        self._counters.device["errors"] += int(np.count_nonzero(batch.status != Status.OK))

    def _write(self, job: Job, lines: Lines, selected: Lines | None) -> bool:
        """Write a job's result, except lines that the tenant does not own; whether there are none."""
        area = job.result_line + np.arange(len(lines))
        written = bool(self.memory.write(area, lines, job.tenant).all())
        if selected is None or job.asked is None:
            return written
        area = job.asked.selected + np.arange(len(selected))
        return bool(self.memory.write(area, selected, job.tenant).all()) and written

    def _count_cycles(self, batch: _Batch) -> None:
        """What each job would take if it were the only one, and what the batch takes."""
        for plain in batch.plain:
            passes = len(plain.kind.passes)
            batch.passes[plain.members] = passes
            batch.lines[plain.members] = plain.lines.sum(axis=1) * passes
            batch.cycles[plain.members] = [
                self._cycles_alike(plain.kind, 1, most) for most in plain.lines.max(axis=1).tolist()
            ]
        for index, work in batch.alone.items():
            batch.cycles[index] = round(timing.batch(self._config, [work]).total)
        self._counters.device["cycles"] += self._cycles_together(batch)

    def _cycles_together(self, batch: _Batch) -> int:
        if len(batch.plain) == 1 and not batch.alone:
            [plain] = batch.plain
            return self._cycles_alike(plain.kind, len(plain.members), int(plain.lines.sum(axis=0).max()))
        works = dict(batch.alone)
        for plain in batch.plain:
            works.update(
                (index, plain.kind.work(lines.astype(np.float64)))
                for index, lines in zip(plain.members.tolist(), plain.lines, strict=True)
            )
        if not works:
            return round(self._start_cycles)
        return round(timing.batch(self._config, [works[index] for index in sorted(works)]).total)

    def _work_out_cycles_alike(self, kind: Kind, count: int, most: int) -> int:
        """What so many jobs of a kind take, of whose lines of a pass the fullest slice has `most` in all.

        Only the fullest slice counts, so that this is known again for jobs of as many rows.
        """
        lines = np.full(self._config.slices, most / count)
        return round(timing.batch(self._config, [kind.work(lines, count)]).total)

    def _records(self, batch: _Batch, first: int) -> Lines:
        """The completion records of a batch whose first descriptor has this index in the ring."""
        records = np.zeros((len(batch.status), LINE_BYTES), np.uint8)
        index = first + np.arange(len(records))
        column(COMPLETION, "tag", records)[:] = column(ATTEND, "tag", batch.descriptors)
        for name in ("status", "detail", "passes"):
            column(COMPLETION, name, records)[:] = getattr(batch, name)
        for name in ("lines", "cycles"):  # modulo their fields' range
            column(COMPLETION, name, records)[:] = getattr(batch, name).astype(np.uint32)
        phases = 1 - index // self._config.ring_slots % 2
        records[:, COMPLETION.offset("phase") // 8] |= phases.astype(np.uint8)
        return records


def _is_fence(descriptor: bytes) -> bool:
    """Whether a descriptor is a claim, release or NOP; one at fault is none."""
    try:
        return opcode_of(ATTEND.unpack(descriptor), descriptor) is not Opcode.ATTEND
    except Refusal:
        return False
