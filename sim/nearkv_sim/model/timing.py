"""How many cycles a batch of attention jobs takes, from what the device is made of.

A batch begins with its first query's way to the units and ends with the last job's results. In between three
things run at once, each over all passes of the batch, and the slowest sets the pace:

- *memory*: a slice's K and V lines, rows opened for them, and the host side's queries and results, whose
  writes turn the bus. Refresh stretches this, once no more refreshes may be owed.
- *issue*: a unit takes a line per cycle, and reads its sums in places in which no V line enters.
- *results*: the partial results of a pass go through one merge.

A unit's issue and its memory are one stream: what the array is late by, the memory makes up for from its
queues, but for a part (`SUMS_EXPOSED`). Results are another: where they are nearly as slow as the stream, the
buffers between run empty and full in turns, and the pace is the norm of both (`EVENNESS`).

Latencies below are those of the blocks; the constants marked *calibrated* were fitted once to RTL runs, for
all configurations alike. docs/estimate.md has the remaining error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import lcm

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Link, Placement
from nearkv_hw.abi.dram import PARTS, Dram, DramPart, ceiling
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.link import RATES
from nearkv_hw.abi.memory import RowLayout

FIRST_READ_CYCLES = 26
"""Doorbell to the first K row's read command, query lines and the opening of the row apart
(`memory.first_read_cycles`)."""
QUERY_WAIT_CYCLES = 36
"""What queries that a host has just written wait for: their write, in a memory that was idle. Calibrated."""
RETURN_CYCLES = 9
"""From a line at the DRAM's pins to its product: answer, order, decode, array."""
PIPELINE_CYCLES = 41
"""A pass's last line to its completion record, partial beats apart: array, merge, finish, write, record."""
POLL_CYCLES = 33
"""What the host sees a batch take longer: its doorbell's way in, and the poll that meets the record.
Calibrated."""
HOST_PATH_CYCLES = 10
"""A host's read outside the memory: endpoint, fabric, owner check and order, there and back."""
DECODING_CYCLES = 9
"""What the HDM decoders add to it."""
CONTROLLER_CYCLES = 5
"""A read in the controller, outside its frames: its way in, and the error correction's check."""
CROSSBAR_CYCLES = 4
"""What a unit's read takes longer where units stand behind the crossbar, there and back."""
WRITES_PER_TURN = 10
"""Writes of a sub-channel between two turns of its bus: from `Drain.high` to `Drain.low` of its queue."""
SUM_CYCLES = 1.85
"""Issue cycles that reading a line of sums takes. Calibrated."""
SUMS_EXPOSED = 0.32
"""Cycles of a slice's memory that reading a line of sums costs. Calibrated."""
PASS_CYCLES = 18.0
"""Cycles between the beats of two passes in the results. Calibrated."""
OPEN_CYCLES: dict[Dram, float] = {
    Dram.DDR5_6400: 1.8,
    Dram.DDR5_4800: 0.0,
    Dram.LPDDR5X_8533: 0.9,
    Dram.HBM3_6400: 0.7,
}
"""Cycles that opening the next pair of rows holds a slice up; what is not hidden behind the rows before.
Calibrated, by part: little where a bank is ready long before its rows are wanted (DDR5, 32 banks and rows of
64 lines), much of an activate where banks are few or rows short.
"""
HOST_LINE_CYCLES = 1.6
"""Lines of a unit that a line read anywhere by the host costs, as it opens a row for itself. Calibrated: 1.0
to 2.2 in `nearkv bench memory --case shares`."""
EVENNESS = 5.5
"""Exponent of the norm. Calibrated."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What equal attention jobs ask of the device.

    Parameters
    ----------
    passes : query heads of each pass of a job.
    lines : K and V lines of a pass in each slice, [slices].
    query_lines : lines of a query.
    result_lines : lines of a query head's result, the denominator's included.
    value_dim : lanes of a result.
    count : such jobs.
    taken : cycles of a unit per line (`unit_cycles`).
    sum_lines : lines in which a unit reads the sums of a query; those of 16-bit values if not given.
    """

    passes: tuple[int, ...]
    lines: npt.NDArray[np.float64]
    query_lines: int
    result_lines: int
    value_dim: int
    count: int = 1
    taken: float = 1.0
    sum_lines: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Cycles of a batch, and what they come of.

    Parameters
    ----------
    start : doorbell to the first line at a unit.
    memory, issue, results : what each alone would take for all passes.
    drain : the last line to the last completion.
    """

    start: float
    memory: float
    issue: float
    results: float
    drain: float

    @property
    def stream(self) -> float:
        """First line to last line."""
        parts = (max(self.memory, self.issue), self.results)
        largest = max(parts)
        if largest == 0:
            return 0.0
        return float(largest * sum((part / largest) ** EVENNESS for part in parts) ** (1 / EVENNESS))

    @property
    def total(self) -> float:
        """Doorbell to the last completion."""
        return self.start + self.stream + self.drain

    @property
    def bound(self) -> str:
        """The name of the largest part."""
        parts = ("start", "memory", "issue", "results", "drain")
        return max(parts, key=lambda name: getattr(self, name))


def batch(
    config: DeviceConfig, works: Iterable[Work], *, host_share: float = 0.0, rested: bool = True
) -> Cycles:
    """The cycles of a batch of jobs, from one doorbell to the last completion.

    The mean over when refreshes fall due.

    Parameters
    ----------
    config : of the device, with units.
    works : the jobs, in their order.
    host_share : lines per cycle and slice that the host wants of the memory meanwhile, 0 to 1.
    rested : whether the memory has had time to make up for refreshes; else as many are owed as may be.

    Raises
    ------
    ValueError : a device without units streams nothing by itself.
    """
    if config.units == 0:
        raise ValueError(f"placement={config.placement.name.lower()} has no units; its rows go over the link")
    jobs = [work for work in works if work.count]
    if not jobs:
        return Cycles(start=0, memory=0, issue=0, results=0, drain=0)
    lines = np.zeros(config.slices)
    issue = np.zeros(config.slices)
    beats = 0.0
    reads = writes = sums_read = 0
    for work in jobs:
        passes = len(work.passes)
        lines += work.count * passes * work.lines
        sums = sum(work.passes) * _lines_of_sums(work)
        sums_read += work.count * sums
        issue += work.count * (passes * work.taken * work.lines + SUM_CYCLES * sums)
        beats += work.count * sum(partial_beats(config, q, work.value_dim) + PASS_CYCLES for q in work.passes)
        reads += work.count * sum(work.passes) * work.query_lines
        writes += work.count * sum(work.passes) * work.result_lines
    first = jobs[0]
    # the first pass's queries are the start's, the last ones' results the drain's
    reads -= first.passes[0] * first.query_lines
    drain = float(PIPELINE_CYCLES)
    for queries, work in _last_passes(jobs):
        drain += partial_beats(config, queries, work.value_dim)
        beats -= partial_beats(config, queries, work.value_dim) + PASS_CYCLES
        writes -= queries * work.result_lines
        sums_read -= queries * _lines_of_sums(work)
        issue -= SUM_CYCLES * queries * _lines_of_sums(work)
    slices = config.slices
    busy = float(lines.max()) * (1 + _opening(config)) + _fabric(config, reads / slices, writes / slices)
    busy += SUMS_EXPOSED * sums_read
    return Cycles(
        start=first.passes[0] * first.query_lines + start_cycles(config),
        memory=_refreshed(config, busy / _units_part(config, host_share), rested=rested),
        issue=float(issue.max()),
        results=beats,
        drain=drain,
    )


def _last_passes(jobs: list[Work]) -> list[tuple[int, Work]]:
    """The query heads of the last pass and of the one before it, with the jobs that they belong to.

    Lines go before sums, so the sums of the pass before the last leave when the last one's lines are in.
    """
    found: list[tuple[int, Work]] = []
    for work in reversed(jobs):
        for _ in range(min(work.count, 2)):
            found += [(queries, work) for queries in reversed(work.passes)]
            if len(found) >= 2:
                return found[:2]
    return found


def call(config: DeviceConfig, work: Work, *, host_share: float = 0.0) -> float:
    """Cycles of equal jobs that the driver posts as batches of a ring's slots, one after the other."""
    full, rest = divmod(work.count, config.ring_slots)
    counts = [(config.ring_slots, min(full, 1)), (config.ring_slots, full - 1), (rest, 1)]
    total, rested = 0.0, True
    for count, times in counts:
        if count and times > 0:
            work_of = replace(work, count=count)
            total += times * batch(config, [work_of], host_share=host_share, rested=rested).total
            rested = False
    return total


