"""Whose descriptor is next: against a plain model in every cycle, and the shares that come of it."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi import configure
from nearkv_hw.abi.owner import WEIGHT_LINES_LOG2
from nearkv_hw.command.turns import Turns

CONFIG = configure("small", apertures=3)
APERTURES = range(CONFIG.apertures)
ROUND = 1 << WEIGHT_LINES_LOG2


def test_config_is_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        Turns(config="small")


class Plain:
    """What `Turns` says, as of its docstring."""

    def __init__(self, weights):
        self.weights = weights
        self.credits = [0 for _ in APERTURES]
        self.turn = 0
        self.debit = None

    def chosen(self, waiting):
        """Whose turn it is, or None."""
        order = sorted(APERTURES, key=lambda n: (n - self.turn) % len(APERTURES))
        return next((n for n in order if n in waiting and self.credits[n] >= 0), None)

    def cycle(self, waiting, take, used):
        """Go on by a cycle; `used` are an aperture and its lines, or None."""
        chosen = self.chosen(waiting)
        if take:
            self.turn = (chosen + 1) % len(APERTURES)
        if self.debit is not None:
            user, lines = self.debit
            self.credits[user] -= lines
        elif chosen is None:
            for n in APERTURES:
                granted = self.credits[n] + self.weights[n] * ROUND
                self.credits[n] = granted if n in waiting else min(granted, 0)
        self.debit = used


def simulate(bench):
    turns = Turns(config=CONFIG)
    simulator = Simulator(turns)
    simulator.add_clock(1e-6)

    async def run(ctx):
        await bench(ctx, turns)

    simulator.add_testbench(run)
    simulator.run()


async def step(ctx, turns, waiting, take, used):
    """Set everything for a cycle, then let it pass; whose turn it was, or None."""
    ctx.set(turns.waiting, sum(1 << n for n in waiting))
    chosen = ctx.get(turns.chosen) if ctx.get(turns.valid) else None
    taken = chosen is not None and take
    ctx.set(turns.take, taken)
    ctx.set(turns.used, used is not None)
    if used is not None:
        ctx.set(turns.user, used[0])
        ctx.set(turns.lines, used[1])
    await ctx.tick()
    return chosen, taken


def test_every_cycle_is_the_plain_model_s():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def bench(ctx, turns):
        plain = Plain([chance.choice([1, 2, 255]) for _ in APERTURES])
        for n in APERTURES:
            ctx.set(turns.weights[n], plain.weights[n])
        none_able = 0
        for number in range(6000):
            if number % 50 == 0:
                busy, heavy = chance.random(), chance.random()
            waiting = {n for n in APERTURES if chance.random() < busy}
            used = None
            if chance.random() < heavy:
                lines = chance.choice(
                    [0, 1, ROUND, ROUND + 1, chance.randrange(1 << 13), chance.randrange(1 << 18)]
                )
                used = chance.choice(APERTURES), lines
            expected = plain.chosen(waiting)
            none_able += expected is None and bool(waiting)
            got, taken = await step(ctx, turns, waiting, chance.random() < 0.5, used)
            assert got == expected, (seed, number)
            plain.cycle(waiting, taken, used)
        assert none_able > 100, seed

    simulate(bench)


def test_lines_of_most_jobs_are_not_lost():
    """As many jobs of as many lines as can be under way, all of them another's turn."""

    async def bench(ctx, turns):
        for n in APERTURES:
            ctx.set(turns.weights[n], 255)
        for _ in range(256):
            await step(ctx, turns, {0}, False, (0, (1 << 32) - 1))
        await step(ctx, turns, {0, 1}, False, None)
        assert ctx.get(turns.valid)
        assert ctx.get(turns.chosen) == 1

    simulate(bench)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (25, 1, 10)])
@pytest.mark.parametrize("sizes", [(500, 500, 500), (40, 9000, 700)])
def test_lines_are_as_the_weights(weights, sizes):
    """All wait for ever, four jobs are under way at once: lines are as weights, whatever the jobs' size."""

    async def bench(ctx, turns):
        for n in APERTURES:
            ctx.set(turns.weights[n], weights[n])
        lines, under_way, left = [0 for _ in APERTURES], [], 0
        while sum(lines) < 3000 * ROUND:
            used = None
            if under_way:
                left -= 500  # lines in a cycle of this test
                if left <= 0:
                    used = under_way.pop(0), 0
                    used = used[0], sizes[used[0]]
                    lines[used[0]] += used[1]
                    left += sizes[under_way[0]] if under_way else 0
            chosen, taken = await step(ctx, turns, set(APERTURES), len(under_way) < 4, used)
            if taken:
                left += 0 if under_way else sizes[chosen]
                under_way.append(chosen)
        slack = max(weights) * ROUND + 5 * max(sizes)
        for n in APERTURES:
            fair = sum(lines) * weights[n] / sum(weights)
            assert abs(lines[n] - fair) <= slack, (lines, fair)

    simulate(bench)


def test_who_was_away_has_saved_nothing_and_owes_nothing():
    async def bench(ctx, turns):
        for n in APERTURES:
            ctx.set(turns.weights[n], 1)
        for _ in range(100):  # aperture 0 alone
            await step(ctx, turns, {0}, True, (0, 10))
        await step(ctx, turns, set(), False, (1, 40 * ROUND))  # one long job of aperture 1
        for _ in range(45):  # nobody waits: debts are paid
            await step(ctx, turns, set(), False, None)
        order = []
        for _ in range(6):
            chosen, _ = await step(ctx, turns, {0, 1}, True, None)
            order.append(chosen)
        assert order in ([0, 1] * 3, [1, 0] * 3)

    simulate(bench)
