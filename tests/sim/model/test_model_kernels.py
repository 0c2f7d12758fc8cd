"""The native kernel, the torch kernel and the reference agree in every bit, on any job and any threads."""

import numpy as np
import pytest
import torch
from contract_cases import seed_of_run
from kernel_cases import batch, check_against_reference, codes, meaning, new_memory
from nearkv_hw.abi import OutputForm
from nearkv_hw.abi.formats import BF16
from nearkv_sim.model import attention
from nearkv_sim.model.job import Job, Shape
from nearkv_sim.model.native import load_kernel

JOBS = 10


@pytest.fixture(scope="module")
def native():
    return load_kernel()


@pytest.mark.parametrize("part", range(10))
def test_random_jobs(native, part):
    """In all parts, 5,000 jobs; those of every fourth batch are one that was split."""
    seed = seed_of_run()
    memory = new_memory()
    for index in range(50):
        given = batch(memory, f"{seed}/{part}/{index}", JOBS, split=index % 4 == 0)
        lines = native(given.work, memory)
        check_against_reference(lines, given)
        torch_lines = attention.attend(given.work, memory)
        assert np.array_equal(meaning(lines, given), meaning(torch_lines, given)), given.text


def long_job(memory, rows, *, group=2, dim=8, regime="plain", form=OutputForm.PARTIAL):
    """A job over many rows, in the order of the image, with the values that attention meets."""
    rng = np.random.default_rng(seed_of_run())
    shape = Shape(dim, dim, group, 0, 0, 0, form)
    log2 = 6
    pages = -(-rows >> log2)
    page_lines = (shape.k_lines + shape.v_lines) << log2
    for first in range(0, pages * page_lines, 1 << 18):
        area = memory.lines[first : min(first + (1 << 18), pages * page_lines)].view("<u2")
        area[:] = codes(rng, *area.shape, BF16, regime, 0.0)
    line = pages * page_lines
    queries = memory.lines[line : line + group * shape.k_lines].view("<u2")
    queries[:] = codes(rng, *queries.shape, BF16, "plain", 0.0)
    job = Job(
        tenant=0, shape=shape, factor=0x3F000000, row_begin=0, row_end=rows, page_rows_log2=log2,
        kv_head=0, table_line=0, query_line=line, result_line=0, sink_line=None,
    )  # fmt: skip
    return job, np.arange(pages, dtype=np.int64) * page_lines


@pytest.mark.parametrize("regime", ["plain", "steps"])
def test_a_million_rows(native, regime):
    memory = new_memory(256)
    work = [long_job(memory, 1 << 20, regime=regime)]
    assert np.array_equal(native(work, memory)[0], attention.attend(work, memory)[0])


def test_threads_do_not_matter(native):
    memory = new_memory()
    job, pages = long_job(memory, 70_000, group=5)
    # Sums of the first rows lie two bins lower, and those of the next one: pieces meet with different tops.
    memory.lines[: 2 * 20_000].view("<u2")[:] &= 0x9FFF
    memory.lines[2 * 20_000 : 2 * 45_000].view("<u2")[:] &= 0xAFFF
    ranges = [(0, 70_000), (1, 69_999), (12_345, 12_346), (0, 0), (50_000, 70_000)]
    work = [
        (Job(**{**vars(job), "row_begin": begin, "row_end": end}), pages[begin >> 6 : -(-end >> 6)])
        for begin, end in ranges
    ]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(np.concatenate(native(work, memory)))
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[0], np.concatenate(attention.attend(work, memory)))


def bf16(number):
    """The bf16 code of a number that has one."""
    bits = int(np.float32(number).view(np.uint32))
    assert bits & 0xFFFF == 0
    return bits >> 16


def small_job(memory, q, k, v, factor):
    """A job of one query over rows of bf16 codes."""
    shape = Shape(len(q), len(v[0]), 1, 0, 0, 0, OutputForm.PARTIAL)
    rows = memory.lines.view("<u2")
    for index, (key, value) in enumerate(zip(k, v, strict=True)):
        rows[index * shape.k_lines : (index + 1) * shape.k_lines].reshape(-1)[: len(key)] = key
        at = 16 * shape.k_lines + index * shape.v_lines
        rows[at : at + shape.v_lines].reshape(-1)[: len(value)] = value
    line = 16 * (shape.k_lines + shape.v_lines)
    rows[line : line + shape.k_lines].reshape(-1)[: len(q)] = q
    job = Job(
        tenant=0, shape=shape, factor=int(np.float32(factor).view(np.uint32)), row_begin=0, row_end=len(k),
        page_rows_log2=4, kv_head=0, table_line=0, query_line=line, result_line=0, sink_line=None,
    )  # fmt: skip
    return job, np.zeros(1, dtype=np.int64)


