# amaranth: UnusedElaboratable=no
"""The heap of the largest keys: against sorting, with keys that rise, fall, and come again."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.common.best import Best

KEY_BITS = 12


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 40])
def test_keeps_the_largest(depth):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    best = Best(key_bits=KEY_BITS, depth=depth)

    async def push(ctx, key):
        """Cycles until the block would take another key."""
        ctx.set(best.i.payload, key)
        ctx.set(best.i.valid, 1)
        took = 0
        while not ctx.get(best.i.ready):
            await ctx.tick()
        await ctx.tick()
        ctx.set(best.i.valid, 0)
        ctx.set(best.i.payload, rng.getrandbits(KEY_BITS))
        while not ctx.get(best.idle):
            took += 1
            await ctx.tick()
        return took + 1

    async def bench(ctx):
        for turn in range(12):
            capacity = rng.choice([0, 1, depth, depth, rng.randint(0, depth)])
            ctx.set(best.capacity, capacity)
            ctx.set(best.clear, 1)
            await ctx.tick()
            ctx.set(best.clear, 0)
            keys = [rng.getrandbits(rng.choice([3, KEY_BITS])) for _ in range(rng.choice([1, 5, 120]))]
            keys = sorted(keys, reverse=turn % 3 == 2) if turn % 3 else keys
            for n, key in enumerate(keys):
                before = sorted(keys[:n])[-capacity:] if capacity else []
                took = await push(ctx, key)
                kept = sorted(keys[: n + 1])[-capacity:] if capacity else []
                assert ctx.get(best.size) == len(kept)
                if kept:
                    assert ctx.get(best.least) == kept[0]
                levels = len(kept).bit_length() if kept != before else 0
                assert Best.drop_cycles <= took <= Best.drop_cycles + Best.level_cycles * levels

    simulator = Simulator(best)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key_bits": 0}, "key_bits must be a positive integer, not 0"),
        ({"depth": 2.0}, "depth must be a positive integer, not 2.0"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Best(**{"key_bits": 8, "depth": 4, **arguments})
