"""Jobs of equal shape worked together: rows from the image, sums by the contract, results as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import OutputForm
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.formats import Format
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import DENOMINATOR
from nearkv_hw.abi.numerics import TOP_NONE
from torch import Tensor

from ..port import Lines
from . import contract
from .memory import LineIndices, Memory
from .walker import FORMATS, Job, Shape, sink_lines

BLOCK_TERMS = 1 << 17
"""Terms that are worked at once: what bounds memory, and fits a core's cache."""
SHORT_ROWS_BITS = 6
"""Jobs of at most 2^SHORT_ROWS_BITS rows are worked together whatever their lengths."""
NO_SINK = 0xFF800000
"""Float32 bits of the sink that adds nothing."""

Work = tuple[Job, LineIndices]
"""A job and its pages' first lines."""


def attend(work: Sequence[Work], memory: Memory) -> list[Lines]:
    """The results of jobs, in their order: lines [group * lines of a result, 64] each."""
    classes: dict[tuple[Shape, int], list[int]] = {}
    for index, (job, _) in enumerate(work):
        length = max(SHORT_ROWS_BITS, (job.rows - 1).bit_length()) if job.rows else 0
        classes.setdefault((job.shape, length), []).append(index)
    results: dict[int, Lines] = {}
    with _one_thread():
        for (shape, _), members in classes.items():
            together = max(1, BLOCK_TERMS // (shape.group * max(shape.head_dim, shape.value_dim)))
            rest = iter(members)
            while some := list(islice(rest, together)):
                lines = _attend_alike(shape, [work[index] for index in some], memory)
                results.update(zip(some, lines, strict=True))
    return [results[index] for index in range(len(work))]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch on the calling thread: on blocks this small, waiting for a second one costs far more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _attend_alike(shape: Shape, work: Sequence[Work], memory: Memory) -> Lines:
    """The results of jobs of one shape, uint8 [jobs, lines, 64]."""
    jobs = [job for job, _ in work]
    queries = _decode(
        memory.lines[_runs([job.query_line for job in jobs], shape.group * shape.k_lines)],
        shape.group,
        FORMATS[shape.query_format],
        shape.head_dim,
    )
    factor = torch.tensor([job.factor for job in jobs], dtype=torch.int64)
    partial = contract.attend(queries, factor, shape.value_dim, _blocks(shape, work, memory))
    if any(job.sink_line is not None for job in jobs):
        partial = contract.add_sinks(partial, _sinks(shape.group, jobs, memory))
    return _result_lines(partial, shape).reshape(len(jobs), -1, LINE_BYTES)


def _blocks(shape: Shape, work: Sequence[Work], memory: Memory) -> Iterator[contract.Block]:
    """The jobs' visible rows, block by block; a job that ends early repeats its last row, invisible."""
    begin = np.array([[job.row_begin] for job, _ in work])
    end = np.array([[job.row_end] for job, _ in work])
    longest = int((end - begin).max())
    if longest == 0:
        return
    page_rows_log2 = np.array([[job.page_rows_log2] for job, _ in work])
    first_page = begin >> page_rows_log2
    pages = np.zeros((len(work), max(len(lines) for _, lines in work)), dtype=np.int64)
    for index, (_, lines) in enumerate(work):
        pages[index, : len(lines)] = lines

    terms = len(work) * shape.group * max(shape.head_dim, shape.value_dim + 1)
    block_rows = max(1, BLOCK_TERMS // terms)
    for start in range(0, longest, block_rows):
        rows = begin + np.arange(start, min(start + block_rows, longest))
        visible = rows < end
        rows = np.minimum(rows, end - 1)
        page = np.take_along_axis(pages, (rows >> page_rows_log2) - first_page, axis=1)
        slot = rows & ((1 << page_rows_log2) - 1)
        k_line = page + slot * shape.k_lines
        v_line = page + (shape.k_lines << page_rows_log2) + slot * shape.v_lines
        yield contract.Block(
            _rows(memory, k_line, shape.k_lines, FORMATS[shape.k_format], shape.head_dim),
            _rows(memory, v_line, shape.v_lines, FORMATS[shape.v_format], shape.value_dim),
            torch.from_numpy(visible),
        )


def _rows(memory: Memory, first_lines: LineIndices, row_lines: int, form: Format, dim: int) -> Tensor:
    """Rows of `row_lines` lines, float64 [jobs, rows, dim]."""
    lines = memory.lines[first_lines[..., None] + np.arange(row_lines)]
    return _decode(lines, first_lines.shape[1], form, dim)


def _decode(lines: Lines, rows: int, form: Format, dim: int) -> Tensor:
    """Lines [jobs, ..., 64] that hold `rows` rows of a job as float64 [jobs, rows, dim]."""
    codes = lines.reshape(len(lines), rows, -1).view("<u2")[..., :dim]
    return contract.decode_table(form)[torch.from_numpy(codes.astype(np.int64))]


def _sinks(group: int, jobs: Sequence[Job], memory: Memory) -> Tensor:
    """Float32 bits of the jobs' sinks, int64 [jobs, group]."""
    sinks = np.full((len(jobs), group), NO_SINK, dtype=np.int64)
    for index, job in enumerate(jobs):
        if job.sink_line is not None:
            lines = memory.lines[job.sink_line : job.sink_line + sink_lines(group)]
            sinks[index] = lines.view("<u4").reshape(-1)[:group]
    return torch.from_numpy(sinks)


def _runs(first_lines: Sequence[int], lines: int) -> LineIndices:
    """Runs of `lines` lines, [runs, lines]."""
    return np.array(first_lines, dtype=np.int64)[:, None] + np.arange(lines)


def _result_lines(partial: contract.Partial, shape: Shape) -> Lines:
    """Results as they lie in memory, uint8 [jobs, group, bytes of a query head's result]."""
    planes: list[npt.NDArray[np.generic]]
    query_nan = partial.query_nan.numpy()

    def kept(plane: Tensor, empty: int = 0) -> npt.NDArray[np.int64]:
        """A plane of sums; those of a NaN query, which have no meaning, as if they were empty."""
        nan = query_nan.reshape(*query_nan.shape, *[1] * (plane.dim() - query_nan.ndim))
        return np.where(nan, empty, plane.numpy())

    if shape.form is OutputForm.PARTIAL:
        sums = partial.numerators
        planes = [
            kept(sums.top, TOP_NONE).astype("<i4"),
            kept(sums.high).astype("<i8", copy=False),
            kept(sums.low).astype("<i8", copy=False),
            kept(partial.lane_flags).astype("u1"),
        ]
    else:
        codes = contract.finish(partial, shape.form).numpy()
        planes = [codes.astype(f"<u{shape.form.lane_bytes}")]
    layout = shape.result
    out = np.zeros((*partial.query_nan.shape, layout.lines * LINE_BYTES), dtype=np.uint8)
    offset = 0
    for plane, plane_lines in zip(planes, layout.planes, strict=True):
        data = np.ascontiguousarray(plane).view(np.uint8)
        out[..., offset : offset + data.shape[-1]] = data
        offset += plane_lines * LINE_BYTES
    denominator = partial.denominator
    words = _pack_words(
        DENOMINATOR,
        top=kept(denominator.top, TOP_NONE),
        flags=query_nan.astype(np.int64),
        high=kept(denominator.high),
        low=kept(denominator.low),
    )
    out[..., offset:] = words.view(np.uint8)
    return out


def _pack_words(layout: Layout, **values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`layout.pack` over arrays: uint64 words [..., words]; no field may cross a word."""
    shape = next(iter(values.values())).shape
    words = np.zeros((*shape, layout.width // 64), dtype=np.uint64)
    fields: Mapping[str, npt.NDArray[np.int64]] = values
    for name, value in fields.items():
        word, shift = divmod(layout.offset(name), 64)
        mask = np.uint64((1 << layout[name].width) - 1)
        words[..., word] |= (value.astype(np.uint64) & mask) << np.uint64(shift)
    return words
