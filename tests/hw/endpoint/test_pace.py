# amaranth: UnusedElaboratable=no
"""The count of tokens that keeps the link's rate."""

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi.config import Link
from nearkv_hw.abi.link import ports, tokens
from nearkv_hw.endpoint.pace import SAVED_CYCLES, Pace


def test_parameters_are_checked():
    with pytest.raises(ValueError, match=r"per_cycle must be positive integers, not \[0\]"):
        Pace(per_cycle=0, costs=[1])
    with pytest.raises(ValueError, match=r"costs must be positive integers, not \[4, 0\]"):
        Pace(per_cycle=1, costs=[4, 0])
    with pytest.raises(ValueError, match=r"costs must be positive integers, not \[\]"):
        Pace(per_cycle=1, costs=[])


def opened(pace, cycles, wish, begun=lambda cycle: 0):
    """Messages of each kind that passed: those of `wish(cycle)` while the link is open, those of
    `begun(cycle)` whether it is or not."""
    passed = []

    async def drive(ctx):
        for cycle in range(cycles):
            now = (wish(cycle) if ctx.get(pace.open) else 0) | begun(cycle)
            ctx.set(pace.passed, now)
            passed.append(now)
            await ctx.tick()

    simulator = Simulator(pace)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    return [sum(now >> kind & 1 for now in passed) for kind in range(len(pace.costs))], passed


@pytest.mark.parametrize("link", Link)
def test_what_is_always_there_passes_at_the_rate(link):
    rate = tokens(link, 800)
    costs = [rate.ndr, rate.drs] * ports(link, 800)
    cycles = 2000
    for wish in (0b10, 0b11, 0b1010, 0b111111):
        wanted = wish & (1 << len(costs)) - 1
        counts, _ = opened(Pace(per_cycle=rate.per_cycle, costs=costs), cycles, lambda _, w=wanted: w)
        spent = sum(cost * count for cost, count in zip(costs, counts, strict=True))
        if sum(cost for kind, cost in enumerate(costs) if wanted >> kind & 1) < rate.per_cycle:
            assert all(count == cycles for kind, count in enumerate(counts) if wanted >> kind & 1)
        else:
            slack = 3 * sum(costs) + SAVED_CYCLES * rate.per_cycle
            assert -sum(costs) <= spent - cycles * rate.per_cycle <= slack


@pytest.mark.parametrize(("per_cycle", "cost"), [(10, 10), (5, 10), (3, 10), (19, 10)])
def test_nothing_is_lost_in_the_long_run(per_cycle, cost):
    cycles = 3000
    (count,), _ = opened(Pace(per_cycle=per_cycle, costs=[cost]), cycles, lambda cycle: 1)
    most = min(cycles, cycles * per_cycle / cost)
    assert most - 1 <= count <= most + 4


@pytest.mark.parametrize("idle_cycles", [10, 1000])
def test_idle_cycles_are_lost(idle_cycles):
    """After a pause, long or short, there are tokens of two cycles and what passes until it is counted."""
    pace = Pace(per_cycle=5, costs=[10])
    _, passed = opened(pace, idle_cycles + 40, lambda cycle: cycle >= idle_cycles)
    assert passed[:idle_cycles] == [0] * idle_cycles
    assert passed[idle_cycles : idle_cycles + 8] == [1, 1, 1, 1, 0, 0, 0, 1]
    assert 20 <= sum(passed) <= 20 + 3


def test_what_has_begun_is_paid_for_afterwards():
    pace = Pace(per_cycle=1, costs=[8, 8])
    counts, passed = opened(pace, 400, lambda cycle: 1, begun=lambda cycle: 2 if cycle in (3, 4) else 0)
    assert counts[1] == 2
    assert 400 - 16 <= 8 * sum(counts) <= 400 + 2 + 3 * 16
    assert not any(passed[5:20])
