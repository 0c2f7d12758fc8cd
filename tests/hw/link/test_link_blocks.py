# amaranth: UnusedElaboratable=no
"""Queues that take and give several items in a cycle, and credits, against plain models."""

from collections import deque

import cocotb
import pytest
from amaranth.lib import data
from nearkv_hw.abi.flits import CREDIT_STEPS
from nearkv_hw.link.credits import POOL_BITS, CreditPool, CreditReturn
from nearkv_hw.link.lanes import LaneQueue
from nearkv_hw.link.packer import Packer
from nearkv_hw.link.receiver import Receiver
from nearkv_hw.link.unpacker import Unpacker
from nearkv_hw.link.wire import Wire
from nearkv_sim.cocotb.payload import pack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import cycles, random, start, value

WIDTH = 12
PLACES = 40
MOST = 3


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("depth", "pushes", "window"), [(4, 1, 1), (8, 1, 2), (8, 1, 3), (8, 3, 1), (4, 2, 2), (16, 3, 4)]
)
def test_lane_queue(depth, pushes, window):
    queue = LaneQueue(shape=WIDTH, depth=depth, pushes=pushes, window=window)
    given = {"depth": depth, "pushes": pushes, "window": window}
    run(queue, module=__file__, parameters=given, tests="lane_queue")


@pytest.mark.rtl
def test_credit_pool():
    run(CreditPool(most=MOST), module=__file__, tests="credit_pool")


@pytest.mark.rtl
def test_credit_return():
    run(CreditReturn(places=PLACES), module=__file__, tests="credit_return")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LaneQueue(shape=8, depth=6), "depth must be a power of two of at least 1, not 6"),
        (lambda: LaneQueue(shape=8, depth=2, window=3), "depth must be a power of two of at least 4, not 2"),
        (lambda: LaneQueue(shape=8, depth=8, pushes=0), "pushes must be a positive integer, not 0"),
        (lambda: CreditPool(most=0), "most must be a positive integer, not 0"),
        (lambda: CreditReturn(places=1024), "places must be an integer from 1 to 1023, not 1024"),
        (lambda: Packer(side="host"), "side must be a Side, not 'host'"),
        (lambda: Receiver(side="host"), "side must be a Side, not 'host'"),
        (lambda: Unpacker(side="host"), "side must be a Side, not 'host'"),
        (lambda: Wire(latency_cycles=1), "latency_cycles must be an integer of at least 2, not 1"),
        (lambda: Wire(flits_per_cycle=2), "flits_per_cycle must be above 0 and at most 1, not 2"),
    ],
)
def test_parameters_are_checked(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@cocotb.test()
async def lane_queue(dut):
    depth, pushes, window = (parameters()[name] for name in ("depth", "pushes", "window"))
    rng, held = random("lanes", depth, pushes, window), deque()
    await start(dut)
    for fill in (0.9, 0.1, 0.5):
        for _ in range(300):
            pop = rng.randint(0, min(window, len(held))) if rng.random() > fill / 2 else 0
            push = rng.randint(0, min(pushes, depth - len(held))) if rng.random() < fill else 0
            new = [rng.getrandbits(WIDTH) for _ in range(pushes)]
            dut.i.value = pack(data.ArrayLayout(WIDTH, pushes), new)
            dut.push.value, dut.pop.value = push, pop
            await cycles(dut, 1)
            assert value(dut.level) == len(held)
            seen = value(dut.o)
            shown = [seen >> WIDTH * n & (1 << WIDTH) - 1 for n in range(min(window, len(held)))]
            assert shown == list(held)[: len(shown)]
            for _ in range(pop):
                held.popleft()
            held.extend(new[:push])


@cocotb.test()
async def credit_pool(dut):
    """What a model has that gets its credits a cycle late and saturates; CXL.cache credits are dropped."""
    rng, count, coming = random("pool"), 0, 0
    await start(dut)
    for spending in (0.9, 0.02):
        for _ in range(600):
            code = rng.getrandbits(4)
            spent = rng.randint(0, min(count, MOST)) if rng.random() < spending else 0
            dut.code.value, dut.spent.value = code, spent
            await cycles(dut, 1)
            assert value(dut.available) == min(count, MOST)
            count = min(count - spent + coming, (1 << POOL_BITS) - 1)
            coming = CREDIT_STEPS[code & 7] if code & 8 else 0
    assert count == (1 << POOL_BITS) - 1


@cocotb.test()
async def credit_return(dut):
    rng, owed, out = random("return"), PLACES, 0
    await start(dut)
    for _ in range(600):
        take = rng.random() < 0.2
        freed = out > 0 and rng.random() < 0.5
        dut.take.value, dut.freed.value = int(take), int(freed)
        await cycles(dut, 1)
        code = value(dut.code)
        assert code & 8
        assert CREDIT_STEPS[code & 7] == max(step for step in CREDIT_STEPS if step <= owed)
        assert bool(dut.some.value) == (owed > 0)
        returned = CREDIT_STEPS[code & 7] if take else 0
        owed, out = owed - returned + freed, out + returned - freed
        assert owed + out == PLACES
