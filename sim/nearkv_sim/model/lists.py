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


def see(job: Job, asked: Asked, memory: Memory) -> Seen:
    """Read the lists of a job.

    Raises
    ------
    Refusal : for lines that the tenant does not own or that are lost, and for what a list may not hold.
    """
    shape = job.shape
    rows = shape.query_rows

    def read(line: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        lines = line + np.arange(lines_of(size_bytes))
        data, allowed = memory.read(lines, job.tenant)
        if not allowed.all():
            raise Refusal(Status.DENIED)
        if memory.poisoned(lines).any():
            raise Refusal(Status.POISON)
        return data.reshape(-1)[:size_bytes]

    pairs = np.array([[job.row_begin, job.row_end]], dtype=np.int64)
    if asked.ranges >= 0:
        raw = read(asked.ranges, asked.range_count * _RANGE_BYTES)
        pairs = raw.view("<u4").reshape(-1, 2).astype(np.int64)
    positions = asked.first_position + np.arange(rows, dtype=np.int64)
    own_rows, tree, slopes, codebooks = _BEYOND, None, None, None
    if asked.tree >= 0:
        position_bytes = lines_of(rows * WORD_BYTES) * LINE_BYTES
        raw = read(asked.tree, position_bytes + rows * TREE_ROW_BYTES)
        positions = raw[: rows * WORD_BYTES].view("<u4").astype(np.int64)
        tree = raw[position_bytes:].reshape(rows, TREE_ROW_BYTES)
        own_rows = job.row_end - rows
    if asked.slopes >= 0:
        slopes = read(asked.slopes, shape.group * WORD_BYTES).view("<u4").astype(np.int64)
    if asked.codebooks >= 0:
        codebooks = read(asked.codebooks, 2 * 2 * LUT_ENTRIES).view("<u2").reshape(2, LUT_ENTRIES)
    _check(job, asked, pairs, positions, slopes)
    runs = pairs[pairs[:, 0] < pairs[:, 1]]
    found = Seen(runs, positions, own_rows, tree, slopes, codebooks)
    return Seen(near(runs, found, asked), positions, own_rows, tree, slopes, codebooks)


def _check(
    job: Job,
    asked: Asked,
    pairs: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    slopes: npt.NDArray[np.int64] | None,
) -> None:
    if asked.ranges >= 0:
        flat = pairs.reshape(-1)
        empty = (pairs[:, 0] >= pairs[:, 1]).any() or (pairs[1:, 0] < pairs[:-1, 1]).any()
        if len(flat) and (empty or flat[0] < job.row_begin or flat[-1] > job.row_end):
            raise Refusal(Status.BAD_LIST)
    if asked.tree >= 0 and (positions >= 1 << POSITION_BITS).any():
        raise Refusal(Status.BAD_LIST)
    if slopes is not None and (slopes >> 23 & 0xFF == 0xFF).any():
        raise Refusal(Status.BAD_LIST)


def near(runs: npt.NDArray[np.int64], seen: Seen, asked: Asked) -> npt.NDArray[np.int64]:
    """Of runs of rows, what some query row may see by causality and window; rows of a tree all stay."""
    if not asked.causal:
        return runs
    last = int(seen.positions.max()) + 1
    parts = [(0, last)]
    if asked.window:
        first = int(seen.positions.min()) - asked.window + 1
        kept = min(asked.kept, last)
        parts = [(0, kept), (max(first, kept), last)] if first > kept else [(0, last)]
    if seen.own_rows < _BEYOND:
        parts = [(begin, min(end, seen.own_rows)) for begin, end in parts] + [(seen.own_rows, _BEYOND)]
    cut = [np.stack([runs[:, 0].clip(b, e), runs[:, 1].clip(b, e)], axis=1) for b, e in parts if b < e]
    if not cut:
        return runs[:0]
    found = np.concatenate(cut)
    found = found[found[:, 0] < found[:, 1]]
    found = found[np.argsort(found[:, 0], kind="stable")]
    # runs that touch are one: a part ends where the next begins
    starts = np.ones(len(found), np.bool_)
    starts[1:] = found[1:, 0] != found[:-1, 1]
    ends = np.append(starts[1:], np.True_)[: len(found)]
    joined: npt.NDArray[np.int64] = np.stack([found[starts, 0], found[ends, 1]], axis=1)
    return joined


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
