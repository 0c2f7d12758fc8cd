"""Refresh: one timer for all sub-channels of a channel, and what each of them does when it is due."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ...abi.dram import PARTS, Dram, DramPart, Refresh
from .banks import decides_ahead
from .countdowns import Countdowns


def known_part(part):
    """The part of a `Dram`, or of a `DramPart` itself."""
    if isinstance(part, DramPart):
        return part
    if not isinstance(part, Dram) or part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(d.name for d in PARTS)}, not {part!r}")
    return PARTS[part]


QUIET_CYCLES = 2048
"""Without any access for so long, the memory counts as idle: longer than a host takes from one call's results
to the next call's doorbell."""


class RefreshTimer(wiring.Component):
    """Says when sub-channels refresh, once for all of a channel, so that they lose the same time.

    Refreshes of all banks may be owed: as long as somebody wants the memory, up to one fewer than the part
    lets a controller postpone. They are made up for one by one while nobody does. So a batch that is shorter
    than these intervals meets none. Refreshes of sets are told when they fall due.

    Parameters
    ----------
    part : the DRAM part.
    density_gbit : its density, by default the part's own.
    refresh : how it is refreshed.

    Members
    -------
    wanted : In(1) : accesses wait.
    due : Out(1) : a cycle in which the sub-channels are to refresh once more; on the whole once in
        `interval_cycles` cycles.
    """

    def __init__(self, *, part, density_gbit=None, refresh=Refresh.ALL_BANK):
        self.part = known_part(part)
        self.density_gbit = self.part.default_density if density_gbit is None else density_gbit
        self.refresh = Refresh(refresh)
        timings = self.part.frames(self.density_gbit, self.refresh)
        self.interval_cycles = timings.refresh_interval * self.part.subchannels
        self.rest_cycles = timings.refresh_to_refresh * self.part.subchannels
        self.postponed = timings.postponed
        super().__init__({"wanted": In(1), "due": Out(1)})

    def elaborate(self, platform):
        m = Module()
        left, falls = Signal(range(self.interval_cycles), init=self.interval_cycles - 1), Signal()
        m.d.comb += falls.eq(left == 0)
        m.d.sync += left.eq(Mux(falls, self.interval_cycles - 1, left - 1))
        if self.refresh is not Refresh.ALL_BANK:
            m.d.sync += self.due.eq(falls)
            return m
        owed, give = Signal(range(self.postponed + 1)), Signal()
        quiet, rest = Signal(range(QUIET_CYCLES + 1)), Signal(range(self.rest_cycles + 1))
        idle = (quiet == QUIET_CYCLES) & (rest == 0)
        m.d.comb += give.eq((owed == self.postponed) | ((owed != 0) & idle))
        m.d.sync += [
            self.due.eq(give),
            owed.eq(owed + falls - give),
            rest.eq(Mux(give, self.rest_cycles, Mux(rest == 0, 0, rest - 1))),
            quiet.eq(Mux(self.wanted, 0, Mux(quiet == QUIET_CYCLES, quiet, quiet + 1))),
        ]
        return m


