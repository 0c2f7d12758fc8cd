"""A whole link: the host's link layer, two wires, the device's link layer."""

from fractions import Fraction

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import Retry, Side
from ..abi.flits256 import BEATS
from ..abi.window import LINK_STATE
from ..structs import layout_of
from .layer import EVENTS, LinkLayer
from .layer256 import LinkLayer256
from .packer import SENT
from .replay import BEAT_WIRE_BITS
from .wire import NOISE, Wire

RETRAIN_CYCLES = 64
"""Cycles in which a physical layer that retrains carries nothing."""
_TOLD = ("state", "stalled")
KINDS = tuple(f"m2s_{name}" for name in SENT[Side.HOST]) + tuple(f"s2m_{name}" for name in SENT[Side.DEVICE])
LAYERS = {
    68: (LinkLayer, 1, {}),
    256: (LinkLayer256, BEATS, {"width": BEAT_WIRE_BITS, "checked": True}),
}
"""For the bytes of a flit one end of the link, transfers of the wire for a flit, and parameters of `Wire`."""


class Link(wiring.Component):
    """Messages in at one end and out at the other.

    Parameters
    ----------
    flit_bytes : 68 or 256.
    latency_cycles : of each wire, as in `Wire`.
    flits_per_cycle : what each wire carries: up to 1, of 256-byte flits up to 1/4.
    options : of both link layers, as in `LinkLayer` and `LinkLayer256`.

    Members
    -------
    host_m2s_req, host_m2s_rwd : In(stream), host_s2m_ndr, host_s2m_drs : Out(stream) : the host's messages.
    device_m2s_req, device_m2s_rwd : Out(stream), device_s2m_ndr, device_s2m_drs : In(stream) : the device's.
    noise : In(NOISE) x 2 : of the wire to the device, and of the one to the host; for every flit of 68 bytes,
        every beat of 256.
    {side}_{event} : Out(1) : as in `LinkLayer`. {side}_state : Out(Retry), {side}_stalled : Out(1).
    device_status : Out(LINK_STATE) : of the device's end.
    {side}_viral : In(1), {side}_viral_ld : In(16), {side}_remote_viral, {side}_remote_viral_ld : as there;
        with flits of 68 bytes alone.
    passed : Out(2) : a flit, or a beat, goes onto the wire to the device, to the host.
    broken : Out(1) : an end found a rule broken, until reset.
    up : Out(1) : the physical layer carries flits.
    """

    def __init__(self, *, flit_bytes=68, latency_cycles=4, flits_per_cycle=None, **options):
        if flit_bytes not in LAYERS:
            raise ValueError(f"flit_bytes must be one of {', '.join(map(str, LAYERS))}, not {flit_bytes!r}")
        self.flit_bytes = flit_bytes
        self._layer, beats, wire = LAYERS[flit_bytes]
        self._options = options
        if flits_per_cycle is None:
            flits_per_cycle = Fraction(1, beats)
        self._wire = {
            "latency_cycles": latency_cycles,
            "flits_per_cycle": Fraction(flits_per_cycle) * beats,
            **wire,
        }
        self.latency_cycles = self._layer.latency_cycles + latency_cycles
        members = {}
        for side in Side:
            name = side.name.lower()
            down, up = (In, Out) if side is Side.HOST else (Out, In)
            for kind, shape in SENT[Side.HOST].items():
                members[f"{name}_m2s_{kind}"] = down(stream.Signature(shape))
            for kind, shape in SENT[Side.DEVICE].items():
                members[f"{name}_s2m_{kind}"] = up(stream.Signature(shape))
            members |= {f"{name}_{event}": Out(1) for event in EVENTS}
            members |= {f"{name}_state": Out(Retry), f"{name}_stalled": Out(1)}
            if flit_bytes == 68:
                members |= {
                    f"{name}_viral": In(1),
                    f"{name}_viral_ld": In(16),
                    f"{name}_remote_viral": Out(1),
                    f"{name}_remote_viral_ld": Out(16),
                }
        members |= {
            "device_status": Out(layout_of(LINK_STATE)),
            "noise": In(NOISE).array(2),
            "passed": Out(2),
            "broken": Out(1),
            "up": Out(1),
        }
        super().__init__(members)

    def elaborate(self, platform):
        m = Module()
        host, device = (self._layer(side=side, **self._options) for side in Side)
        to_device, to_host = (Wire(**self._wire) for _ in range(2))
        m.submodules.host, m.submodules.device = host, device
        m.submodules.to_device, m.submodules.to_host = to_device, to_host
        m.d.comb += self.device_status.eq(device.status)
        for side, layer in ((Side.HOST, host), (Side.DEVICE, device)):
            name = side.name.lower()
            for kind in KINDS:
                wiring.connect(m, wiring.flipped(getattr(self, f"{name}_{kind}")), getattr(layer, kind))
            m.d.comb += [
                *(getattr(self, f"{name}_{told}").eq(getattr(layer, told)) for told in (*EVENTS, *_TOLD)),
                layer.phy_up.eq(self.up),
            ]
            if self.flit_bytes == 68:
                m.d.comb += [
                    layer.viral.eq(getattr(self, f"{name}_viral")),
                    layer.viral_ld.eq(getattr(self, f"{name}_viral_ld")),
                    getattr(self, f"{name}_remote_viral").eq(layer.remote_viral),
                    getattr(self, f"{name}_remote_viral_ld").eq(layer.remote_viral_ld),
                ]
        for n, (wire, source, target) in enumerate(((to_device, host, device), (to_host, device, host))):
            wiring.connect(m, source.tx, wire.i)
            wiring.connect(m, wire.o, target.rx)
            m.d.comb += [
                wire.noise.eq(self.noise[n]),
                wire.up.eq(self.up),
                self.passed[n].eq(wire.i.valid & wire.i.ready),
            ]
        down = Signal(range(RETRAIN_CYCLES + 1))
        wanted = to_device.failed | to_host.failed | host.retrain | device.retrain
        m.d.comb += [
            self.up.eq(down == 0),
            self.broken.eq(
                host.malformed
                | host.overflow
                | host.unexpected
                | device.malformed
                | device.overflow
                | device.unexpected
            ),
        ]
        with m.If(down != 0):
            m.d.sync += down.eq(down - 1)
        with m.Elif(wanted):
            m.d.sync += down.eq(RETRAIN_CYCLES)
        return m
