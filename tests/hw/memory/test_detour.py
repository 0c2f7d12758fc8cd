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
        FabricDetour(channel=2, config=configure("small"))
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not None"):
        FabricDetour(channel=0, config=None)


@pytest.mark.parametrize("channels", [1, 4])
def test_lines_and_answers(channels):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    config = configure("small", channels=channels, capacity_bytes=1 << 30)
    channel = rng.randrange(channels)
    dut = FabricDetour(channel=channel, config=config)
    extent_lines = EXTENT_BYTES // LINE_BYTES

    async def bench(ctx):
        for _ in range(50):
            extent, within = rng.randrange(config.slice_extents), rng.randrange(extent_lines)
            tenant, data, fault = rng.randrange(8), rng.getrandbits(512), rng.choice(list(Fault))
            asks, takes = rng.randrange(2), rng.randrange(2)
            ctx.set(dut.unit.request.payload, {"line": extent * extent_lines + within, "tenant": tenant})
            ctx.set(dut.unit.request.valid, asks)
            ctx.set(dut.fabric.request.ready, takes)
            ctx.set(dut.fabric.response.valid, asks)
            ctx.set(dut.unit.response.ready, takes)
            ctx.set(dut.fabric.response.payload, {"data": data, "fault": fault})
            await ctx.delay(1e-9)
            request = ctx.get(dut.fabric.request.payload)
            assert config.slice_of(request["line"] * LINE_BYTES) == channel
            assert request["line"] == (extent * channels + channel) * extent_lines + within
            assert (request["tenant"], request["write"]) == (tenant, 0)
            assert ctx.get(dut.fabric.request.valid) == ctx.get(dut.unit.response.valid) == asks
            assert ctx.get(dut.unit.request.ready) == ctx.get(dut.fabric.response.ready) == takes
            answer = ctx.get(dut.unit.response.payload)
            assert (answer["data"], answer["fault"]) == (data, fault)

    simulator = Simulator(dut)
    simulator.add_testbench(bench)
    simulator.run()
