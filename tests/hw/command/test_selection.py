# amaranth: UnusedElaboratable=no
"""The selector against sorting: many equal bounds, several passes and units, any order of arrival."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi.numerics import SCORE_LIMIT
from nearkv_hw.command.selection import Selector

CANDIDATES = 32


def random_bounds(rng, count):
    kind = rng.choice(["few", "any", "rising", "edges"])
    if kind == "few":
        return [rng.randint(-2, 2) for _ in range(count)]
    if kind == "edges":
        return [rng.choice([-SCORE_LIMIT, -1, 0, 1, SCORE_LIMIT]) for _ in range(count)]
    bounds = [rng.randint(-SCORE_LIMIT, SCORE_LIMIT) for _ in range(count)]
    return sorted(bounds) if kind == "rising" else bounds


def expected(bounds, select_pages):
    """Verdicts as the contract has them."""
    *others, last = range(len(bounds))
    chosen = sorted(others, key=lambda n: (-bounds[n], n))[: select_pages - 1]
    return [int(n == last or n in chosen) for n in range(len(bounds))]


class Bench:
    def __init__(self, selector, rng, backlog):
        self.selector, self.rng, self.backlog = selector, rng, backlog
        self.queues = [[] for _ in range(selector.units)]

    async def offer(self, ctx):
        """Bounds of the units, each unit's in their order."""
        offered = [False] * len(self.queues)
        while True:
            for n, (queue, port) in enumerate(zip(self.queues, self.selector.bounds, strict=True)):
                if not offered[n] and queue and self.rng.random() < 0.7:
                    for name, value in queue[0].items():
                        ctx.set(getattr(port.payload, name), value)
                    offered[n] = True
                ctx.set(port.valid, offered[n])
            taken = [ctx.get(port.ready) and offered[n] for n, port in enumerate(self.selector.bounds)]
            await ctx.tick()
            for n, done in enumerate(taken):
                if done:
                    self.queues[n].pop(0)
                    offered[n] = False

    async def jobs(self, ctx):
        selector, rng = self.selector, self.rng
        for _ in range(40):
            count = rng.choice([0, 1, 2, 3, rng.randint(1, CANDIDATES), CANDIDATES])
            select_pages = rng.choice([1, 2, 3, rng.randint(1, CANDIDATES), CANDIDATES, 1 << 20])
            passes = rng.randint(1, 3)
            while not ctx.get(selector.feed.idle):
                await ctx.tick()
            ctx.set(selector.feed.start, 1)
            ctx.set(selector.feed.select_pages, select_pages)
            await ctx.tick()
            ctx.set(selector.feed.start, 0)
            ctx.set(selector.feed.select_pages, rng.getrandbits(24))
            unit_of = [rng.randrange(selector.units) for _ in range(count)]
            largest = [-SCORE_LIMIT] * count
            for number in range(passes):
                for candidate, value in enumerate(random_bounds(rng, count)):
                    largest[candidate] = max(value, largest[candidate])
                    ctx.set(selector.feed.asked, 1)
                    self.queues[unit_of[candidate]].append(
                        {
                            "value": value,
                            "candidate": candidate,
                            "first": number == 0,
                            "last": number == passes - 1,
                        }
                    )
                    await ctx.tick()
                    ctx.set(selector.feed.asked, 0)
                    while sum(map(len, self.queues)) > self.backlog:
                        await ctx.tick()
            want = expected(largest, select_pages) if count else []
            for _ in range(rng.randint(1, 3)):
                ctx.set(selector.feed.serve, 1)
                ready = rng.choice([0.4, 1])
                stop = rng.choice([count, rng.randint(0, count)])
                assert [await self.verdict(ctx, ready) for _ in range(stop)] == want[:stop]
                while not ctx.get(selector.feed.idle):
                    await ctx.tick()
                assert ctx.get(selector.feed.selected) == sum(want)
                if stop == count:
                    for _ in range(5):
                        assert not ctx.get(selector.feed.verdicts.valid)
                        await ctx.tick()
                ctx.set(selector.feed.serve, 0)
                await ctx.tick()

    async def verdict(self, ctx, ready):
        while True:
            ctx.set(self.selector.feed.verdicts.ready, is_ready := self.rng.random() < ready)
            valid, payload = (
                ctx.get(self.selector.feed.verdicts.valid),
                ctx.get(self.selector.feed.verdicts.payload),
            )
            await ctx.tick()
            if is_ready and valid:
                ctx.set(self.selector.feed.verdicts.ready, 0)
                return payload


@pytest.mark.parametrize(("units", "backlog"), [(1, 2), (1, 64), (2, 9), (4, 200)])
def test_selects_the_best(units, backlog):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    selector = Selector(units=units, candidates=CANDIDATES)
    bench = Bench(selector, random.Random(seed), backlog)
    simulator = Simulator(selector)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench.jobs)
    simulator.add_testbench(bench.offer, background=True)
    simulator.run()


def test_a_bound_and_a_verdict_per_cycle():
    """Falling bounds of which few are among the best."""
    selector = Selector(units=2, candidates=CANDIDATES)

    async def bench(ctx):
        ctx.set(selector.feed.start, 1)
        ctx.set(selector.feed.select_pages, 1)
        await ctx.tick()
        ctx.set(selector.feed.start, 0)
        for candidate in range(CANDIDATES):
            port = selector.bounds[candidate % 2]
            for name, value in (("value", -candidate), ("candidate", candidate), ("first", 1), ("last", 1)):
                ctx.set(getattr(port.payload, name), value)
            ctx.set(selector.feed.asked, 1)
            ctx.set(port.valid, 1)
            assert ctx.get(port.ready)
            await ctx.tick()
            ctx.set(port.valid, 0)
        ctx.set(selector.feed.asked, 0)
        while not ctx.get(selector.feed.idle):
            await ctx.tick()
        ctx.set(selector.feed.verdicts.ready, 1)
        ctx.set(selector.feed.serve, 1)
        await ctx.tick().repeat(Selector.verdict_cycles)
        for candidate in range(CANDIDATES):
            assert ctx.get(selector.feed.verdicts.valid)
            assert ctx.get(selector.feed.verdicts.payload) == (candidate == CANDIDATES - 1)
            await ctx.tick()
        assert not ctx.get(selector.feed.verdicts.valid)

    simulator = Simulator(selector)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "units must be a positive integer, not 0"),
        ({"candidates": 1}, "candidates must be a power of two from 2 to 65536, not 1"),
        ({"candidates": 48}, "candidates must be a power of two from 2 to 65536, not 48"),
        ({"candidates": 1 << 17}, "candidates must be a power of two from 2 to 65536, not 131072"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Selector(**{"units": 1, **arguments})
