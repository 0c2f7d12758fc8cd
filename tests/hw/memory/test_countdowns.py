# amaranth: UnusedElaboratable=no
"""Count-downs against the rule that their docstring states, one Python number for each."""

import random

import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator
from nearkv_hw.memory.dram.countdowns import Countdowns


@pytest.mark.parametrize("distances", [(1,), (2,), (6, 119), (13, 3, 24), (1, 11), (4, 4)])
def test_no_start_shortens_what_is_under_way(distances):
    check(distances, over_others=None)


@pytest.mark.parametrize("distances", [(2, 11), (6, 6, 119)])
def test_starts_that_find_none_under_way_need_no_comparison(distances):
    check(distances, over_others=(False,) * len(distances))


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="count must be a positive integer, not 0"):
        Countdowns(count=0, distances=[1])
    with pytest.raises(ValueError, match="distances must be integers of at least 1"):
        Countdowns(count=1, distances=[0])
    with pytest.raises(ValueError, match="over_others must say it of 1 distances"):
        Countdowns(count=1, distances=[2], over_others=[True, False])


def check(distances, over_others):
    """Random starts, at most one for each count-down in a frame; the longest one may always start."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    count = 5
    dut = Countdowns(count=count, distances=distances, over_others=over_others)
    longest = distances.index(max(distances))

    async def bench(ctx):
        ends, frame = [0] * count, 0  # the frames from which on the next command may be
        for _ in range(2_000):
            over = ctx.get(dut.over)
            assert over == sum((frame >= end) << i for i, end in enumerate(ends))
            assert ctx.get(dut.soon) == sum((frame + 1 >= end) << i for i, end in enumerate(ends))
            tick = rng.randrange(2)
            starts = [0] * len(distances)
            for i in range(count):
                n = rng.randrange(len(distances))
                may = over_others is None or over >> i & 1 or n == longest
                if may and rng.random() < 0.2:
                    starts[n] |= 1 << i
                    if tick:
                        ends[i] = max(ends[i], frame + distances[n])
            for start, value in zip(dut.start, starts, strict=True):
                ctx.set(start, value)
            ctx.set(dut.tick, tick)
            frame += tick
            await ctx.tick()

    m = Module()
    m.submodules.dut = dut
    m.d.sync += Signal().eq(1)  # distances of one frame need no register
    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
