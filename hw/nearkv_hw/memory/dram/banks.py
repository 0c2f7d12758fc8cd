"""What a controller knows of its banks: open rows, and the commands that the part's rules allow."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from .countdowns import Countdowns


def place_layout(part, density_gbit):
    """Where a line lies in a sub-channel."""
    return data.StructLayout(
        {
            "bank": exact_log2(part.banks),
            "row": ceil_log2(part.rows_of(density_gbit)),
            "column": exact_log2(part.row_lines),
        }
    )


class Commands(wiring.Signature):
    """The commands of a frame, seen from who gives them: at most one column command, one precharge (of a
    bank, or of all), one activate (which may be late), one refresh (of the banks of `refresh_banks`).

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    """

    def __init__(self, *, part, density_gbit):
        place = place_layout(part, density_gbit)
        bank, row = place["bank"].shape, place["row"].shape
        super().__init__(
            {
                "column": Out(1),
                "column_write": Out(1),
                "column_bank": Out(bank),
                "activate": Out(1),
                "activate_late": Out(1),
                "activate_bank": Out(bank),
                "activate_row": Out(row),
                "precharge": Out(1),
                "precharge_all": Out(1),
                "precharge_bank": Out(bank),
                "refresh": Out(1),
                "refresh_banks": Out(part.banks),
            }
        )


def decides_ahead(part):
    """Whether a frame is too short to see what the one before it brought and to decide, too.

    What the rules allow is then worked out a frame ahead, and what the frame between forbids is taken off
    when it is known (`Aftermath`).
    """
    return part.subchannels < 3


class Banks(wiring.Component):
    """State of the banks, and the part's rules as count-downs in frames.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    refresh : how it is refreshed.

    Raises
    ------
    ValueError : the part has late activates, and a controller of it would decide ahead.

    Members
    -------
    follow : In(1) : the first cycle of a frame; `commands` take effect. tick : In(1) : its last one.
    commands : In(Commands) : the commands of the frame before.
    open : Out(banks) : banks with an open row.
    closable : Out(banks) : banks whose row may be closed in this frame.
    reads, writes, activates, precharges : Out(banks) : banks to which the rules allow each command in this
        frame; if the controller decides ahead, in the next one, as far as this one's commands leave it.
    late : Out(1) : an activate of this frame must be late: the one before was, or the window of four has only
        so much room.
    crowded : Out(1) : if the frame of `commands` has an activate, the next one must not have one.
    read_turn, write_turn : Out(1) : the data bus is free for reads, for writes, in this frame.
    column_banks, activate_banks, precharge_banks : Out(banks) : the banks of `commands`, as bits.
    asked : In(place).array(2) : places, with `tick`. look : In(place), second : In(1) : with `follow`: one of
        them again, and which one.
    look_hit, look_closed, look_kept : Out(1) : whether that place is in the open row of its bank, and whether
        the bank has none, after `commands`; whether its row was open before them and still is.

    Outputs but those of the last two lines, and `column_banks` and so on, follow from registers that change
    with `follow`.
    """

    def __init__(self, *, part, density_gbit, refresh):
        self.part = part
        self.timings = part.frames(density_gbit, refresh)
        if self.timings.late and decides_ahead(part):
            raise ValueError(
                f"part must have at least 3 sub-channels for late activates, {part.dram.name} has "
                f"{part.subchannels}; set late_tck to 0"
            )
        place = place_layout(part, density_gbit)
        self._row = place["row"].shape
        super().__init__(
            {
                "follow": In(1),
                "tick": In(1),
                "commands": In(Commands(part=part, density_gbit=density_gbit)),
                **{name: Out(part.banks) for name in ("open", "closable")},
                **{name: Out(part.banks) for name in ("reads", "writes", "activates", "precharges")},
                **{f"{name}_banks": Out(part.banks) for name in ("column", "activate", "precharge")},
                "late": Out(1),
                "crowded": Out(1),
                "read_turn": Out(1),
                "write_turn": Out(1),
                "asked": In(place).array(2),
                "second": In(1),
                "look": In(place),
                "look_hit": Out(1),
                "look_closed": Out(1),
                "look_kept": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        t, count, c = self.timings, self.part.banks, self.commands
        groups = self.part.bank_groups
        group_bits = exact_log2(groups)
        a_read, a_write = c.column & ~c.column_write, c.column & c.column_write

        def one_of(size, command, number, name):
            """A vector with the bit of the command's bank or group."""
            vector = Signal(size, name=name)
            m.d.comb += vector.eq(command << number)
            return vector

        read_bank = one_of(count, a_read, c.column_bank, "read_bank")
        written_bank = one_of(count, a_write, c.column_bank, "written_bank")
        read_group = one_of(groups, a_read, c.column_bank[:group_bits], "read_group")
        written_group = one_of(groups, a_write, c.column_bank[:group_bits], "written_group")
        activated_group = one_of(groups, c.activate, c.activate_bank[:group_bits], "activated_group")
        activated = self.activate_banks
        m.d.comb += [
            self.column_banks.eq(read_bank | written_bank),
            activated.eq(c.activate << c.activate_bank),
            self.precharge_banks.eq((c.precharge & ~c.precharge_all) << c.precharge_bank),
        ]
        precharged, refreshed = Signal(count), Signal(count)
        m.d.comb += [
            precharged.eq(self.precharge_banks | (c.precharge & c.precharge_all).replicate(count)),
            refreshed.eq(c.refresh_banks & c.refresh.replicate(count)),
        ]

        def countdowns(name, size, over_others=(), **starts):
            """Count-downs, given as distance=(frames, what starts it). Commands wait until theirs is over,
            and so start one while none is under way, except for those in `over_others`."""
            m.submodules[name] = block = Countdowns(
                count=size,
                distances=[frames for frames, _ in starts.values()],
                over_others=[start in over_others for start in starts],
            )
            m.d.comb += block.tick.eq(self.follow)
            for start, (_, vector) in zip(block.start, starts.values(), strict=True):
                m.d.comb += start.eq(vector)
            return block

        def after_activate(frames, vector):
            """What activates start, and late ones: `frames` takes the distance from the timings of each."""
            if not t.late:
                return {"activate": (frames(t), vector)}
            late = c.activate_late.replicate(len(vector))
            return {"activate": (frames(t), vector & ~late), "late": (frames(t.late), vector & late)}

        # A closed bank waits for its activate, an open one for its first column command.
        settled = countdowns(
            "settled",
            count,
            **after_activate(lambda of: of.activate_to_column, activated),
            precharge=(t.precharge_to_activate, precharged),
            refresh=(t.refresh, refreshed),
        )
        closable = countdowns(
            "closable",
            count,
            over_others=("read",),  # after a write
            # Opening and closing together take a row cycle.
            **after_activate(
                lambda of: max(of.activate_to_precharge, of.activate_to_activate - t.precharge_to_activate),
                activated,
            ),
            read=(t.column_to_precharge_read, read_bank),
            write=(t.column_to_precharge_write, written_bank),
        )
        group_reads = countdowns(
            "group_reads",
            groups,
            read=(t.column_same_group, read_group),
            write=(t.write_to_read_same_group, written_group),
        )
        group_writes = countdowns(
            "group_writes",
            groups,
            write=(t.column_same_group_write, written_group),
        )
        group_activates = countdowns(
            "group_activates",
            groups,
            **after_activate(lambda of: of.activate_same_group, activated_group),
        )
        bus_reads = countdowns(
            "bus_reads",
            1,
            read=(t.column_other_group, a_read),
            write=(t.write_to_read_other_group, a_write),
        )
        bus_writes = countdowns(
            "bus_writes", 1, write=(t.column_other_group, a_write), read=(t.read_to_write, a_read)
        )
        bus_activates = countdowns(
            "bus_activates",
            1,
            activate=(t.activate_other_group, c.activate),
            refresh=(t.refresh_to_other, c.refresh),
        )

        # Of five activates the first and the last are a window apart: at most four in all but its last frame.
        recent = Signal(t.four_activates - 1)  # the last frame's first
        inside = Signal(range(5))  # this frame's window
        remain = Signal(range(5))  # the next one's, without this frame
        with m.If(self.follow):
            m.d.sync += [
                recent.eq(Cat(c.activate, recent)),
                inside.eq(remain + c.activate),
                remain.eq(remain + c.activate - recent[-2]),
                self.open.eq((self.open | activated) & ~precharged),
            ]

        ahead = decides_ahead(self.part)
        may_activate = Signal()
        m.d.comb += may_activate.eq((remain if ahead else inside) < 4)
        if t.late:
            on_time = Signal.like(recent)  # of these, the ones that were not late
            with m.If(self.follow):
                m.d.sync += on_time.eq(Cat(c.activate & ~c.activate_late, on_time))
            # A late activate may be a whole window behind the first one where one in its place is not.
            far = on_time[t.late.four_activates - 1 :].any()
            m.d.comb += [
                self.late.eq((inside == 4) | (recent[0] & ~on_time[0])),
                may_activate.eq((inside < 4) | far),
            ]

        def allowed(block):
            return block.soon if ahead else block.over

        def over_banks(block):
            """What a block of groups or of the bus allows, for each bank."""
            return allowed(block).replicate(count // block.count)

        m.d.comb += [
            self.read_turn.eq(bus_reads.over),
            self.write_turn.eq(bus_writes.over),
            self.closable.eq(self.open & closable.over),
            self.crowded.eq(remain >= 3),
            self.reads.eq(self.open & allowed(settled) & over_banks(group_reads) & over_banks(bus_reads)),
            self.writes.eq(self.open & allowed(settled) & over_banks(group_writes) & over_banks(bus_writes)),
            self.activates.eq(
                ~self.open
                & allowed(settled)
                & over_banks(group_activates)
                & over_banks(bus_activates)
                & may_activate.replicate(count)
            ),
            self.precharges.eq(self.open & allowed(closable)),
        ]

        m.submodules.rows = rows = Memory(shape=self._row, depth=count, init=[])
        write = rows.write_port()
        m.d.comb += [
            write.en.eq(self.follow & c.activate),
            write.addr.eq(c.activate_bank),
            write.data.eq(c.activate_row),
        ]
        found = []  # of each place: its bank has an open row; it is the place's
        for place in self.asked:
            read = rows.read_port(domain="comb")
            m.d.comb += read.addr.eq(place.bank)
            found.append((self.open.bit_select(place.bank, 1), read.data == place.row))
        were_open, were_row = Signal(2), Signal(2)
        with m.If(self.tick):
            m.d.sync += [
                were.eq(Cat(bits))
                for were, bits in zip((were_open, were_row), zip(*found, strict=True), strict=True)
            ]
        was_open, was_row = (were.bit_select(self.second, 1) for were in (were_open, were_row))
        bank, opened, still_open = self.look.bank, Signal(), Signal()
        m.d.comb += [
            opened.eq(c.activate & (c.activate_bank == bank)),
            still_open.eq(was_open & ~(c.precharge & (c.precharge_all | (c.precharge_bank == bank)))),
            self.look_kept.eq(still_open & was_row),
            self.look_closed.eq(~still_open & ~opened),
            self.look_hit.eq(Mux(opened, c.activate_row == self.look.row, self.look_kept)),
        ]
        return m
