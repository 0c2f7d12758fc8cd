"""The device: CXL.mem messages in, CXL.mem messages out."""

from math import ceil
from operator import add

from amaranth.hdl import Cat, Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from .abi import DeviceConfig
from .abi.config import LinkLayer, Placement
from .abi.link import WIRE_NS, flits_per_cycle, ports
from .abi.window import (
    CHANNEL_COUNTERS,
    DEVICE_COUNTERS,
    LINK_COUNTERS,
    MEMORY_COUNTERS,
    QUEUE_COUNTERS,
)
from .attention.unit import AttentionUnit
from .command.completer import Completer
from .command.walker import Walker
from .command.window import CommandWindow
from .common.trees import reduce_tree
from .endpoint.endpoint import Endpoint, decoder_registers
from .endpoint.messages import DRS, NDR, REQ, RWD
from .link.counters import LinkCounters
from .link.link import Link
from .memory.audit import Reports
from .memory.channel import OUTSTANDING, MemoryChannel
from .memory.detour import FabricDetour
from .memory.fabric import Fabric
from .memory.ranks import RankBus
from .results.results import Results
from .timeline import stage_taps

UNIT_LINES = OUTSTANDING + 16
"""Lines that a unit may ask for ahead: some more than its channel keeps under way."""
STREAMS = ("m2s_req", "m2s_rwd", "s2m_ndr", "s2m_drs")


