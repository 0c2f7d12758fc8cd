# amaranth: UnusedElaboratable=no
"""The fabric: each request reaches its channel and each answer its master, in order and in fair shares."""

from collections import Counter

import cocotb
import pytest
from memory_model import EXTENT_LINES
from nearkv_hw.abi import configure
from nearkv_hw.interfaces import FabricRequest, FabricResponse, Fault
from nearkv_hw.memory.fabric import Fabric
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start

EXTENTS = 8
"""Of the whole device."""
LINES = EXTENTS * EXTENT_LINES


@pytest.mark.rtl
@pytest.mark.parametrize(("masters", "channels"), [(1, 1), (3, 2)])
def test_fabric(masters, channels):
    fabric = Fabric(
        masters=masters, config=configure("small", channels=channels, capacity_bytes=EXTENTS << 20)
    )
    run(
        fabric,
        module=__file__,
        parameters={
            "masters": masters,
            "channels": channels,
            "request_cycles": fabric.request_cycles,
            "answer_cycles": fabric.answer_cycles,
        },
    )


@pytest.mark.parametrize("masters", [0, -1, 1.5, None])
def test_masters_are_checked(masters):
    with pytest.raises(ValueError, match="masters must be a positive integer, not"):
        Fabric(masters=masters, config=configure("small"))


def test_config_is_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 2"):
        Fabric(masters=2, config=2)


def channel_of(line):
    """(channel, channel line) of a device line."""
    extent, offset = divmod(line, EXTENT_LINES)
    return extent % parameters()["channels"], extent // parameters()["channels"] * EXTENT_LINES + offset


class Channel:
    """Answers requests in order, each with a line that tells the request; keeps what it saw."""

    def __init__(self, dut, index, idle=0.0, backpressure=0.0):
        self.sink = StreamSink(
            dut, f"channels_{index}_request", shape=FabricRequest, backpressure=backpressure
        )
        self.source = StreamSource(dut, f"channels_{index}_response", shape=FabricResponse, idle=idle)
        self.requests = []
        cocotb.start_soon(self._run())

    async def _run(self):
        while True:
            (request,) = await self.sink.receive()
            self.requests.append(request)
            self.source.send([answer_to(request)])


def answer_to(request):
    """An answer that tells its request."""
    return {
        "id": request["id"],
        "write": request["write"],
        "fault": request["data"] % 4,
        "data": request["data"] ^ request["line"],
    }


class Bench:
    def __init__(self, dut, idle=0.0, backpressure=0.0):
        masters, channels = range(parameters()["masters"]), range(parameters()["channels"])
        self.sources = [
            StreamSource(dut, f"masters_{i}_request", shape=FabricRequest, idle=idle) for i in masters
        ]
        self.sinks = [
            StreamSink(dut, f"masters_{i}_response", shape=FabricResponse, backpressure=backpressure)
            for i in masters
        ]
        self.channels = [Channel(dut, c, idle, backpressure) for c in channels]


