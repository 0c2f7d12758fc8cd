"""A memory channel: owner check, arbitration of attention unit, fabric and scrub, the memory behind them."""

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi import DeviceConfig
from ..abi.config import Placement
from ..abi.dram import Dram
from ..abi.lines import LINE_BITS
from ..abi.owner import Violation
from ..common.arbiter import RoundRobin
from ..common.buffer import Buffer
from ..common.reorder import Reorder
from ..interfaces import (
    REQUEST_ID_BITS,
    DevLoad,
    FabricPort,
    FabricRequest,
    FabricResponse,
    Fault,
    OwnerPort,
    Refusal,
    UnitMemory,
)
from .audit import Reporter
from .backend import fabric_access, unit_access, write_answer
from .dram.memory import COUNTERS as MEMORY_COUNTERS
from .dram.memory import DramMemory
from .fixed import FixedMemory
from .load import LoadMeter
from .owners import OwnerTable
from .scrub import EXTENT_LINES_LOG2, Scrubber

OUTSTANDING = 128
"""Accesses of each client that may be under way: enough to hide a row that must be closed and opened."""
_CHECKED = 4
"""Accesses of each client from the check until their place is known to be free: one per cycle needs four."""


class _Read(data.Struct):
    """What a client's slot is filled with."""

    data: LINE_BITS
    poison: 1


class _Asked(data.Struct):
    """What the channel keeps of an access while it is under way."""

    id: REQUEST_ID_BITS
    write: 1
    fault: Fault
    scrub: 1  # nobody waits for the answer


