"""A unit's memory port on the way through the fabric, where the unit stands behind the crossbar."""

from amaranth.hdl import Cat, Const, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..interfaces import FabricPort, UnitMemory
from .channel import EXTENT_LINES_LOG2


class FabricDetour(wiring.Component):
    """Turns a unit's reads of its own channel into reads of the fabric.

    Parameters
    ----------
    channel : the unit's channel.
    config : the device's configuration.

    Members
    -------
    unit : In(UnitMemory) : the unit's reads, of lines of its channel.
    fabric : Out(FabricPort) : the same reads, of lines of the device.

    Nothing is added to the fabric's latency.
    """

    def __init__(self, *, channel, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if not isinstance(channel, int) or not 0 <= channel < config.slices:
            raise ValueError(f"channel must be from 0 to {config.slices - 1}, not {channel!r}")
        self.channel = channel
        self.config = config
        super().__init__({"unit": In(UnitMemory()), "fabric": Out(FabricPort())})

    def elaborate(self, platform):
        m = Module()
        asked, request = self.unit.request, self.fabric.request
        bits = (self.config.slices - 1).bit_length()
        line = asked.payload.line
        m.d.comb += [
            request.valid.eq(asked.valid),
            asked.ready.eq(request.ready),
            request.payload.tenant.eq(asked.payload.tenant),
            request.payload.line.eq(
                Cat(line[:EXTENT_LINES_LOG2], Const(self.channel, bits), line[EXTENT_LINES_LOG2:])
            ),
            self.unit.response.valid.eq(self.fabric.response.valid),
            self.fabric.response.ready.eq(self.unit.response.ready),
            self.unit.response.payload.data.eq(self.fabric.response.payload.data),
            self.unit.response.payload.fault.eq(self.fabric.response.payload.fault),
        ]
        return m
