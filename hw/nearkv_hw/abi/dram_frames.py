"""Frames: the beat in which a DRAM controller decides, and a part's rules as distances in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """The place of a kind of command in a frame.

    Parameters
    ----------
    cycle : device cycle of the frame in which the part is told of the command.
    even, odd : its first tCK on the bus, counted from the start of that cycle, in even and in odd frames.
    takes : tCK that it takes on the bus, counted from the first one; it acts in the last of them.
    """

    cycle: int
    even: int
    odd: int
    takes: tuple[int, ...] = (0,)

    def acts(self, odd: int) -> int:
        """The tCK in which the command acts, counted from the start of `cycle`."""
        return (self.odd if odd else self.even) + self.takes[-1]


@dataclass(frozen=True)
class Slots:
    """Places of the commands in a frame. A refresh takes the precharge's.

    Parameters
    ----------
    column : of a read or write of a line.
    precharge : of a precharge, of one bank or all, and of a refresh.
    activate : of an activate.
    late_tck : how much later than in its place an activate may be; 0 if never. Where the window of four
        activates is no whole number of frames, this half of one makes up for it.
    """

    column: Slot
    precharge: Slot
    activate: Slot
    late_tck: int = 0


@dataclass(frozen=True, kw_only=True)
class LateTimings:
    """What is different where an activate is late by `Slots.late_tck`.

    Parameters
    ----------
    activate_to_column, activate_to_precharge, activate_to_activate : from a late one, as in `FrameTimings`.
    activate_other_group, activate_same_group : from a late one to one that is not.
    four_activates : the fifth of five activates, a late one, after the first, which is not.
    """

    activate_to_column: int
    activate_to_precharge: int
    activate_to_activate: int
    activate_other_group: int
    activate_same_group: int
    four_activates: int


@dataclass(frozen=True, kw_only=True)
class FrameTimings:
    """A part's rules for a controller that decides once per frame.

    All are distances in frames between the frames of two commands, except where the name says otherwise; a
    larger distance is allowed, too. What follows a late activate keeps those of `late` instead; what comes
    before one keeps the distances here, and those of two late ones are as of two that are not.

    Parameters
    ----------
    activate_to_column : the row may be read and written.
    column_to_precharge_read, column_to_precharge_write : after a read, a write of the bank.
    activate_to_precharge, activate_to_activate, precharge_to_activate : of the same bank.
    activate_other_group, activate_same_group : activates of different banks.
    four_activates : the fifth of five activates after the first.
    column_other_group, column_same_group : reads, and writes of other bank groups.
    column_same_group_write : writes of the same bank group.
    read_to_write : any banks.
    write_to_read_other_group, write_to_read_same_group : any banks.
    refresh_interval : from refresh to refresh on average; with `Refresh.PER_BANK` of any sets.
    refresh : from a refresh to an activate of a bank that it refreshes.
    refresh_to_other : from a refresh of a set to an activate in another one, and back.
    refresh_to_refresh : from a refresh of a set to the next one, of any set.
    precharge_to_refresh : from the precharge of all banks, or of the last of a set.
    refresh_sets : 1 with `Refresh.ALL_BANK`, else the number of sets.
    postponed : refreshes (of each set) that may be owed.
    read_cycles : device cycles from the cycle in which a read is told to the cycle that shows its line.
    late : distances where an activate is late; None where none ever is.
    """

    activate_to_column: int
    column_to_precharge_read: int
    column_to_precharge_write: int
    activate_to_precharge: int
    activate_to_activate: int
    precharge_to_activate: int
    activate_other_group: int
    activate_same_group: int
    four_activates: int
    column_other_group: int
    column_same_group: int
    column_same_group_write: int
    read_to_write: int
    write_to_read_other_group: int
    write_to_read_same_group: int
    refresh_interval: int
    refresh: int
    refresh_to_other: int
    refresh_to_refresh: int
    precharge_to_refresh: int
    refresh_sets: int
    postponed: int
    read_cycles: int
    late: LateTimings | None
