# amaranth: UnusedElaboratable=no
"""The queue between two streams: order, latency, throughput and level."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.common.queue import Queue
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, random, start, value

WIDTH = 12


@pytest.mark.rtl
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_queue(depth):
    queue = Queue(shape=WIDTH, depth=depth)
    run(queue, module=__file__, parameters={"depth": depth, "latency_cycles": queue.latency_cycles})


@pytest.mark.parametrize("depth", [0, -1, 2.5, None])
def test_depth_is_checked(depth):
    with pytest.raises(ValueError, match="depth must be a positive integer"):
        Queue(shape=8, depth=depth)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.6])
async def keeps_order(dut, idle, backpressure):
    await start(dut)
    source = StreamSource(dut, "i", idle=idle)
    sink = StreamSink(dut, "o", backpressure=backpressure)
    items = [random("items").randrange(1 << WIDTH) for _ in range(300)]
    source.send(items)
    assert await sink.receive(len(items)) == items


@cocotb.test()
async def has_stated_latency_and_throughput(dut):
    await start(dut)
    source = StreamSource(dut, "i")
    sink = StreamSink(dut, "o")
    source.send(range(50))
    assert await sink.receive(50) == list(range(50))
    assert sink.cycles[0] - source.cycles[0] == parameters()["latency_cycles"]
    assert sink.cycles[-1] - sink.cycles[0] == (49 if parameters()["depth"] > 1 else 98)


@cocotb.test()
async def holds_depth_items_and_counts_them(dut):
    await start(dut)
    depth = parameters()["depth"]
    source = StreamSource(dut, "i")
    sink = StreamSink(dut, "o", backpressure=1.0)
    source.send(range(depth + 3))
    for _ in range(depth + 6):
        await RisingEdge(dut.clk)
    assert len(source.cycles) == depth
    assert value(dut.level) == depth
    sink.backpressure = 0.0
    assert await sink.receive(depth + 3) == list(range(depth + 3))
