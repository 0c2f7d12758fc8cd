# amaranth: UnusedElaboratable=no
"""A slice's load, cycle by cycle, against sums over the windows."""

import cocotb
import pytest
from nearkv_hw.abi.cxl import DevLoad
from nearkv_hw.memory.load import WINDOW_CYCLES, LoadMeter
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import cycles, random, start, value


@pytest.mark.rtl
@pytest.mark.parametrize("places", [2, 32, 112])
def test_load_meter(places):
    run(LoadMeter(places=places), module=__file__, parameters={"places": places})


@pytest.mark.parametrize("places", [0, 1.0])
def test_parameters_are_checked(places):
    with pytest.raises(ValueError, match=f"places must be a positive integer, not {places}"):
        LoadMeter(places=places)


def load_of(places, taken, waiting, refused):
    """The load of a window."""
    if 4 * sum(refused) >= WINDOW_CYCLES:
        severe = 4 * sum(refused) >= 3 * WINDOW_CYCLES
        return DevLoad.SEVERE_OVERLOAD if severe else DevLoad.MODERATE_OVERLOAD
    optimal = 4 * sum(waiting) >= places * WINDOW_CYCLES or 4 * sum(taken) >= WINDOW_CYCLES
    return DevLoad.OPTIMAL if optimal else DevLoad.LIGHT


def window_of(rng, most, total):
    """Numbers up to `most` for each cycle of a window, with this sum."""
    numbers = [0] * WINDOW_CYCLES
    for place in rng.sample(range(WINDOW_CYCLES), WINDOW_CYCLES):
        numbers[place] = min(total, most)
        total -= numbers[place]
    assert total == 0
    return numbers


@cocotb.test()
async def agrees_with_sums(dut):
    """Windows of every load, those at the thresholds among them."""
    rng, places = random("levels"), parameters()["places"]
    windows = [[[0] * WINDOW_CYCLES] * 3]  # the first one has begun when `start` returns
    for _ in range(60):
        wanted = rng.choice([WINDOW_CYCLES // 4 - rng.randrange(2), rng.randrange(2 * WINDOW_CYCLES)])
        taken = window_of(rng, most=2, total=wanted if rng.random() < 0.3 else wanted // 8)
        wanted = places * WINDOW_CYCLES // 4 - rng.randrange(2)
        if rng.random() < 0.3:
            wanted = rng.randrange(places * WINDOW_CYCLES)
        waiting = window_of(rng, most=places, total=wanted)
        often = rng.choice([0, 0, 0.25, 0.75, rng.random()])
        count = round(often * WINDOW_CYCLES) - (often > 0 and rng.randrange(2))
        windows.append([taken, waiting, window_of(rng, most=1, total=max(count, 0))])
    await start(dut)
    seen = []
    for taken, waiting, refused in windows:
        for n in range(WINDOW_CYCLES):
            if not seen and n == 0:
                seen.append(value(dut.load))  # that cycle is over
                continue
            dut.taken.value, dut.waiting.value, dut.refused.value = taken[n], waiting[n], refused[n]
            await cycles(dut, 1)
            seen.append(value(dut.load))
    expected = [load_of(places, *window) for window in windows]
    assert set(expected) == set(DevLoad)
    latency = LoadMeter.latency_cycles
    for n, load in enumerate(expected[:-1]):
        first = (n + 1) * WINDOW_CYCLES - 1 + latency
        assert seen[first : first + WINDOW_CYCLES] == [load] * len(seen[first : first + WINDOW_CYCLES])
