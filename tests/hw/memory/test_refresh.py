# amaranth: UnusedElaboratable=no
"""Sets of banks that take turns to be refreshed: each in its turn, none while it still is."""

import random

import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator
from nearkv_hw.abi.dram import PARTS, Refresh
from nearkv_hw.memory.dram.refresh import Refresher

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

    m = Module()
    m.submodules.dut = dut
    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    last = {}
    for n, (frame, number) in enumerate(given):
        assert n == 0 or frame - given[n - 1][0] >= t.refresh_to_refresh
        assert number not in last or frame - last[number] >= t.refresh
        last[number] = frame
    for n in range(0, len(given), t.refresh_sets):
        assert sorted(number for _, number in given[n : n + t.refresh_sets]) == list(range(t.refresh_sets))
