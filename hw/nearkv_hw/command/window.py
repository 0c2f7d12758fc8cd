"""The command window: rings, doorbells and register lines, one window per aperture, and the owner's page."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import enum, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi import DeviceConfig
from ..abi.config import LinkLayer
from ..abi.descriptor import COMPLETION, COMPLETION_BYTES, DESCRIPTOR_BYTES
from ..abi.lines import LINE_BITS, LINE_BYTES
from ..abi.owner import OWNER_OFFSET
from ..abi.window import (
    CHANNEL_COUNTERS,
    COMPLETIONS_OFFSET,
    DESCRIPTORS_OFFSET,
    DEVICE_COUNTERS,
    DOORBELL,
    DOORBELL_OFFSET,
    EXTENT_COUNTERS,
    LINK_COUNTERS,
    MEMORY_COUNTERS,
    QUEUE_COUNTERS,
    REGISTERS_OFFSET,
)
from ..interfaces import EXTENTS_BITS, REQUEST_ID_BITS, FabricPort, Refusal
from ..structs import layout_of
from .owner import OWNER_LINES, OwnerPage
from .records import Completed, Posted
from .registers import REGISTER_BITS, Registers, link_layer_members
from .turns import Turns

_OWNER_LINE = OWNER_OFFSET // LINE_BYTES
_LINES = _OWNER_LINE + OWNER_LINES
_DOORBELL_BYTES = DOORBELL["tail"].width // 8


class Part(enum.Enum, shape=3):
    """Which part of the window a read is answered from."""

    REGISTERS = 0
    DESCRIPTORS = 1
    EXTENSIONS = 2
    COMPLETIONS = 3
    NOTHING = 4
    OWNER = 5


class CommandWindow(wiring.Component):
    """Holds the rings of all apertures, posts their descriptors as `Turns` chooses, and answers the host.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    host : In(FabricPort()) : reads and writes; `line` of the window, `tenant` is the aperture.
    descriptors : Out(stream(Posted)) : posted descriptors.
    completions : In(stream(Completed)) : records to write; always taken.
    cycles : Out(64) : the device's cycle counter.
    device : In(DEVICE_COUNTERS) : counters of the endpoint and the violations; what the window counts itself
        (cycles, jobs, errors) is not looked at.
    link : In(LINK_COUNTERS), extents : In(EXTENT_COUNTERS) : counters of the link and of the extents; those
        of a tenant are not looked at.
    quotas, holdings : Out, In(EXTENTS_BITS).array(apertures) : extents that each tenant may own, and does.
    reports, lost, forget : In(stream(Refusal)), In, Out(1) : violations, as of `OwnerPage`.
    link_layers, link_state : In : with a link layer, as of `Registers`.
    channels, memories, queues : In(CHANNEL_COUNTERS | MEMORY_COUNTERS | QUEUE_COUNTERS).array(slices) : those
        of the slices of memory.

    A descriptor slot is written with byte enables. A poisoned write fills a slot's first line with zeros and
    its second with ones, neither of which is good. A doorbell is refused and counted as an error when it is
    poisoned, partly disabled, goes back, or names more descriptors than the ring holds. Completion records
    and registers cannot be written; what lies between the parts reads as zero.

    Lines behind the window are the owner's page, whatever the aperture; a poisoned write there is refused.

    One access in two cycles, answered one cycle after it was taken; a descriptor is posted
    `post_latency_cycles` after its doorbell at the earliest, one in two cycles.
    """

    latency_cycles = 1
    post_latency_cycles = 2

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "host": In(FabricPort()),
                "descriptors": Out(stream.Signature(Posted)),
                "completions": In(stream.Signature(Completed)),
                "cycles": Out(64),
                "device": In(layout_of(DEVICE_COUNTERS)),
                "link": In(layout_of(LINK_COUNTERS)),
                "extents": In(layout_of(EXTENT_COUNTERS)),
                "channels": In(layout_of(CHANNEL_COUNTERS)).array(config.slices),
                "memories": In(layout_of(MEMORY_COUNTERS)).array(config.slices),
                "queues": In(layout_of(QUEUE_COUNTERS)).array(config.slices),
                "quotas": Out(EXTENTS_BITS).array(config.apertures),
                "holdings": In(EXTENTS_BITS).array(config.apertures),
                "reports": In(stream.Signature(Refusal)),
                "lost": In(8),
                "forget": Out(1),
                **link_layer_members(config),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.registers = registers = Registers(config=self.config)
        refused, completed, failed = Signal(), Signal(), Signal()
        self._page = m.submodules.owner = OwnerPage(config=self.config)
        self._turns = m.submodules.turns = Turns(config=self.config)
        self._own(m, registers)
        self._count(m, registers, refused, completed, failed)
        rung = Signal(self.config.apertures)  # by a doorbell with new descriptors
        self._answer(m, registers, refused, rung)
        self._post(m, registers, rung)
        self._complete(m, registers, completed, failed)
        return m

    def _count(self, m, registers, refused, completed, failed):
        """The counters that the window keeps itself, beside those that it is told."""
        jobs, errors = Signal(64), Signal(64)
        m.d.sync += self.cycles.eq(self.cycles + 1)
        with m.If(completed):
            m.d.sync += jobs.eq(jobs + 1)
        rejected = Signal()  # a cycle after the judgement, which is long enough without an addition
        m.d.sync += rejected.eq(refused)
        with m.If(failed | rejected):
            m.d.sync += errors.eq(errors + failed + rejected)
        m.d.comb += [
            registers.device.eq(self.device),
            registers.device.cycles.eq(self.cycles),
            registers.device.jobs.eq(jobs),
            registers.device.errors.eq(errors),
        ]
        m.d.comb += [registers.link.eq(self.link), registers.extents.eq(self.extents)]
        if self.config.link_layer is not LinkLayer.OFF:
            m.d.comb += [
                registers.link_state.eq(self.link_state),
                *(
                    theirs.eq(ours)
                    for theirs, ours in zip(registers.link_layers, self.link_layers, strict=True)
                ),
            ]
        for name in ("channels", "memories", "queues"):
            for theirs, given in zip(getattr(registers, name), getattr(self, name), strict=True):
                m.d.comb += theirs.eq(given)

    def _own(self, m, registers):
        """What goes by the owner's page."""
        page = self._page
        wiring.connect(m, wiring.flipped(self.reports), page.reports)
        m.d.comb += [page.cycles.eq(self.cycles), page.lost.eq(self.lost), self.forget.eq(page.forget)]
        for n in range(self.config.apertures):
            m.d.comb += [
                self.quotas[n].eq(page.quotas[n]),
                page.holdings[n].eq(self.holdings[n]),
                registers.quotas[n].eq(page.quotas[n]),
                registers.holdings[n].eq(self.holdings[n]),
                self._turns.weights[n].eq(page.weights[n]),
            ]

    @property
    def _slots(self):
        """Slots of all apertures' rings."""
        return (1 << ceil_log2(self.config.apertures)) * self.config.ring_slots

    def _slot(self, aperture, index):
        """The address in a ring memory of an aperture's slot."""
        return Cat(index[: ceil_log2(self.config.ring_slots)], aperture[: ceil_log2(self.config.apertures)])

    def _answer(self, m, registers, refused, rung):
        """Takes an access in one cycle and answers it from the next on."""
        request, response = self.host.request, self.host.response
        access = request.payload
        line = access.line[: ceil_log2(_LINES)]
        slot_lines = DESCRIPTOR_BYTES // LINE_BYTES
        self._descriptor_rings = [
            memory.Memory(shape=LINE_BITS, depth=self._slots, init=[]) for _ in range(slot_lines)
        ]
        m.submodules.completion_ring = self._completion_ring = records = memory.Memory(
            shape=LINE_BITS, depth=self._slots, init=[]
        )
        records_read = records.read_port()

        descriptor = line - DESCRIPTORS_OFFSET // LINE_BYTES
        record = line - COMPLETIONS_OFFSET // LINE_BYTES
        in_registers = _within(line, REGISTERS_OFFSET // LINE_BYTES, 1 << REGISTER_BITS)
        in_descriptors = _within(line, DESCRIPTORS_OFFSET // LINE_BYTES, slot_lines * self.config.ring_slots)
        in_page = line >= _OWNER_LINE
        page = self._page
        in_records = _within(line, COMPLETIONS_OFFSET // COMPLETION_BYTES, self.config.ring_slots)

        busy, take, write = Signal(), Signal(), Signal()
        part = Signal(Part)
        request_id, is_write = Signal(REQUEST_ID_BITS, reset_less=True), Signal()
        m.d.comb += [
            request.ready.eq(~busy),
            take.eq(request.valid & ~busy),
            write.eq(take & access.write),
            registers.read.eq(take),
            registers.line.eq(line),
            registers.aperture.eq(access.tenant),
            page.access.eq(take & in_page),
            page.line.eq(line),
            page.write.eq(access.write & ~access.poison),
            page.given.eq(access.data),
            page.enable.eq(access.enable),
            records_read.en.eq(take),
            records_read.addr.eq(self._slot(access.tenant, record)),
            response.valid.eq(busy),
            response.payload.id.eq(request_id),
            response.payload.write.eq(is_write),
        ]
        shown = []
        for number, ring in enumerate(self._descriptor_rings):
            m.submodules[f"descriptor_ring_{number}"] = ring
            ring_write, ring_read = ring.write_port(granularity=8), ring.read_port()
            here = write & in_descriptors & (descriptor[: ceil_log2(slot_lines)] == number)
            m.d.comb += [
                ring_write.addr.eq(self._slot(access.tenant, descriptor >> ceil_log2(slot_lines))),
                ring_write.data.eq(Mux(access.poison, (1 << LINE_BITS) - 1 if number else 0, access.data)),
                ring_write.en.eq(Mux(here, access.enable | access.poison.replicate(64), 0)),
                ring_read.en.eq(take),
                ring_read.addr.eq(ring_write.addr),
            ]
            shown.append(ring_read.data)
        with m.Switch(part):
            for source, value in (
                (Part.REGISTERS, registers.data),
                (Part.DESCRIPTORS, shown[0]),
                (Part.EXTENSIONS, shown[1]),
                (Part.COMPLETIONS, records_read.data),
                (Part.OWNER, page.data),
            ):
                with m.Case(source):
                    m.d.comb += response.payload.data.eq(value)
        with m.If(take):
            m.d.sync += [
                busy.eq(1),
                request_id.eq(access.id),
                is_write.eq(access.write),
                part.eq(Part.NOTHING),
            ]
            with m.If(~access.write):
                with m.If(in_registers):
                    m.d.sync += part.eq(Part.REGISTERS)
                with m.If(in_page):
                    m.d.sync += part.eq(Part.OWNER)
                with m.If(in_descriptors):
                    second = descriptor[: ceil_log2(slot_lines)].any()
                    m.d.sync += part.eq(Mux(second, Part.EXTENSIONS, Part.DESCRIPTORS))
                with m.If(in_records & self._is_written(m, registers, access.tenant, record)):
                    m.d.sync += part.eq(Part.COMPLETIONS)
        with m.Elif(response.ready):
            m.d.sync += busy.eq(0)

        with m.If(page.refused | (write & in_page & access.poison)):
            m.d.comb += refused.eq(1)
        doorbell = write & (line == DOORBELL_OFFSET // LINE_BYTES)
        self._ring_doorbell(m, registers, doorbell, refused, rung)

    def _is_written(self, m, registers, aperture, record):
        """Whether a record was written since reset: what the memory held before is never shown for one."""
        written = Signal()
        slot = record[: ceil_log2(self.config.ring_slots)]
        for n, ring in enumerate(registers.rings):
            lapped = Signal(name=f"lapped{n}")
            with m.If(ring.completed == self.config.ring_slots):
                m.d.sync += lapped.eq(1)
            with m.If(aperture == n):
                m.d.comb += written.eq(lapped | (slot < ring.completed))
        return written

    def _ring_doorbell(self, m, registers, doorbell, refused, rung):
        access = self.host.request.payload
        tail = access.data[DOORBELL.offset("tail") :][: DOORBELL["tail"].width]
        whole = access.enable[:_DOORBELL_BYTES].all() & ~access.poison
        for aperture, ring in enumerate(registers.rings):
            ours = doorbell & (access.tenant == aperture)
            stored = Signal(ring.tail.shape(), name=f"tail{aperture}")
            # A tail that went back could fall behind a head that moves at the same time.
            goes_on = (tail - stored)[: len(stored)] <= self.config.ring_slots
            fits = whole & goes_on & ((tail - ring.head)[: len(stored)] <= self.config.ring_slots)
            m.d.comb += ring.tail.eq(stored)
            with m.If(ours & fits):
                m.d.sync += stored.eq(tail)
                m.d.comb += rung[aperture].eq(tail != ring.head)
            with m.If(ours & ~fits):
                m.d.comb += refused.eq(1)

    def _post(self, m, registers, rung):
        """Takes descriptors from the rings."""
        ports = [ring.read_port() for ring in self._descriptor_rings]
        apertures = self.config.apertures
        heads = [Signal(32, name=f"head{n}") for n in range(apertures)]
        waiting = Signal(apertures)
        turns, chosen = self._turns, self._turns.chosen
        index = Signal(32)
        out = self.descriptors
        for n, (head, ring) in enumerate(zip(heads, registers.rings, strict=True)):
            m.d.comb += ring.head.eq(head)
            # A cycle late: a head that moves is seen in time, since posting takes a cycle.
            m.d.sync += waiting[n].eq((ring.tail != head) | rung[n])
            with m.If(chosen == n):
                m.d.comb += index.eq(head)
        m.d.comb += [
            turns.waiting.eq(waiting),
            *(port.addr.eq(self._slot(chosen, index)) for port in ports),
            out.payload.line.eq(ports[0].data),
            out.payload.extension.eq(ports[1].data),
        ]
        with m.FSM():
            with m.State("CHOOSE"):
                m.d.comb += [turns.take.eq(turns.valid), *(port.en.eq(turns.valid) for port in ports)]
                m.d.sync += [out.payload.tenant.eq(chosen), out.payload.index.eq(index)]
                m.d.sync += out.payload.fetched.eq(self.cycles)
                with m.If(turns.valid):
                    for n, head in enumerate(heads):
                        with m.If(chosen == n):
                            m.d.sync += head.eq(head + 1)
                    m.next = "POST"
            with m.State("POST"):
                m.d.comb += [*(port.en.eq(0) for port in ports), out.valid.eq(1)]  # the lines read stay
                with m.If(out.ready):
                    m.next = "CHOOSE"

    def _complete(self, m, registers, completed, failed):
        """Writes records into the ring of their aperture."""
        port = self._completion_ring.write_port()
        completion = self.completions.payload
        m.d.comb += [
            self.completions.ready.eq(1),
            completed.eq(self.completions.valid),
            failed.eq(self.completions.valid & completion.failed),
            port.en.eq(self.completions.valid),
            port.addr.eq(self._slot(completion.tenant, completion.index)),
            port.data.eq(completion.record),
            self._turns.used.eq(self.completions.valid),
            self._turns.user.eq(completion.tenant),
            self._turns.lines.eq(completion.record[COMPLETION.offset("lines") :]),
        ]
        for n, ring in enumerate(registers.rings):
            count = Signal(32, name=f"completed{n}")
            m.d.comb += ring.completed.eq(count)
            with m.If(self.completions.valid & (completion.tenant == n)):
                m.d.sync += count.eq(count + 1)


def _within(line, first, count):
    """Whether a line is one of `count` from `first` on."""
    return (line >= first) & (line < first + count)
