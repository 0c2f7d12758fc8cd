"""What a controller knows of its banks: open rows, and the commands that the part's rules allow."""

from amaranth.hdl import Cat, Module, Signal
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
    bank, or of all), one activate, one refresh (of the banks of `refresh_banks`). Each has its bank as
    a number and as a bit of a vector, which is zero without the command (and for a precharge of all).

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
                "column_banks": Out(part.banks),
                "activate": Out(1),
                "activate_bank": Out(bank),
                "activate_banks": Out(part.banks),
                "activate_row": Out(row),
                "precharge": Out(1),
                "precharge_all": Out(1),
                "precharge_bank": Out(bank),
                "precharge_banks": Out(part.banks),
                "refresh": Out(1),
                "refresh_banks": Out(part.banks),
            }
        )


class Banks(wiring.Component):
    """State of the banks, and the part's rules as count-downs in frames.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    refresh : how it is refreshed.

    Members
    -------
    tick : In(1) : a frame ends; its commands take effect.
    commands : In(Commands) : the frame's commands.
    open : Out(banks) : banks with an open row.
    reads, writes, activates, precharges : Out(banks) : banks to which the rules allow each command in this
        frame.
    read_turn, write_turn : Out(1) : the data bus is free for reads, for writes.
    look_bank, look_row : In : a row to look up; look_hit, look_closed : Out(1) : whether it is the open row
        of the bank, and whether the bank has none.

    All outputs follow from registers that change with `tick`.
    """

    def __init__(self, *, part, density_gbit, refresh):
        self.part = part
        self.timings = part.frames(density_gbit, refresh)
        place = place_layout(part, density_gbit)
        self._row = place["row"].shape
        super().__init__(
            {
                "tick": In(1),
                "commands": In(Commands(part=part, density_gbit=density_gbit)),
                **{name: Out(part.banks) for name in ("open", "reads", "writes", "activates", "precharges")},
                "read_turn": Out(1),
                "write_turn": Out(1),
                "look_bank": In(place["bank"].shape),
                "look_row": In(self._row),
                "look_hit": Out(1),
                "look_closed": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        t, count, c = self.timings, self.part.banks, self.commands
        groups, repeats = self.part.bank_groups, self.part.banks_per_group

        def of_groups(vector, name):
            """The groups of the banks in a vector."""
            result = Signal(groups, name=name)
            m.d.comb += result.eq(Cat(vector[group::groups].any() for group in range(groups)))
            return result

        activated, closed = c.activate_banks, c.precharge_banks
        read_bank, written_bank = Signal(count), Signal(count)
        m.d.comb += [
            read_bank.eq(c.column_banks & (~c.column_write).replicate(count)),
            written_bank.eq(c.column_banks & c.column_write.replicate(count)),
        ]
        read_group = of_groups(read_bank, "read_group")
        written_group = of_groups(written_bank, "written_group")
        activated_group = of_groups(activated, "activated_group")
        precharged, refreshed = Signal(count), Signal(count)
        m.d.comb += [
            precharged.eq(closed | (c.precharge & c.precharge_all).replicate(count)),
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
            m.d.comb += block.tick.eq(self.tick)
            for start, (_, vector) in zip(block.start, starts.values(), strict=True):
                m.d.comb += start.eq(vector)
            return block.over

        # A closed bank waits for its activate, an open one for its first column command.
        settled = countdowns(
            "settled",
            count,
            column=(t.activate_to_column, activated),
            activate=(t.precharge_to_activate, precharged),
            refresh=(t.refresh, refreshed),
        )
        closable = countdowns(
            "closable",
            count,
            over_others=("read",),  # after a write
            # Opening and closing together take a row cycle.
            row=(
                max(t.activate_to_precharge, t.activate_to_activate - t.precharge_to_activate),
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
            "group_activates", groups, activate=(t.activate_same_group, activated_group)
        )
        a_read, a_write = c.column & ~c.column_write, c.column & c.column_write
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
        recent = Signal(t.four_activates - 1)
        inside, following = Signal(range(5)), Signal(range(5))
        m.d.comb += following.eq(inside + c.activate - recent[-1])
        with m.If(self.tick):
            m.d.sync += [recent.eq(Cat(c.activate, recent)), inside.eq(following)]

        with m.If(self.tick):
            m.d.sync += self.open.eq((self.open | activated) & ~precharged)
        may_activate = Signal()
        m.d.comb += [
            self.read_turn.eq(bus_reads),
            self.write_turn.eq(bus_writes),
            may_activate.eq(bus_activates & (inside < 4)),
            self.reads.eq(self.open & settled & group_reads.replicate(repeats) & bus_reads.replicate(count)),
            self.writes.eq(
                self.open & settled & group_writes.replicate(repeats) & bus_writes.replicate(count)
            ),
            self.activates.eq(
                ~self.open & settled & group_activates.replicate(repeats) & may_activate.replicate(count)
            ),
            self.precharges.eq(self.open & closable),
        ]

        m.submodules.rows = rows = Memory(shape=self._row, depth=count, init=[])
        write, read = rows.write_port(), rows.read_port(domain="comb")
        m.d.comb += [
            write.en.eq(self.tick & c.activate),
            write.addr.eq(c.activate_bank),
            write.data.eq(c.activate_row),
            read.addr.eq(self.look_bank),
            self.look_closed.eq(~self.open.bit_select(self.look_bank, 1)),
            self.look_hit.eq(~self.look_closed & (read.data == self.look_row)),
        ]
        return m
