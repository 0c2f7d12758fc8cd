"""A memory channel: owner check, arbitration between attention unit and fabric, the memory behind them."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.config import EXTENT_SHIFT
from ..abi.lines import LINE_SHIFT
from ..common.arbiter import RoundRobin
from ..common.queue import Queue
from ..interfaces import (
    LINE_ADDRESS_BITS,
    REQUEST_ID_BITS,
    FabricPort,
    FabricRequest,
    FabricResponse,
    Fault,
    OwnerPort,
    UnitMemory,
)
from .fixed import FixedMemory
from .owners import OwnerTable

EXTENT_LINES_LOG2 = EXTENT_SHIFT - LINE_SHIFT


class AccessTag(data.Struct):
    """What the channel keeps of an access while it is in the memory."""

    unit: 1
    id: REQUEST_ID_BITS
    write: 1
    fault: Fault


class MemoryChannel(wiring.Component):
    """One channel of device memory, where every access is checked, and nowhere else.

    An access to an extent that its tenant does not own is answered `Fault.DENIED`, beyond the channel
    `Fault.OUTSIDE`; then no data is returned and nothing is written. Accesses are carried out in the order in
    which they are accepted, so a read sees exactly the writes accepted before it. A unit and a fabric that
    both want the channel get every other cycle each. Until the owner table is clear after reset nothing is
    accepted.

    Parameters
    ----------
    channel : which channel this is, from 0.
    config : the device's configuration.

    Members
    -------
    unit : In(UnitMemory) : reads by the attention unit, answered in order; answers cannot be refused.
    fabric : In(FabricPort) : reads and writes by everybody else, answered in order. Lines are the channel's.
        A request is accepted only when room for its answer is set aside: answers left lying stop the fabric,
        not the unit.
    owner : In(OwnerPort) : look-ups and claims of extents of the channel.
    fabric_reads, fabric_writes : Out(64) : lines read and written for the fabric, refused ones not counted.
    conflicts : Out(64) : cycles in which unit and fabric both had a request.
    violations : Out(64) : accesses answered `Fault.DENIED`.

    Latency from a request to its answer is `unit_latency_cycles` at `unit` (exactly) and
    `fabric_latency_cycles` at `fabric` (at least). Throughput is one line per cycle in all.
    """

    def __init__(self, *, channel, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if not isinstance(channel, int) or not 0 <= channel < config.channels:
            raise ValueError(f"channel must be from 0 to {config.channels - 1}, not {channel!r}")
        self.channel = channel
        self.config = config
        super().__init__(
            {
                "unit": In(UnitMemory()),
                "fabric": In(FabricPort()),
                "owner": In(OwnerPort()),
                "fabric_reads": Out(64),
                "fabric_writes": Out(64),
                "conflicts": Out(64),
                "violations": Out(64),
            }
        )

    @property
    def unit_latency_cycles(self):
        """Cycles from a unit's request to its answer."""
        return self.config.memory_latency_cycles

    @property
    def fabric_latency_cycles(self):
        """Cycles from a fabric request to its answer when none is left lying."""
        return self.config.memory_latency_cycles + 2  # the queue of answers

    @property
    def fabric_outstanding(self):
        """Fabric requests that can be under way; enough for one per cycle."""
        return self.fabric_latency_cycles + 2

    def elaborate(self, platform):
        m = Module()
        m.submodules.owners = owners = OwnerTable(config=self.config)
        m.submodules.memory = memory = FixedMemory(
            channel=self.channel, latency_cycles=self.unit_latency_cycles - 1, tag=AccessTag
        )
        m.submodules.arbiter = arbiter = RoundRobin(count=2)
        m.submodules.answers = answers = Queue(shape=FabricResponse, depth=self.fabric_outstanding)
        wiring.connect(m, wiring.flipped(self.owner), owners.port)

        # Accept: one access per cycle into the stage in which it meets its owner.
        asked, unit_asked = self.fabric.request, self.unit.request
        promised = Signal(range(self.fabric_outstanding + 1))
        room = Signal(init=1)
        stage_valid, stage_unit = Signal(), Signal(reset_less=True)
        stage = Signal(FabricRequest, reset_less=True)
        free, from_unit, from_fabric = Signal(), Signal(), Signal()
        m.d.comb += [
            free.eq(owners.ready & (~stage_valid | memory.commands.ready)),
            arbiter.requests[0].eq(unit_asked.valid),
            arbiter.requests[1].eq(asked.valid & room),
            arbiter.accept.eq(free & arbiter.grant.any()),
            unit_asked.ready.eq(free & arbiter.grant[0]),
            asked.ready.eq(free & arbiter.grant[1]),
            from_unit.eq(unit_asked.ready),
            from_fabric.eq(asked.ready),
            owners.check.eq(from_unit | from_fabric),
        ]
        line = Signal(LINE_ADDRESS_BITS)
        with m.If(arbiter.grant[0]):
            m.d.comb += line.eq(unit_asked.payload.line)
        with m.Else():
            m.d.comb += line.eq(asked.payload.line)
        m.d.comb += owners.extent.eq(line >> EXTENT_LINES_LOG2)
        with m.If(free):
            m.d.sync += stage_valid.eq(from_unit | from_fabric)
            m.d.sync += [stage_unit.eq(from_unit), stage.line.eq(line), stage.id.eq(asked.payload.id)]
            with m.If(from_unit):
                m.d.sync += [stage.tenant.eq(unit_asked.payload.tenant), stage.write.eq(0)]
            with m.Else():
                m.d.sync += [stage.tenant.eq(asked.payload.tenant), stage.write.eq(asked.payload.write)]
        with m.If(from_fabric & asked.payload.write):
            for name in ("poison", "enable", "data"):
                m.d.sync += stage[name].eq(asked.payload[name])

        # Check, and hand over to the memory.
        command = memory.commands.payload
        fault = Signal(Fault)
        with m.If(stage.line >= self.config.channel_lines):
            m.d.comb += fault.eq(Fault.OUTSIDE)
        with m.Elif(~owners.owner.owned | (owners.owner.tenant != stage.tenant)):
            m.d.comb += fault.eq(Fault.DENIED)
        m.d.comb += [
            memory.commands.valid.eq(stage_valid),
            command.touch.eq(fault == Fault.NONE),
            *(command[name].eq(stage[name]) for name in ("line", "write", "poison", "enable", "data")),
            command.tag.unit.eq(stage_unit),
            command.tag.id.eq(stage.id),
            command.tag.write.eq(stage.write),
            command.tag.fault.eq(fault),
        ]

        # Answer.
        answer = memory.answers.payload
        shown, met = Signal.like(answer.data), Signal(Fault)
        m.d.comb += met.eq(answer.tag.fault)
        with m.If(~answer.tag.write & (answer.tag.fault == Fault.NONE)):
            m.d.comb += shown.eq(answer.data)
            with m.If(answer.poison):
                m.d.comb += met.eq(Fault.POISON)
        m.d.comb += [
            self.unit.response.valid.eq(memory.answers.valid & answer.tag.unit),
            self.unit.response.payload.data.eq(shown),
            self.unit.response.payload.fault.eq(met),
            answers.i.valid.eq(memory.answers.valid & ~answer.tag.unit),
            answers.i.payload.id.eq(answer.tag.id),
            answers.i.payload.write.eq(answer.tag.write),
            answers.i.payload.fault.eq(met),
            answers.i.payload.data.eq(shown),
        ]
        wiring.connect(m, answers.o, wiring.flipped(self.fabric.response))
        left = Signal()
        m.d.comb += left.eq(answers.o.valid & answers.o.ready)
        with m.If(from_fabric & ~left):
            m.d.sync += [promised.eq(promised + 1), room.eq(promised != self.fabric_outstanding - 1)]
        with m.If(left & ~from_fabric):
            m.d.sync += [promised.eq(promised - 1), room.eq(1)]

        done = Signal()
        m.d.comb += done.eq(memory.commands.valid & memory.commands.ready)
        for counter, event in (
            (self.fabric_reads, done & command.touch & ~stage_unit & ~stage.write),
            (self.fabric_writes, done & command.touch & ~stage_unit & stage.write),
            (self.violations, done & (fault == Fault.DENIED)),
            (self.conflicts, unit_asked.valid & asked.valid),
        ):
            with m.If(event):
                m.d.sync += counter.eq(counter + 1)
        return m
