# amaranth: UnusedElaboratable=no
"""Refreshes: owed while the memory is wanted, and made up for; sets in their turn, none while it still is."""

import random
from itertools import pairwise

import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator
from nearkv_hw.abi.dram import PARTS, Refresh
from nearkv_hw.memory.dram.refresh import QUIET_CYCLES, Refresher, RefreshTimer

ROUNDS = 12


@pytest.mark.parametrize("dram", list(PARTS), ids=lambda dram: dram.name.lower())
def test_sets_take_turns_and_rest(dram):
    """Banks that accesses wait for now and then: refreshes come late, and then close together."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, part = random.Random(seed), PARTS[dram]
    t = part.frames(part.default_density, Refresh.PER_BANK)
    dut = Refresher(part=part, density_gbit=part.default_density, refresh=Refresh.PER_BANK)
    given = []

    async def bench(ctx):
        frame = 0
        while len(given) < ROUNDS * t.refresh_sets:
            for cycle in range(part.subchannels):
                first, last = cycle == 0, cycle == part.subchannels - 1
                ctx.set(dut.due, first and frame % t.refresh_interval == 0)
                ctx.set(dut.follow, first)
                ctx.set(dut.tick, last)
                if first and rng.random() < 0.05:
                    free = given[-1][1] if given else 0
                    of_last = sum(1 << bank for bank in range(part.banks) if part.bank_set(bank) == free)
                    everything = (1 << part.banks) - 1
                    ctx.set(dut.wanted, rng.choice((0, everything, everything & ~of_last)))
                if last and ctx.get(dut.refresh):
                    given.append((frame, ctx.get(dut.refresh_set)))
                await ctx.tick()
            frame += 1
        assert frame < (len(given) + t.postponed) * t.refresh_interval

    _simulate(dut, bench)
    last = {}
    for n, (frame, number) in enumerate(given):
        assert n == 0 or frame - given[n - 1][0] >= t.refresh_to_refresh
        assert number not in last or frame - last[number] >= t.refresh
        last[number] = frame
    for n in range(0, len(given), t.refresh_sets):
        assert sorted(number for _, number in given[n : n + t.refresh_sets]) == list(range(t.refresh_sets))


@pytest.mark.parametrize("dram", list(PARTS), ids=lambda dram: dram.name.lower())
def test_refreshes_are_owed_while_the_memory_is_wanted(dram):
    dut = RefreshTimer(part=dram)
    interval, most = dut.interval_cycles, dut.postponed
    # busy, short pauses, and idle for long enough to make up for all
    busy = (most + 2) * interval + 20  # so that all of the quiet time lies before the next one falls due
    idle = QUIET_CYCLES + most * (dut.rest_cycles + 1) + 2 * interval
    given = []

    async def bench(ctx):
        for cycle in range(busy + idle):
            pause = cycle % (QUIET_CYCLES + 10) < QUIET_CYCLES - 1
            ctx.set(dut.wanted, (cycle < busy - 1 and not pause) or cycle == busy - 1)
            if ctx.get(dut.due):
                given.append(cycle)
            await ctx.tick()

    _simulate(dut, bench)
    late = [cycle for cycle in given if cycle < busy]
    made_up = [cycle for cycle in given if cycle >= busy]
    assert [cycle // interval for cycle in late] == [most, most + 1, most + 2]
    assert made_up[0] >= busy + QUIET_CYCLES
    assert all(b - a >= dut.rest_cycles for a, b in pairwise(made_up))
    assert len(given) == (busy + idle) // interval


def _simulate(dut, bench):
    m = Module()
    m.submodules.dut = dut
    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
