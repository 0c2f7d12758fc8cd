# amaranth: UnusedElaboratable=no
"""Masters that share a port: every request arrives once, every answer goes to whoever asked."""

import cocotb
import pytest
from nearkv_hw.endpoint.merge import Merge
from nearkv_hw.interfaces import FabricRequest, FabricResponse
from nearkv_hw.verilog import to_verilog
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start


@pytest.mark.rtl
@pytest.mark.parametrize("masters", [2, 3])
def test_merge(masters):
    merge = Merge(masters=masters)
    run(merge, module=__file__, parameters={"masters": masters, "latency_cycles": merge.latency_cycles})


@pytest.mark.rtl
def test_one_master_is_wired_through():
    assert not to_verilog(Merge(masters=1)).clocked


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="masters must be a positive integer, not 0"):
        Merge(masters=0)


async def answer(dut, asked, answers, rng, delay):
    """The port: answers each request with what the request was, in order."""
    while True:
        (request,) = await asked.receive()
        if delay:
            await cycles(dut, rng.randrange(delay))
        answers.send([{"id": request["id"], "write": request["write"], "data": request["data"] + 1}])


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.5])
async def every_master_has_its_answers(dut, idle, backpressure):
    await start(dut)
    rng = random("requests", idle, backpressure)
    masters, count = parameters()["masters"], 200
    asked = StreamSink(dut, "port_request", shape=FabricRequest, backpressure=backpressure)
    answers = StreamSource(dut, "port_response", shape=FabricResponse, idle=idle)
    cocotb.start_soon(answer(dut, asked, answers, rng, 4 if idle else 0))
    sinks, sources = [], []
    for n in range(masters):
        source = StreamSource(dut, f"masters_{n}_request", shape=FabricRequest, idle=idle)
        sinks.append(
            StreamSink(dut, f"masters_{n}_response", shape=FabricResponse, backpressure=backpressure)
        )
        sources.append(source)
        source.send(
            [
                {"id": i, "line": rng.getrandbits(34), "write": i % 2, "data": n << 20 | i}
                for i in range(count)
            ]
        )
    for n, sink in enumerate(sinks):
        got = [(a["id"], a["write"], a["data"]) for a in await sink.receive(count)]
        assert got == [(i, i % 2, (n << 20 | i) + 1) for i in range(count)]
    if not idle and not backpressure:
        latency = parameters()["latency_cycles"]
        assert asked.cycles[0] - min(source.cycles[0] for source in sources) == latency
        assert min(sink.cycles[0] for sink in sinks) - answers.cycles[0] == latency
        spread = [sink.cycles[count // 2] - sinks[0].cycles[count // 2] for sink in sinks]
        assert all(abs(difference) <= masters for difference in spread), "masters have their turns"
