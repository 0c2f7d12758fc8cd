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
from nearkv_hw.abi.formats import LUT_FORMAT, Format
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import DENOMINATOR
from nearkv_hw.abi.numerics import TOP_NONE
from nearkv_hw.abi.rows import Stored
from torch import Tensor

from ..port import Lines
from . import contract
from .finishing import finish
from .job import FORMATS, Job, Shape
from .lists import distances, sees
from .memory import LineIndices, Memory
from .walker import list_lines

BLOCK_TERMS = 1 << 17
"""Terms that are worked at once: what bounds memory, and fits a core's cache."""
SHORT_ROWS_BITS = 6
"""Jobs of at most 2^SHORT_ROWS_BITS rows are worked together whatever their lengths."""
NO_SINK = 0xFF800000
"""Float32 bits of the sink that adds nothing."""

Work = tuple[Job, LineIndices]
"""A job and its pages' first lines."""


def attend(work: Sequence[Work], memory: Memory) -> list[Lines]:
    """The results of jobs, in their order: lines [queries * lines of a result, 64] each."""
    classes: dict[tuple[Shape, int, int], list[int]] = {}
    for index, (job, _) in enumerate(work):
        length = max(SHORT_ROWS_BITS, (job.rows - 1).bit_length()) if job.rows else 0
        alone = 0 if job.seen is None else index + 1
        classes.setdefault((job.shape, length, alone), []).append(index)
    results: dict[int, Lines] = {}
    with one_thread():
        for (shape, _, _), members in classes.items():
            together = max(1, BLOCK_TERMS // (shape.queries * max(shape.head_dim, shape.value_dim)))
            rest = iter(members)
            while some := list(islice(rest, together)):
                lines = _attend_alike(shape, [work[index] for index in some], memory)
                results.update(zip(some, lines, strict=True))
    return [results[index] for index in range(len(work))]


@contextmanager
def one_thread() -> Iterator[None]:
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
    factor = torch.tensor([job.factor for job in jobs], dtype=torch.int64)
    blocks = _blocks(shape, work, memory)
    partial = contract.attend(
        queries_of(jobs, memory), factor, shape.value_dim, blocks, softcap=shape.softcap
    )
    if any(job.sink_line is not None for job in jobs):
        sinks = _sinks(shape.group, jobs, memory).repeat(1, shape.query_rows)
        partial = contract.add_sinks(partial, sinks)
    return _result_lines(partial, shape).reshape(len(jobs), -1, LINE_BYTES)


def queries_of(jobs: Sequence[Job], memory: Memory) -> Tensor:
    """The queries of jobs of one shape, float64 [jobs, queries, head_dim]."""
    shape = jobs[0].shape
    lines = memory.lines[_runs([job.query_line for job in jobs], shape.queries * shape.query_lines)]
    codes = lines.reshape(len(jobs), shape.queries, -1).view("<u2")[..., : shape.head_dim]
    return contract.decode_table(FORMATS[shape.query_format])[torch.from_numpy(codes.astype(np.int64))]


def _blocks(shape: Shape, work: Sequence[Work], memory: Memory) -> Iterator[contract.Block]:
    """The jobs' visible rows, block by block; a job that ends early repeats its last row, invisible."""
    counts = np.array([[int((job.runs[:, 1] - job.runs[:, 0]).sum())] for job, _ in work])
    longest = int(counts.max())
    if longest == 0:
        return
    first_page = np.array([[job.first_page] for job, _ in work])
    pages = np.zeros((len(work), max(len(lines) for _, lines in work)), dtype=np.int64)
    for index, (_, lines) in enumerate(work):
        pages[index, : len(lines)] = lines
    log2 = np.array([[job.page_rows_log2] for job, _ in work])
    reader = _Rows(shape, log2, memory)
    seen, asked = work[0][0].seen, work[0][0].asked
    begin = np.array([[job.row_begin] for job, _ in work])
    own = None if seen is None else np.concatenate([np.arange(b, e) for b, e in seen.runs])

    terms = len(work) * shape.queries * max(shape.head_dim, shape.value_dim + 1)
    block_rows = max(1, BLOCK_TERMS // terms)
    for start in range(0, longest, block_rows):
        some = np.arange(start, min(start + block_rows, longest))
        visible = torch.from_numpy(some < counts)[:, None]
        bias = None
        if own is None:
            rows = np.minimum(begin + some, begin + np.maximum(counts, 1) - 1)
        else:
            assert seen is not None
            assert asked is not None
            rows = own[some][None]
            mask = torch.from_numpy(sees(seen, asked, own[some]))
            visible = mask.repeat_interleave(shape.group, dim=0)[None]
            if seen.slopes is not None:
                far = torch.from_numpy(distances(seen, own[some]))
                slopes = torch.from_numpy(seen.slopes)
                bias = contract.alibi(slopes[None, :, None], far[:, None]).flatten(0, 1)[None]
        page = np.take_along_axis(pages, (rows >> log2) - first_page, axis=1)
        slot = rows & ((1 << log2) - 1)
        k, v = reader.rows(page, slot, None if seen is None else seen.codebooks)
        yield contract.Block(k, v, visible, bias)


class _Rows:
    """Reads rows of pages.

    Parameters
    ----------
    shape : of the jobs.
    page_rows_log2 : of each job, [jobs, 1].
    """

    def __init__(self, shape: Shape, page_rows_log2: LineIndices, memory: Memory) -> None:
        self._shape = shape
        self._memory = memory
        layouts = [shape.layout(log2) for log2 in page_rows_log2[:, 0].tolist()]
        self._layout = layouts[0]
        self._areas = np.array([layout.areas for layout in layouts], dtype=np.int64)

    def rows(
        self, page: LineIndices, slot: LineIndices, codebooks: npt.NDArray[np.uint16] | None
    ) -> tuple[Tensor, Tensor]:
        """K and V, float64 [jobs, rows, dim], of rows in slots of pages [jobs, rows]."""
        shape, layout = self._shape, self._layout
        books = (None, None) if codebooks is None else (codebooks[0], codebooks[1])
        k = self._part(page, slot, 0, layout.k, shape.head_dim, books[0])
        if shape.latent:
            return k, k[..., : shape.value_dim]
        return k, self._part(page, slot, 2, layout.value, shape.value_dim, books[1])

    def _part(
        self,
        page: LineIndices,
        slot: LineIndices,
        area: int,
        stored: Stored,
        dim: int,
        codebook: npt.NDArray[np.uint16] | None,
    ) -> Tensor:
        book = codebook if stored.element.codebook else None
        found = _decoded(self._bytes(page, slot, area), stored.element, dim, book)
        if stored.scale is None:
            return found
        scales = _decoded(self._bytes(page, slot, area + 1), stored.scale, stored.blocks(dim), None)
        return found * scales.repeat_interleave(stored.block or dim, dim=-1)[..., :dim]

    def _bytes(self, page: LineIndices, slot: LineIndices, area: int) -> Lines:
        """The bytes of rows in an area, [jobs, rows, pitch]."""
        pitch = self._layout.pitches[area]
        at = self._areas[:, area, None] + slot * pitch
        first = page + at // LINE_BYTES
        if pitch % LINE_BYTES == 0:
            whole: Lines = self._memory.lines[first[..., None] + np.arange(pitch // LINE_BYTES)]
            return whole.reshape(*slot.shape, pitch)
        lines = self._memory.lines[first].reshape(*slot.shape, LINE_BYTES // pitch, pitch)
        which = (at % LINE_BYTES // pitch)[..., None, None]
        found: Lines = np.take_along_axis(lines, which, axis=2)[:, :, 0]
        return found


def _decoded(data: Lines, form: Format, count: int, codebook: npt.NDArray[np.uint16] | None) -> Tensor:
    """The first `count` codes of bytes [jobs, rows, bytes] as float64."""
    if form.bits == 16:
        codes = np.ascontiguousarray(data).view("<u2")
    elif form.bits == 4:
        codes = np.stack([data & 0xF, data >> 4], axis=-1).reshape(*data.shape[:2], -1)
    else:
        codes = data
    index = torch.from_numpy(codes[..., :count].astype(np.int64))
    if codebook is None:
        return contract.decode_table(form)[index]
    entries = torch.from_numpy(codebook.astype(np.int64))
    return contract.decode_table(LUT_FORMAT)[entries][index]


def _sinks(group: int, jobs: Sequence[Job], memory: Memory) -> Tensor:
    """Float32 bits of the jobs' sinks, int64 [jobs, group]."""
    sinks = np.full((len(jobs), group), NO_SINK, dtype=np.int64)
    for index, job in enumerate(jobs):
        if job.sink_line is not None:
            lines = memory.lines[job.sink_line : job.sink_line + list_lines(group)]
            sinks[index] = lines.view("<u4").reshape(-1)[:group]
    return torch.from_numpy(sinks)


def _runs(first_lines: Sequence[int], lines: int) -> LineIndices:
    """Runs of `lines` lines, [runs, lines]."""
    return np.array(first_lines, dtype=np.int64)[:, None] + np.arange(lines)


def _result_lines(partial: contract.Partial, shape: Shape) -> Lines:
    """Results as they lie in memory, uint8 [jobs, queries, bytes of a query's result]."""
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
        codes = finish(partial, shape.form, shape.output_scale).numpy()
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
