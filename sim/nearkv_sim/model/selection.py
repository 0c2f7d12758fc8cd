"""The pages that a job with a selection attends to (docs/numerics.md, section 13)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import Status
from nearkv_hw.abi.descriptor import WORD_BYTES
from nearkv_hw.abi.formats import BF16
from nearkv_hw.abi.lines import LINE_BYTES, lines_of

from . import contract
from .attention import one_thread, queries_of
from .job import FORMATS, Asked, Job, Refusal, Seen
from .lists import sees
from .memory import LineIndices, Memory
from .segments import Segments, segments


def candidates(job: Job, asked: Asked, seen: Seen) -> npt.NDArray[np.int64]:
    """The pages with a row that some query row sees, rising."""
    rows = np.concatenate([np.arange(begin, end) for begin, end in seen.runs] or [np.empty(0, np.int64)])
    found: npt.NDArray[np.int64] = np.unique(rows[sees(seen, asked, rows).any(axis=0)] >> job.page_rows_log2)
    return found


def summary_fault(
    job: Job, numbers: npt.NDArray[np.int64], pages: LineIndices, memory: Memory
) -> Refusal | None:
    """The first of these pages that the tenant does not own, or whose summary is lost.

    Parameters
    ----------
    pages : first lines of the pages from the job's first one on.
    """
    first = pages[numbers - job.first_page] + job.layout.summary_offset // LINE_BYTES
    allowed = memory.allowed(first, job.tenant)
    lost = memory.spoilt(first, first + 2 * job.layout.summary_lines, 1) if not memory.intact else ~allowed
    faults = np.flatnonzero(~allowed | lost)
    if not len(faults):
        return None
    status = Status.POISON if allowed[faults[0]] else Status.PAGE_DENIED
    return Refusal(status, int(numbers[faults[0]]))


def select(
    job: Job, asked: Asked, seen: Seen, numbers: npt.NDArray[np.int64], pages: LineIndices, memory: Memory
) -> tuple[Job, npt.NDArray[np.int64]]:
    """The job with the rows of selected pages alone, and their numbers.

    Parameters
    ----------
    numbers : the candidates, whose pages and summaries are good.
    pages : first lines of the pages from the job's first one on.
    """
    chosen = numbers
    if len(numbers) > asked.select_pages:
        first = pages[numbers - job.first_page] + job.layout.summary_offset // LINE_BYTES
        bounds = _bounds(job, first, memory)
        order = np.lexsort((numbers[:-1], -bounds[:-1]))[: asked.select_pages - 1]
        chosen = np.append(np.sort(numbers[:-1][order]), numbers[-1])
    parts: Segments = segments(job)
    runs = parts.where(np.isin(parts.pages, chosen)).runs(job.page_rows_log2)
    return replace(job, seen=replace(seen, runs=runs)), chosen


def selected_lines(chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """What the device writes of a selection: how many pages, and their numbers; lines [n, 64]."""
    words = np.zeros(lines_of((1 + len(chosen)) * WORD_BYTES) * LINE_BYTES // WORD_BYTES, "<u4")
    words[0] = len(chosen)
    words[1 : 1 + len(chosen)] = chosen
    return words.view(np.uint8).reshape(-1, LINE_BYTES)


def _bounds(job: Job, first: LineIndices, memory: Memory) -> npt.NDArray[np.int64]:
    """The largest bound of each page whose summary begins at a line."""
    shape, lines = job.shape, job.layout.summary_lines
    form = FORMATS.get(shape.k_format, BF16)
    data = memory.lines[first[:, None] + np.arange(2 * lines)].reshape(len(first), 2, -1)
    codes = torch.from_numpy(data.view("<u2")[..., : shape.head_dim].astype(np.int64))
    with one_thread():
        rows = contract.decode_table(form)[codes]
        queries = queries_of([job], memory)[0]
        found = contract.bounds(queries, job.factor, rows[:, 0], rows[:, 1])
    bounds: npt.NDArray[np.int64] = found.numpy()
    return bounds
