"""Random attention jobs in a memory image, for kernels that are held against each other and the reference."""

import random
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from nearkv.reference import Partial, State, decode_attention, finish, merge, score_factor
from nearkv.results import Finished, partial_of
from nearkv_hw.abi import LINE_BYTES, OutputForm, configure
from nearkv_hw.abi.formats import BF16, FP16, Format
from nearkv_hw.abi.lines import lines_of
from nearkv_hw.abi.memory import DENOMINATOR, PARTIAL_LANE_BYTES
from nearkv_hw.abi.numerics import TOP_NONE
from nearkv_sim.model.counters import Counters
from nearkv_sim.model.job import Job, Shape
from nearkv_sim.model.memory import Memory

REGIMES = ("plain", "plain", "anything", "tiny", "huge", "alike", "steps")
"""How exponents are drawn; with "steps" they differ from row to row by more than within a row."""
SCALES = (0.05, 0.3, -0.4, 1.0, 30.0, 1e-3, 1e-6, 1e-20, -1e-38, 1e-42, 2e38, 0.0)
DIMS = (1, 7, 8, 9, 16, 31, 32, 33, 40, 64, 80, 128, 200, 256)
SPECIAL_SINKS = (0x7FC00000, 0x7F800000, 0xFF800000, 0x3F333333, 0xF149F2CA, 0, 1)
OUTPUTS = {OutputForm.FP32: torch.float32, OutputForm.BF16: torch.bfloat16, OutputForm.FP16: torch.float16}
DTYPES = {BF16.name: torch.bfloat16, FP16.name: torch.float16}


def codes(rng: np.random.Generator, rows: int, dim: int, form: Format, regime: str, specials: float):
    """Codes [rows, dim]: exponents as the regime says, some zeros, and specials as often as told."""
    top = (1 << form.exponent_bits) - 1
    middle = top // 2
    low, high = {
        "plain": (middle - 7, middle + 2),
        "anything": (0, top),
        "tiny": (0, 2),
        "huge": (top - 2, top),
        "alike": (middle, middle + 1),
        "steps": (0, 4),
    }[regime]
    field = rng.integers(low, high, (rows, dim))
    if regime == "steps":
        field = np.minimum(field + rng.choice(np.linspace(0, top - 4, 9).astype(int), (rows, 1)), top - 1)
    fraction = rng.integers(0, 1 << form.fraction_bits, (rows, dim)) * (regime != "alike")
    found = rng.integers(0, 2, (rows, dim)) << 15 | field << form.fraction_bits | fraction
    found = np.where(rng.random((rows, dim)) < rng.choice((0, 0.05, 0.9)), found & 0x8000, found)
    infinity = top << form.fraction_bits
    special = rng.choice((infinity, infinity | 0x8000, infinity | 1, 0xFFFF), (rows, dim))
    return np.where(rng.random((rows, dim)) < specials, special, found).astype(np.uint16)


@dataclass
class Batch:
    """Jobs of one shape over one context: what a kernel takes, and the same as arguments of the reference.

    `sinks` are those of the jobs that have any: all of them, or one part of a whole. `whole` is the row range
    that the jobs are parts of; None where they are jobs of their own.
    """

    memory: Memory
    work: list
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor
    scale: float
    sinks: torch.Tensor | None
    whole: tuple[int, int] | None
    text: str

    def reference(self) -> Partial:
        """The reference's partial, [jobs, group]."""
        if self.whole is None or self.sinks is None:
            return self._attend(slice(None), self.visible, self.sinks)
        sinks = [None if job.sink_line is None else self.sinks for job, _ in self.work]
        jobs = [slice(n, n + 1) for n in range(len(sinks))]
        return _joined(
            [self._attend(job, self.visible[job], of_job) for job, of_job in zip(jobs, sinks, strict=True)]
        )

    def reference_of_whole(self) -> Partial:
        """The reference's partial of what the jobs are parts of, [1, group]."""
        visible = torch.zeros_like(self.visible[:1])
        visible[:, slice(*self.whole)] = True
        return self._attend(slice(1), visible, self.sinks)

    def _attend(self, jobs, visible, sinks) -> Partial:
        options = {"scale": self.scale, "visible": visible, "sinks": sinks}
        return decode_attention(self.q[jobs], self.k[jobs], self.v[jobs], **options, partial=True)


