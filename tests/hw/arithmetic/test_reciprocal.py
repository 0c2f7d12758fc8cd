# amaranth: UnusedElaboratable=no
"""The reciprocal is floor(2^61 / l) for every denominator, after exactly the promised cycles.

Proved here: smallest and largest denominators, those beside powers of two, and random ones, under idle and
backpressure; latency and interval; `soon` rises exactly its notice ahead and never for longer.
"""

from itertools import pairwise

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.arithmetic.reciprocal import Reciprocal
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycle, random, start

NOTICE_CYCLES = 4


@pytest.mark.rtl
def test_reciprocal():
    component = Reciprocal(notice_cycles=NOTICE_CYCLES)
    given = {"latency": component.latency_cycles, "interval": component.interval_cycles}
    run(component, module=__file__, parameters=given)


@pytest.mark.parametrize("notice", [-1, 16, 1.5, None])
def test_notice_is_checked(notice):
    with pytest.raises(ValueError, match="notice_cycles must be an integer from 0 to 15, not"):
        Reciprocal(notice_cycles=notice)


def denominators(rng, count):
    low, high = 1 << 30, (1 << 31) - 1
    edges = [low, low + 1, low + 2, high, high - 1, high - 2, 3 << 29, (3 << 29) - 1, (3 << 29) + 1]
    near = [low + (1 << k) + d for k in range(1, 30) for d in (-1, 0, 1)]
    return edges + near + [rng.randint(low, high) for _ in range(count)]


@cocotb.test()
async def is_exact(dut):
    """Every quotient equals Python's, with idle and backpressure."""
    await start(dut)
    values = denominators(random("values"), 400)
    source = StreamSource(dut, "i", idle=0.2)
    sink = StreamSink(dut, "o", backpressure=0.3)
    source.send(values)
    assert await sink.receive(len(values)) == [(1 << 61) // value for value in values]


@cocotb.test()
async def keeps_its_time(dut):
    """At full rate: latency and interval as the properties say, and `soon` as announced."""
    await start(dut)
    values = denominators(random("times"), 20)
    source = StreamSource(dut, "i")
    sink = StreamSink(dut, "o")
    soon = []

    async def watch():
        while True:
            await RisingEdge(dut.clk)
            if dut.soon.value:
                soon.append(cycle() - 1)

    cocotb.start_soon(watch())
    source.send(values)
    await sink.receive(len(values))
    latency, interval = parameters()["latency"], parameters()["interval"]
    assert [out - taken for taken, out in zip(source.cycles, sink.cycles, strict=True)] == [latency] * len(
        values
    )
    assert {b - a for a, b in pairwise(sink.cycles)} == {interval}
    assert soon == [out - early for out in sink.cycles for early in range(NOTICE_CYCLES, -1, -1)]
