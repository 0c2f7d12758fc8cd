"""What the extension of a job names in memory: row ranges, trees, slopes and codebooks, read and checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import Status
from nearkv_hw.abi.descriptor import TREE_ROW_BYTES, WORD_BYTES
from nearkv_hw.abi.formats import LUT_ENTRIES
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.numerics import POSITION_BITS

from .job import Asked, Job, Refusal, Seen
from .memory import Memory

_RANGE_BYTES = 8
_BEYOND = 1 << 40
"""A row that no context has."""


def see(job: Job, asked: Asked, memory: Memory) -> tuple[Seen, Refusal | None]:
    """Read the lists of a job; the second is what ended its list of ranges early.

    Lists that belong to queries are read here whatever becomes of them; `walker.read_queries` judges them.
    """
    shape = job.shape
    rows = shape.query_rows

    def read(line: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        lines = line + np.arange(lines_of(size_bytes))
        data = np.zeros((len(lines), LINE_BYTES), np.uint8)
        allowed = memory.allowed(lines, job.tenant)
        data[allowed] = memory.lines[lines[allowed]]
        return data.reshape(-1)[:size_bytes]

    pairs, fault = np.array([[job.row_begin, job.row_end]][: job.rows], np.int64).reshape(-1, 2), None
    if asked.ranges >= 0:
        pairs, fault = _ranges(job, asked, memory)
    positions = asked.first_position + np.arange(rows, dtype=np.int64)
    own_rows, tree, slopes, codebooks = _BEYOND, None, None, None
    if asked.tree >= 0:
        raw = read(asked.tree, position_lines(rows) * LINE_BYTES + rows * TREE_ROW_BYTES)
        positions = raw[: rows * WORD_BYTES].view("<u4").astype(np.int64)
        tree = raw[position_lines(rows) * LINE_BYTES :].reshape(rows, TREE_ROW_BYTES)
        own_rows = job.row_end - rows
    if asked.slopes >= 0:
        slopes = read(asked.slopes, shape.group * WORD_BYTES).view("<u4").astype(np.int64)
    if asked.codebooks >= 0:
        codebooks = read(asked.codebooks, 2 * 2 * LUT_ENTRIES).view("<u2").reshape(2, LUT_ENTRIES)
    runs = pairs if asked.tree >= 0 else near(pairs, positions, asked)
    return Seen(runs, positions, own_rows, tree, slopes, codebooks), fault


def position_lines(query_rows: int) -> int:
    """Lines of the positions of a tree."""
    return lines_of(query_rows * WORD_BYTES)


def bad_words(seen: Seen, asked: Asked) -> list[int]:
    """The lines with a slope that is no number or a position that is too large."""
    found = []
    for line, words in (
        (asked.slopes, None if seen.slopes is None else seen.slopes >> 23 & 0xFF == 0xFF),
        (asked.tree, None if seen.tree is None else seen.positions >= 1 << POSITION_BITS),
    ):
        if words is not None:
            found += (line + np.unique(np.flatnonzero(words) // (LINE_BYTES // WORD_BYTES))).tolist()
    return found


def _ranges(job: Job, asked: Asked, memory: Memory) -> tuple[npt.NDArray[np.int64], Refusal | None]:
    """The ranges before the first that is at fault, and that fault."""
    lines = asked.ranges + np.arange(lines_of(asked.range_count * _RANGE_BYTES))
    data, allowed = memory.read(lines, job.tenant)
    lost = np.zeros(lines.shape, np.bool_)
    lost[allowed] = memory.poisoned(lines[allowed])
    pairs = data.reshape(-1)[: asked.range_count * _RANGE_BYTES].view("<u4").reshape(-1, 2).astype(np.int64)
    before = np.concatenate([[job.row_begin], pairs[:-1, 1]])[: len(pairs)]
    bad = (pairs[:, 0] < before) | (pairs[:, 0] >= pairs[:, 1]) | (pairs[:, 1] > job.row_end)
    of_range = np.arange(len(pairs)) * _RANGE_BYTES // LINE_BYTES
    faults = np.flatnonzero(bad | ~allowed[of_range] | lost[of_range])
    if not len(faults):
        return pairs, None
    first = int(faults[0])
    line = of_range[first]
    status = Status.BAD_LIST
    if not allowed[line]:
        status = Status.DENIED
    elif lost[line]:
        status = Status.POISON
    return pairs[:first], Refusal(status)


def near(
    runs: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], asked: Asked
) -> npt.NDArray[np.int64]:
    """Of runs of rows, what some query row may see by causality and window."""
    if not asked.causal:
        return runs
    last = int(positions[-1]) + 1
    parts = [(0, last)]
    first = int(positions[0]) - asked.window + 1
    if asked.window and first > asked.kept:
        parts = [(0, min(asked.kept, last)), (first, last)]
    cut = np.stack(
        [np.stack([runs[:, 0].clip(min=b), runs[:, 1].clip(max=e)], axis=1) for b, e in parts], axis=1
    ).reshape(-1, 2)
    found: npt.NDArray[np.int64] = cut[cut[:, 0] < cut[:, 1]]
    return found


def sees(seen: Seen, asked: Asked, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which query row sees which of these rows, of its runs: bool [query_rows, rows]."""
    count = len(seen.positions)
    query = seen.positions[:, None]
    held = rows
    if seen.tree is not None:
        own = rows >= seen.own_rows
        index = np.where(own, rows - seen.own_rows, 0)
        held = np.where(own, seen.positions[index], rows)
    found = np.ones((count, len(rows)), np.bool_)
    if asked.causal:
        found = held <= query
        if asked.window:
            found &= (held > query - asked.window) | (rows < asked.kept)
    if seen.tree is not None:
        bits = seen.tree[:, index >> 3] >> (index & 7).astype(np.uint8) & 1
        found &= ~own | bits.astype(np.bool_)
    return found


def distances(seen: Seen, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of rows less those of the query rows, [query_rows, rows]."""
    held = rows
    if seen.tree is not None:
        own = rows >= seen.own_rows
        held = np.where(own, seen.positions[np.where(own, rows - seen.own_rows, 0)], rows)
    return held - seen.positions[:, None]
