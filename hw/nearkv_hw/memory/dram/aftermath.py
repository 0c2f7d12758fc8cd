"""What the commands of one frame forbid in the next one."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from .banks import Commands


class Aftermath(wiring.Component):
    """Tells banks apart that the commands just given keep from having one in the very next frame.

    A command never allows another one in the next frame, it only forbids; so a controller may work out what
    the rules allow before it knows the frame's commands, and take this off. Banks that are refreshed are not
    told: the refresher holds them back itself.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    refresh : how it is refreshed.
    banks : banks that are asked for.
    write : whether their column commands are writes; else reads.

    Members
    -------
    commands : In(Commands) : a frame's commands.
    crowded : In(1) : with the activate of that frame the window of four is full.
    bank : In(bank).array(banks) : which banks.
    stops_column, stops_activate, stops_precharge : Out(banks) : what each must not have in the next frame.
        Of a bank that had a row open or none as the command needs, as far as was known before the commands.

    No registers.
    """

    def __init__(self, *, part, density_gbit, refresh, banks, write):
        self.part = part
        self.timings = part.frames(density_gbit, refresh)
        self.write = write
        super().__init__(
            {
                "commands": In(Commands(part=part, density_gbit=density_gbit)),
                "crowded": In(1),
                "bank": In(exact_log2(part.banks)).array(banks),
                **{f"stops_{name}": Out(banks) for name in ("column", "activate", "precharge")},
            }
        )

    def elaborate(self, platform):
        m = Module()
        t, c = self.timings, self.commands
        group_bits = exact_log2(self.part.bank_groups)
        a_read, a_write = Signal(), Signal()
        m.d.comb += [a_read.eq(c.column & ~c.column_write), a_write.eq(c.column & c.column_write)]

        def within(frames, command):
            """The command, if its distance reaches beyond the next frame."""
            return command if frames > 1 else 0

        if self.write:
            same_group = within(t.column_same_group_write, a_write)
            anywhere = within(t.column_other_group, a_write) | within(t.read_to_write, a_read)
        else:
            same_group = within(t.column_same_group, a_read) | within(t.write_to_read_same_group, a_write)
            anywhere = within(t.column_other_group, a_read) | within(t.write_to_read_other_group, a_write)
        keeps_open = within(t.column_to_precharge_read, a_read) | within(t.column_to_precharge_write, a_write)
        no_activate = (
            within(t.activate_other_group, c.activate)
            | within(t.refresh_to_other, c.refresh)
            | (c.activate & self.crowded)
            | (c.precharge & c.precharge_all)
        )
        near = slice(group_bits if t.activate_same_group > 1 else None)  # what must not be the same
        for n, bank in enumerate(self.bank):
            group = bank[:group_bits]
            closes = c.precharge & (c.precharge_all | (bank == c.precharge_bank))
            m.d.comb += [
                self.stops_column[n].eq(
                    anywhere | (same_group & (group == c.column_bank[:group_bits])) | closes
                ),
                self.stops_activate[n].eq(no_activate | (c.activate & (bank[near] == c.activate_bank[near]))),
                self.stops_precharge[n].eq((keeps_open & (bank == c.column_bank)) | closes),
            ]
        return m
