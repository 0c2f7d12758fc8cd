"""Bits that change in the model's DRAM: one in a word is corrected and counted, two are poison."""

import numpy as np
import pytest
from nearkv_hw.abi import LINE_BYTES, Status, configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.window import MEMORY_COUNTERS, MEMORY_COUNTERS_LINE, register_address
from nearkv_sim.port import Access, Read, Write
from rawhost import RawHost, factor_bits

DRAM = {"dram": "ddr5_6400", "capacity_bytes": 256 << 20}
PAGE_ROWS = 4


class Bench:
    """A tenant with two jobs over the two heads of one table."""

    def __init__(self, port):
        self.port, self.config = port, port.config
        self.host = RawHost(port, 0)
        rng = np.random.default_rng(5)
        k, v = (rng.integers(0x3F00, 0x3FFF, (2, 20, 40), dtype=np.uint16) for _ in range(2))
        q = rng.integers(0x3F00, 0x3FFF, (6, 40), dtype=np.uint16)
        self.table = self.host.table(list(k), list(v), page_rows=PAGE_ROWS)
        factor = factor_bits(0.1)
        self.jobs = [
            self.host.job(self.table, q, factor=factor, sinks=[0] * 6, kv_head=head) for head in (0, 1)
        ]

    def end(self, **changes):
        """Status and detail of both jobs in one batch, and their results."""
        records = self.host.post(*(job.descriptor(tag=n, **changes) for n, job in enumerate(self.jobs)))
        results = [self.host.read(job.fields["result"], job.result_bytes) for job in self.jobs]
        return [(Status(r["status"]), r["detail"]) for r in records], results

    def page(self, head, number):
        """Device address of a page."""
        return self.table.pages[head][number]

    def counted(self, name):
        """A counter of the memory, over all slices."""
        lines = [MEMORY_COUNTERS_LINE + s for s in range(self.config.slices)]
        addresses = np.array([register_address(self.config, 0, line) for line in lines], np.uint64)
        (result,) = self.port.run([Read(addresses)])
        return sum(MEMORY_COUNTERS.unpack(line.tobytes())[name] for line in result.data)


@pytest.fixture
def bench(open_port):
    return Bench(open_port(**DRAM))


@pytest.mark.parametrize("bits", [[0], [511], [512], [575], [5, 64, 130, 520 + 16]])
def test_one_bit_in_a_word_is_corrected_and_counted(bench, bits):
    good = bench.end()
    bench.port.inject(bench.page(1, 2), bits)
    before = bench.counted("corrected")
    assert bench.end() == good
    assert bench.counted("corrected") - before == 2  # the job's two passes
    assert bench.counted("uncorrectable") == 0


@pytest.mark.parametrize("bits", [[0, 1], [3, 512], [575, 448], [64, 127, 512]])
def test_two_bits_in_a_word_end_the_job_and_no_other(bench, bits):
    _, good = bench.end()
    bench.port.inject(bench.page(1, 2) + LINE_BYTES * 2, bits)
    bench.port.inject(bench.page(1, 3), [0, 1])
    ends, results = bench.end()
    assert ends == [(Status.OK, 0), (Status.POISON, 2)]
    assert results == good  # the other job's again, and this one's is as it was
    assert bench.counted("uncorrectable") > 0
    # rows before the page are as good as ever
    assert bench.end(row_end=2 * PAGE_ROWS)[0] == [(Status.OK, 0), (Status.OK, 0)]


def test_a_bit_that_flips_back_is_none(bench):
    good = bench.end()
    bench.port.inject(bench.page(0, 0), [4, 5])
    bench.port.inject(bench.page(0, 0), [5, 4])
    assert bench.end() == good
    assert bench.counted("corrected") == bench.counted("uncorrectable") == 0


def test_table_queries_and_entries_can_be_poisoned(bench):
    for address in (
        bench.table.address,
        bench.jobs[1].fields["queries"],
        bench.table.entry_address(1, 0, 5) // LINE_BYTES * LINE_BYTES,
    ):
        bench.port.inject(address, [0, 1])
        ends, _ = bench.end()
        assert ends[1] == (Status.POISON, 0)
        bench.port.inject(address, [0, 1])
        assert bench.end()[0][1] == (Status.OK, 0)


def test_what_a_write_leaves_of_it(bench):
    line = bench.host.allocate(LINE_BYTES)
    address = np.array([line], np.uint64)
    ones, part = np.full((1, LINE_BYTES), 0xFF, np.uint8), np.array([1], np.uint64)

    def read():
        (result,) = bench.port.run([Read(address)])
        return result.access[0], int(result.data[0, 0])

    bench.port.inject(line, [0, 1])
    assert read()[0] == Access.POISON
    bench.port.run([Write(address, ones, part)])
    assert read()[0] == Access.POISON  # the rest of the line is still lost
    bench.port.run([Write(address, ones)])
    assert read() == (Access.DATA, 0xFF)
    bench.port.inject(line, [7])
    bench.port.run([Write(address, np.zeros_like(ones), part)])
    before = bench.counted("corrected")
    assert read() == (Access.DATA, 0)
    assert bench.counted("corrected") == before


def test_what_cannot_be_injected(open_port):
    port = open_port(**DRAM)
    for address in (-64, 1, 256 << 20):
        with pytest.raises(ValueError, match="address must be a multiple of 64 below 0x10000000, not"):
            port.inject(address, [0])
    for bit in (-1, 576):
        with pytest.raises(ValueError, match=f"bits must be from 0 to 575, not {bit}"):
            port.inject(EXTENT_BYTES, [0, bit])
    with pytest.raises(RuntimeError, match="dram=fixed keeps no check bits; choose a DRAM part"):
        open_port(dram="fixed").inject(0, [0])
    port.close()
    with pytest.raises(RuntimeError, match="is closed"):
        port.inject(0, [0])
    assert configure(**DRAM).dram.name == "DDR5_6400"