def batch(memory: Memory, seed: str, jobs: int, most_rows: int = 140, *, split: bool = False) -> Batch:
    """A random batch; `memory` is overwritten.

    With `split` the jobs are one, cut into as many row ranges, of which some may be empty: they have the
    same queries, give partials, and one of them has the sinks.
    """
    draw, rng = random.Random(seed), np.random.default_rng(random.Random(seed).getrandbits(64))
    formats = [draw.choice((BF16, FP16)) for _ in range(3)]
    head_dim, value_dim = draw.choice(DIMS), draw.choice(DIMS)
    group = draw.choice((1, 2, 3, 4, 5, 8, 16))
    rows = draw.randint(
        0, draw.choice((12, most_rows, most_rows, most_rows) if split else (12, 40, most_rows))
    )
    specials = draw.choice((0.0, 0.0, 0.0, 0.0005, 0.02))
    regimes = [draw.choice(REGIMES) for _ in range(3)]
    scale = draw.choice(SCALES)
    k = codes(rng, rows, head_dim, formats[0], regimes[0], specials)
    v = codes(rng, rows, value_dim, formats[1], regimes[1], specials)
    q = codes(rng, jobs * group, head_dim, formats[2], regimes[2], specials / 8)
    sinks = None
    if draw.random() < 0.3:
        sinks = [draw.choice((*SPECIAL_SINKS, draw.getrandbits(32))) for _ in range(group)]
    form = OutputForm.PARTIAL if split else draw.choice((OutputForm.PARTIAL, *OutputForm))
    if split:
        q[:] = np.tile(q[:group], (jobs, 1))
    shape = Shape(head_dim, value_dim, group, formats[0].code, formats[1].code, formats[2].code, form)
    page_rows_log2 = draw.choice((2, 3, 4, 6))

    image = memory.lines
    image[:20_000] = 0xFF  # what is no row, and the rest of a row's last line, are NaN
    pages = -(-rows // (1 << page_rows_log2))
    page_lines = (shape.k_lines + shape.v_lines) << page_rows_log2
    page_at = np.array(draw.sample(range(pages), pages), dtype=np.int64) * page_lines
    for row in range(rows):
        page, slot = page_at[row >> page_rows_log2], row & ((1 << page_rows_log2) - 1)
        _put(image, page + slot * shape.k_lines, k[row])
        _put(image, page + (shape.k_lines << page_rows_log2) + slot * shape.v_lines, v[row])
    free = pages * page_lines
    for index, row in enumerate(q):
        _put(image, free + index * shape.k_lines, row)
    sink_line = free + len(q) * shape.k_lines
    if sinks is not None:
        _put(image, sink_line, np.array(sinks, dtype=np.uint32))

    def some_rows() -> tuple[int, int]:
        if draw.random() < 0.6:
            return tuple(sorted((draw.randint(0, rows), draw.randint(0, rows))))
        return 0, rows

    if split:
        whole = begin, end = some_rows()
        cuts = draw.sample(range(begin, end + 1), min(jobs - 1, end - begin + 1))
        ranges = list(pairwise(sorted([begin, *cuts, *[end] * (jobs - len(cuts))])))
        draw.shuffle(ranges)
        with_sinks = {draw.randrange(jobs)}
    else:
        whole, ranges, with_sinks = None, [some_rows() for _ in range(jobs)], set(range(jobs))
    work, visible = [], torch.zeros(jobs, rows, dtype=torch.bool)
    for index, (begin, end) in enumerate(ranges):
        job = Job(
            tenant=0, shape=shape, factor=score_factor(scale), row_begin=begin, row_end=end,
            page_rows_log2=page_rows_log2, kv_head=0, table_line=0, result_line=0,
            query_line=free + index * group * shape.k_lines,
            sink_line=sink_line if sinks is not None and index in with_sinks else None,
        )  # fmt: skip
        first, last = begin >> page_rows_log2, -(-end >> page_rows_log2)
        work.append((job, page_at[first : last if end > begin else first]))
        visible[index, begin:end] = True
    tensors = [
        torch.from_numpy(c.view(np.int16)).view(DTYPES[form.name])
        for c, form in zip((q, k, v), (formats[2], *formats[:2]), strict=True)
    ]
    return Batch(
        memory=memory,
        work=work,
        q=tensors[0].view(jobs, group, head_dim),
        k=tensors[1][None, :, None].expand(jobs, -1, -1, -1),
        v=tensors[2][None, :, None].expand(jobs, -1, -1, -1),
        visible=visible,
        scale=scale,
        sinks=None if sinks is None else torch.tensor(np.array(sinks, np.uint32).view(np.float32)),
        whole=whole,
        text=f"seed {seed!r}: {shape}, {rows} rows, {regimes}, scale {scale}, {specials=}, {sinks=}, "
        f"ranges {ranges}, {whole=}",
    )


def new_memory(mib: int = 64) -> Memory:
    """An empty image."""
    config = configure("small", capacity_bytes=mib << 20)
    return Memory(config, Counters(config))


def check_against_reference(lines, given: Batch) -> None:
    """Result lines of a batch hold what the reference says, in every bit that has a meaning.

    Those of parts, merged one by one or in pairs, hold what it says of the whole.
    """
    if given.whole is not None:
        shape = given.work[0][0].shape
        jobs = np.stack(lines).reshape(len(lines), 1, shape.group, -1, LINE_BYTES)
        parts = [partial_of(Finished(job, completions=None), shape.value_dim) for job in jobs]
        whole = given.reference_of_whole()
        for merged in (reduce(merge, parts), _merged_in_pairs(parts[::-1])):
            assert merged.equal(whole), given.text
    want, shape = given.reference(), given.work[0][0].shape
    data = np.stack(lines).reshape(len(lines), shape.group, -1)
    denominator = data[..., -LINE_BYTES:]
    nan = denominator[..., DENOMINATOR.offset("flags") // 8] == 1
    assert np.array_equal(nan, want.query_nan.numpy()), given.text
    top = np.where(nan, TOP_NONE, denominator[..., :4].copy().view("<i4")[..., 0])
    limbs = np.where(nan[..., None], 0, denominator[..., 8:24].copy().view("<i8"))
    alive = ~want.query_nan
    assert np.array_equal(top, torch.where(alive, want.denominator.top, TOP_NONE)), given.text
    for limb, plane in ((0, want.denominator.high), (1, want.denominator.low)):
        assert np.array_equal(limbs[..., limb], torch.where(alive, plane, 0)), given.text
    if shape.form is not OutputForm.PARTIAL:
        finished = finish(want, out_dtype=OUTPUTS[shape.form])
        size = shape.form.lane_bytes
        got = data[..., : shape.value_dim * size].copy().view(f"<i{size}")
        assert np.array_equal(got, finished.view(torch.int32 if size == 4 else torch.int16)), given.text
        return
    offset = 0
    planes = (want.numerators.top, want.numerators.high, want.numerators.low, want.lane_flags)
    for plane, size in zip(planes, PARTIAL_LANE_BYTES, strict=True):
        got = data[..., offset : offset + shape.value_dim * size].copy().view(f"<i{size}")
        got = np.where(nan[..., None], 0, got)
        assert np.array_equal(got, torch.where(alive[..., None], plane, 0)), given.text
        offset += lines_of(shape.value_dim * size) * LINE_BYTES


def _merged_in_pairs(parts: list[Partial]) -> Partial:
    """Neighbours merged, then neighbours of those."""
    while len(parts) > 1:
        parts = [reduce(merge, parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return parts[0]


def _joined(partials: list[Partial]) -> Partial:
    """Partials of some jobs as one of all."""

    def states(name: str) -> State:
        of_all = [getattr(one, name) for one in partials]
        return State(*(torch.cat([getattr(s, plane) for s in of_all]) for plane in ("top", "high", "low")))

    return Partial(
        states("denominator"),
        states("numerators"),
        torch.cat([one.query_nan for one in partials]),
        torch.cat([one.lane_flags for one in partials]),
    )


def meaning(lines, given: Batch):
    """Result lines of a batch, uint8 [jobs, group, bytes]: zero where a query is NaN, but for its codes."""
    shape = given.work[0][0].shape
    return meaning_of_results(np.stack(lines).reshape(len(lines), shape.group, -1), shape.form)


def meaning_of_results(data, form: OutputForm):
    """Results of query heads, uint8 [..., bytes]: zero where a query is NaN, but for its codes."""
    data = data.copy()
    nan = data[..., -LINE_BYTES + DENOMINATOR.offset("flags") // 8] == 1
    kept = DENOMINATOR.offset("flags") // 8
    data[nan, -LINE_BYTES : -LINE_BYTES + kept] = 0
    data[nan, -LINE_BYTES + kept + 1 :] = 0
    if form is OutputForm.PARTIAL:
        data[nan, :-LINE_BYTES] = 0
    return data


def _put(image, line: int, values) -> None:
    raw = np.ascontiguousarray(values).view(np.uint8)
    image[line : line + lines_of(len(raw))].reshape(-1)[: len(raw)] = raw
