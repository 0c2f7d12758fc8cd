"""When a sub-channel's data bus turns from reads to writes and back."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

IDLE_FRAMES = 32
"""Without reads for so long, writes go even if they are few."""
STALE_FRAMES = 1024
"""How long few writes wait for one of them to go."""


class Drain(wiring.Component):
    """Collects writes and lets them go together, for each turn of the bus costs time.

    Writes begin when the queue is three quarters full (`high`), when a read waits for one of them, when there
    were no reads for `IDLE_FRAMES`, when they waited for `STALE_FRAMES`, and, unless they are few, together
    with those of another sub-channel. While reads wait, writes end when few are left (`low`). Between writes
    and reads of the fabric itself there is a limit: writes end after twice the queue, too, and the next ones
    begin no sooner than after as many frames. When writes may keep the unit's reads waiting is for `Shares`;
    what has begun has as many frames as the queue has entries to end.

    Parameters
    ----------
    entries : entries of the write queue, at least 4.

    Members
    -------
    tick : In(1) : a frame ends.
    level : In(range(entries + 1)) : writes that wait.
    reads : In(1) : reads wait. own_reads : In(1) : reads of the fabric wait.
    force : In(1) : a read waits for a queued write, and goes before all shares.
    hazard : In(1) : a read waits for a queued write.
    allow : In(1) : the fabric may have the bus, by its share.
    write_column : In(1) : the frame before this one had a write.
    join : In(1) : writes of a sub-channel that shares this one's clients begin.
    begins : Out(1) : in the frame after the one in which the writes' turn began.
    writing : Out(1) : the bus is for writes.
    wants : Out(1) : writes want the bus, or have it.
    soon : Out(1) : they will before long.
    """

    def __init__(self, *, entries):
        if not isinstance(entries, int) or entries < 4:
            raise ValueError(f"entries must be an integer of at least 4, not {entries!r}")
        self.entries = entries
        self.high = entries * 3 // 4
        self.low = max(1, entries // 8)
        super().__init__(
            {
                "tick": In(1),
                "level": In(range(entries + 1)),
                **{
                    name: In(1)
                    for name in ("reads", "own_reads", "force", "hazard", "allow", "write_column", "join")
                },
                **{name: Out(1) for name in ("writing", "begins", "wants", "soon")},
            }
        )

    def elaborate(self, platform):
        m = Module()
        some = Signal()
        idle, stale = Signal(range(IDLE_FRAMES + 1)), Signal(range(STALE_FRAMES + 1))
        burst = Signal(range(2 * self.entries + 1))  # writes, or frames for reads, that are left of this turn
        overrun = Signal(range(self.entries + 1))  # frames of this turn beyond the fabric's share
        due, stop, few, joins, over = Signal(), Signal(), Signal(), Signal(), Signal()
        is_idle, is_stale, spent, full = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            some.eq(self.level != 0),
            full.eq(self.level >= self.high),
            is_idle.eq(idle == IDLE_FRAMES),
            is_stale.eq(stale == STALE_FRAMES),
            spent.eq(burst == 0),
            joins.eq(self.join & (self.level > self.low)),
            due.eq(some & (self.hazard | is_idle | ((full | is_stale | joins) & (spent | ~self.own_reads)))),
            few.eq(self.reads & ~is_stale & (self.level <= self.low)),
            over.eq(~self.force & (overrun == self.entries)),
            stop.eq(~some | over | (~self.hazard & (few | (self.own_reads & spent)))),
            self.wants.eq(self.writing | (some & (self.hazard | is_idle | full | is_stale))),
            self.soon.eq((self.level >= self.high - self.entries // 4) & self.allow),
        ]
        with m.If(self.tick):
            m.d.sync += [
                idle.eq(Mux(self.reads, 0, Mux(is_idle, idle, idle + 1))),
                stale.eq(Mux(some & ~self.write_column, Mux(is_stale, stale, stale + 1), 0)),
            ]
            with m.If((self.write_column | ~self.writing) & ~spent):
                m.d.sync += burst.eq(burst - 1)
            with m.If(~self.writing):
                m.d.sync += overrun.eq(0)
            with m.Elif(~self.allow & (overrun != self.entries)):
                m.d.sync += overrun.eq(overrun + 1)
            turns = Mux(self.writing, stop, due & (self.allow | self.force))
            m.d.sync += self.begins.eq(turns & ~self.writing)
            with m.If(turns):
                m.d.sync += [self.writing.eq(~self.writing), burst.eq(2 * self.entries)]
        return m