class Refresher(wiring.Component):
    """Refreshes one sub-channel: holds banks back, closes them, refreshes them.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    refresh : how it is refreshed; sets of banks take turns.

    Members
    -------
    due : In(1) : one more refresh is due; in any cycle.
    follow : In(1) : a frame's first cycle. tick : In(1) : its last one.
    open, closable : In(banks) : banks with an open row, and those that may be closed in this frame.
    wanted : In(banks) : banks that accesses wait for. Of the sets that have not had their turn, one that
        nobody waits for comes first; a refresh waits for such a set until the next one is due.
    activate : In(1) : the frame activates a row.
    hold : Out(banks) : banks that must get no other command in the next frame.
    quiet : Out(1) : no bank may be activated in the next frame.
    precharge, precharge_all, precharge_bank, refresh, refresh_banks, refresh_set : Out :
        this frame's commands; they come before all others. At most one of the two.
    busy : Out(1) : a refresh is under way, from holding banks back to the first allowed activate.

    Every refresh that is due is given. From the last column command of the banks to their first one after
    the refresh pass column_to_precharge + precharge_to_refresh + refresh + activate_to_column frames of the
    part's timings, no more.
    """

    def __init__(self, *, part, density_gbit, refresh):
        self.part = part
        self.refresh_mode = Refresh(refresh)
        self.timings = part.frames(density_gbit, refresh)
        banks = part.banks
        super().__init__(
            {
                "due": In(1),
                "follow": In(1),
                "tick": In(1),
                "open": In(banks),
                "closable": In(banks),
                "wanted": In(banks),
                "activate": In(1),
                "hold": Out(banks),
                "quiet": Out(1),
                "precharge": Out(1),
                "precharge_all": Out(1),
                "precharge_bank": Out(exact_log2(banks)),
                "refresh": Out(1),
                "refresh_banks": Out(banks),
                "refresh_set": Out(exact_log2(part.refresh_sets(Refresh.PER_BANK))),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        t, banks = self.timings, self.part.banks
        everything = self.refresh_mode is Refresh.ALL_BANK
        ahead = decides_ahead(self.part)
        begin, begun, refreshed = Signal(), Signal(), Signal()
        held, holding = Signal(), Signal()  # banks are held back; and their state is final
        if everything:
            members, calm, rested = ~Const(0, banks), Const(1), Const(1)
        else:
            members, calm, rested = self._choose_set(m, begin, refreshed)

        # At most one refresh is late by more than a few frames, but several may come due while one waits.
        owed = Signal(range(2 * t.postponed + 1))
        m.d.comb += refreshed.eq(self.tick & self.refresh)
        m.d.sync += owed.eq(owed + self.due - refreshed)

        def countdown(name, frames, start):
            m.submodules[name] = block = Countdowns(count=1, distances=[frames])
            m.d.comb += [block.tick.eq(self.tick), block.start[0].eq(start)]
            return block.over

        closed = countdown("closed", t.precharge_to_refresh, self.precharge | begun)
        next_refresh = countdown("next_refresh", t.refresh_to_refresh, self.refresh)
        under_way = countdown("under_way", t.refresh, self.refresh)

        # What is decided ahead holds banks back from the next frame on; only then is their state final.
        m.d.comb += begin.eq(
            (self.follow if ahead else self.tick)
            & ~held
            & (owed != 0)
            & next_refresh
            & (calm | ((owed > 1) & rested))
        )
        with m.If(begin):
            m.d.sync += [held.eq(1), self.hold.eq(members)]
        with m.Elif(refreshed):
            m.d.sync += [held.eq(0), self.hold.eq(0)]
        if ahead:
            with m.If(self.tick):
                m.d.sync += holding.eq(held & ~self.refresh)
            m.d.comb += begun.eq(held & ~holding)
        else:
            m.d.comb += [holding.eq(held), begun.eq(begin)]
        left_open = Signal(banks)
        m.d.comb += left_open.eq(self.open & self.hold)
        ready = Signal()
        m.d.comb += [
            ready.eq(holding & ~left_open.any()),
            self.refresh_banks.eq(self.hold),
            self.busy.eq(holding | ~under_way),
        ]
        if everything:
            m.d.comb += [
                self.precharge.eq(holding & self.open.any() & ~(self.open & ~self.closable).any()),
                self.precharge_all.eq(self.precharge),
                self.refresh.eq(ready & closed),
            ]
        else:
            last_activate = countdown("last_activate", t.refresh_to_other, self.activate)
            calmed = Signal(init=1)  # no activate is under way that `quiet` came too late for
            if ahead:
                with m.If(self.tick):
                    m.d.sync += calmed.eq(self.quiet)
            closable = left_open & self.closable & holding.replicate(banks)
            lowest = Signal(banks)
            m.d.comb += [
                lowest.eq(closable & (~closable + 1)),
                self.precharge.eq(closable.any()),
                self.precharge_bank.eq(
                    Cat(
                        (lowest & sum(1 << b for b in range(banks) if b >> k & 1)).any()
                        for k in range(exact_log2(banks))
                    )
                ),
                self.refresh.eq(ready & closed & last_activate & calmed),
                # A refresh keeps a distance to activates of other banks on both sides.
                self.quiet.eq(ready),
            ]
        return m

    def _choose_set(self, m, begin, refreshed):
        """Sets take turns, in any order: the banks of the one that comes next, whether nobody waits for them,
        and whether there is one: the last of a round may still be refreshed when the next round begins."""
        sets = self.timings.refresh_sets
        banks_of = [
            [b for b in range(self.part.banks) if self.part.bank_set(b) == number] for number in range(sets)
        ]
        chosen = Signal(sets)
        done, left, free = Signal(sets), Signal(sets), Signal(sets)
        m.submodules.resting = resting = Countdowns(count=sets, distances=[self.timings.refresh])
        m.d.comb += [
            resting.tick.eq(self.tick),
            resting.start[0].eq(self.refresh << self.refresh_set),
            left.eq(~done & resting.over),
            free.eq(left & ~Cat(Cat(self.wanted[b] for b in banks).any() for banks in banks_of)),
            chosen.eq(Mux(free.any(), free & (~free + 1), left & (~left + 1))),
        ]
        with m.If(begin):
            m.d.sync += self.refresh_set.eq(
                Cat(Cat(chosen[n] for n in range(sets) if n >> k & 1).any() for k in range(exact_log2(sets)))
            )
        after = Signal(sets)
        m.d.comb += after.eq(done | (1 << self.refresh_set))
        with m.If(refreshed):
            m.d.sync += done.eq(Mux(after.all(), 0, after))
        members = Cat(chosen[self.part.bank_set(b)] for b in range(self.part.banks))
        return members, free.any(), left.any()
