# amaranth: UnusedElaboratable=no
"""The round-robin arbiter: one grant, kept until accepted; nobody is served twice while another waits."""

import random

import pytest
from amaranth.hdl import ClockDomain, Module
from amaranth.sim import Simulator
from nearkv_hw.common.arbiter import RoundRobin


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_grants_are_single_kept_and_fair(count):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    arbiter = RoundRobin(count=count)

    async def bench(ctx):
        waiting, held, overtaken = set(), None, [0] * count
        for _ in range(2000):
            waiting |= {i for i in range(count) if rng.random() < 0.3}
            accept = rng.random() < 0.6
            ctx.set(arbiter.requests, sum(1 << i for i in waiting))
            ctx.set(arbiter.accept, 0)
            grant = ctx.get(arbiter.grant)
            assert grant.bit_count() == bool(waiting)
            if not waiting:
                await ctx.tick()
                continue
            chosen = grant.bit_length() - 1
            assert chosen in waiting
            assert held in (None, chosen)
            ctx.set(arbiter.accept, accept)
            assert ctx.get(arbiter.grant) == grant
            held = None if accept else chosen
            if accept:
                waiting.discard(chosen)
                overtaken[chosen] = 0
                for i in waiting:
                    overtaken[i] += 1
                assert max(overtaken) < count
            await ctx.tick()

    m = Module()
    m.domains.sync = ClockDomain()  # also where the block itself has no register
    m.submodules.arbiter = arbiter
    simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("count", [0, -1, 2.0, None])
def test_count_is_checked(count):
    with pytest.raises(ValueError, match="count must be a positive integer, not"):
        RoundRobin(count=count)