class Device(wiring.Component):
    """The top of the design, whole but for the black boxes that stand in for DRAM.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    m2s_req : In(stream) x ports : M2S Req messages (reads), 87 bits; `abi.link.ports` says how many ports.
    m2s_rwd : In(stream) x ports : M2S RwD messages (writes): header, byte enables, data; 663 bits.
    s2m_ndr : Out(stream) x ports : S2M NDR messages (completions), 30 bits.
    s2m_drs : Out(stream) x ports : S2M DRS messages: header, data; 552 bits.
    decoder_write, decoder_read_word, decoder_read_data : with `config.hdm_decoders`, as of `Endpoint`: what
        CXL.io reaches of the component registers.

    With `config.link_layer` the streams are those of a host's link layer, which is part of this design then,
    and flits are on the wire between it and the device's.

    The endpoint hands the host's accesses to the fabric or to the command window. The walker takes
    descriptors from the window and tells every attention unit what to do; each unit streams from the slice of
    memory that it stands beside, and the results side merges, finishes and writes; the completer tells the
    window. Where units stand is `config.placement`.
    """

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        count = ports(config.link, config.clock_mhz)
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)).array(count),
                "m2s_rwd": In(stream.Signature(RWD)).array(count),
                "s2m_ndr": Out(stream.Signature(NDR)).array(count),
                "s2m_drs": Out(stream.Signature(DRS)).array(count),
                **decoder_registers(config),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.endpoint = endpoint = Endpoint(config=config)
        m.submodules.window = window = CommandWindow(config=config)
        m.submodules.walker = walker = Walker(config=config)
        m.submodules.completer = completer = Completer(ring_slots=config.ring_slots)
        self._link(m, endpoint, window)
        if config.hdm_decoders:
            wiring.connect(m, wiring.flipped(self.decoder_write), endpoint.decoder_write)
            m.d.comb += [
                endpoint.decoder_read_word.eq(self.decoder_read_word),
                self.decoder_read_data.eq(endpoint.decoder_read_data),
            ]
        masters = [*endpoint.memory, walker.fabric]
        units = [self._unit(m, n, walker) for n in range(config.units)]
        if units:
            masters.append(self._results(m, walker, completer, units))
        if config.placement is Placement.FABRIC:
            masters += [self._detour(m, n, unit) for n, unit in enumerate(units)]
        channels = self._memory(m, masters, walker)
        if config.placement is not Placement.FABRIC:
            for channel, unit in zip(channels, units, strict=False):
                wiring.connect(m, unit.memory, channel.unit)

        wiring.connect(m, endpoint.window, window.host)
        wiring.connect(m, window.descriptors, walker.descriptors)
        wiring.connect(m, walker.tickets, completer.tickets)
        wiring.connect(m, walker.query_outcomes, completer.query_outcomes)
        wiring.connect(m, walker.page_outcomes, completer.page_outcomes)
        wiring.connect(m, completer.o, window.completions)
        m.d.comb += [completer.now.eq(window.cycles), walker.retired.eq(completer.retired)]
        for n in range(config.apertures):
            m.d.comb += [
                walker.quotas[n].eq(window.quotas[n]),
                window.holdings[n].eq(walker.holdings[n]),
            ]
        m.d.comb += [load.eq(channel.load) for load, channel in zip(endpoint.loads, channels, strict=True)]
        self._reports(m, window, channels)
        self._counters(m, window, endpoint, channels, units)
        results = m.submodules.results if units else None
        m.submodules.timeline = stage_taps(
            endpoint=endpoint, window=window, walker=walker, units=units, results=results, completer=completer
        )
        return m

    def _link(self, m, endpoint, window):
        """The host's messages to the endpoint, in flits where there is a link layer."""
        config = self.config
        if config.link_layer is LinkLayer.OFF:
            for name in STREAMS:
                for outer, inner in zip(getattr(self, name), getattr(endpoint, name), strict=True):
                    wiring.connect(m, wiring.flipped(outer), inner)
            return
        (port,) = range(endpoint.ports)  # what a link layer takes is less than two lines in a cycle
        m.submodules.link = link = Link(
            flit_bytes=256 if config.link_layer is LinkLayer.FLITS_256 else 68,
            latency_cycles=ceil(WIRE_NS * config.clock_mhz / 1000),
            flits_per_cycle=flits_per_cycle(config.link, config.clock_mhz, config.link_layer),
        )
        for name in STREAMS:
            wiring.connect(m, wiring.flipped(getattr(self, name)[port]), getattr(link, f"host_{name}"))
            wiring.connect(m, getattr(link, f"device_{name}"), getattr(endpoint, name)[port])
        m.submodules.link_counters = counters = LinkCounters()
        for name, member in counters.signature.members.items():
            if member.flow is In:
                m.d.comb += getattr(counters, name).eq(getattr(link, name))
        m.d.comb += window.link_state.eq(link.device_status)
        for theirs, ours in zip(window.link_layers, counters.counters, strict=True):
            m.d.comb += theirs.eq(ours)

    def _unit(self, m, n, walker):
        """An attention unit and its orders."""
        unit = m.submodules[f"unit{n}"] = AttentionUnit(
            lanes=self.config.lanes,
            weight_pipes=self.config.weight_pipes,
            queries=self.config.queries,
            finish_lanes=self.config.finish_lanes,
            outstanding=UNIT_LINES,
        )
        wiring.connect(m, walker.jobs[n], unit.jobs)
        wiring.connect(m, walker.queries[n], unit.queries)
        wiring.connect(m, walker.pages[n], unit.pages)
        wiring.connect(m, unit.bounds, walker.bounds[n])
        return unit

    def _results(self, m, walker, completer, units):
        """The results side; returns its port into the fabric."""
        m.submodules.results = results = Results(units=len(units), finish_lanes=self.config.finish_lanes)
        wiring.connect(m, walker.results, results.jobs)
        wiring.connect(m, results.done, completer.passes)
        for unit, partials in zip(units, results.partials, strict=True):
            wiring.connect(m, unit.partials, partials)
        return results.fabric

    def _detour(self, m, n, unit):
        """A unit behind the crossbar; returns its port into the fabric."""
        detour = m.submodules[f"detour{n}"] = FabricDetour(
            channel=n, config=self.config, outstanding=UNIT_LINES
        )
        wiring.connect(m, unit.memory, detour.unit)
        return detour.fabric

    def _memory(self, m, masters, walker):
        """The slices of memory behind the fabric."""
        config = self.config
        m.submodules.fabric = fabric = Fabric(masters=len(masters), config=config)
        for master, port in zip(masters, fabric.masters, strict=True):
            wiring.connect(m, master, port)
        channels = []
        for n, owner in enumerate(walker.owners):
            channel = m.submodules[f"channel{n}"] = MemoryChannel(channel=n, config=config)
            wiring.connect(m, owner, channel.owner)
            channels.append(channel)
        for n in range(config.channels):
            of_channel = range(n, config.slices, config.channels)
            sources = [fabric.channels[s] for s in of_channel]
            if config.ranks > 1:
                bus = m.submodules[f"bus{n}"] = RankBus(ranks=config.ranks)
                for source, port in zip(sources, bus.fabric, strict=True):
                    wiring.connect(m, source, port)
                sources = list(bus.ranks)
            for s, source in zip(of_channel, sources, strict=True):
                wiring.connect(m, source, channels[s].fabric)
        for snoop, written in zip(walker.snoops, fabric.written, strict=True):
            m.d.comb += snoop.eq(written)
        return channels

    def _reports(self, m, window, channels):
        """Violations on their way to the log."""
        m.submodules.reports = reports = Reports(config=self.config, each=channels[0].reports)
        sources = [refused for channel in channels for refused in channel.refused]
        for source, port in zip(sources, reports.i, strict=True):
            wiring.connect(m, source, port)
        wiring.connect(m, reports.o, window.reports)
        m.d.comb += [
            reports.missed.eq(Cat(channel.missed for channel in channels)),
            window.lost.eq(reports.lost),
            *(channel.forget.eq(window.forget) for channel in channels),
        ]

    def _counters(self, m, window, endpoint, channels, units):
        """Every counter comes from the block that has one of its name."""
        for layout, values in ((DEVICE_COUNTERS, window.device), (LINK_COUNTERS, window.link)):
            for field in layout:
                if hasattr(endpoint, field.name):
                    m.d.comb += values[field.name].eq(getattr(endpoint, field.name))
        m.d.comb += window.device.violations.eq(
            reduce_tree([channel.violations for channel in channels], add)
        )
        for name in ("scrubbing", "free", "scrub_lines"):
            of_channels = [getattr(channel, name) for channel in channels]
            m.d.comb += window.extents[name].eq(reduce_tree(of_channels, add))
        for n, channel in enumerate(channels):
            blocks = [channel, *units[n : n + 1]]
            for layout, values in (
                (CHANNEL_COUNTERS, window.channels[n]),
                (MEMORY_COUNTERS, window.memories[n]),
                (QUEUE_COUNTERS, window.queues[n]),
            ):
                for field in layout:
                    for block in blocks:
                        if hasattr(block, field.name):
                            m.d.comb += values[field.name].eq(getattr(block, field.name))
