"""The timing model: cases worked by hand, what must grow with what, and the RTL's figures."""

from dataclasses import replace

import numpy as np
import pytest
from nearkv_hw.abi import configure
from nearkv_hw.abi.dram import PARTS, ceiling
from nearkv_sim.model import timing

FIXED = configure(dram="fixed")


def work(config, **given):
    shape = {"jobs": 1, "rows": 256, "group": 4, "value_dim": 128, "row_lines": 8, "query_lines": 4}
    return timing.uniform(config, **{**shape, **given})


def cycles(config, **given):
    return timing.call(config, work(config, **given))


def test_a_single_job_by_hand():
    # 16 query lines, 26 cycles to the read, 40 of the memory, 9 back; 1,024 lines a slice; 41 and 4 * 65 + 1
    found = timing.batch(FIXED, [work(FIXED)])
    assert found.start == 16 + 26 + 40 + 9
    assert found.memory == found.stream == 1024
    assert found.issue == pytest.approx(1024)
    assert found.drain == 41 + 261
    assert found.total == 91 + 1024 + 302
    assert found.bound == "memory"


def test_refresh_and_rows_by_hand():
    config = configure()
    share = ceiling(PARTS[config.dram], config.density_gbit, config.refresh)

    def memory(rows, **rested):
        return timing.batch(config, [work(config, rows=rows)], **rested).memory

    # a pair of rows of both sub-channels holds 256 lines
    busy = 1 + timing.OPEN_CYCLES[config.dram] / 256
    assert memory(256) == pytest.approx(1024 * busy)  # shorter than the three intervals that may be owed
    assert memory(256, rested=False) == pytest.approx(1024 * busy / share)
    # of 3,120 cycles each, which is 3.9 us
    assert memory(1 << 16) == pytest.approx((262144 * busy - 3 * (1 - share) * 3120) / share)
    assert timing.batch(config, [work(config)]).start == 16 + 26 + 36 + 10 + 15 + 9


def test_two_drains_end_a_batch():
    assert timing.batch(FIXED, [work(FIXED, jobs=2)]).drain == 41 + 2 * 261
    assert timing.batch(FIXED, [work(FIXED, group=5)]).drain == 41 + 261 + 66


def test_results_bind_short_jobs():
    assert timing.batch(FIXED, [work(FIXED, jobs=64, rows=16)]).bound == "results"
    assert timing.batch(FIXED, [work(FIXED, jobs=64, rows=4096)]).bound == "memory"


@pytest.mark.parametrize(
    "given", [{"rows": 512}, {"jobs": 2}, {"group": 5}, {"row_lines": 9}, {"value_dim": 256}]
)
@pytest.mark.parametrize("dram", ["fixed", "ddr5_6400", "ddr5_4800", "lpddr5x_8533", "hbm3_6400"])
def test_more_work_takes_longer(dram, given):
    config = configure(dram=dram)
    assert cycles(config, **given) > cycles(config)


def test_more_device_takes_less_time():
    small, more = configure(queries=4), configure(queries=8)
    assert cycles(more, group=8, rows=4096) < 0.6 * cycles(small, group=8, rows=4096)
    assert cycles(configure(channels=4), rows=4096) < 0.55 * cycles(small, rows=4096)
    assert cycles(configure(finish_lanes=8), rows=16, jobs=32) < cycles(small, rows=16, jobs=32)


def test_cycles_are_linear_in_long_contexts():
    config = configure()
    one, two = cycles(config, rows=1 << 20, jobs=8), cycles(config, rows=1 << 21, jobs=8)
    assert two == pytest.approx(2 * one, rel=1e-4)


def test_refresh_by_sets_costs_nothing():
    rows = 1 << 16
    assert cycles(configure(refresh="per_bank"), rows=rows) < 0.93 * cycles(configure(), rows=rows)


def test_ranks_stream_at_once():
    one, two = configure(), configure(placement="rank", ranks=2)
    assert cycles(two, rows=1 << 16) == pytest.approx(cycles(one, rows=1 << 16) / 2, rel=0.01)


def test_host_traffic_takes_at_most_its_share():
    config = configure(fabric_share=4)
    jobs = [work(config, rows=4096)]
    alone, *beside = (
        timing.batch(config, jobs, host_share=share, rested=False).memory for share in (0, 0.1, 0.2, 0.9)
    )
    assert [alone, *beside] == sorted([alone, *beside])
    assert beside[-1] == pytest.approx(alone / (12 / 16))


def test_a_ring_takes_so_many_jobs():
    config = configure(ring_slots=4)
    one, next_ones, next_one = (
        timing.batch(config, [work(config, jobs=jobs)], rested=rested).total
        for jobs, rested in ((4, True), (4, False), (1, False))  # the second owes what the first did not pay
    )
    assert cycles(config, jobs=8) == pytest.approx(one + next_ones)
    assert cycles(config, jobs=5) == pytest.approx(one + next_one)


def test_few_jobs_do_not_balance():
    odd = timing.batch(FIXED, [work(FIXED, rows=48)])
    assert odd.memory == 2 * 16 * 8  # three pages on two slices


def test_jobs_of_all_kinds_add_up():
    lines = np.array([100.0, 300.0])
    uneven = replace(work(FIXED), lines=lines)
    assert timing.batch(FIXED, [uneven, replace(uneven, lines=lines[::-1])]).memory == pytest.approx(
        timing.batch(FIXED, [replace(uneven, lines=lines * 0 + 200, count=2)]).memory
    )


def test_nothing_takes_nothing():
    assert timing.batch(FIXED, []).total == 0


def test_no_units():
    with pytest.raises(ValueError, match="placement=host has no units; its rows go over the link"):
        timing.batch(configure(placement="host"), [])


def test_constants_of_the_blocks():
    drain = pytest.importorskip("nearkv_hw.memory.dram.drain")
    from nearkv_hw.memory.dram.controller import WRITE_ENTRIES

    queue = drain.Drain(entries=WRITE_ENTRIES)
    assert queue.high - queue.low == timing.WRITES_PER_TURN
