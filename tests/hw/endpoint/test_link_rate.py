"""Every link carries its rate: reads, writes and both, of a large region that lies in all channels."""

from functools import partial

import cocotb
import pytest
from host_model import Host, req, rwd
from memory_system import MemorySystem, claim, line_of
from nearkv_hw.abi import configure, cxl
from nearkv_hw.abi.config import EXTENT_BYTES, Link
from nearkv_hw.abi.link import RATES, lines_per_cycle
from nearkv_hw.memory.channel import OUTSTANDING
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import start

CHANNELS = 4
CLOCK_MHZ = 800
COUNT = 2400
"""Lines of a measurement, of each kind."""
OVERHEAD_CYCLES = 8
"""Of a channel around its memory."""
LEAST = 0.97
"""Of the rate of the link, or of ports and memory where these are slower."""


@pytest.mark.rtl
@pytest.mark.parametrize("latency_cycles", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "link",
    [
        pytest.param(
            link, marks=() if link in (Link.X8_64, Link.X16_64) else pytest.mark.slow, id=link.name.lower()
        )
        for link in Link
    ],
)
def test_link_rate(link, latency_cycles):
    config = configure(
        channels=CHANNELS,
        capacity_bytes=CHANNELS * EXTENT_BYTES,
        link=link,
        dram="fixed",
        clock_mhz=CLOCK_MHZ,
        memory_latency_cycles=latency_cycles,
    )
    system = MemorySystem(config=config)
    run(
        system,
        module=__file__,
        parameters={"link": int(link), "ports": system.endpoint.ports, "latency_cycles": latency_cycles},
    )


async def begin(dut):
    """The hosts of all ports, all extents theirs."""
    await start(dut)
    await claim(dut, channels=CHANNELS)
    return [Host(dut, port=port) for port in range(parameters()["ports"])]


def rate(cycles):
    """Messages per cycle, the start and the end of the run left out."""
    taken = sorted(cycles)[COUNT // 6 : -COUNT // 6]
    return (len(taken) - 1) / (taken[-1] - taken[0])


line = partial(line_of, channels=CHANNELS)


@cocotb.test()
@cocotb.parametrize(kind=["reads", "writes", "both"])
async def carries_the_links_rate(dut, kind):
    hosts = await begin(dut)
    link = RATES[Link(parameters()["link"])]
    reads, writes = kind != "writes", kind != "reads"
    for n, host in enumerate(hosts):
        mine = range(n, COUNT, len(hosts))
        if reads:
            host.req.send([req(cxl.M2SReqOp.MEM_RD, line(i), i) for i in mine])
        if writes:
            host.rwd.send([rwd(cxl.M2SRwDOp.MEM_WR, line(COUNT + i), i, i) for i in mine])
    for n, host in enumerate(hosts):
        count = len(range(n, COUNT, len(hosts)))
        if reads:
            await host.drs.receive(count)
        if writes:
            await host.ndr.receive(count)
    flits = link.flits
    slots_per_cycle = float(link.slots_per_second / (CLOCK_MHZ * 10**6))
    m2s = reads * flits.req.value + writes * flits.rwd.value
    s2m = reads * flits.drs.value + writes * flits.ndr.value
    most = slots_per_cycle / float(max(m2s, s2m))  # of each kind
    if kind == "reads":
        assert most == pytest.approx(float(lines_per_cycle(Link(parameters()["link"]), CLOCK_MHZ)))
    read = rate([cycle for host in hosts for cycle in host.drs.cycles]) if reads else 0
    written = rate([cycle for host in hosts for cycle in host.ndr.cycles]) if writes else 0
    dut._log.info("read %.4f and written %.4f lines per cycle; %.4f each at most", read, written, most)
    # A port carries a message per cycle in all, and so does a channel, which has so many accesses under way.
    under_way = CHANNELS * OUTSTANDING / (parameters()["latency_cycles"] + OVERHEAD_CYCLES)
    assert read + written >= LEAST * min(most * (reads + writes), len(hosts), CHANNELS, under_way)
    assert float(flits.req.value) * read + float(flits.rwd.value) * written <= 1.005 * slots_per_cycle
    assert float(flits.drs.value) * read + float(flits.ndr.value) * written <= 1.005 * slots_per_cycle
