# amaranth: UnusedElaboratable=no
"""How many ports the endpoint has, how much may be under way at each, and how long a read takes behind it."""

from fractions import Fraction

import pytest
from memory_system import MemorySystem
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import Link
from nearkv_hw.abi.dram import PARTS, Dram
from nearkv_hw.abi.link import lines_per_cycle
from nearkv_hw.endpoint.endpoint import Endpoint
from nearkv_sim.model import timing


def test_parameters_are_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        Endpoint(config="small")


@pytest.mark.parametrize("link", Link)
@pytest.mark.parametrize("latency_cycles", [2, 40, 200])
def test_the_buffering_law_holds_for_the_link(link, latency_cycles):
    endpoint = Endpoint(
        config=configure("small", dram="fixed", memory_latency_cycles=latency_cycles, link=link)
    )
    rate = lines_per_cycle(link, 800)
    assert endpoint.ports - 1 < rate <= endpoint.ports
    assert len(endpoint.m2s_req) == len(endpoint.s2m_drs) == len(endpoint.memory) == endpoint.ports
    # Alone a port has enough for the link or for a line per cycle, whichever is less.
    assert endpoint.outstanding >= max(32, min(1, rate) * (latency_cycles + 12))


@pytest.mark.parametrize("link", Link)
@pytest.mark.parametrize("dram", PARTS)
def test_a_refresh_leaves_the_link_full(link, dram):
    """While the memory refreshes itself the answers kept last for the pause, at the link's rate."""
    config = configure("small", dram=dram, link=link)
    endpoint, part = Endpoint(config=config), PARTS[dram]
    refresh_ns = Fraction(part.densities[config.density_gbit].rfc.value)
    pause_cycles = refresh_ns / part.cycle_ns
    under_way = endpoint.ports * endpoint.outstanding
    assert under_way >= lines_per_cycle(link, config.clock_mhz) * (pause_cycles + 60)
    assert under_way > Endpoint(config=configure(dram=Dram.FIXED, link=link)).outstanding


@pytest.mark.parametrize("dram", Dram)
def test_a_read_takes_what_the_timing_model_says(dram):
    config = configure("small", dram=dram)
    assert timing.host_read_cycles(config) == MemorySystem(config=config).read_cycles