def start_cycles(config: DeviceConfig) -> float:
    """Cycles from a doorbell to the first line at a unit, query lines apart."""
    crossbar = CROSSBAR_CYCLES if config.placement is Placement.FABRIC else 0
    return FIRST_READ_CYCLES + _first_row(config) + read_cycles(config) + RETURN_CYCLES + crossbar


def _first_row(config: DeviceConfig) -> int:
    """Cycles that the first lines wait for their row and their queries: an idle memory has no row open."""
    part = PARTS.get(config.dram)
    if part is None:
        return 0
    frames = part.frames(config.density_gbit, config.refresh)
    return QUERY_WAIT_CYCLES + (frames.activate_to_column - 1) * part.subchannels


def read_cycles(config: DeviceConfig) -> int:
    """Cycles from a read command to its line at the pins."""
    part = PARTS.get(config.dram)
    if part is None:
        return config.memory_latency_cycles
    return part.frames(config.density_gbit, config.refresh).read_cycles


def host_read_cycles(config: DeviceConfig) -> int:
    """Cycles from a host's read of a closed bank to its line, both at the endpoint, on an idle device.

    The most that they are: a read that meets its frame well is quicker by up to a frame. Units do not stand
    at ranks.
    """
    part = PARTS.get(config.dram)
    path = HOST_PATH_CYCLES + (DECODING_CYCLES if config.hdm_decoders else 0)
    if part is None:
        return path + config.memory_latency_cycles
    frames = part.frames(config.density_gbit, config.refresh)
    entering = 3 if part.subchannels == 2 else 2  # frames until the activate
    opening = (entering + frames.activate_to_column) * part.subchannels
    return path + CONTROLLER_CYCLES + opening + frames.read_cycles


