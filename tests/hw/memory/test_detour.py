# amaranth: UnusedElaboratable=no
"""A unit behind the crossbar asks for the same lines as beside its channel."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.interfaces import Fault
from nearkv_hw.memory.detour import FabricDetour


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="channel must be from 0 to 1, not 2"):
        FabricDetour(channel=2, config=configure("small"), outstanding=8)
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not None"):
        FabricDetour(channel=0, config=None, outstanding=8)
    with pytest.raises(ValueError, match="outstanding must be an integer of at least 3, not 2"):
        FabricDetour(channel=0, config=configure("small"), outstanding=2)


@pytest.mark.parametrize("channels", [1, 4])
def test_requests_pass_with_the_line_of_the_device(channels):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = configure("small", channels=channels, capacity_bytes=1 << 30)
    channel = rng.randrange(channels)
    dut = FabricDetour(channel=channel, config=config, outstanding=8)
    extent_lines = EXTENT_BYTES // LINE_BYTES

    async def bench(ctx):
        for _ in range(50):
            extent, within = rng.randrange(config.slice_extents), rng.randrange(extent_lines)
            tenant, asks, takes = rng.randrange(8), rng.randrange(2), rng.randrange(2)
            ctx.set(dut.unit.request.payload, {"line": extent * extent_lines + within, "tenant": tenant})
            ctx.set(dut.unit.request.valid, asks)
            ctx.set(dut.fabric.request.ready, takes)
            await ctx.delay(1e-9)
            request = ctx.get(dut.fabric.request.payload)
            assert config.slice_of(request["line"] * LINE_BYTES) == channel
            assert request["line"] == (extent * channels + channel) * extent_lines + within
            assert (request["tenant"], request["write"]) == (tenant, 0)
            assert ctx.get(dut.fabric.request.valid) == asks
            assert ctx.get(dut.unit.request.ready) == takes

    run(dut, bench)


def test_answers_never_wait_in_the_fabric():
    """All that may be under way arrives while the unit takes nothing; then it leaves in order."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = FabricDetour(channel=0, config=configure("small"), outstanding=8)
    answers = [(rng.getrandbits(512), rng.choice(list(Fault))) for _ in range(dut.outstanding)]

    async def bench(ctx):
        ctx.set(dut.fabric.response.valid, 1)
        for n, (data, fault) in enumerate(answers):
            assert ctx.get(dut.fabric.response.ready)
            assert ctx.get(dut.unit.response.valid) == (n >= dut.answer_cycles)
            ctx.set(dut.fabric.response.payload, {"data": data, "fault": fault})
            await ctx.tick()
        ctx.set(dut.fabric.response.valid, 0)
        ctx.set(dut.unit.response.ready, 1)
        for data, fault in answers:
            assert ctx.get(dut.unit.response.valid)
            answer = ctx.get(dut.unit.response.payload)
            assert (answer["data"], answer["fault"]) == (data, fault)
            await ctx.tick()
        assert not ctx.get(dut.unit.response.valid)

    run(dut, bench, clocked=True)


def run(dut, bench, clocked=False):
    simulator = Simulator(dut)
    if clocked:
        simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
