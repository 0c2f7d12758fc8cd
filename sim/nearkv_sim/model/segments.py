"""Rows of a job page by page: what is read of each, in lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.lines import LINE_BYTES

from .job import Job
from .memory import LineIndices, Mask, Memory


@dataclass(frozen=True)
class Segments:
    """Runs of rows, each within a page, rising.

    Members
    -------
    pages : each one's page, numbered in the context.
    begin, end : its rows, numbered in the page.
    """

    pages: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def where(self, mask: Mask) -> Segments:
        """Some of them."""
        return Segments(self.pages[mask], self.begin[mask], self.end[mask])

    def runs(self, page_rows_log2: int) -> npt.NDArray[np.int64]:
        """The same rows, numbered in the context: int64 [n, 2]."""
        starts = self.pages << page_rows_log2
        found: npt.NDArray[np.int64] = np.stack([starts + self.begin, starts + self.end], axis=1)
        return found


def segments(job: Job) -> Segments:
    """The rows that a job reads."""
    log2, runs = job.page_rows_log2, job.runs
    first, last = runs[:, 0] >> log2, runs[:, 1] - 1 >> log2
    counts = last - first + 1
    of_run = np.repeat(np.arange(len(runs)), counts)
    before = np.cumsum(counts) - counts
    pages = np.arange(len(of_run)) - before[of_run] + first[of_run]
    starts = pages << log2
    begin = np.maximum(runs[of_run, 0], starts) - starts
    end = np.minimum(runs[of_run, 1], starts + (1 << log2)) - starts
    return Segments(pages, begin, end)


def lines_of(job: Job, parts: Segments) -> npt.NDArray[np.int64]:
    """The lines that hold codes and scales of each segment."""
    found = np.zeros(len(parts.pages), np.int64)
    for pitch in job.layout.pitches:
        if pitch:
            found += -(-parts.end * pitch // LINE_BYTES) - parts.begin * pitch // LINE_BYTES
    return found


def spoilt(job: Job, parts: Segments, first_lines: LineIndices, reads: int, memory: Memory) -> Mask:
    """Which segments, of pages with these first lines, have a line that cannot be corrected."""
    lost = np.zeros(len(parts.pages), np.bool_)
    if memory.intact:
        return lost
    layout = job.layout
    for area, pitch in zip(layout.areas, layout.pitches, strict=True):
        if pitch:
            base = first_lines + area // LINE_BYTES
            begin, end = parts.begin * pitch // LINE_BYTES, -(-parts.end * pitch // LINE_BYTES)
            lost |= memory.spoilt(base + begin, base + end, reads)
    return lost
