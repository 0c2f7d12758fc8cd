"""A unit's memory port on the way through the fabric, where the unit stands behind the crossbar."""

from amaranth.hdl import Cat, Const, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..common.queue import Queue
from ..interfaces import FabricPort, ReadResponse, UnitMemory
from .channel import EXTENT_LINES_LOG2


class FabricDetour(wiring.Component):
    """Turns a unit's reads of its own channel into reads of the fabric.

    There is a place for the answer of every read under way, so an answer never waits in the fabric: a unit
    that waits for its queries would otherwise stop the walker's reads of them in the same channel.

    Parameters
    ----------
    channel : the unit's channel.
    config : the device's configuration.
    outstanding : lines that the unit asks for and has not yet taken, at most.

    Members
    -------
    unit : In(UnitMemory) : the unit's reads, of lines of its channel.
    fabric : Out(FabricPort) : the same reads, of lines of the device.

    The way there takes no cycle, the way back `answer_cycles`.
    """

    answer_cycles = 2

    def __init__(self, *, channel, config, outstanding):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if not isinstance(channel, int) or not 0 <= channel < config.slices:
            raise ValueError(f"channel must be from 0 to {config.slices - 1}, not {channel!r}")
        if not isinstance(outstanding, int) or outstanding < 3:
            raise ValueError(f"outstanding must be an integer of at least 3, not {outstanding!r}")
        self.channel = channel
        self.config = config
        self.outstanding = outstanding
        super().__init__({"unit": In(UnitMemory()), "fabric": Out(FabricPort())})

    def elaborate(self, platform):
        m = Module()
        asked, request = self.unit.request, self.fabric.request
        answered = self.fabric.response
        m.submodules.answers = answers = Queue(shape=ReadResponse, depth=self.outstanding)
        wiring.connect(m, answers.o, wiring.flipped(self.unit.response))
        bits = (self.config.slices - 1).bit_length()
        line = asked.payload.line
        m.d.comb += [
            request.valid.eq(asked.valid),
            asked.ready.eq(request.ready),
            request.payload.tenant.eq(asked.payload.tenant),
            request.payload.line.eq(
                Cat(line[:EXTENT_LINES_LOG2], Const(self.channel, bits), line[EXTENT_LINES_LOG2:])
            ),
            answers.i.valid.eq(answered.valid),
            answered.ready.eq(answers.i.ready),
            answers.i.payload.data.eq(answered.payload.data),
            answers.i.payload.fault.eq(answered.payload.fault),
        ]
        return m
