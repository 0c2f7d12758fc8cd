"""The device: CXL.mem messages in, CXL.mem messages out."""

from operator import add

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from .abi import DeviceConfig
from .abi.window import CHANNEL_COUNTERS, DEVICE_COUNTERS, LINK_COUNTERS
from .attention.unit import AttentionUnit
from .command.completer import Completer
from .command.walker import Walker
from .command.window import CommandWindow
from .common.trees import reduce_tree
from .endpoint.endpoint import Endpoint
from .endpoint.messages import DRS, NDR, REQ, RWD
from .memory.channel import MemoryChannel
from .memory.fabric import Fabric
from .results.results import Results

LINES_AHEAD = 16
"""Lines that a unit may ask for beyond those that the memory's latency keeps under way."""


class Device(wiring.Component):
    """The top of the design, whole but for the sparse store that stands in for DRAM.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    m2s_req : In(stream) : M2S Req messages (reads), 87 bits.
    m2s_rwd : In(stream) : M2S RwD messages (writes): header, byte enables, data; 663 bits.
    s2m_ndr : Out(stream) : S2M NDR messages (completions), 30 bits.
    s2m_drs : Out(stream) : S2M DRS messages: header, data; 552 bits.

    The endpoint hands the host's accesses to the fabric or to the command window. The walker takes
    descriptors from the window and tells every channel's attention unit what to do; the units stream from
    their own channels, and the results side merges, finishes and writes; the completer tells the window.
    """

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)),
                "m2s_rwd": In(stream.Signature(RWD)),
                "s2m_ndr": Out(stream.Signature(NDR)),
                "s2m_drs": Out(stream.Signature(DRS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.endpoint = endpoint = Endpoint(config=config)
        m.submodules.window = window = CommandWindow(config=config)
        m.submodules.walker = walker = Walker(config=config)
        m.submodules.completer = completer = Completer(ring_slots=config.ring_slots)
        m.submodules.results = results = Results(channels=config.channels, finish_lanes=config.finish_lanes)
        for name in ("m2s_req", "m2s_rwd", "s2m_ndr", "s2m_drs"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(endpoint, name))
        channels = self._memory(m, (endpoint.memory, walker.fabric, results.fabric), walker.owners)
        units = self._units(m, channels, walker, results)

        wiring.connect(m, endpoint.window, window.host)
        wiring.connect(m, window.descriptors, walker.descriptors)
        wiring.connect(m, walker.results, results.jobs)
        wiring.connect(m, walker.tickets, completer.tickets)
        wiring.connect(m, walker.query_outcomes, completer.query_outcomes)
        wiring.connect(m, walker.page_outcomes, completer.page_outcomes)
        wiring.connect(m, results.done, completer.passes)
        wiring.connect(m, completer.o, window.completions)
        m.d.comb += [completer.now.eq(window.cycles), walker.retired.eq(completer.retired)]
        self._counters(m, window, endpoint, channels, units)
        return m

    def _memory(self, m, masters, owners):
        """The memory channels behind the fabric."""
        m.submodules.fabric = fabric = Fabric(masters=len(masters), config=self.config)
        for master, port in zip(masters, fabric.masters, strict=True):
            wiring.connect(m, master, port)
        channels = []
        for n, (port, owner) in enumerate(zip(fabric.channels, owners, strict=True)):
            channel = m.submodules[f"channel{n}"] = MemoryChannel(channel=n, config=self.config)
            wiring.connect(m, port, channel.fabric)
            wiring.connect(m, owner, channel.owner)
            channels.append(channel)
        return channels

    def _units(self, m, channels, walker, results):
        """An attention unit beside every channel."""
        units = []
        for n, channel in enumerate(channels):
            unit = m.submodules[f"unit{n}"] = AttentionUnit(
                lanes=self.config.lanes,
                queries=self.config.queries,
                finish_lanes=self.config.finish_lanes,
                fifo_depth=channel.unit_latency_cycles + LINES_AHEAD,
            )
            wiring.connect(m, walker.jobs[n], unit.jobs)
            wiring.connect(m, walker.queries[n], unit.queries)
            wiring.connect(m, walker.pages[n], unit.pages)
            wiring.connect(m, unit.memory, channel.unit)
            wiring.connect(m, unit.partials, results.partials[n])
            units.append(unit)
        return units

    def _counters(self, m, window, endpoint, channels, units):
        """Every counter comes from the block that has one of its name."""
        for layout, values in ((DEVICE_COUNTERS, window.device), (LINK_COUNTERS, window.link)):
            for field in layout:
                if hasattr(endpoint, field.name):
                    m.d.comb += values[field.name].eq(getattr(endpoint, field.name))
        m.d.comb += window.device.violations.eq(
            reduce_tree([channel.violations for channel in channels], add)
        )
        for values, channel, unit in zip(window.channels, channels, units, strict=True):
            for field in CHANNEL_COUNTERS:
                block = channel if hasattr(channel, field.name) else unit
                m.d.comb += values[field.name].eq(getattr(block, field.name))
