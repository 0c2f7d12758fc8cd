"""The CXL.mem endpoint: as many ports as the link needs, at the link's rate."""

from math import ceil
from operator import add

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.config import LinkLayer
from ..abi.dram import PARTS, Dram
from ..abi.hdm import WORD_BITS
from ..abi.link import lines_per_cycle, ports, tokens
from ..common.trees import reduce_tree
from ..interfaces import DevLoad, FabricPort
from .hdm.address_map import AddressMap
from .hdm.decoders import RegisterWrite
from .merge import Merge
from .messages import DRS, NDR, REQ, RWD
from .pace import Pace
from .port import EVENTS, Port, request_cycles
from .translation import Translation

_OVERHEAD_CYCLES = 12
"""From a message's arrival to its answer's departure, at most, on an idle device without memory latency."""

_QUEUED_CYCLES = 32
"""What a read of DRAM waits in the controller's queues while others are served."""


def decoder_registers(config):
    """Members of a design with the decoders' registers; none where the device has no decoders."""
    if not config.hdm_decoders:
        return {}
    return {
        "decoder_write": In(stream.Signature(RegisterWrite)),
        "decoder_read_word": In(WORD_BITS),
        "decoder_read_data": Out(32),
    }


class Endpoint(wiring.Component):
    """Ports that carry messages side by side, and one count of tokens per direction for all of them.

    A link of x16 at 64 GT/s brings more than two lines per device cycle, so the endpoint has as many ports
    as `abi.link` says. Each is a host's four message streams, with tags of its own, and a master of the
    fabric. Between messages of different ports there is no order: what depends on a message waits for its
    answer, as CXL.mem has it between its channels. Messages pass as fast as the link carries them, and no
    faster: reads, writes and their headers in each direction take their slots (`abi.link`).

    The buffering law is lines per cycle <= outstanding / round trip. `outstanding` is half as many again as
    it takes at the link's rate, or at a line per cycle, which is all that a port can carry: a host that uses
    one port alone has that much. With DRAM there are as many again as keep the link full with answers while
    the memory refreshes itself.

    Parameters
    ----------
    config : the device's configuration.

    Members
    -------
    m2s_req : In(stream(REQ)) x ports, m2s_rwd : In(stream(RWD)) x ports : requests from the host.
    s2m_ndr : Out(stream(NDR)) x ports, s2m_drs : Out(stream(DRS)) x ports : answers to the host.
    memory : Out(FabricPort()) x ports : accesses to lines of the device.
    window : Out(FabricPort()) : accesses to lines of an aperture's command window; it answers in order.
    loads : In(DevLoad) x slices : of each slice of the memory, with the attention work there. The most loaded
        one is what the answers' DevLoad tells, or the port's own room if that is scarcer (`Answers`).
    link_reads, link_writes, outside_reads, outside_writes, unsupported : Out(64) : as in `abi.window`.
    decoder_write, decoder_read_word, decoder_read_data : with `config.hdm_decoders`, the registers of the
        decoders between the messages and all that is behind, as `write`, `read_word` and `read_data` of
        `AddressMap`.

    Latency is `request_cycles` from a message to its request and `answer_cycles` from an answer to its
    message, on an idle link; with several ports accesses to the window take `Merge.latency_cycles` more each
    way. Throughput is the link's, and one message per cycle and port at most.
    """

    answer_cycles = Port.answer_cycles

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        self.ports = count = ports(config.link, config.clock_mhz)
        self.request_cycles = request_cycles(config)
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)).array(count),
                "m2s_rwd": In(stream.Signature(RWD)).array(count),
                "s2m_ndr": Out(stream.Signature(NDR)).array(count),
                "s2m_drs": Out(stream.Signature(DRS)).array(count),
                "memory": Out(FabricPort()).array(count),
                "window": Out(FabricPort()),
                "loads": In(DevLoad).array(config.slices),
                **dict.fromkeys(EVENTS, Out(64)),
                **decoder_registers(config),
            }
        )

    @property
    def outstanding(self):
        """Req messages, and as many RwD, under way at most, at each port."""
        rate = lines_per_cycle(self.config.link, self.config.clock_mhz)
        latency_cycles, pause_cycles = _memory_cycles(self.config)
        translation_cycles = Translation.latency_cycles if self.config.hdm_decoders else 0
        round_trip = latency_cycles + _OVERHEAD_CYCLES + translation_cycles
        return max(32, ceil(min(1, rate) * round_trip * 3 / 2 + rate / self.ports * pause_cycles))

    def elaborate(self, platform):
        m = Module()
        members = [Port(config=self.config, outstanding=self.outstanding) for _ in range(self.ports)]
        m.submodules.merge = merge = Merge(masters=self.ports)
        wiring.connect(m, merge.port, wiring.flipped(self.window))
        for i, port in enumerate(members):
            m.submodules[f"port_{i}"] = port
            for name in ("m2s_req", "m2s_rwd", "s2m_ndr", "s2m_drs", "memory"):
                wiring.connect(m, wiring.flipped(getattr(self, name)[i]), getattr(port, name))
            wiring.connect(m, port.window, merge.masters[i])
        self._keep_pace(m, members)
        if self.config.hdm_decoders:
            self._decode(m, members)
        load = Signal(DevLoad)
        highest = reduce_tree([each.as_value() for each in self.loads], lambda a, b: Mux(a > b, a, b))
        m.d.sync += load.as_value().eq(highest)
        m.d.comb += [port.load.eq(load) for port in members]
        for name in EVENTS:
            counter = getattr(self, name)
            happened = Signal(self.ports, name=f"{name}_now")
            m.d.comb += happened.eq(Cat(getattr(port, name) for port in members))
            with m.If(happened.any()):
                m.d.sync += counter.eq(counter + reduce_tree(happened, add))
        return m

    def _decode(self, m, members):
        """One set of decoders for all ports."""
        m.submodules.map = addresses = AddressMap(config=self.config, lookups=self.ports)
        wiring.connect(m, wiring.flipped(self.decoder_write), addresses.write)
        m.d.comb += [
            addresses.read_word.eq(self.decoder_read_word),
            self.decoder_read_data.eq(addresses.read_data),
        ]
        for port, asked, found in zip(members, addresses.i, addresses.o, strict=True):
            wiring.connect(m, port.asked, asked)
            wiring.connect(m, found, port.found)

    def _keep_pace(self, m, members):
        """Open both directions as the link carries; behind a link layer the flits keep the pace."""
        if self.config.link_layer is not LinkLayer.OFF:
            m.d.comb += [opened.eq(1) for port in members for opened in (port.m2s_open, port.s2m_open)]
            return
        rate = tokens(self.config.link, self.config.clock_mhz)
        for direction, kinds in (
            ("m2s", (("req", rate.req), ("rwd", rate.rwd))),
            ("s2m", (("ndr", rate.ndr), ("drs", rate.drs))),
        ):
            pairs = [(getattr(port, f"{direction}_{kind}"), cost) for port in members for kind, cost in kinds]
            pace = Pace(per_cycle=rate.per_cycle, costs=[cost for _, cost in pairs])
            m.submodules[f"{direction}_pace"] = pace
            m.d.comb += pace.passed.eq(Cat(messages.valid & messages.ready for messages, _ in pairs))
            for port in members:
                m.d.comb += getattr(port, f"{direction}_open").eq(pace.open)


def _memory_cycles(config):
    """How long a read takes in the memory, and how long the memory pauses to refresh itself."""
    if config.dram is Dram.FIXED:
        return config.memory_latency_cycles, 0
    part = PARTS[config.dram]
    frames = part.frames(config.density_gbit, config.refresh)
    opening = (frames.precharge_to_activate + frames.activate_to_column) * part.subchannels
    pause = (frames.precharge_to_refresh + frames.refresh + frames.activate_to_column) * part.subchannels
    return opening + frames.read_cycles + _QUEUED_CYCLES, pause