class MemoryChannel(wiring.Component):
    """One channel of device memory, where every access is checked, and nowhere else.

    An access to an extent that its tenant does not own is answered `Fault.DENIED`, beyond the channel
    `Fault.OUTSIDE`; then no data is returned and nothing is written. A client's accesses to one line are
    carried out in the order in which they were accepted, and a read accepted after a write was answered sees
    the write, whoever asks. A unit and a fabric that both want the channel get their shares (see
    `DeviceConfig.fabric_share`). Until the owner table is clear after reset nothing is accepted.

    Zeros are written over an extent that was given back, as writes of the fabric behind all those that were
    accepted before, one line in `SCRUB_INTERVAL_CYCLES` where neither unit nor fabric asks, and where they
    always do, one in `SCRUB_PATIENCE_CYCLES` and little more. Only then is the extent free.

    Parameters
    ----------
    channel : which slice of the memory this is, from 0.
    config : the device's configuration.

    Members
    -------
    unit : In(UnitMemory) : reads by the attention unit, answered in order.
    fabric : In(FabricPort) : reads and writes by everybody else, answered in order. Lines are the channel's.
        A request is accepted only when room for its answer is set aside: answers left lying stop only whoever
        leaves them.
    owner : In(OwnerPort) : look-ups, claims and releases of extents of the channel.
    scrubbing, free : Out : extents that were given back and are not zero yet, and free ones.
    scrub_lines : Out(64) : lines that zeros were written over.
    load : Out(DevLoad) : of the memory, with what the unit wants of it; see `LoadMeter`.
    refused : Out(stream(Refusal)).array : reports of refused accesses, one stream for each check of the owner
        table; `line` is of the channel.
    missed, forget : Out, In(1) : see `Reporter`; a bit of `missed` for each.
    fabric_reads, fabric_writes : Out(64) : lines read and written for the fabric, refused ones not counted.
    conflicts : Out(64) : cycles in which unit and fabric both had a request.
    blocked_cycles : Out(64) : cycles in which a request of unit or fabric found no room.
    violations : Out(64) : accesses answered `Fault.DENIED`.
    row_hits, ... : Out(64) : counters of the memory, see `abi.window`; zero without DRAM.

    Throughput is one line per cycle in all.
    """

    def __init__(self, *, channel, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if not isinstance(channel, int) or not 0 <= channel < config.slices:
            raise ValueError(f"channel must be from 0 to {config.slices - 1}, not {channel!r}")
        self.channel = channel
        self.config = config
        own = ("fabric_reads", "fabric_writes", "conflicts", "violations", "blocked_cycles")
        counters = (*own, *MEMORY_COUNTERS)
        super().__init__(
            {
                "unit": In(UnitMemory()),
                "fabric": In(FabricPort()),
                "owner": In(OwnerPort()),
                "scrubbing": Out(range(config.slice_extents + 1)),
                "free": Out(range(config.slice_extents + 1)),
                "scrub_lines": Out(64),
                "load": Out(DevLoad),
                "refused": Out(stream.Signature(Refusal)).array(self.reports),
                "missed": Out(self.reports),
                "forget": In(1),
                **{name: Out(64) for name in counters},
            }
        )

    @property
    def reports(self):
        """Streams of reports."""
        # a unit at the PHY does not share the controller's front
        return 2 if self.config.placement is Placement.PHY else 1

    path_cycles = 2 + Reorder.latency_cycles
    """Cycles of an access outside the memory: check, buffer, and the way back."""

    @property
    def latency_cycles(self):
        """Most cycles from a read's request to its answer, with nothing else under way."""
        config = self.config
        fixed = config.dram is Dram.FIXED
        return self.path_cycles + (
            config.memory_latency_cycles if fixed else DramMemory.unloaded_cycles(config)
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        bits = ceil_log2(OUTSTANDING)
        if config.dram is Dram.FIXED:
            memory = FixedMemory(
                channel=self.channel, latency_cycles=config.memory_latency_cycles, slot_bits=bits
            )
        else:
            memory = DramMemory(channel=self.channel, config=config, slot_bits=bits)
        m.submodules.memory = memory
        m.submodules.meter = meter = LoadMeter(places=memory.places)
        accesses = (memory.port.unit, memory.port.fabric)
        m.d.sync += meter.taken.eq(sum(access.valid & access.ready for access in accesses))
        m.d.comb += [
            meter.waiting.eq(memory.waiting),
            meter.refused.eq(memory.refused),
            self.load.eq(meter.load),
        ]
        apart = self.reports == 2
        m.submodules.owners = owners = OwnerTable(config=config, checks=self.reports)
        wiring.connect(m, wiring.flipped(self.owner), owners.port)

        m.submodules.scrubber = scrubber = Scrubber(extents=config.slice_extents)
        wiring.connect(m, owners.scrub, scrubber.extent)
        m.d.comb += [
            self.scrubbing.eq(owners.scrubbing),
            self.free.eq(owners.free),
            self.scrub_lines.eq(scrubber.lines),
        ]

        unit = _Client(shape=unit_access(bits))
        fabric = _Client(shape=fabric_access(bits), marks=memory.writers)
        m.d.comb += scrubber.written.eq(fabric.scrubbed)
        m.submodules.unit_client, m.submodules.fabric_client = unit, fabric
        clients = [(self.unit.request, unit), (self.fabric.request, fabric)]
        self._check(m, owners, scrubber, [[client] for client in clients] if apart else [clients])
        self._connect(m, memory.port, unit, fabric)
        self._answer(m, unit, fabric)

        requests = (self.unit.request, self.fabric.request)
        blocked = Signal()
        m.d.sync += [
            blocked.eq(Cat(request.valid & ~request.ready for request in requests).any()),
            self.blocked_cycles.eq(self.blocked_cycles + blocked),
        ]
        for name in MEMORY_COUNTERS:
            if hasattr(memory, name):
                m.d.comb += getattr(self, name).eq(getattr(memory, name))
        return m

    def _check(self, m, owners, scrubber, client_sets):
        """Accesses meet their owners, one per cycle of every set of clients; what passes goes on.

        The scrubber's lines are accesses of the last client, the fabric, and take turns that are left over.
        """
        counted = {name: [] for name in ("fabric_reads", "fabric_writes", "violations")}
        for n, (check, clients) in enumerate(zip(owners.checks, client_sets, strict=True)):
            m.submodules[f"turns_{n}"] = turns = RoundRobin(count=len(clients))
            stage = Signal(FabricRequest, name=f"stage_{n}", reset_less=True)
            slot = Signal(ceil_log2(OUTSTANDING), name=f"slot_{n}", reset_less=True)
            partial = Signal(name=f"partial_{n}", reset_less=True)
            beside = {"slot": slot, "partial": partial}
            whose = Signal(len(clients), name=f"whose_{n}")
            scrubs = Signal(name=f"scrubs_{n}")  # what stands in `stage` is a line to scrub
            insists, scrub = Signal(name=f"insists_{n}"), Signal(name=f"scrub_{n}")
            if n == len(client_sets) - 1:
                waits = scrubber.o.valid & clients[-1][1].room
                others = Cat(request.valid for request, _ in clients).any()
                m.d.comb += [
                    insists.eq(scrubber.urgent & waits),
                    scrub.eq(insists | (waits & ~others)),
                    scrubber.o.ready.eq(scrub),
                ]
                m.d.sync += scrubs.eq(scrub)
            m.d.comb += [
                turns.accept.eq(owners.ready & turns.grant.any()),
                check.valid.eq(turns.accept | scrub),
            ]
            m.d.sync += whose.eq(
                turns.grant & turns.accept.replicate(len(clients)) | (scrub << len(clients) - 1)
            )
            for k, (request, client) in enumerate(clients):
                asked, write = request.payload, _field(request.payload, "write")
                m.d.comb += [
                    turns.requests[k].eq(request.valid & client.room & ~insists),
                    request.ready.eq(owners.ready & turns.grant[k]),
                    client.take.eq(request.ready),
                ]
                with m.If(turns.grant[k]):
                    m.d.comb += check.extent.eq(asked.line >> EXTENT_LINES_LOG2)
                    m.d.sync += [
                        stage.line.eq(asked.line),
                        stage.tenant.eq(asked.tenant),
                        stage.id.eq(_field(asked, "id")),
                        stage.write.eq(write),
                        stage.poison.eq(_field(asked, "poison")),
                        slot.eq(client.slot),
                    ]
                with m.If(request.valid & write):
                    m.d.sync += [
                        *(stage[name].eq(_field(asked, name)) for name in ("enable", "data")),
                        partial.eq(~Value.cast(_field(asked, "enable")).all()),
                    ]
            if n == len(client_sets) - 1:
                with m.If(scrub):
                    m.d.comb += [clients[-1][1].take.eq(1), check.extent.eq(scrubber.extent.payload)]
                    m.d.sync += [
                        stage.line.eq(scrubber.o.payload),
                        stage.write.eq(1),
                        stage.poison.eq(0),
                        stage.data.eq(0),
                        partial.eq(0),
                        slot.eq(clients[-1][1].slot),
                    ]

            owner = check.owner
            allowed = Mux(scrubs, owner.scrubbing, owner.owned & (owner.tenant == stage.tenant))
            fault = Signal(Fault, name=f"fault_{n}")
            with m.If(stage.line >= self.config.slice_lines):
                m.d.comb += fault.eq(Fault.OUTSIDE)
            with m.Elif(~allowed):
                m.d.comb += fault.eq(Fault.DENIED)
            good = fault == Fault.NONE
            m.submodules[f"reporter_{n}"] = reporter = Reporter()
            wiring.connect(m, reporter.o, wiring.flipped(self.refused[n]))
            refusal = reporter.i.refusal
            m.d.comb += [
                reporter.i.valid.eq(whose.any() & (fault == Fault.DENIED)),
                refusal.line.eq(stage.line),
                refusal.tenant.eq(stage.tenant),
                refusal.kind.eq(Mux(stage.write, Violation.WRITE, Violation.READ)),
                reporter.forget.eq(self.forget),
                self.missed[n].eq(reporter.missed),
            ]
            for k, (_, client) in enumerate(clients):
                if "write" not in client.shape.members:  # the unit
                    with m.If(whose[k]):
                        m.d.comb += refusal.kind.eq(Violation.UNIT_READ)
            for k, (_, client) in enumerate(clients):
                m.d.comb += [
                    client.checked.eq(whose[k]),
                    client.fault.eq(fault),
                    client.id.eq(stage.id),
                    client.write.eq(stage.write),
                    client.scrub.eq(scrubs),
                    *(
                        client.access[name].eq(beside[name] if name in beside else stage[name])
                        for name in client.shape.members
                    ),
                ]
                if "write" in client.shape.members:
                    counted["fabric_reads"].append(whose[k] & good & ~stage.write)
                    counted["fabric_writes"].append(whose[k] & good & stage.write & ~scrubs)
                counted["violations"].append(whose[k] & (fault == Fault.DENIED))
        for name, events in counted.items():
            counter, now = getattr(self, name), Signal(range(len(events) + 1), name=f"{name}_now")
            m.d.sync += [now.eq(sum(events)), counter.eq(counter + now)]
        with m.If(self.unit.request.valid & self.fabric.request.valid):
            m.d.sync += self.conflicts.eq(self.conflicts + 1)

    def _connect(self, m, port, unit, fabric):
        """The memory's ports."""
        wiring.connect(m, unit.accesses, port.unit)
        wiring.connect(m, fabric.accesses, port.fabric)
        for client, read in ((unit, port.unit_read), (fabric, port.fabric_read)):
            m.d.comb += [
                client.arrive.eq(read.valid),
                client.arrive_slot.eq(read.payload.slot),
                client.arrived.data.eq(read.payload.data),
                client.arrived.poison.eq(read.payload.poison),
            ]
        for mark, written in zip(fabric.marks, port.written, strict=True):
            m.d.comb += mark.eq(written)

    def _answer(self, m, unit, fabric):
        m.d.comb += [
            self.unit.response.valid.eq(unit.o.valid),
            unit.o.ready.eq(self.unit.response.ready),
            self.unit.response.payload.data.eq(unit.o.payload.data),
            self.unit.response.payload.fault.eq(unit.o.payload.fault),
            self.fabric.response.valid.eq(fabric.o.valid),
            fabric.o.ready.eq(self.fabric.response.ready),
            self.fabric.response.payload.eq(fabric.o.payload),
        ]


def _field(asked, name):
    """A field of a request; zero where requests of its kind do not have it."""
    return getattr(asked, name, 0)


class _Client(wiring.Component):
    """What the channel keeps for one that asks: checked accesses on their way, and answers in order.

    Parameters
    ----------
    shape : of an access to the memory.
    marks : ports at which writes are done.

    Members
    -------
    room, take, slot : an access can be accepted; it is, and its answer's place is `slot`.
    checked, fault, id, write, scrub, access : in the next cycle: what the check found, and the access.
    accesses : Out(stream) : what passed.
    arrive, arrive_slot, arrived, marks : answers of the memory.
    o : Out(stream(FabricResponse)) : answers, in order, but those of scrubs.
    scrubbed : Out(1) : a scrub would have its answer.
    """

    def __init__(self, *, shape, marks=0):
        bits = ceil_log2(OUTSTANDING)
        self.shape = shape
        super().__init__(
            {
                "room": Out(1),
                "take": In(1),
                "slot": Out(bits),
                "checked": In(1),
                "fault": In(Fault),
                "id": In(REQUEST_ID_BITS),
                "write": In(1),
                "scrub": In(1),
                "access": In(shape),
                "accesses": Out(stream.Signature(shape)),
                "arrive": In(1),
                "arrive_slot": In(bits),
                "arrived": In(_Read),
                "marks": In(write_answer(bits)).array(marks),
                "o": Out(stream.Signature(FabricResponse)),
                "scrubbed": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.buffer = buffer = Buffer(shape=self.shape, depth=_CHECKED, early=True)
        m.submodules.reorder = reorder = Reorder(shape=_Read, depth=OUTSTANDING, marks=len(self.marks) + 1)
        m.submodules.asked = asked = Memory(shape=_Asked, depth=OUTSTANDING, init=[])
        keep, recall = asked.write_port(), asked.read_port(domain="comb")
        wiring.connect(m, buffer.o, wiring.flipped(self.accesses))

        passes = self.checked & (self.fault == Fault.NONE)
        # A place is given back when its access leaves, or is refused.
        space, after = Signal(range(_CHECKED + 1), init=_CHECKED), Signal(range(_CHECKED + 1))
        some, left = Signal(init=1), Signal()
        refused = Signal(write_answer(len(self.slot)))
        m.d.comb += after.eq(space - self.take + left + refused.valid)
        m.d.sync += [
            left.eq(self.accesses.valid & self.accesses.ready),
            refused.valid.eq(self.checked & ~passes),
            refused.slot.eq(self.access.slot),
            space.eq(after),
            some.eq(after != 0),
        ]
        m.d.comb += [
            self.room.eq(some & reorder.room),
            self.slot.eq(reorder.slot),
            reorder.take.eq(self.take),
            buffer.i.valid.eq(passes),
            buffer.early.eq(self.checked),
            buffer.i.payload.eq(self.access),
            keep.en.eq(self.checked),
            keep.addr.eq(self.access.slot),
            keep.data.id.eq(self.id),
            keep.data.write.eq(self.write),
            keep.data.fault.eq(self.fault),
            keep.data.scrub.eq(self.scrub),
            reorder.arrive.eq(self.arrive),
            reorder.arrive_slot.eq(self.arrive_slot),
            reorder.arrived.eq(self.arrived),
        ]
        for mine, theirs in zip((refused, *self.marks), reorder.marks, strict=True):
            m.d.comb += theirs.eq(mine)

        answer, read = self.o.payload, reorder.o.payload
        m.d.comb += [
            recall.addr.eq(read.slot),
            self.o.valid.eq(reorder.o.valid & ~recall.data.scrub),
            self.scrubbed.eq(reorder.o.valid & recall.data.scrub),
            reorder.o.ready.eq(self.o.ready | recall.data.scrub),
            answer.id.eq(recall.data.id),
            answer.write.eq(recall.data.write),
            answer.fault.eq(recall.data.fault),
        ]
        with m.If(~recall.data.write & (recall.data.fault == Fault.NONE)):
            m.d.comb += answer.data.eq(read.data.data)
            with m.If(read.data.poison):
                m.d.comb += answer.fault.eq(Fault.POISON)
        return m
