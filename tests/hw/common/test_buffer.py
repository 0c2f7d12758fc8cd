# amaranth: UnusedElaboratable=no
"""The buffer: order under idle and backpressure, latency, full rate, depth."""

import random as python_random

import cocotb
import pytest
from amaranth.sim import Simulator
from nearkv_hw.common.buffer import Buffer
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start


@pytest.mark.rtl
@pytest.mark.parametrize("depth", [2, 5])
def test_buffer(depth):
    buffer = Buffer(shape=70, depth=depth)
    run(buffer, module=__file__, parameters={"depth": depth, "latency_cycles": buffer.latency_cycles})


@pytest.mark.parametrize("depth", [1, 0, 2.5, None])
def test_depth_is_checked(depth):
    with pytest.raises(ValueError, match="depth must be an integer of at least 2, not"):
        Buffer(shape=8, depth=depth)


@pytest.mark.parametrize("depth", [2, 3])
def test_early_payloads_are_no_items(depth):
    """What `early` stores is offered only if `i.valid` comes with it."""
    seed = python_random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = python_random.Random(seed)
    dut = Buffer(shape=16, depth=depth, early=True)
    sent, out = [], []

    async def bench(ctx):
        for _ in range(500):
            early = rng.random() < 0.8
            valid = early and rng.random() < 0.6
            payload = rng.getrandbits(16)
            ctx.set(dut.early, early)
            ctx.set(dut.i.valid, valid)
            ctx.set(dut.i.payload, payload)
            ctx.set(dut.o.ready, rng.random() < 0.5)
            if valid and ctx.get(dut.i.ready):
                sent.append(payload)
            if ctx.get(dut.o.valid) and ctx.get(dut.o.ready):
                out.append(ctx.get(dut.o.payload))
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    assert len(out) > 150
    assert out == sent[: len(out)]


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.6])
async def keeps_order(dut, idle, backpressure):
    await start(dut)
    source = StreamSource(dut, "i", idle=idle)
    sink = StreamSink(dut, "o", backpressure=backpressure)
    rng = random("items")
    items = [rng.getrandbits(70) for _ in range(300)]
    source.send(items)
    assert await sink.receive(len(items)) == items


@cocotb.test()
async def has_stated_latency_rate_and_depth(dut):
    await start(dut)
    source = StreamSource(dut, "i")
    sink = StreamSink(dut, "o", backpressure=1.0)
    source.send(range(50))
    await cycles(dut, 20)
    assert len(source.cycles) == parameters()["depth"]
    sink.backpressure = 0.0
    assert await sink.receive(50) == list(range(50))
    assert sink.cycles[-1] - sink.cycles[0] == 49
    source.send([7])
    await sink.receive()
    assert sink.cycles[-1] - source.cycles[-1] == parameters()["latency_cycles"]
