"""Endpoint, fabric and channels together, as in the device, with everything around them left open."""

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.endpoint.endpoint import Endpoint
from nearkv_hw.endpoint.messages import DRS, NDR, REQ, RWD
from nearkv_hw.interfaces import FabricPort, OwnerPort, OwnerRequest, OwnerResponse, UnitMemory
from nearkv_hw.memory.channel import MemoryChannel
from nearkv_hw.memory.fabric import Fabric
from nearkv_sim.cocotb.streams import StreamSink, StreamSource

EXTENT_LINES = EXTENT_BYTES // LINE_BYTES


class MemorySystem(wiring.Component):
    """The host's streams, the window, one more master; every channel's unit, owner port and violations."""

    def __init__(self, *, config):
        self.config = config
        self.endpoint = Endpoint(config=config)
        self.fabric = Fabric(masters=self.endpoint.ports + 1, config=config)
        self.channels = [MemoryChannel(channel=c, config=config) for c in range(config.channels)]
        ports = self.endpoint.ports
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)).array(ports),
                "m2s_rwd": In(stream.Signature(RWD)).array(ports),
                "s2m_ndr": Out(stream.Signature(NDR)).array(ports),
                "s2m_drs": Out(stream.Signature(DRS)).array(ports),
                "window": Out(FabricPort()),
                "other": In(FabricPort()),
                "units": In(UnitMemory()).array(config.channels),
                "owners": In(OwnerPort()).array(config.channels),
                "violations": Out(64).array(config.channels),
                "outside_reads": Out(64),
                "outside_writes": Out(64),
            }
        )

    @property
    def read_cycles(self):
        """From a MemRd to its MemData on an idle device."""
        endpoint, fabric = self.endpoint, self.fabric
        way_in = endpoint.request_cycles + fabric.request_cycles
        way_out = fabric.answer_cycles + endpoint.answer_cycles
        return way_in + self.channels[0].latency_cycles + way_out

    def elaborate(self, platform):
        m = Module()
        m.submodules.endpoint, m.submodules.fabric = self.endpoint, self.fabric
        for name in ("m2s_req", "m2s_rwd", "s2m_ndr", "s2m_drs"):
            for outer, inner in zip(getattr(self, name), getattr(self.endpoint, name), strict=True):
                wiring.connect(m, wiring.flipped(outer), inner)
        wiring.connect(m, wiring.flipped(self.window), self.endpoint.window)
        for i, port in enumerate(self.endpoint.memory):
            wiring.connect(m, port, self.fabric.masters[i])
        wiring.connect(m, wiring.flipped(self.other), self.fabric.masters[self.endpoint.ports])
        for c, channel in enumerate(self.channels):
            m.submodules[f"channel_{c}"] = channel
            wiring.connect(m, self.fabric.channels[c], channel.fabric)
            wiring.connect(m, wiring.flipped(self.units[c]), channel.unit)
            wiring.connect(m, wiring.flipped(self.owners[c]), channel.owner)
            m.d.comb += [
                self.violations[c].eq(channel.violations),
                self.endpoint.loads[c].eq(channel.load),
            ]
        m.d.comb += [
            self.outside_reads.eq(self.endpoint.outside_reads),
            self.outside_writes.eq(self.endpoint.outside_writes),
        ]
        return m


async def claim(dut, *, channels, owners=None):
    """Give extents to tenants, by `owners`; the first of every channel to tenant 0 if not given."""
    owners = dict.fromkeys(range(channels), 0) if owners is None else owners
    for c in range(channels):
        source = StreamSource(dut, f"owners_{c}_request", shape=OwnerRequest)
        sink = StreamSink(dut, f"owners_{c}_response", shape=OwnerResponse)
        claims = [
            {"extent": extent // channels, "tenant": tenant, "claim": 1}
            for extent, tenant in owners.items()
            if extent % channels == c
        ]
        source.send(claims)
        assert not any(answer["owned"] for answer in await sink.receive(len(claims)))


def line_of(n, *, channels):
    """The n-th line of a memory with an extent in each channel: neighbours lie in different channels, then in
    different sub-channels."""
    return n % channels * EXTENT_LINES + n // channels
