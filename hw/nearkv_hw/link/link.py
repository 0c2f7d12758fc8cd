"""A whole link: the host's link layer, two wires, the device's link layer."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import TIMEOUT_FLITS, Retry, Side
from .layer import EVENTS, LinkLayer
from .packer import SENT
from .wire import NOISE, Wire

RETRAIN_CYCLES = 64
"""Cycles in which a physical layer that retrains carries nothing."""
KINDS = tuple(f"m2s_{name}" for name in SENT[Side.HOST]) + tuple(f"s2m_{name}" for name in SENT[Side.DEVICE])


class Link(wiring.Component):
    """Messages in at one end and out at the other.

    Parameters
    ----------
    latency_cycles, flits_per_cycle : of each wire, as in `Wire`.
    multi_data, entries, timeout_flits, places : of both link layers, as in `LinkLayer`.

    Members
    -------
    host_m2s_req, host_m2s_rwd : In(stream), host_s2m_ndr, host_s2m_drs : Out(stream) : the host's messages.
    device_m2s_req, device_m2s_rwd : Out(stream), device_s2m_ndr, device_s2m_drs : In(stream) : the device's.
    noise : In(NOISE) x 2 : of the wire to the device, and of the one to the host.
    {side}_{event} : Out(1) : as in `LinkLayer`. {side}_state : Out(Retry).
    {side}_viral : In(1), {side}_viral_ld : In(16), {side}_remote_viral, {side}_remote_viral_ld : as there.
    passed : Out(2) : a flit goes onto the wire to the device, to the host.
    broken : Out(1) : an end found a rule broken, until reset.
    up : Out(1) : the physical layer carries flits.
    """

    def __init__(
        self,
        *,
        latency_cycles=4,
        flits_per_cycle=1,
        multi_data=True,
        entries=128,
        timeout_flits=TIMEOUT_FLITS,
        places=None,
    ):
        self._common = {
            "multi_data": multi_data,
            "entries": entries,
            "timeout_flits": timeout_flits,
            "places": places,
        }
        self._wire = {"latency_cycles": latency_cycles, "flits_per_cycle": flits_per_cycle}
        self.latency_cycles = LinkLayer.latency_cycles + latency_cycles
        members = {}
        for side in Side:
            name = side.name.lower()
            down, up = (In, Out) if side is Side.HOST else (Out, In)
            for kind, shape in SENT[Side.HOST].items():
                members[f"{name}_m2s_{kind}"] = down(stream.Signature(shape))
            for kind, shape in SENT[Side.DEVICE].items():
                members[f"{name}_s2m_{kind}"] = up(stream.Signature(shape))
            members |= {f"{name}_{event}": Out(1) for event in EVENTS}
            members |= {
                f"{name}_state": Out(Retry),
                f"{name}_viral": In(1),
                f"{name}_viral_ld": In(16),
                f"{name}_remote_viral": Out(1),
                f"{name}_remote_viral_ld": Out(16),
            }
        super().__init__(
            {**members, "noise": In(NOISE).array(2), "passed": Out(2), "broken": Out(1), "up": Out(1)}
        )

    def elaborate(self, platform):
        m = Module()
        host, device = (LinkLayer(side=side, **self._common) for side in Side)
        to_device, to_host = (Wire(**self._wire) for _ in range(2))
        m.submodules.host, m.submodules.device = host, device
        m.submodules.to_device, m.submodules.to_host = to_device, to_host
        for side, layer in ((Side.HOST, host), (Side.DEVICE, device)):
            name = side.name.lower()
            for kind in KINDS:
                wiring.connect(m, wiring.flipped(getattr(self, f"{name}_{kind}")), getattr(layer, kind))
            m.d.comb += [
                *(
                    getattr(self, f"{name}_{told}").eq(getattr(layer, told))
                    for told in (*EVENTS, "state", "remote_viral", "remote_viral_ld")
                ),
                layer.viral.eq(getattr(self, f"{name}_viral")),
                layer.viral_ld.eq(getattr(self, f"{name}_viral_ld")),
                layer.phy_up.eq(self.up),
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