def random_request(rng, master):
    """A request whose data tells the master, so that a channel can tell whose it is."""
    line = rng.randrange(LINES) if rng.random() < 0.9 else rng.choice([LINES, LINES + 5, (1 << 34) - 1])
    return {
        "line": line,
        "tenant": rng.randrange(8),
        "id": rng.getrandbits(20),
        "write": rng.randrange(2),
        "poison": rng.randrange(2),
        "enable": rng.getrandbits(64),
        "data": rng.getrandbits(500) << 8 | master,
    }


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def routes_and_keeps_order(dut, idle, backpressure):
    rng = random("requests", idle, backpressure)
    await start(dut)
    bench = Bench(dut, idle, backpressure)
    sent = [[random_request(rng, i) for _ in range(150)] for i in range(len(bench.sources))]
    for source, requests in zip(bench.sources, sent, strict=True):
        source.send(requests)
    received = [await sink.receive(150) for sink in bench.sinks]
    await cycles(dut, 20)
    assert all(len(sink) == 0 for sink in bench.sinks)

    for c, channel in enumerate(bench.channels):
        for i, requests in enumerate(sent):
            here = [
                {**r, "line": channel_of(r["line"])[1]}
                for r in requests
                if r["line"] < LINES and channel_of(r["line"])[0] == c
            ]
            assert [r for r in channel.requests if r["data"] & 0xFF == i] == here
            expected = [answer_to(r) for r in here]
            told = {(a["id"], a["data"]) for a in expected}
            assert [a for a in received[i] if (a["id"], a["data"]) in told] == expected
    for requests, answers in zip(sent, received, strict=True):
        outside = [r for r in requests if r["line"] >= LINES]
        expected = [
            {"id": r["id"], "write": r["write"], "fault": Fault.OUTSIDE.value, "data": 0} for r in outside
        ]
        assert outside
        assert [a for a in answers if a["data"] == 0] == expected


@cocotb.test()
async def has_stated_latency(dut):
    await start(dut)
    bench = Bench(dut)
    bench.sources[0].send([{"line": 0}])
    await bench.sinks[0].receive()
    assert bench.channels[0].sink.cycles[0] - bench.sources[0].cycles[0] == parameters()["request_cycles"]
    assert bench.sinks[0].cycles[0] - bench.channels[0].source.cycles[0] == parameters()["answer_cycles"]


@cocotb.test()
async def a_master_that_alternates_has_one_per_cycle(dut):
    await start(dut)
    bench = Bench(dut)
    count = 100
    bench.sources[0].send([{"line": i * EXTENT_LINES % LINES, "id": i} for i in range(count)])
    answers = await bench.sinks[0].receive(count)
    assert sorted(a["id"] for a in answers) == list(range(count))
    assert bench.sources[0].cycles[-1] - bench.sources[0].cycles[0] == count - 1
    assert bench.sinks[0].cycles[-1] - bench.sinks[0].cycles[0] == count - 1


@cocotb.test()
async def masters_of_different_channels_do_not_meet(dut):
    await start(dut)
    bench = Bench(dut)
    pairs = list(zip(bench.sources, range(parameters()["channels"]), strict=False))
    count = 100
    for source, c in pairs:
        source.send([{"line": c * EXTENT_LINES + i} for i in range(count)])
    for i in range(len(pairs)):
        await bench.sinks[i].receive(count)
        assert bench.sources[i].cycles[-1] - bench.sources[i].cycles[0] == count - 1
        assert bench.sinks[i].cycles[-1] - bench.sinks[i].cycles[0] == count - 1


@cocotb.test()
async def masters_share_a_channel_evenly(dut):
    await start(dut)
    bench = Bench(dut)
    masters, count = len(bench.sources), 60
    for i, source in enumerate(bench.sources):
        source.send([{"line": n, "data": i} for n in range(count)])
    for sink in bench.sinks:
        await sink.receive(count)
    order = [request["data"] for request in bench.channels[0].requests]
    assert bench.channels[0].sink.cycles[-1] - bench.channels[0].sink.cycles[0] == masters * count - 1
    for first in range(0, masters * count, masters):
        assert Counter(order[first : first + masters]) == Counter(range(masters))


@cocotb.test()
async def a_channel_that_stops_stops_no_other(dut):
    await start(dut)
    bench = Bench(dut)
    if len(bench.sources) == 1:
        return
    bench.channels[0].sink.backpressure = 1.0
    bench.sources[0].send([{"line": n} for n in range(10)])
    other = 1 % parameters()["channels"]
    count = 50
    bench.sources[1].send([{"line": other * EXTENT_LINES + n} for n in range(count)])
    await bench.sinks[1].receive(count)
    assert len(bench.channels[0].sink) == 0
    bench.channels[0].sink.backpressure = 0.0
    await bench.sinks[0].receive(10)
