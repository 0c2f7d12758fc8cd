"""Attention jobs on the model device against the contract's oracle: any shape, range, place and batch."""

import random

import numpy as np
import oracle
import pytest
from contract_cases import seed_of_run
from expected import assert_equal, partial
from nearkv_hw.abi import ELEMENT_FORMATS, LINE_BYTES, OutputForm
from nearkv_hw.abi.memory import ENTRY
from rawhost import RawHost, factor_bits, float_bits

FORMS = list(OutputForm)
REGIMES = ("plain", "anything", "tiny", "huge", "alike")
SPECIALS = {"bf16": (0x7F80, 0xFF80, 0x7FC1, 0xFFFF), "fp16": (0x7C00, 0xFC00, 0x7E01, 0xFFFF)}


def random_codes(rng, shape, name, regime, specials=0.0):
    """Codes of numbers with exponents as the regime says, some zeros, and specials as often as told."""
    form = ELEMENT_FORMATS[name]
    top = (1 << form.exponent_bits) - 1
    low, high = {
        "plain": (top // 2 - 4, top // 2 + 2),
        "anything": (0, top),
        "tiny": (0, 2),
        "huge": (top - 2, top),
        "alike": (top // 2, top // 2 + 1),
    }[regime]
    field = rng.integers(low, high, shape)
    fraction = rng.integers(0, 1 << form.fraction_bits, shape) * (regime != "alike")
    codes = rng.integers(0, 2, shape) << 15 | field << form.fraction_bits | fraction
    codes = np.where(rng.random(shape) < 0.05, codes & 0x8000, codes)
    special = rng.choice(SPECIALS[name], shape)
    return np.where(rng.random(shape) < specials, special, codes).astype(np.uint16)


def random_job(host, rng, draw):
    """A random job, and what the oracle says of each of its queries."""
    names = [draw.choice(("bf16", "fp16")) for _ in range(3)]
    head_dim, value_dim = (draw.choice((1, 3, 31, 32, 33, 40, 64, 65)) for _ in range(2))
    rows, group = draw.randint(0, 21), draw.choice((1, 1, 2, 3, 5))
    specials = draw.choice((0.0, 0.0, 0.003, 0.05))
    k = random_codes(rng, (rows, head_dim), names[0], draw.choice(REGIMES), specials)
    v = random_codes(rng, (rows, value_dim), names[1], draw.choice(REGIMES), specials)
    q = random_codes(rng, (group, head_dim), names[2], draw.choice(REGIMES), specials / 4)
    factor = draw.choice((
        factor_bits(head_dim**-0.5), factor_bits(-0.3), 0, 0x80000000, float_bits(1e-42), float_bits(2e38)
    ))  # fmt: skip
    sinks = None
    if draw.random() < 0.4:
        sinks = [draw.choice((0x7FC00000, 0x7F800000, 0xFF800000, float_bits(0.7), float_bits(-1e30), 0, 1))]
        sinks += [float_bits(draw.uniform(-4, 4)) for _ in range(group - 1)]
    pages = list(range(-(-rows // 4)))
    draw.shuffle(pages)
    table = host.table([k], [v], page_rows=4, formats=(names[0], names[1]), order=pages)
    begin, end = sorted((draw.randint(0, rows), rows if draw.random() < 0.5 else draw.randint(0, rows)))
    form = draw.choice(FORMS)
    job = host.job(
        table, q, factor=factor, form=form, begin=begin, end=end, sinks=sinks, query_format=names[2]
    )
    want = [
        partial(
            head,
            k[begin:end],
            v[begin:end],
            formats=(names[0], names[1]),
            factor=factor,
            sink=None if sinks is None else sinks[n],
            query_format=names[2],
        )
        for n, head in enumerate(q)
    ]
    return job, want, form


@pytest.mark.parametrize("preset", [{}, {"channels": 1, "queries": 2}, {"channels": 4, "queries": 16}])
def test_random_jobs_in_one_batch(open_port, preset):
    seed = seed_of_run()
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    host = RawHost(open_port(**preset))
    cases = [random_job(host, rng, draw) for _ in range(40)]
    records = host.post(*(job.descriptor(tag=n) for n, (job, _, _) in enumerate(cases)))
    for n, (record, (job, want, form)) in enumerate(zip(records, cases, strict=True)):
        assert (record["status"], record["tag"]) == (0, n), job.fields
        assert record["passes"] == -(-len(want) // host.config.queries)
        for got, state in zip(host.results(job), want, strict=True):
            assert_equal(got, state, form)


def plain(seed, *shape):
    return random_codes(np.random.default_rng(seed), shape, "bf16", "plain")


@pytest.mark.parametrize("rows", [3, 4, 5, 8], ids="S={}".format)
def test_last_page_is_full_or_not(open_port, rows):
    # facts: E1 (flash-attention#1314, nano-vllm#115)
    host = RawHost(open_port())
    k, v, q = plain(1, rows, 8), plain(2, rows, 8), plain(3, 1, 8)
    job = host.job(host.table([k], [v], page_rows=4), q, factor=factor_bits(0.3))
    state = partial(q[0], k, v, formats=("bf16", "bf16"), factor=factor_bits(0.3))
    assert_equal(host.attend(job)[0], state, OutputForm.PARTIAL)


def test_range_beyond_the_table_reads_nothing(open_port):
    # facts: E2 (flash-attention#2709/#2711)
    port = open_port()
    host = RawHost(port)
    table = host.table([plain(1, 8, 8)], [plain(2, 8, 8)], page_rows=4, committed=9)
    job = host.job(table, plain(3, 1, 8), factor=0, end=9)
    [record] = host.post(job.descriptor())
    assert record["status"] == 9  # BAD_RANGE
    assert record["lines"] == 0
    assert host.read(job.fields["result"], job.result_bytes) == b"\xff" * job.result_bytes


@pytest.mark.parametrize("number", [65_536, 70_000])
def test_page_number_beyond_16_bits(open_port, number):
    # facts: E3 (ROCm/ATOM#702): the page's place in memory, and its place in the context
    host = RawHost(open_port(capacity_bytes=1 << 30), first_extent=128)
    rows = plain(number, 4, 32)
    page_bytes = 4 * 2 * LINE_BYTES
    assert host.claim(0, 128)["status"] == 0
    host.write(number * page_bytes, rows.tobytes() + rows[::-1].tobytes())
    table = host.table([rows[:0]], [rows[:0]], page_rows=4, entries=number + 1, committed=4 * (number + 1))
    entry = ENTRY.pack(valid=1, line=number * page_bytes // LINE_BYTES).to_bytes(8, "little")
    host.write_bytes(table.entry_address(0, number, number + 1), entry)
    job = host.job(table, plain(9, 1, 32), factor=factor_bits(0.2), begin=4 * number, end=4 * number + 4)
    state = partial(plain(9, 1, 32)[0], rows, rows[::-1], formats=("bf16", "bf16"), factor=factor_bits(0.2))
    assert_equal(host.attend(job)[0], state, OutputForm.PARTIAL)


def test_everything_beyond_4_gib(open_port):
    # facts: E5 (aiter#3824)
    host = RawHost(open_port(dram="fixed", capacity_bytes=1 << 40), first_extent=700_001)
    k, v, q = plain(1, 9, 16), plain(2, 9, 16), plain(3, 2, 16)
    job = host.job(host.table([k], [v], page_rows=4), q, factor=factor_bits(0.25))
    for got, query in zip(host.attend(job), q, strict=True):
        state = partial(query, k, v, formats=("bf16", "bf16"), factor=factor_bits(0.25))
        assert_equal(got, state, OutputForm.PARTIAL)


def test_no_visible_row_is_written_as_zero(open_port):
    # facts: A8, A9, C1: the result area holds NaN before, and so do all rows beyond the range
    host = RawHost(open_port())
    table = host.table([plain(1, 4, 8)], [plain(2, 4, 8)], page_rows=4)
    for form in (OutputForm.FP32, OutputForm.BF16, OutputForm.FP16):
        job = host.job(table, np.full((2, 8), 0x7FC0, dtype=np.uint16), factor=0, form=form, begin=3, end=3)
        for got in host.attend(job):
            assert got.codes == [0] * 8
            assert got.denominator == (None, 0, 0)
            assert not got.query_nan


def test_window_of_four(open_port):
    # facts: A1: W = 4 of S = 6 with equal weights and one-hot values
    host = RawHost(open_port())
    one = 0x3F80
    table = host.table([plain(1, 6, 8)], [(np.eye(6) * one).astype(np.uint16)], page_rows=4)
    job = host.job(table, np.zeros((1, 8), np.uint16), factor=0, form=OutputForm.FP32, begin=2)
    assert host.attend(job)[0].codes == [0, 0] + [float_bits(0.25)] * 4


def test_sink_belongs_to_one_part(open_port):
    # facts: B6: 3 keys of logit 0, sink 0, v = 1; three parts, one of them empty
    host = RawHost(open_port())
    k, v = np.zeros((3, 8), np.uint16), np.full((3, 8), 0x3F80, dtype=np.uint16)
    table = host.table([k], [v], page_rows=4)
    query = np.zeros((1, 8), np.uint16)
    parts = [
        host.attend(host.job(table, query, factor=0, begin=begin, end=end, sinks=sinks))[0]
        for begin, end, sinks in ((0, 0, [0]), (0, 1, None), (1, 3, None))
    ]
    whole = host.attend(host.job(table, query, factor=0, sinks=[0]))[0]
    denominator, lane = oracle.EMPTY, oracle.EMPTY
    for part in parts:
        denominator = oracle.merge(denominator, part.denominator)
        lane = oracle.merge(lane, part.numerators[0])
    assert (denominator, lane) == (whole.denominator, whole.numerators[0])
    assert oracle.finish(oracle.Partial(denominator, [lane], False, [set()]), "fp32") == [float_bits(0.75)]


def result_bytes(host, job):
    [record] = host.post(job.descriptor())
    assert record["status"] == 0
    return host.read(job.fields["result"], job.result_bytes)


def test_same_bits_whatever_the_place(open_port):
    """Permuted rows and pages, page sizes, channels and kept queries: the formula is of the set of rows."""
    seed = seed_of_run()
    rng = np.random.default_rng(seed)
    k, v = random_codes(rng, (40, 24), "fp16", "plain"), random_codes(rng, (40, 24), "fp16", "anything")
    q = random_codes(rng, (7, 24), "fp16", "plain")

    def run(order, page_rows, pages=None, **preset):
        host = RawHost(open_port(**preset))
        table = host.table([k[order]], [v[order]], page_rows=page_rows, formats=("fp16", "fp16"), order=pages)
        return result_bytes(host, host.job(table, q, factor=factor_bits(0.2)))

    straight = np.arange(40)
    first = run(straight, 8)
    assert run(rng.permutation(40), 8) == first
    assert run(straight, 8, pages=[3, 0, 4, 1, 2]) == first
    for page_rows in (4, 16, 64):
        assert run(straight, page_rows) == first
    for preset in ({"channels": 1}, {"channels": 4}, {"queries": 1}, {"queries": 16}, {"finish_lanes": 8}):
        assert run(straight, 16, **preset) == first


def test_same_bits_alone_and_in_a_batch(open_port):
    # facts: G1
    host = RawHost(open_port())
    lengths = (3, 64, 200, 1, 130, 500, 6, 16)
    jobs = []
    for n, rows in enumerate(lengths):
        table = host.table([plain(n, rows, 16)], [plain(n + 50, rows, 16)], page_rows=4)
        jobs.append(
            host.job(table, plain(n + 99, 3, 16), factor=factor_bits(0.3), begin=rows // 2 + rows % 2)
        )
    alone = [result_bytes(host, job) for job in jobs]
    for job in jobs:
        host.write(job.fields["result"], b"\xff" * job.result_bytes)
    assert {record["status"] for record in host.post(*(job.descriptor() for job in jobs))} == {0}
    assert [host.read(job.fields["result"], job.result_bytes) for job in jobs] == alone


def test_heads_of_a_table(open_port):
    host = RawHost(open_port())
    k, v, q = plain(1, 3, 20, 8), plain(2, 3, 20, 8), plain(3, 1, 8)
    table = host.table(list(k), list(v), page_rows=4, entries=9)
    for head in range(3):
        job = host.job(table, q, factor=factor_bits(0.3), kv_head=head, begin=5, end=18)
        state = partial(q[0], k[head, 5:18], v[head, 5:18], formats=("bf16", "bf16"), factor=factor_bits(0.3))
        assert_equal(host.attend(job)[0], state, OutputForm.PARTIAL)


def test_largest_group_and_dims(open_port):
    host = RawHost(open_port())
    k, v, q = plain(1, 5, 256), plain(2, 5, 256), plain(3, 128, 256)
    sinks = [float_bits(n / 16) for n in range(128)]
    job = host.job(host.table([k], [v], page_rows=4), q, factor=factor_bits(1 / 16), sinks=sinks)
    [record] = host.post(job.descriptor())
    assert (record["status"], record["passes"], record["lines"]) == (0, 32, 32 * 5 * 16)
    results = host.results(job)
    for n in (0, 77, 127):
        state = partial(q[n], k, v, formats=("bf16", "bf16"), factor=factor_bits(1 / 16), sink=sinks[n])
        assert_equal(results[n], state, OutputForm.PARTIAL)


@pytest.mark.slow
def test_four_million_rows(open_port):
    """2^22 rows of a few distinct kinds: the sums are those of each kind, times its count."""
    rows, kinds, page_rows = 1 << 22, 8, 8192
    host = RawHost(open_port())
    k, v, q = plain(1, kinds, 8), plain(2, kinds, 8), plain(3, 1, 8)
    page = host.table([np.tile(k, (page_rows // kinds, 1))], [np.tile(v, (page_rows // kinds, 1))],
                      page_rows=page_rows).pages[0][0]  # fmt: skip
    entries = rows // page_rows
    table = host.table([k[:0]], [v[:0]], page_rows=page_rows, entries=entries, committed=rows)
    words = np.full(entries, ENTRY.pack(valid=1, line=page // LINE_BYTES), dtype="<u8")
    host.write(table.entry_address(0, 0, entries), words.tobytes())
    got = host.attend(host.job(table, q, factor=factor_bits(0.3), end=rows))[0]
    once = partial(q[0], k, v, formats=("bf16", "bf16"), factor=factor_bits(0.3))

    def times(state, count):
        return (state[0], state[1] * count, state[2] * count)

    assert got.denominator == times(once.denominator, rows // kinds)
    assert got.numerators == [times(lane, rows // kinds) for lane in once.numerators]
