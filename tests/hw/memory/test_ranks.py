# amaranth: UnusedElaboratable=no
"""The bus that ranks share: one request and one answer per cycle, each rank's in order, none lost."""

import itertools
import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.memory.ranks import RankBus


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_are_checked(ranks):
    with pytest.raises(ValueError, match=f"ranks must be 2 or 4, not {ranks}"):
        RankBus(ranks=ranks)


def simulate(dut, bench):
    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()


def ways(dut):
    """(source, target) of every stream that passes, by kind."""
    return {
        "request": [(a.request, b.request) for a, b in zip(dut.fabric, dut.ranks, strict=True)],
        "response": [(b.response, a.response) for a, b in zip(dut.fabric, dut.ranks, strict=True)],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_traffic(ranks):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = RankBus(ranks=ranks)
    came = {kind: [[] for _ in pairs] for kind, pairs in ways(dut).items()}
    count = 150

    async def bench(ctx):
        sent = {kind: [0] * ranks for kind in came}
        holds = {}
        while any(len(got) < count for gots in came.values() for got in gots):
            for kind, pairs in ways(dut).items():
                for n, (source, target) in enumerate(pairs):
                    holds[kind, n] = holds.get((kind, n)) or rng.random() < 0.6
                    ctx.set(source.valid, holds[kind, n] and sent[kind][n] < count)
                    ctx.set(source.payload.data, sent[kind][n])
                    ctx.set(source.payload.id, n)
                    ctx.set(target.ready, rng.random() < 0.6)
            for kind, pairs in ways(dut).items():
                passed = 0
                for n, (source, target) in enumerate(pairs):
                    if ctx.get(source.valid & source.ready):
                        sent[kind][n] += 1
                        holds[kind, n] = False
                        passed += 1
                    if ctx.get(target.valid & target.ready):
                        assert ctx.get(target.payload.id) == n
                        came[kind][n].append(ctx.get(target.payload.data))
                assert passed <= 1, "the bus carried two in one cycle"
            await ctx.tick()

    simulate(dut, bench)
    assert all(got == list(range(count)) for gots in came.values() for got in gots)


@pytest.mark.parametrize("ranks", [2, 4])
def test_latency_and_rate(ranks):
    """All ranks want the bus: it is never idle, and each has its turn; one alone has all of it."""
    dut = RankBus(ranks=ranks)
    arrivals = [[] for _ in range(ranks)]
    alone = []

    async def bench(ctx):
        for cycle in range(20 * ranks):
            for source, target in ways(dut)["request"]:
                ctx.set(source.valid, 1)
                ctx.set(target.ready, 1)
            for n, (_, target) in enumerate(ways(dut)["request"]):
                if ctx.get(target.valid):
                    arrivals[n].append(cycle)
            await ctx.tick()
        for n, (source, _) in enumerate(ways(dut)["request"]):
            ctx.set(source.valid, n == 1)
        await ctx.tick().repeat(ranks + 1)
        for _ in range(20):
            alone.append(ctx.get(ways(dut)["request"][1][1].valid))
            await ctx.tick()

    simulate(dut, bench)
    assert arrivals[0][0] == dut.latency_cycles
    assert all(b - a == ranks for times in arrivals for a, b in itertools.pairwise(times))
    assert alone == [1] * 20