def assert_kernels_agree(native, memory, work):
    for one, other in zip(native(work, memory), attention.attend(work, memory), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("small", [1.0, 1.0078125, 1.9921875])
@pytest.mark.parametrize("exponent", range(-33, -16))
def test_products_that_cancel_to_what_a_double_had_no_room_for(native, small, exponent):
    """2^31 - 2^31 + small: the contract's grid goes down to 2^-32, a double beside 2^31 to 2^-21."""
    q, key = [bf16(0.0)] * 16, [bf16(0.0)] * 16
    q[0], q[1], q[8] = bf16(2.0**16), bf16(2.0**16), bf16(1.0)
    key[0], key[1], key[8] = bf16(1.5 * 2.0**15), bf16(-1.5 * 2.0**15), bf16(small * 2.0**exponent)
    memory = new_memory()
    for factor in (2.0**12, 2.0**5):
        assert_kernels_agree(native, memory, [small_job(memory, q, [key], [[bf16(1.0)]], factor)])


@pytest.mark.parametrize("exponent", [-40, -33, -32, -31])
def test_terms_that_the_grid_cuts_off(native, exponent):
    """255 products just below a step of the grid beside one product of 1: each is cut off, not their sum."""
    q, key = [bf16(1.0)] * 256, [bf16(1.9921875 * 2.0**exponent)] * 256
    key[0] = bf16(1.0)
    memory = new_memory()
    for factor in (2.0**11, -(2.0**4)):
        assert_kernels_agree(native, memory, [small_job(memory, q, [key], [[bf16(1.0)]], factor)])


@pytest.mark.parametrize("distance", [0, 31, 32, 33, 495, 511, 512, 513, 544, 545, 700, 1100, 5000])
def test_light_rows_beside_heavy_ones(native, distance):
    """Lanes where either row holds nothing, or the largest or smallest value that there is."""
    ends = [0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, bf16(1.0)]
    v = [[a for a in ends for _ in ends], [b for _ in ends for b in ends]]
    memory = new_memory()
    for heavy in (0, 31):
        light = int(np.float32(heavy - distance).view(np.uint32)) >> 16  # or the next code below
        k = [[bf16(heavy)], [light]]
        assert_kernels_agree(native, memory, [small_job(memory, [bf16(1.0)], k, v, 1.0)])


def test_scores_at_their_limit(native):
    memory = new_memory()
    for exponent in range(19, 26):
        for key in (1.0, 1.9921875, -1.0, -1.9921875):
            k = [[bf16(key * 2.0**exponent)], [bf16(key * 2.0 ** (exponent - 1))]]
            work = [small_job(memory, [bf16(1.0)], k, [[bf16(1.0)], [bf16(-3.0)]], 1.0)]
            assert_kernels_agree(native, memory, work)


def test_ties_of_scores_go_away_from_zero(native):
    memory = new_memory()
    for odd in (1, 3, 127, -1, -3, -127):
        work = [small_job(memory, [bf16(1.0)], [[bf16(odd * 2.0**-21)]], [[bf16(1.0)]], 1.0)]
        assert_kernels_agree(native, memory, work)


def test_the_caller_s_float_unit_is_left_alone(native):
    """A process may have told its float unit to flush subnormals; bf16's smallest values stay."""
    memory = new_memory()
    k, v = [[0x0001], [0x8003], [bf16(1.0)]], [[0x0001], [0x0002], [0x8001]]
    work = [small_job(memory, [0x7F00], k, v, 3.0)]
    plain = native(work, memory)[0]
    assert torch.set_flush_denormal(True)
    try:
        flushed = native(work, memory)[0]
        assert (torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(plain, flushed)
    assert 1.0 + 1.5 * 2.0**-53 == 1.0 + 2.0**-52, "rounding is to nearest again"
