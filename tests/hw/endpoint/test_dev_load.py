# amaranth: UnusedElaboratable=no
"""DevLoad as a host sees it: of its own messages, of attention at the channels, of both.

The units' ports are driven as attention units drive them: lines in order, as many under way as the channel
takes. What a slice of memory says of its queues is in tests/hw/memory/test_load_meter.py, what a port says
of its own in test_port.py.
"""

from collections import Counter
from functools import partial

import cocotb
import memory_system
import pytest
from host_model import Host, req
from memory_system import MemorySystem, claim
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.cxl import DevLoad, M2SReqOp
from nearkv_hw.interfaces import ReadRequest, ReadResponse
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, start

CHANNELS = 2
UNIT_LINES = 1500
HOST_LINES = 1000
WARM_CYCLES = 250
"""Cycles after which units have filled their channels' queues, and a window of a load after that is over."""
QUIET_CYCLES = 300
"""Cycles after which nothing of what was asked is left, and two windows of a load are over."""


@pytest.mark.rtl
@pytest.mark.parametrize(("dram", "fabric_share"), [("fixed", 8), ("ddr5_6400", 8), ("ddr5_6400", 2)])
def test_dev_load(dram, fabric_share):
    config = configure(
        "small",
        dram=dram,
        channels=CHANNELS,
        capacity_bytes=CHANNELS * EXTENT_BYTES,
        fabric_share=fabric_share,
    )
    system = MemorySystem(config=config)
    run(
        system,
        module=__file__,
        parameters={
            "ports": system.endpoint.ports,
            "queues": dram != "fixed",
            "fabric_share": fabric_share,
        },
    )


class Bench:
    """A host at each port, a unit at each channel, all memory theirs."""

    def __init__(self, dut):
        self._dut = dut
        self.hosts = [Host(dut, port=n) for n in range(parameters()["ports"])]
        self.units = [StreamSource(dut, f"units_{c}_request", shape=ReadRequest) for c in range(CHANNELS)]
        self.lines = [StreamSink(dut, f"units_{c}_response", shape=ReadResponse) for c in range(CHANNELS)]

    async def attend(self, channels=range(CHANNELS), lines=UNIT_LINES):
        """Units stream; returns once their channels' load is that of the stream."""
        for c in channels:
            self.units[c].send([{"line": n} for n in range(lines)])
        await cycles(self._dut, WARM_CYCLES)

    async def probe(self, count=8):
        """The loads that a host is told that has one read under way."""
        loads = Counter()
        for n in range(count):
            drs = await self.hosts[0].read(line_of(n))
            loads[DevLoad(drs["header"]["dev_load"])] += 1
            await cycles(self._dut, 10)
        return loads

    async def stream(self, step=1):
        """The loads that all hosts are told that read as fast as they can; those of the start left out."""
        for n, host in enumerate(self.hosts):
            lines = [line_of(step * (i * len(self.hosts) + n)) for i in range(HOST_LINES)]
            host.req.send([req(M2SReqOp.MEM_RD, line, i) for i, line in enumerate(lines)])
        loads = Counter()
        for host in self.hosts:
            drss = await host.drs.receive(HOST_LINES)
            loads.update(DevLoad(drs["header"]["dev_load"]) for drs in drss[HOST_LINES // 4 :])
        self._dut._log.warning("hosts are told %s", loads)
        return loads

    async def quiet(self):
        """Once nothing is left of earlier work, its load is forgotten."""
        for unit in self.units:
            await unit.drained()
        await cycles(self._dut, QUIET_CYCLES)
        assert set(await self.probe()) == {DevLoad.LIGHT}


line_of = partial(memory_system.line_of, channels=CHANNELS)


@cocotb.test()
async def idle_is_light(dut):
    await start(dut)
    bench = Bench(dut)
    await claim(dut, channels=CHANNELS)
    assert set(await bench.probe(count=40)) == {DevLoad.LIGHT}


@cocotb.test()
@cocotb.parametrize(channels=[[0], [1], [0, 1]])
async def attention_is_optimal_load(dut, channels):
    """Of all channels or of one: the most loaded one counts. With the last line it is over."""
    await start(dut)
    bench = Bench(dut)
    await claim(dut, channels=CHANNELS)
    for _ in range(2):
        await bench.attend(channels)
        assert set(await bench.probe()) == {DevLoad.OPTIMAL}
        assert not any(len(bench.lines[c]) == UNIT_LINES for c in channels), "a unit was done before"
        await bench.quiet()
        for c in channels:
            await bench.lines[c].receive(UNIT_LINES)


@cocotb.test()
async def the_links_rate_is_optimal_load(dut):
    """The answers that wait for the link are no load, however many messages hosts have under way."""
    await start(dut)
    bench = Bench(dut)
    await claim(dut, channels=CHANNELS)
    loads = await bench.stream()
    assert loads[DevLoad.OPTIMAL] > 0.9 * loads.total()
    assert max(loads) <= DevLoad.MODERATE_OVERLOAD
    await bench.quiet()


@cocotb.test()
async def more_than_the_memory_gives_is_overload(dut):
    """Lines of one sub-channel of one channel, which has half of what the link carries. Then it falls."""
    await start(dut)
    bench = Bench(dut)
    await claim(dut, channels=CHANNELS)
    loads = await bench.stream(step=2 * CHANNELS)
    overload = loads[DevLoad.MODERATE_OVERLOAD] + loads[DevLoad.SEVERE_OVERLOAD]
    if parameters()["queues"]:
        assert overload > 0.9 * loads.total()
    else:  # a channel of the fixed memory keeps pace with the link
        assert overload < 0.1 * loads.total()
    await bench.quiet()


@cocotb.test()
async def attention_and_host_together(dut):
    """Each alone is an optimal load. So are both, unless the fabric's share is less than the host wants."""
    await start(dut)
    bench = Bench(dut)
    await claim(dut, channels=CHANNELS)
    lines = 8 * HOST_LINES  # more than go while the host reads its own
    await bench.attend(lines=lines)
    loads = await bench.stream()
    assert all(len(sink) < lines for sink in bench.lines), "a unit was done before"
    if parameters()["fabric_share"] == 2:  # an eighth of two channels; the link has room for half of them
        assert loads[DevLoad.MODERATE_OVERLOAD] + loads[DevLoad.SEVERE_OVERLOAD] > 0.9 * loads.total()
    else:
        assert loads[DevLoad.OPTIMAL] > 0.9 * loads.total()
    await bench.quiet()
