"""The command path: descriptors are taken from a ring, done in order, and answered by completion records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from nearkv_hw.abi import DeviceConfig, Opcode, Status
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, COMPLETION, DESCRIPTOR_VERSION, FLAG_SINKS, NOP
from nearkv_hw.abi.window import completion_phase

from ..port import Lines
from . import timing
from .counters import Counters
from .kernels import Attend
from .memory import LineIndices, Mask, Memory
from .walker import Job, Refusal, Walk, admit, check, read_queries, walk
from .window import CommandWindow

_LAYOUTS = {Opcode.NOP: NOP, Opcode.ATTEND: ATTEND, Opcode.CLAIM_EXTENTS: CLAIM}


@dataclass
class _Task:
    """A descriptor under way, and what its completion record will say."""

    index: int
    tag: int
    job: Job | None = None
    pages: LineIndices | None = None
    """First lines of the pages, when nothing has gone wrong so far."""
    status: Status = Status.OK
    detail: int = 0
    passes: int = 0
    lines: int = 0
    work: timing.Work | None = None
    """What it asked of the memory and the units, if it came so far."""


class Engine:
    """Does what command windows ask for.

    Parameters
    ----------
    config, counters : the device's.
    attend : what computes jobs.

    Members
    -------
    memory : the device's memory.
    """

    def __init__(self, config: DeviceConfig, counters: Counters, attend: Attend) -> None:
        self.memory = Memory(config, counters)
        self._config = config
        self._counters = counters
        self._attend = attend

    def serve(self, window: CommandWindow) -> None:
        """Do everything that is posted in a window's ring.

        Attention jobs between two claims or NOPs read memory as it was before the first of them wrote.
        """
        waiting: list[_Task] = []
        while window.head != window.tail:
            index, descriptor = window.fetch()
            head = ATTEND.unpack(descriptor)
            task = _Task(index, head["tag"])
            try:
                opcode = _opcode_of(head, descriptor)
                if opcode is Opcode.ATTEND:
                    self._begin(task, head, window.aperture)
                else:
                    self._finish(waiting, window)
                    waiting = []
                    if opcode is Opcode.CLAIM_EXTENTS:
                        self._claim(CLAIM.unpack(descriptor), window.aperture)
            except Refusal as refusal:
                task.status, task.detail = refusal.status, refusal.detail
            waiting.append(task)
        self._finish(waiting, window)

    def _begin(self, task: _Task, fields: dict[str, int], tenant: int) -> None:
        """Check and walk a job; what it streams is counted here, what it computes comes later."""
        task.job = job = check(fields, tenant, self._config)
        passes = timing.passes_of(self._config, job.shape.group)
        entries = admit(job, self.memory)
        queries = read_queries(job, passes, self.memory)
        found = walk(job, entries, self.memory)
        self._stream(task, job, passes, found.pages)
        fault = self._first_fault(job, passes, queries, found)
        if fault:
            raise fault
        task.pages = found.pages

    def _first_fault(self, job: Job, passes: list[int], queries: list[Status], found: Walk) -> Refusal | None:
        """Pass by pass: its queries and sinks, its pages, its page-table entries, and then its results.

        The pages are those before the first entry at fault, so that the lowest page at fault is told. Entries
        and pages are the same for every pass. A result that cannot be written is found when it is
        written, unless the queries of a later pass cannot be read.
        """
        if queries[0] is not Status.OK:
            return Refusal(queries[0])
        allowed = self.memory.allowed(found.pages, job.tenant)
        faults = np.flatnonzero(~allowed | self._spoilt(job, passes, found.pages) & allowed)
        if len(faults):
            first = int(faults[0])
            status = Status.POISON if allowed[first] else Status.PAGE_DENIED
            return Refusal(status, job.first_page + first)
        if found.fault:
            return found.fault
        bad = next((n for n, status in enumerate(queries) if status is not Status.OK), None)
        if bad is None:
            return None
        heads = sum(passes[:bad])
        before = job.result_line + np.arange(heads * job.shape.result.lines)
        writable = self.memory.allowed(before, job.tenant).all()
        return Refusal(queries[bad] if writable else Status.RESULT_DENIED)

    def _spoilt(self, job: Job, passes: list[int], pages: LineIndices) -> Mask:
        """Which pages, given by their first lines, have a visible row that cannot be corrected."""
        if self.memory.intact:
            return np.zeros(len(pages), np.bool_)
        shape = job.shape
        starts = (job.first_page + np.arange(len(pages))) << job.page_rows_log2
        begin = np.maximum(starts, job.row_begin) - starts
        end = begin + job.rows_of(job.first_page + np.arange(len(pages)))
        v_area = pages + (shape.k_lines << job.page_rows_log2)
        k = self.memory.spoilt(pages + begin * shape.k_lines, pages + end * shape.k_lines, len(passes))
        v = self.memory.spoilt(v_area + begin * shape.v_lines, v_area + end * shape.v_lines, len(passes))
        return k | v

    def _stream(self, task: _Task, job: Job, passes: list[int], pages: LineIndices) -> None:
        """Count the lines of a job's pages, given by their first lines, and note its work."""
        config, shape, counters = self._config, job.shape, self._counters
        rows = job.rows_of(job.first_page + np.arange(len(pages)))
        lines = rows * (shape.k_lines + shape.v_lines) * len(passes)
        allowed = self.memory.allowed(pages, job.tenant)
        if not allowed.all():
            counters.device["violations"] += int(lines[~allowed].sum())
        # as doubles, which hold the counts of 2^23 rows exactly
        streamed = np.bincount(self.memory.channels_of(pages), lines, config.slices).astype(np.int64)
        counters.channels["unit_lines"] += streamed
        counters.channels["unit_busy"] += streamed
        for queries in passes:
            counters.channels["partial_beats"] += timing.partial_beats(config, queries, shape.value_dim)
        task.passes, task.lines = len(passes), int(lines.sum())
        task.work = timing.Work(
            passes=tuple(passes),
            lines=streamed / len(passes),
            query_lines=shape.k_lines,
            result_lines=shape.result.lines,
            value_dim=shape.value_dim,
        )

    def _claim(self, fields: dict[str, int], tenant: int) -> None:
        first, count = fields["first_extent"], fields["extent_count"]
        if count == 0 or first + count > self._config.extents:
            raise Refusal(Status.BAD_EXTENT)
        taken = self.memory.claim(first, count, tenant)
        if taken is not None:
            raise Refusal(Status.EXTENT_TAKEN, taken)

    def _finish(self, tasks: list[_Task], window: CommandWindow) -> None:
        """Compute and write the results of good jobs, then write every record, in order."""
        good = [(task, (task.job, task.pages)) for task in tasks if task.job and task.pages is not None]
        results = self._attend([work for _, work in good], self.memory)
        for (task, (job, _)), lines in zip(good, results, strict=True):
            self._write(task, job, lines)
        for task in tasks:
            window.complete(task.index, self._record(task))
            self._counters.device["jobs"] += 1
            self._counters.device["errors"] += task.status is not Status.OK
        works = [task.work for task in tasks if task.work]
        if works:
            self._counters.device["cycles"] += round(timing.batch(self._config, works).total)
        elif tasks:
            self._counters.device["cycles"] += round(timing.start_cycles(self._config))

    def _write(self, task: _Task, job: Job, lines: Lines) -> None:
        """Write a job's result, except lines that the tenant does not own."""
        area = job.result_line + np.arange(len(lines))
        if not self.memory.write(area, lines, job.tenant).all():
            task.status = Status.RESULT_DENIED

    def _cycles_alone(self, task: _Task) -> int:
        """What a descriptor would take if it were the only one."""
        if task.work is None:
            return round(timing.start_cycles(self._config))
        return round(timing.batch(self._config, [task.work]).total)

    def _record(self, task: _Task) -> bytes:
        return COMPLETION.pack_bytes(
            phase=completion_phase(self._config, task.index),
            status=task.status,
            passes=task.passes,
            tag=task.tag,
            cycles=self._cycles_alone(task) % (1 << COMPLETION["cycles"].width),
            lines=task.lines % (1 << COMPLETION["lines"].width),
            detail=task.detail,
        )


def _opcode_of(head: dict[str, int], descriptor: bytes) -> Opcode:
    """A descriptor's opcode; Refusal for what every opcode's descriptor may not hold."""
    if head["version"] != DESCRIPTOR_VERSION:
        raise Refusal(Status.BAD_VERSION)
    if head["opcode"] not in list(Opcode):
        raise Refusal(Status.BAD_OPCODE)
    opcode = Opcode(head["opcode"])
    known = FLAG_SINKS if opcode is Opcode.ATTEND else 0
    reserved = int.from_bytes(descriptor, "little") & _LAYOUTS[opcode].reserved_mask()
    if head["flags"] & ~known or reserved or (opcode is Opcode.ATTEND and head["output_scale"]):
        raise Refusal(Status.BAD_FLAGS)
    return opcode
