# amaranth: UnusedElaboratable=no
"""Every consumer gets the items that it was chosen for, in order, whenever it takes them."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.common.fork import Fork

OUTPUTS = 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": 0}, "outputs must be a positive integer, not 0"),
        ({"interval_cycles": 3}, "interval_cycles must be 1 or 2, not 3"),
    ],
)
def test_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        Fork(**{"shape": 8, "outputs": OUTPUTS, **changes})


def run(dut, items, *, idle, backpressure, rng):
    """Offers `items` of (to, payload); the cycles in which they went in, and what came out where and when."""
    went_in, came_out = [], [[] for _ in range(OUTPUTS)]
    expected = sum(to.bit_count() for to, _ in items)

    async def bench(ctx):
        offers, cycle = False, 0
        while len(went_in) < len(items) or sum(map(len, came_out)) < expected:
            offers = offers or (len(went_in) < len(items) and rng.random() >= idle)
            ctx.set(dut.i.valid, offers)
            if offers:
                to, payload = items[len(went_in)]
                ctx.set(dut.i.payload.to, to)
                ctx.set(dut.i.payload.payload, payload)
            for o, out in zip(dut.o, came_out, strict=True):
                takes = rng.random() >= backpressure
                ctx.set(o.ready, takes)
                if takes and ctx.get(o.valid):
                    out.append((cycle, ctx.get(o.payload)))
            if offers and ctx.get(dut.i.ready):
                went_in.append(cycle)
                offers = False
            await ctx.tick()
            cycle += 1
            assert cycle < 100 * len(items), "an item was lost"
        for o in dut.o:
            assert not ctx.get(o.valid)

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    return went_in, came_out


@pytest.mark.parametrize("interval_cycles", [1, 2])
def test_order(interval_cycles):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    items = [(rng.randrange(1 << OUTPUTS), rng.randrange(256)) for _ in range(200)]
    dut = Fork(shape=8, outputs=OUTPUTS, interval_cycles=interval_cycles)
    _, came_out = run(dut, items, idle=0.3, backpressure=0.4, rng=rng)
    for n, out in enumerate(came_out):
        assert [payload for _, payload in out] == [payload for to, payload in items if to >> n & 1]


@pytest.mark.parametrize("interval_cycles", [1, 2])
def test_latency_and_rate(interval_cycles):
    dut = Fork(shape=8, outputs=OUTPUTS, interval_cycles=interval_cycles)
    items = [((1 << OUTPUTS) - 1, n) for n in range(20)]
    went_in, came_out = run(dut, items, idle=0, backpressure=0, rng=random.Random(0))
    assert went_in == [n * interval_cycles for n in range(20)]
    for out in came_out:
        assert out == [(cycle + Fork.latency_cycles, n) for n, cycle in enumerate(went_in)]
