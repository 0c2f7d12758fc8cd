# amaranth: UnusedElaboratable=no
"""Slots filled in any order come out in the order in which they were given out."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.common.reorder import Reorder, SmallReorder

either = pytest.mark.parametrize("kind", [Reorder, SmallReorder])


@either
@pytest.mark.parametrize("depth", [1, 3, 512, 4.0])
def test_depth_is_checked(kind, depth):
    with pytest.raises(ValueError, match="depth must be a power of two from 2 to 256, not"):
        kind(shape=8, depth=depth)


@either
@pytest.mark.parametrize("depth", [2, 16])
def test_order(kind, depth):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = kind(shape=16, depth=depth, marks=2)
    count = 400
    out, taken = [], []

    async def bench(ctx):
        under_way = []  # (slot, number) to be filled
        held = None
        while len(out) < count:
            take = len(taken) < count and rng.random() < 0.7 and ctx.get(dut.room)
            ctx.set(dut.take, take)
            if take:
                slot = ctx.get(dut.slot)
                assert slot not in [s for s, _ in taken[len(out) :]], "a slot was given out twice"
                taken.append((slot, len(taken)))
            rng.shuffle(under_way)
            arrives = bool(under_way) and rng.random() < 0.6
            ctx.set(dut.arrive, arrives)
            if arrives:
                slot, number = under_way.pop()
                ctx.set(dut.arrive_slot, slot)
                ctx.set(dut.arrived, number)
            for mark in dut.marks:
                marks = bool(under_way) and rng.random() < 0.2
                ctx.set(mark.valid, marks)
                if marks:
                    slot, number = under_way.pop()
                    taken[number] = (slot, None)
                    ctx.set(mark.slot, slot)
            if take:
                under_way.append(taken[-1])
            ready = rng.random() < 0.6
            ctx.set(dut.o.ready, ready)
            if ctx.get(dut.o.valid):
                offered = ctx.get(dut.o.payload.slot), ctx.get(dut.o.payload.data)
                assert held in (None, offered), "what is offered must hold"
                held = None if ready else offered
                if ready:
                    slot, number = taken[len(out)]
                    assert offered[0] == slot
                    assert number is None or offered[1] == number
                    out.append(offered)
            else:
                assert held is None
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    assert sum(number is None for _, number in taken) > 20


@either
def test_latency_and_rate(kind):
    dut = kind(shape=16, depth=8)
    seen = []

    async def bench(ctx):
        ctx.set(dut.o.ready, 1)
        ctx.set(dut.take, 1)
        for cycle in range(40):
            ctx.set(dut.arrive, cycle > 0)
            ctx.set(dut.arrive_slot, (cycle - 1) % 8)
            ctx.set(dut.arrived, cycle)
            assert ctx.get(dut.room)
            if ctx.get(dut.o.valid):
                seen.append((cycle, ctx.get(dut.o.payload.data)))
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    assert seen == [(n + dut.latency_cycles, n) for n in range(1, 40 - dut.latency_cycles)]
