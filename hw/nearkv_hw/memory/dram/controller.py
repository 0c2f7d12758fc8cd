"""The controller of one DRAM sub-channel: accesses of a unit and of the fabric become commands."""

from amaranth.hdl import Cat, Module, Mux, Shape, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ...abi.dram import Dram, Refresh
from ...common.delay import Delay
from ...structs import bits_of
from .banks import Banks, Commands, decides_ahead, place_layout
from .door import CONTENTS_BITS, Door, fabric_layout, unit_layout
from .drain import Drain
from .pins import DramPins
from .queue import AccessQueue
from .refresh import Refresher, known_part
from .selector import Selector
from .shares import Shares, checked_share

_OF_ROWS = (
    *("activate", "activate_bank", "activate_row"),
    *("precharge", "precharge_all", "precharge_bank"),
)
"""Commands that open and close rows."""
_DOOR_CYCLES = 3
"""From a transfer to where the door has checked and chosen it, beyond the frame that it waits for."""
WRITE_ENTRIES = 16
"""Writes that a controller collects unless told otherwise."""
IDLE_FRAMES = 128
"""How long rows stay open without any access; the next one then need not close another row first."""
LINGER_FRAMES = 64
"""How long a client that stopped asking still has its part of the read queue kept free."""


class DramController(wiring.Component):
    """Schedules the accesses of a sub-channel so that the part's rules are kept and its time is used.

    Time passes in frames of as many device cycles as the part has sub-channels. A frame has at most one
    column command (which moves a line), one activate, and one precharge or refresh; all are decided together
    in the frame before. Rows stay open until another one is needed, or nothing was for `IDLE_FRAMES`. Ready
    accesses go oldest first; writes are collected and go in bursts; how two clients that want the same are
    told apart is for `Shares`, which row of a bank comes first for `Selector`.

    Accesses of the fabric to one line keep their order, and a read that comes after `written` of a write to
    its line, from whichever client, sees it. A read that finds a write of its line queued, and a write that
    finds a read, waits at the door (and what comes behind it from its client), and the other one goes first.

    Parameters
    ----------
    part : the DRAM part.
    density_gbit : its density in Gbit, by default the part's own.
    refresh : how it is refreshed.
    tag : shape of what comes back with an answer.
    fabric_share : sixteenths of the time that belong to the fabric when both want it, 0 to 16.
    read_entries, write_entries : accesses that are looked at together, at least 8; by default 16, reads
        of LPDDR5X 56, of HBM3 40: rows of few banks open so late that 16 do not reach far enough.

    Members
    -------
    unit : In(stream(unit_layout)), fabric : In(stream(fabric_layout)) : accesses. `line` counts the
        sub-channel's lines.
    phase : In(1) : the first cycle of each frame.
    due : In(1) : a cycle in which one more refresh is due, from `RefreshTimer`.
    join : In(1), drains : Out(1) : writes begin in another sub-channel, in this one. Accesses come in order,
        so a sub-channel that writes while the others read would stop them: they turn together.
    pins : Out(DramPins) : the part.
    answers : Out(stream(unit, tag), always_ready) : whose line the part shows in this cycle.
    written : Out(stream(tag), always_ready) : a write has its place in the order.
    row_hit, row_miss, row_conflict : Out(1) : a cycle for each column command: its row was open, had to be
        opened, another one had to be closed first.
    refresh_busy, turnaround : Out(1) : cycles of frames in which refresh holds banks back; in which accesses
        wait for the data bus to turn.
    reads_waiting, writes_waiting : Out : levels of the queues.

    Unloaded, a read is answered `unloaded_cycles` cycles or fewer after it was taken. Row hits in two bank
    groups in turn go at one line per frame.
    """

    def __init__(
        self,
        *,
        part,
        density_gbit=None,
        refresh=Refresh.ALL_BANK,
        tag,
        fabric_share=8,
        read_entries=None,
        write_entries=WRITE_ENTRIES,
    ):
        self.part = known_part(part)
        self.density_gbit = self.part.default_density if density_gbit is None else density_gbit
        self.refresh = Refresh(refresh)
        self.timings = self.part.frames(self.density_gbit, self.refresh)
        self.tag = tag
        self.fabric_share = checked_share(fabric_share)
        self.read_entries = default_read_entries(self.part) if read_entries is None else read_entries
        self.write_entries = write_entries
        for name in ("read_entries", "write_entries"):
            entries = getattr(self, name)
            if not isinstance(entries, int) or entries < 8:
                raise ValueError(f"{name} must be an integer of at least 8, not {entries!r}")
        self._place = place_layout(self.part, self.density_gbit)
        self.line_bits = self._place.size
        super().__init__(
            {
                "unit": In(stream.Signature(unit_layout(self.line_bits, tag))),
                "fabric": In(stream.Signature(fabric_layout(self.line_bits, tag))),
                "phase": In(1),
                "due": In(1),
                "join": In(1),
                "drains": Out(1),
                "pins": Out(DramPins(part=self.part, density_gbit=self.density_gbit)),
                "answers": Out(
                    stream.Signature(data.StructLayout({"unit": 1, "tag": tag}), always_ready=True)
                ),
                "written": Out(stream.Signature(tag, always_ready=True)),
                **{
                    name: Out(1)
                    for name in ("row_hit", "row_miss", "row_conflict", "refresh_busy", "turnaround")
                },
                "reads_waiting": Out(range(self.read_entries + 1)),
                "writes_waiting": Out(range(self.write_entries + 1)),
            }
        )

    @property
    def fabric_entries(self):
        """Reads of the fabric among `read_entries` while the unit wants some: a quarter with two sixteenths,
        half with eight. The fewer they are, the further the unit's reach ahead."""
        return max(4, self.read_entries * min(self.fabric_share + 4, 18) // 24)

    @property
    def unloaded_cycles(self):
        """Most cycles from the transfer of a read of a closed bank to its answer, with nothing else to do."""
        # It is checked in the last cycle but one of a frame, chosen in the last one, enters in the next one,
        # and is flagged in the last but one of that; in the next one where the controller decides ahead.
        entering = 3 if decides_ahead(self.part) else 2
        frames = entering + self.timings.activate_to_column
        return frames * self.part.subchannels + self.timings.read_cycles + _DOOR_CYCLES

    def elaborate(self, platform):
        m = Module()
        part = self.part
        size = {"part": part, "density_gbit": self.density_gbit}
        m.submodules.banks = banks = Banks(**size, refresh=self.refresh)
        m.submodules.refresher = refresher = Refresher(**size, refresh=self.refresh)
        m.submodules.reads = reads = AccessQueue(**size, entries=self.read_entries, asked=1)
        m.submodules.writes = writes = AccessQueue(**size, entries=self.write_entries, asked=2)
        m.submodules.read_selector = read_selector = Selector(
            **size, refresh=self.refresh, entries=self.read_entries, shared=True
        )
        m.submodules.write_selector = write_selector = Selector(
            **size, refresh=self.refresh, entries=self.write_entries, shared=False
        )
        m.submodules.drain = drain = Drain(entries=self.write_entries)
        m.submodules.shares = shares = Shares(fabric_share=self.fabric_share)

        # The cycles of a frame.
        steps = [self.phase]
        for k in range(1, part.subchannels):
            step = Signal(name=f"step_{k}")
            m.d.sync += step.eq(steps[-1])
            steps.append(step)
        follow, tick = steps[0], steps[-1]
        collect, flag = (follow, tick) if decides_ahead(part) else (steps[-3], steps[-2])

        # The frame's commands, and from then on those of the frame before.
        commands = Commands(**size).create(path=("now",))
        told = Commands(**size).create(path=("told",))
        of_unit = Signal(reset_less=True)  # the line is the unit's
        with m.If(tick):
            m.d.sync += [
                of_unit.eq(read_selector.column_unit),
                *(getattr(told, name).eq(getattr(commands, name)) for name in commands.signature.members),
            ]
        left = Signal(data.StructLayout({"unit": 1, "reads": 1, "writes": 1}))  # the queues, with `follow`
        m.d.comb += [
            left.reads.eq(self.pins.column_valid & ~told.column_write),
            left.writes.eq(self.pins.column_valid & told.column_write),
            left.unit.eq(left.reads & of_unit),
        ]
        self._elaborate_door(m, banks, reads, writes, drain, shares, left, steps)
        wiring.connect(m, told, banks.commands)
        m.d.comb += [
            banks.follow.eq(follow),
            banks.tick.eq(tick),
            refresher.follow.eq(follow),
            refresher.tick.eq(tick),
            refresher.due.eq(self.due),
            refresher.open.eq(banks.open),
            refresher.closable.eq(banks.closable),
            refresher.activate.eq(commands.activate),
            refresher.wanted.eq(read_selector.wanted | write_selector.wanted),
            drain.tick.eq(tick),
            drain.join.eq(self.join),
            self.drains.eq(drain.begins),
            shares.tick.eq(follow),
        ]
        free = ~refresher.hold
        closes_idle = self._elaborate_idle(m, banks, refresher, tick)
        for queue, selector, columns in (
            (reads, read_selector, banks.reads),
            (writes, write_selector, banks.writes),
        ):
            wiring.connect(m, told, selector.commands)
            m.d.comb += [
                *(
                    getattr(selector, name).eq(getattr(queue, name))
                    for name in ("used", "hits", "closes", "units")
                ),
                *(a.eq(b) for a, b in zip(selector.entry, queue.entries, strict=True)),
                selector.arrives.eq(queue.insert),
                selector.arrives_bank.eq(queue.place.bank),
                # what was opened just now stays open for longer than this matters
                selector.arrives_hit.eq(banks.look_kept),
                selector.arrives_unit.eq(queue.unit),
                selector.crowded.eq(banks.crowded),
                selector.collect.eq(collect),
                selector.flag.eq(flag),
                selector.tick.eq(tick),
                selector.columns.eq(columns & free),
                selector.activates.eq(banks.activates & free & ~refresher.quiet.replicate(part.banks)),
                selector.precharges.eq(banks.precharges & free),
                queue.follow.eq(follow),
                queue.stay.eq(selector.stay),
                queue.leave.eq(selector.leave),
                *(getattr(queue, name).eq(getattr(told, name)) for name in _OF_ROWS),
            ]
        m.d.comb += [
            read_selector.active.eq(~drain.writing),
            read_selector.prepare.eq(drain.writing),
            read_selector.others.eq(write_selector.wanted),
            read_selector.favour_unit.eq(shares.favour_unit),
            read_selector.first_unit.eq(shares.first_unit),
            read_selector.may_yield.eq(shares.may_yield),
            shares.yields.eq(read_selector.yields),
            write_selector.active.eq(drain.writing),
            write_selector.prepare.eq(drain.soon),
            write_selector.others.eq(read_selector.wanted),
        ]

        # Only the queue with the bus has column commands, and its row commands come
        # first.
        def picked(name):
            """A value of the selector whose row command it is."""
            kind = name.split("_")[0]
            from_writes = Mux(drain.writing, getattr(write_selector, kind), ~getattr(read_selector, kind))
            return Mux(from_writes, getattr(write_selector, name), getattr(read_selector, name))

        m.d.comb += [
            commands.column.eq(read_selector.column | write_selector.column),
            commands.column_write.eq(write_selector.column),
            commands.column_bank.eq(read_selector.column_place.bank | write_selector.column_place.bank),
            commands.activate.eq(read_selector.activate | write_selector.activate),
            commands.activate_late.eq(banks.late),
            commands.activate_bank.eq(picked("activate_bank")),
            commands.activate_row.eq(picked("activate_row")),
            commands.precharge.eq(
                refresher.precharge
                | closes_idle
                | (~refresher.refresh & (read_selector.precharge | write_selector.precharge))
            ),
            commands.precharge_all.eq(refresher.precharge_all | closes_idle),
            commands.precharge_bank.eq(
                Mux(refresher.precharge, refresher.precharge_bank, picked("precharge_bank"))
            ),
            commands.refresh.eq(refresher.refresh),
            commands.refresh_banks.eq(refresher.refresh_banks),
            drain.write_column.eq(told.column & told.column_write),
            shares.unit_column.eq(left.unit),
            shares.fabric_column.eq((left.reads | left.writes) & ~left.unit),
            shares.pause.eq(refresher.busy if self.refresh is Refresh.ALL_BANK else 0),
        ]
        self._elaborate_pins(m, told, of_unit, refresher, (read_selector, write_selector), follow, tick)
        self._elaborate_counters(m, told, banks, refresher, drain, follow, tick)
        return m

    def _elaborate_idle(self, m, banks, refresher, tick):
        """Whether this frame closes all rows: nobody has wanted any for so long that every rule is met."""
        wanted, idle, closes = Signal(), Signal(range(IDLE_FRAMES + 2)), Signal()
        m.d.comb += [
            wanted.eq((self.reads_waiting != 0) | (self.writes_waiting != 0) | refresher.hold.any()),
            closes.eq((idle == IDLE_FRAMES) & ~wanted & banks.open.any()),
        ]
        with m.If(wanted):
            m.d.sync += idle.eq(0)
        with m.Elif(tick & (idle <= IDLE_FRAMES)):
            m.d.sync += idle.eq(idle + 1)
        return closes

    def _elaborate_door(self, m, banks, reads, writes, drain, shares, left, steps):
        """Accesses enter the queues: one per frame, of the clients in turn."""
        follow, check, tick = steps[0], steps[-2], steps[-1]
        # accesses come in order: the others' go on while one sub-channel has more than its queue holds
        m.submodules.door = door = Door(
            part=self.part,
            density_gbit=self.density_gbit,
            tag=self.tag,
            unit_waiting=self.read_entries,
        )
        wiring.connect(m, wiring.flipped(self.unit), door.unit)
        wiring.connect(m, wiring.flipped(self.fabric), door.fabric)
        unit_share, fabric_share = Signal(init=1), Signal(init=1)  # has room in the read queue
        m.d.comb += [
            door.check.eq(check),
            door.choose.eq(tick),
            door.unit_room.eq(~reads.full & unit_share),
            door.fabric_room.eq(~reads.full & fabric_share),
            door.write_room.eq(~writes.full),
            reads.asked[0].eq(door.fabric_place),
            writes.asked[0].eq(door.fabric_place),
            writes.asked[1].eq(door.unit_place),
            door.fabric_met_read.eq(reads.same[0]),
            door.fabric_met_write.eq(writes.same[0]),
            door.unit_met.eq(writes.same[1]),
            banks.asked[0].eq(door.fabric_place),
            banks.asked[1].eq(door.unit_place),
            banks.second.eq(door.from_unit),
            banks.look.eq(door.place),
            reads.insert.eq(door.enters & ~door.write),  # with `follow`
            writes.insert.eq(door.enters & door.write),
            door.leave.eq(follow & writes.insert),
        ]
        for queue in (reads, writes):
            m.d.comb += [
                queue.place.eq(door.place),
                queue.unit.eq(door.from_unit),
                queue.hit.eq(banks.look_hit),
                queue.closed.eq(banks.look_closed),
            ]

        # What the queues hold, and what follows for shares and writes.
        def level(size, entered, left, name):
            held = Signal(range(size + 1), name=name)
            m.d.sync += held.eq(held + entered - left)
            return held

        unit_reads = level(self.read_entries, door.takes_unit, left.unit, "unit_reads")
        reads_taken = door.takes_unit | (door.takes_fabric & ~door.takes_write)
        all_reads = level(self.read_entries, reads_taken, left.reads, "all_reads")
        all_writes = level(self.write_entries, door.takes_write, left.writes, "all_writes")
        fabric_reads = Signal.like(all_reads)
        unit_wants, fabric_wants = Signal(), Signal()
        m.d.comb += [
            self.reads_waiting.eq(all_reads),
            self.writes_waiting.eq(all_writes),
            fabric_reads.eq(all_reads - unit_reads),
            unit_wants.eq(door.unit_waits | (unit_reads != 0)),
            fabric_wants.eq(door.fabric_waits | (fabric_reads != 0)),
            shares.unit_wants.eq(unit_wants),
            shares.fabric_wants.eq(fabric_wants | drain.wants),
            drain.level.eq(all_writes),
            drain.reads.eq(unit_wants | drain.own_reads),
            drain.own_reads.eq((fabric_reads != 0) | door.fabric_reads),
            drain.hazard.eq(door.unit_blocked | door.fabric_blocked),
            drain.force.eq(door.unit_blocked),
            drain.allow.eq(~shares.holds_writes),
        ]
        for wants, held, room, most in (
            (drain.own_reads, unit_reads, unit_share, self.read_entries * 3 // 4),
            (unit_wants, fabric_reads, fabric_share, self.fabric_entries),
        ):
            lingers = Signal(range(LINGER_FRAMES + 1))  # the other client wants or wanted its part
            with m.If(wants):
                m.d.sync += lingers.eq(LINGER_FRAMES)
            with m.Elif(tick & (lingers != 0)):
                m.d.sync += lingers.eq(lingers - 1)
            m.d.sync += room.eq((lingers == 0) | (held < most))

        # What entries need once they are chosen.
        m.submodules.tags = tags = Memory(shape=Shape.cast(self.tag).width, depth=self.read_entries, init=[])
        m.submodules.data = lines = Memory(shape=CONTENTS_BITS, depth=self.write_entries, init=[])
        tags_in, lines_in = tags.write_port(), lines.write_port()
        self._tags_out, self._lines_out = (memory.read_port(domain="comb") for memory in (tags, lines))
        m.d.comb += [
            tags_in.en.eq(follow & reads.insert),
            tags_in.addr.eq(reads.slot),
            tags_in.data.eq(bits_of(door.tag)),
            lines_in.en.eq(follow & writes.insert),
            lines_in.addr.eq(writes.slot),
            lines_in.data.eq(door.contents),
        ]
        written_tag = Signal(self.tag, reset_less=True)
        m.d.sync += self.written.valid.eq(follow & writes.insert)
        with m.If(writes.insert):
            m.d.sync += written_tag.eq(door.tag)
        m.d.comb += self.written.payload.eq(written_tag)

    def _elaborate_pins(self, m, told, of_unit, refresher, selectors, follow, tick):
        """The part is told of the column command in the first cycle of the next frame, of others in the
        second."""
        pins, (read_selector, write_selector) = self.pins, selectors
        m.d.sync += pins.column_valid.eq(tick & (read_selector.column | write_selector.column))
        with m.If(tick):
            m.d.sync += [
                pins.odd.eq(~pins.odd),
                pins.column_column.eq(read_selector.column_place.column | write_selector.column_place.column),
                pins.refresh_set.eq(refresher.refresh_set),
            ]
        m.d.sync += [
            getattr(pins, f"{name}_valid").eq(follow & getattr(told, name))
            for name in ("activate", "precharge", "refresh")
        ]
        m.d.comb += [
            pins.column_write.eq(told.column_write),
            pins.column_bank.eq(told.column_bank),
            *(
                getattr(pins, name).eq(getattr(told, name))
                for name in (
                    *("activate_late", "activate_bank", "activate_row"),
                    *("precharge_all", "precharge_bank"),
                )
            ),
            pins.refresh_all.eq(self.refresh is Refresh.ALL_BANK),
            Cat(pins.write_data, pins.write_check, pins.write_poison).eq(self._lines_out.data),
        ]
        with m.If(tick):
            m.d.sync += [
                self._tags_out.addr.eq(read_selector.column_slot),
                self._lines_out.addr.eq(write_selector.column_slot),
            ]

        # Whose line the part will show.
        shape = self.answers.payload.shape()
        m.submodules.under_way = under_way = Delay(shape=shape, cycles=self.timings.read_cycles)
        m.d.comb += [
            under_way.i.valid.eq(pins.column_valid & ~pins.column_write),
            under_way.i.payload.unit.eq(of_unit),
            bits_of(under_way.i.payload.tag).eq(self._tags_out.data),
            self.answers.valid.eq(under_way.o.valid),
            self.answers.payload.eq(under_way.o.payload),
        ]

    def _elaborate_counters(self, m, told, banks, refresher, drain, follow, tick):
        """How each column command met its row, a frame later, and what frames were lost to."""
        count = self.part.banks
        for_refresh = Signal()  # the precharge is
        with m.If(tick):
            m.d.sync += [
                for_refresh.eq(refresher.precharge),
                self.refresh_busy.eq(refresher.busy),
                self.turnaround.eq(
                    ~refresher.busy
                    & Mux(
                        drain.writing,
                        (self.writes_waiting != 0) & ~banks.write_turn,
                        (self.reads_waiting != 0) & ~banks.read_turn,
                    )
                ),
            ]
        of_column, of_activate, of_precharge, refreshed = (
            Signal(count, name=f"of_{n}", reset_less=True) for n in ("column", "activate", "close", "refresh")
        )
        counts, column = Signal(), Signal()
        m.d.sync += [counts.eq(follow), column.eq(follow & told.column)]
        with m.If(follow):
            m.d.sync += [
                of_column.eq(banks.column_banks),
                of_activate.eq(banks.activate_banks),
                of_precharge.eq(banks.precharge_banks & (~for_refresh).replicate(count)),
                refreshed.eq(told.refresh_banks & told.refresh.replicate(count)),
            ]
        fresh, shut = Signal(count), Signal(count)  # rows without a column command; closed for another row
        was_fresh, was_shut = Signal(), Signal()
        m.d.comb += [was_fresh.eq((fresh & of_column).any()), was_shut.eq((shut & of_column).any())]
        with m.If(counts):
            m.d.sync += [
                fresh.eq((fresh & ~of_column) | of_activate),
                shut.eq(((shut & ~of_column) | of_precharge) & ~refreshed),
            ]
        m.d.sync += [
            self.row_hit.eq(column & ~was_fresh),
            self.row_miss.eq(column & was_fresh & ~was_shut),
            self.row_conflict.eq(column & was_fresh & was_shut),
        ]


def default_read_entries(part):
    """Reads that a controller of the part looks at together unless told otherwise."""
    return {Dram.LPDDR5X_8533: 56, Dram.HBM3_6400: 40}.get(part.dram, 16)