def link_cycles(config: DeviceConfig, *, reads: int = 0, writes: int = 0) -> int:
    """Cycles in which host accesses of one kind pass, many at a time."""
    read, write, unit = _cycles_on_link(config.link, config.clock_mhz)
    on_link = -(-(reads * read + writes * write) // unit)
    return max(on_link, -(-(reads + writes) // config.slices))


@cache
def _cycles_on_link(link: Link, clock_mhz: int) -> tuple[int, int, int]:
    """Of a read and of a write, and the number that both are to be divided by."""
    rate = RATES[link]
    read, write = (
        Fraction(slots * clock_mhz * 10**6 / rate.slots_per_second)
        for slots in (rate.flits.drs.value, rate.flits.rwd.value)
    )
    unit = lcm(read.denominator, write.denominator)
    return int(read * unit), int(write * unit), unit


def partial_beats(config: DeviceConfig, queries: int, value_dim: int) -> int:
    """Beats that one channel's unit drains for a pass: denominators, lanes, end."""
    return queries + queries * -(-value_dim // config.finish_lanes) + 1


def passes_of(config: DeviceConfig, group: int) -> list[int]:
    """The query heads of each pass of a job."""
    return [min(config.queries, group - first) for first in range(0, group, config.queries)]


def uniform(
    config: DeviceConfig,
    *,
    jobs: int,
    rows: int,
    group: int,
    value_dim: int,
    row_lines: float,
    query_lines: int,
    page_rows: int = 16,
    result_lines: int | None = None,
    taken: float = 1.0,
) -> Work:
    """The work of equal jobs whose pages are dealt to the slices in turn, one job's after the other's.

    Parameters
    ----------
    config : of the device.
    jobs, rows, group : how many jobs, their rows, and their query heads.
    value_dim : lanes of a result.
    row_lines : lines of a row, K and V; a fraction where rows share lines.
    query_lines : lines of a query.
    page_rows : rows of a page.
    result_lines : lines of a query head's result; float32 lanes and a denominator if not given.
    taken : cycles of a unit per line.
    """
    lines = np.full(config.slices, rows * row_lines / config.slices)
    if jobs < config.slices:  # few jobs do not balance: the busiest slice has a page more than others
        pages = jobs * -(-rows // page_rows)
        own = -(-pages // config.slices) * page_rows
        if pages and (pages - 1) % config.slices == 0:  # it has the last page, which may be short
            own -= pages * page_rows - jobs * rows
        lines[0] = own * row_lines / jobs
    return Work(
        passes=tuple(passes_of(config, group)),
        lines=lines,
        query_lines=query_lines,
        result_lines=lines_of(4 * value_dim) + 1 if result_lines is None else result_lines,
        value_dim=value_dim,
        count=jobs,
        taken=taken,
    )


def unit_cycles(config: DeviceConfig, layout: RowLayout, queries: int) -> float:
    """Cycles of a unit per line of rows.

    More than one where a line has codes for more elements than there are lanes, or several rows that are not
    taken at once, where V lies in the K row, or where the weights of a row take longer.
    """
    steps = layout.k.steps(layout.head_dim, config.lanes)
    steps += layout.value.steps(layout.value_dim, config.lanes)
    weights = min(queries, config.queries // config.weight_pipes)
    pitches = layout.k.pitch_code(layout.head_dim), layout.value.pitch_code(layout.value_dim)
    together = 1 << pitches[0] if config.rows_abreast > 1 and len({*pitches}) == 1 else 1
    scales = (layout.k_scale_pitch_bytes + layout.v_scale_pitch_bytes) / LINE_BYTES
    return (max(steps, weights) / together + scales) * LINE_BYTES / layout.row_bytes


def _lines_of_sums(work: Work) -> int:
    """Lines in which a unit reads the sums of a query."""
    return lines_of(2 * work.value_dim) if work.sum_lines is None else work.sum_lines


def _opening(config: DeviceConfig) -> float:
    """What opening rows adds to a line."""
    part = PARTS.get(config.dram)
    return 0.0 if part is None else OPEN_CYCLES[part.dram] / pair_lines(part)


def pair_lines(part: DramPart) -> int:
    """Lines of a run that lie in one pair of rows of every sub-channel, until the next rows are opened."""
    return 2 * part.row_lines * part.subchannels


def _fabric(config: DeviceConfig, reads: float, writes: float) -> float:
    """Cycles of a slice's memory for its share of queries read and results written."""
    part = PARTS.get(config.dram)
    if part is None:
        return reads + writes
    frames = part.frames(config.density_gbit, config.refresh)
    per_write = max(1.0, frames.column_same_group_write / 2)  # neighbours lie in two bank groups
    lost_frames = frames.read_to_write - 1 + frames.write_to_read_other_group - 1
    turns = writes / (WRITES_PER_TURN * part.subchannels)
    return reads + writes * per_write + turns * lost_frames * part.subchannels


def _refreshed(config: DeviceConfig, busy: float, *, rested: bool) -> float:
    """Cycles in which a memory that refreshes is busy for so many."""
    part = PARTS.get(config.dram)
    if part is None:
        return busy
    best = ceiling(part, config.density_gbit, config.refresh)
    frames = part.frames(config.density_gbit, config.refresh)
    interval = frames.refresh_interval * part.subchannels
    owed = (frames.postponed - 1) * (1 - best) * interval if rested else 0.0
    return max(busy, (busy - owed) / best)


def _units_part(config: DeviceConfig, host_share: float) -> float:
    """Share of a memory's busy time that is a unit's beside so much traffic of the host."""
    part = PARTS.get(config.dram)
    best = 1.0 if part is None else ceiling(part, config.density_gbit, config.refresh)
    return max(1 - config.fabric_share / 16, 1 - HOST_LINE_CYCLES * host_share / best)
