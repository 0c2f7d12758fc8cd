"""From a good descriptor to the pages of a job: the page table, and what else the job reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import TREE_ROW_BYTES, WORD_BYTES
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.memory import (
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    table_entry_lines,
)
from nearkv_hw.abi.numerics import MAX_ROWS

from .job import Job, Refusal
from .lists import bad_words, position_lines
from .memory import LineIndices, Mask, Memory

_MASKS_PER_LINE = LINE_BYTES // TREE_ROW_BYTES
_EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
_LINE_OFFSET = np.uint64(ENTRY.offset("line"))
_LINE_MASK = np.uint64((1 << ENTRY["line"].width) - 1)
ENTRY_FIXED_BITS = 1 | ENTRY.reserved_mask()
"""Of a page-table entry: 1 in a good one, and nothing but that."""


def list_lines(group: int) -> int:
    """Lines of a list with a float32 for each query head of a group."""
    return lines_of(group * WORD_BYTES)


def admit(job: Job, memory: Memory) -> int:
    """Check the page table's header, and the row range against it; the entries that a head has room for."""
    line, allowed = memory.read(np.array([job.table_line]), job.tenant)
    if not allowed.all():
        raise Refusal(Status.DENIED)
    if memory.poisoned(np.array([job.table_line])).any():
        raise Refusal(Status.POISON)
    table = TABLE.unpack(line.tobytes())
    if table["magic"] != TABLE_MAGIC or table["version"] != LAYOUT_VERSION or job.kv_head >= table["heads"]:
        raise Refusal(Status.BAD_TABLE)
    room = min(table["committed_rows"], table["entries"] << job.page_rows_log2, MAX_ROWS)
    if not job.row_begin <= job.row_end <= room:
        raise Refusal(Status.BAD_RANGE)
    if job.asked is not None and job.asked.tree >= 0 and job.shape.query_rows > job.row_end:
        raise Refusal(Status.BAD_RANGE)
    return table["entries"]


def read_queries(job: Job, passes: list[int], memory: Memory) -> list[Status]:
    """For each pass, of so many queries, how the reads of its queries and of their lists end."""
    found = []
    first = 0
    bad = []
    if job.asked is not None and job.seen is not None:
        bad = bad_words(job.seen, job.asked)
    for queries in passes:
        lines = _lines_of_queries(job, first, queries)
        allowed = memory.check(lines, job.tenant)
        lost = np.zeros(lines.shape, np.bool_)
        lost[allowed] = memory.poisoned(lines[allowed])
        wrong = np.isin(lines, bad)
        faults = np.flatnonzero(~allowed | lost | wrong)
        if not len(faults):
            found.append(Status.OK)
        elif not allowed[faults[0]]:
            found.append(Status.DENIED)
        else:
            found.append(Status.POISON if lost[faults[0]] else Status.BAD_LIST)
        first += queries
    return found


def _lines_of_queries(job: Job, first: int, queries: int) -> npt.NDArray[np.int64]:
    """The lines of a pass's queries and of their lists, in the order in which they are read."""
    size, group = job.shape.query_lines, job.shape.group
    parts = [(job.query_line + size * first, size * queries)]
    if (asked := job.asked) is not None:
        parts += [(asked.codebooks, 1)] if asked.codebooks >= 0 else []
        parts += [(asked.slopes, list_lines(group))] if asked.slopes >= 0 else []
        if asked.tree >= 0:
            rows = first // group // _MASKS_PER_LINE, (first + queries - 1) // group // _MASKS_PER_LINE
            positions = position_lines(job.shape.query_rows)
            parts += [(asked.tree, positions), (asked.tree + positions + rows[0], rows[1] - rows[0] + 1)]
    parts += [] if job.sink_line is None else [(job.sink_line, list_lines(group))]
    return np.concatenate([line + np.arange(count) for line, count in parts])


@dataclass(frozen=True)
class Walk:
    """The pages of a job's row range, in order.

    Members
    -------
    pages : each page's first line, up to the first that cannot be read or is not good.
    fault : why the walk ended early, if it did.
    """

    pages: LineIndices
    fault: Refusal | None = None


def walk(job: Job, room: int, memory: Memory, needed: npt.NDArray[np.bool_] | None = None) -> Walk:
    """Read a job's page-table entries; a head has room for `room` of them.

    Of the pages of its row range only those that are `needed` have to be good; all if not given.
    """
    if job.rows == 0:
        return Walk(np.empty(0, dtype=np.int64))
    last_page = job.row_end - 1 >> job.page_rows_log2
    lines = np.arange(job.first_page // ENTRIES_PER_LINE, last_page // ENTRIES_PER_LINE + 1)
    begin = job.first_page % ENTRIES_PER_LINE
    these = slice(begin, begin + last_page - job.first_page + 1)
    marked = np.zeros((len(lines), ENTRIES_PER_LINE), np.bool_)
    marked.reshape(-1)[these] = True if needed is None else needed
    wanted: Mask = np.logical_or.reduce(marked, axis=1)
    lines += job.table_line + 1 + job.kv_head * table_entry_lines(room)
    data = np.zeros((len(lines), LINE_BYTES), np.uint8)
    allowed = np.ones(lines.shape, np.bool_)
    data[wanted], allowed[wanted] = memory.read(lines[wanted], job.tenant)
    entries = data.view("<u8").reshape(-1)[these]
    pages = (entries >> _LINE_OFFSET & _LINE_MASK).astype(np.int64)
    good = entries & np.uint64(ENTRY_FIXED_BITS) == 1
    good &= (pages % _EXTENT_LINES + job.layout.page_lines <= _EXTENT_LINES) & (pages < len(memory.lines))
    if good.all() and allowed.all() and memory.intact:
        return Walk(pages)
    readable = allowed.repeat(ENTRIES_PER_LINE)[these]
    lost = np.zeros(lines.shape, np.bool_)
    lost[wanted & allowed] = memory.poisoned(lines[wanted & allowed])
    spoilt = lost.repeat(ENTRIES_PER_LINE)[these]
    fine = good & readable & ~spoilt
    if needed is not None:
        fine[~needed] = True
        pages = np.where(needed, pages, 0)
    if fine.all():
        return Walk(pages)
    first = int(np.argmin(fine))
    if not readable[first] or spoilt[first]:
        return Walk(pages[:first], Refusal(Status.POISON if spoilt[first] else Status.DENIED))
    return Walk(pages[:first], Refusal(Status.BAD_PAGE, job.first_page + first))
