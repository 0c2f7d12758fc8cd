"""Jobs that the native kernel takes together end as they do one at a time: records, results, counters, order.

The torch kernel never takes jobs together, so a device with it is the other side of every comparison.
"""

import random

import numpy as np
import pytest
from contract_cases import seed_of_run
from nearkv_hw.abi import LINE_BYTES, OutputForm, Status, configure, window
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, MAX_PAGE_ROWS_LOG2
from nearkv_hw.abi.memory import ENTRIES_PER_LINE, ENTRY, TABLE, table_entry_lines
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_sim.model import ModelPort
from nearkv_sim.port import Read
from rawhost import RawHost, claim_descriptor, factor_bits, nop_descriptor

CAPACITY = 256 << 20
OTHER = 200
"""The first extent of a second tenant."""


class Twins:
    """The same host on a device of either kernel: what is asked of one is asked of both."""

    def __init__(self, **overrides):
        config = configure("small", capacity_bytes=CAPACITY, **overrides)
        self.hosts = [RawHost(ModelPort(config, kernel=kernel)) for kernel in ("native", "torch")]
        for host in self.hosts:
            RawHost(host.port, 1, first_extent=OTHER).allocate(EXTENT_BYTES)

    def each(self, do):
        """What both answer, when it is the same."""
        one, other = (do(host) for host in self.hosts)
        assert one == other
        return one

    def check(self, jobs=()):
        """Results, ring and counters of both are equal; without jobs, the whole memory."""
        config = self.hosts[0].config
        lines = [window.DEVICE_COUNTERS_LINE, window.RING_LINE]
        lines += [first + s for first in (16, 32) for s in range(config.slices)]
        self.each(lambda host: host.port.link_bytes)
        for line in lines:
            self.each(lambda host, line=line: host.register(line, window.CHANNEL_COUNTERS))
        for job in jobs:
            self.each(lambda host, job=job: host.read(job.fields["result"], job.result_bytes))
        if not jobs:
            self.each(lambda host: host.read(0, host._free))

    def close(self):
        """End both."""
        for host in self.hosts:
            host.port.close()


@pytest.fixture
def twins():
    opened = []

    def open_twins(**overrides):
        opened.append(Twins(**overrides))
        return opened[-1]

    yield open_twins
    for twin in opened:
        twin.close()


def contexts(host, seed):
    """Jobs over tables of several shapes, a few over each head."""
    draw = random.Random(seed)
    rng = np.random.default_rng(draw.getrandbits(64))
    jobs = []
    for dim, group, page_rows, rows in ((40, 6, 4, 21), (64, 3, 16, 60), (128, 4, 16, 200), (8, 1, 64, 64)):
        k, v, q = (
            rng.integers(0x3E00, 0x3FFF, shape, dtype=np.uint16)
            for shape in ((2, rows, dim), (2, rows, dim), (group, dim))
        )
        channels = None if rows < 100 else (0,)  # dealt to channels, pages take an extent each
        table = host.table(list(k), list(v), page_rows=page_rows, channels=channels)
        for number in range(4):
            begin, end = sorted(draw.sample(range(rows + 1), 2)) if number > 1 else (0, rows)
            jobs.append(
                host.job(
                    table, q, factor=factor_bits(0.1), kv_head=number % 2, begin=begin, end=end,
                    form=draw.choice(list(OutputForm)), sinks=draw.choice((None, [0x3F000000] * group)),
                )
            )  # fmt: skip
    return jobs


def descriptor(draw, job, others, tag):
    """A job's descriptor, now and then with something wrong or rare about it."""
    fields = job.fields
    theirs = OTHER * EXTENT_BYTES
    roomy = [other for other in others if other.result_bytes >= job.result_bytes]
    wrong = draw.choice(
        (
            {}, {}, {}, {}, {}, {},
            {"row_end": draw.randint(0, 300)},
            {"row_begin": fields["row_end"]},
            {"kv_head": 2},
            {"group": draw.choice((0, 1, 129, 200))},
            {"version": 2},
            {"flags": draw.choice((0, 2, 4))},
            {"score_factor": draw.choice((0x7F800000, factor_bits(0.3)))},
            {"table": draw.choice((theirs, CAPACITY, 1, fields["queries"]))},
            {"queries": draw.choice((theirs, theirs - LINE_BYTES, CAPACITY - LINE_BYTES, 32))},
            {"result": draw.choice((theirs, theirs - LINE_BYTES, (1 << 63) + 64, 32))},
            {"result": draw.choice(roomy).fields["result"]},
            {"sinks": draw.choice((theirs, 5))},
            {"output_form": draw.choice((0, 1, 2, 3, 5))},
        )
    )  # fmt: skip
    return ATTEND.pack_bytes({**fields, "tag": tag, **wrong})


