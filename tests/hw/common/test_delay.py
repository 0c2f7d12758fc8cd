# amaranth: UnusedElaboratable=no
"""The delay line: every item comes out unchanged, exactly so many cycles later, whatever comes between."""

import random

import pytest
from amaranth.hdl import ClockDomain, Module
from amaranth.sim import Simulator
from nearkv_hw.common.delay import Delay


@pytest.mark.parametrize("cycles", [0, 1, 2, 3, 4, 7, 38])
def test_delays(cycles):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    delay = Delay(shape=12, cycles=cycles)
    assert delay.latency_cycles == cycles
    items = [rng.randrange(1 << 12) if rng.random() < 0.6 else None for _ in range(400)]

    async def bench(ctx):
        for n, item in enumerate(items):
            ctx.set(delay.i.valid, item is not None)
            ctx.set(delay.i.payload, rng.randrange(1 << 12) if item is None else item)
            expected = items[n - cycles] if n >= cycles else None
            assert ctx.get(delay.o.valid) == (expected is not None)
            if expected is not None:
                assert ctx.get(delay.o.payload) == expected
            await ctx.tick()

    m = Module()
    m.domains.sync = ClockDomain()  # also where the block itself has no register
    m.submodules.delay = delay
    simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("cycles", [-1, 1.0, None])
def test_cycles_are_checked(cycles):
    with pytest.raises(ValueError, match="cycles must be a non-negative integer, not"):
        Delay(shape=8, cycles=cycles)
