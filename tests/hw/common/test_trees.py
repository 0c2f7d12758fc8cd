# amaranth: UnusedElaboratable=no
"""Trees: balanced, every item once; pipelined with stages that hold still; leading ones to the top."""

import random

import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator
from nearkv_hw.common.trees import normalise_steps, one_hot_select, pipelined_tree, reduce_tree, tree_stages


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_reduce_tree_is_balanced_and_takes_every_item_once(count):
    depth, items = reduce_tree(
        [(0, [i]) for i in range(count)], lambda a, b: (max(a[0], b[0]) + 1, a[1] + b[1])
    )
    assert items == list(range(count))
    assert depth == (count - 1).bit_length()


@pytest.mark.parametrize("count", [1, 5])
def test_one_hot_select_takes_the_marked_one_or_zero(count):
    m, one_hot = Module(), Signal(count)
    values = [Signal(4, name=f"value_{i}", init=i + 3) for i in range(count)]
    selected = Signal(4)
    m.d.comb += selected.eq(one_hot_select(one_hot, values))

    async def bench(ctx):
        assert ctx.get(selected) == 0
        for i in range(count):
            ctx.set(one_hot, 1 << i)
            assert ctx.get(selected) == i + 3

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()


def test_a_tree_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a tree needs at least one item"):
        reduce_tree([], max)


def test_too_few_stages_are_refused():
    with pytest.raises(ValueError, match="1 stages of 2 levels leave 2 items; give more enables"):
        pipelined_tree(Module(), [Signal(4)] * 8, lambda a, b: a + b, shape=7, levels=2, enables=[Signal()])


@pytest.mark.parametrize(("count", "levels"), [(2, 1), (5, 2), (8, 2), (9, 3)])
def test_pipelined_tree_sums_and_holds(count, levels):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    rng = random.Random(seed)
    m = Module()
    stages = tree_stages(count, levels)
    items = [Signal(8, name=f"item_{i}") for i in range(count)]
    enables = [Signal(name=f"enable_{i}") for i in range(stages)]
    total = pipelined_tree(m, items, lambda a, b: a + b, shape=16, levels=levels, enables=enables)

    async def bench(ctx):
        sums = []
        for _ in range(200):
            values = [rng.randrange(256) for _ in items]
            for item, value in zip(items, values, strict=True):
                ctx.set(item, value)
            sums.append(sum(values))
            for enable in enables:
                ctx.set(enable, 1)
            await ctx.tick()
            if len(sums) >= stages:
                assert ctx.get(total) == sums[-stages]
        held = ctx.get(total)
        ctx.set(enables[-1], 0)
        for item in items:
            ctx.set(item, 0)
        for _ in range(stages + 1):
            await ctx.tick()
            assert ctx.get(total) == held

    simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()


def test_normalise_steps_bring_the_leading_one_to_the_top():
    m = Module()
    value = Signal(11)
    normalised, shift = normalise_steps(m, value, (8, 4, 2, 1), "value")

    async def bench(ctx):
        for number in range(1, 1 << 11):
            ctx.set(value, number)
            zeros = 11 - number.bit_length()
            assert ctx.get(normalised) == number << zeros
            assert ctx.get(shift) == zeros
        ctx.set(value, 0)
        assert ctx.get(normalised) == 0

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()