def spoil(draw, host, job):
    """Spoil a job's page table; where the line lies that it stood in, and what that held."""
    table, extent_lines = job.fields["table"], EXTENT_BYTES // LINE_BYTES
    line = host.read(table, LINE_BYTES)
    header = TABLE.unpack(line)
    if draw.random() < 0.5:
        wrong = draw.choice(
            (
                {"magic": 1}, {"version": 2}, {"heads": draw.randint(0, 1)}, {"reserved_version": 1},
                {"entries": draw.choice((0, 1, header["entries"] - 1, header["entries"] + 9, (1 << 32) - 1))},
                {"committed_rows": draw.choice((draw.randint(0, job.fields["row_end"]), (1 << 32) - 1))},
            )
        )  # fmt: skip
        host.write(table, TABLE.pack_bytes({**header, **wrong}))
        return table, line
    page = draw.randrange(header["entries"])
    number = job.fields["kv_head"] * table_entry_lines(header["entries"]) + page // ENTRIES_PER_LINE
    place, at = table + (1 + number) * LINE_BYTES, page % ENTRIES_PER_LINE * ENTRY.width // 8
    line = host.read(place, LINE_BYTES)
    entry = ENTRY.unpack(line[at : at + ENTRY.width // 8])
    wrong = draw.choice(
        (
            {"valid": 0}, {"reserved_low": 1}, {"reserved_end": 1 << 11},
            {"line": entry["line"] + 1}, {"line": draw.randint(1, 3) * extent_lines - 1},
            {"line": draw.choice((OTHER, OTHER - 1)) * extent_lines},
            {"line": CAPACITY // LINE_BYTES - draw.randint(0, 1)}, {"line": (1 << 46) - 1},
        )
    )  # fmt: skip
    host.write_bytes(place + at, ENTRY.pack_bytes({**entry, **wrong}))
    return place, line


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("overrides", [{}, {"channels": 4, "queries": 8, "dram": "fixed"}], ids=str)
def test_random_batches(twins, part, overrides):
    """Jobs of several kinds, jobs and tables at fault, fences and claims, with results that overlap."""
    seed = f"{seed_of_run()}/{part}"
    draw, both = random.Random(seed), twins(**overrides)
    jobs = both.each(lambda host: contexts(host, seed))
    seen = set()
    for _ in range(12):
        some = draw.sample(jobs, draw.randint(1, 6))
        batch = [
            descriptor(draw, draw.choice(some), jobs, draw.getrandbits(32))
            for _ in range(draw.randint(1, 30))
        ]
        for _ in range(draw.choice((0, 0, 1, 3))):
            fence = draw.choice(
                (nop_descriptor(5), nop_descriptor(5, flags=1), claim_descriptor(OTHER - 2, 2))
            )
            batch.insert(draw.randint(0, len(batch)), fence)
        turns, spoilt = f"{seed}/{draw.random()}", draw.choice((None, *some))
        if spoilt:
            whole = both.each(lambda host, at=turns, job=spoilt: spoil(random.Random(at), host, job))
        records = both.each(lambda host, batch=batch: host.post(*batch))
        if spoilt:
            both.each(lambda host, whole=whole: host.write(*whole))
        seen |= {Status(record["status"]) for record in records}
        both.check(jobs)
    both.check()
    assert Status.OK in seen
    assert len(seen) > 3, seen


def test_one_job_fails_and_the_others_are_right(twins):
    """A page that is another's ends one head's job; the other head's jobs have their results."""
    both = twins()
    jobs = both.each(lambda host: contexts(host, 1))[4:8]
    good = both.each(lambda host: [host.post(job.descriptor())[0]["status"] for job in jobs])
    assert good == [Status.OK] * 4
    want = both.each(lambda host: [host.read(job.fields["result"], job.result_bytes) for job in jobs])
    table, entries = jobs[1].fields["table"], 4

    def spoil(host):
        for job in jobs:
            host.write(job.fields["result"], bytes(job.result_bytes))
        header = TABLE.unpack(host.read(table, LINE_BYTES))
        assert header["entries"] == entries
        entry = table + LINE_BYTES * 2  # the first of head 1
        host.write_bytes(entry, ENTRY.pack_bytes(valid=1, line=OTHER * EXTENT_BYTES // LINE_BYTES))

    both.each(spoil)
    records = both.each(lambda host: host.post(*(job.descriptor(tag=n) for n, job in enumerate(jobs))))
    assert [(r["status"], r["detail"], r["tag"]) for r in records[:2]] == [
        (Status.OK, 0, 0), (Status.PAGE_DENIED, 0, 1),
    ]  # fmt: skip
    results = both.each(lambda host: [host.read(job.fields["result"], job.result_bytes) for job in jobs])
    for record, result, whole in zip(records, results, want, strict=True):
        assert result == (whole if record["status"] == Status.OK else bytes(len(whole)))
    both.check()


def test_no_more_rows_than_a_sum_holds(twins):
    """One page stands for the last rows of a table that promises one row too many."""
    both, page_rows = twins(), 1 << MAX_PAGE_ROWS_LOG2

    def last_rows(host):
        codes = np.full((8, 8), 0x3F80, np.uint16)
        table = host.table(
            [codes], [codes], page_rows=page_rows, entries=(MAX_ROWS + 1) // page_rows, committed=MAX_ROWS + 1
        )
        entry = ENTRY.pack_bytes(valid=1, line=table.pages[0][0] // LINE_BYTES)
        host.write_bytes(table.address + LINE_BYTES + (MAX_ROWS // page_rows) * len(entry), entry)
        job = host.job(table, codes[:1], factor=factor_bits(1))
        ends = (MAX_ROWS, MAX_ROWS + 1)
        return host.post(*(job.descriptor(row_begin=MAX_ROWS - 1, row_end=end) for end in ends))

    records = both.each(last_rows)
    assert [record["status"] for record in records] == [Status.OK, Status.BAD_RANGE]
    both.check()


def test_later_results_lie_over_earlier_ones(twins):
    both = twins()
    jobs = both.each(lambda host: contexts(host, 2))[4:6]
    place = jobs[0].fields["result"]
    for order in (jobs, jobs[::-1]):
        both.each(lambda host, order=order: host.post(*(job.descriptor(result=place) for job in order)))
        both.check()
        size = order[-1].result_bytes
        over = both.each(lambda host, size=size: host.read(place, size))
        last = both.each(lambda host, order=order: host.post(order[-1].descriptor(result=place)))
        assert last[0]["status"] == Status.OK
        assert over == both.each(lambda host, size=size: host.read(place, size))


def test_jobs_read_what_was_there_before_any_of_them_wrote(twins):
    """The first job's result lies over the second one's queries; behind a fence it is seen."""
    both = twins()
    jobs = both.each(lambda host: contexts(host, 3))[4:6]
    second = jobs[1].fields
    [alone] = both.each(lambda host: host.post(jobs[1].descriptor()))
    assert alone["status"] == Status.OK
    want = both.each(lambda host: host.read(second["result"], jobs[1].result_bytes))
    over = jobs[0].descriptor(result=second["queries"])
    both.each(lambda host: host.post(over, jobs[1].descriptor()))
    assert both.each(lambda host: host.read(second["result"], jobs[1].result_bytes)) == want
    both.each(lambda host: host.post(over, nop_descriptor(), jobs[1].descriptor()))
    assert both.each(lambda host: host.read(second["result"], jobs[1].result_bytes)) != want
    both.check()


def test_inverted_bits_end_one_job_of_many(twins):
    both = twins(dram="ddr5_6400")
    jobs = both.each(lambda host: contexts(host, 4))[4:8]

    def page(host):
        line = host.read(jobs[0].fields["table"] + LINE_BYTES, LINE_BYTES)
        return ENTRY.unpack(line[:8])["line"] * LINE_BYTES

    at = both.each(page)
    for bits in ([3], [3, 70], [3, 4]):
        both.each(lambda host, bits=bits: host.port.inject(at, bits))
        both.each(lambda host: host.post(*(job.descriptor() for job in jobs)))
        both.check(jobs)


def test_windows_of_several_tenants_in_one_program(twins):
    """Registers, rings and memory of two apertures in one read, out of order."""
    both = twins()

    def places(host):
        config = host.config
        host.allocate(LINE_BYTES)
        found = [window.register_address(config, a, line) for line in (3, 0, 1) for a in (1, 0)]
        found += [window.completion_address(config, 1, 0), OTHER * EXTENT_BYTES, 0]
        found += [config.aperture_bytes + OTHER * EXTENT_BYTES, 7 * config.aperture_bytes]
        [result] = host.port.run([Read(np.array(found, np.uint64))])
        return result.data.tobytes(), result.access.tolist()

    _, access = both.each(places)
    assert access == [0] * 7 + [1, 0, 0, 1]
    both.check()
