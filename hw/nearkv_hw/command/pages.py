"""Page-table entries into rows to stream."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import EXTENT_SHIFT
from ..abi.descriptor import Status
from ..abi.lines import LINE_SHIFT
from ..abi.memory import ENTRIES_PER_LINE, ENTRY
from ..common.buffer import Buffer
from ..interfaces import PAGE_BITS, ROW_BITS, PageItem
from ..structs import layout_of
from .queries import line_status
from .reader import RunIssue
from .records import ListPort, Outcome, PageWork, Run, SelectorPort, WalkLine, WalkRead

_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1
_EXTENT_LINES_SHIFT = EXTENT_SHIFT - LINE_SHIFT
_AHEAD_BITS = 9  # as many lines as a reader may have under way

TOKEN = data.StructLayout(
    {
        "end": 1,  # no page: the pass ends
        "first": 1,
        "last": 1,
        "page": PAGE_BITS,
        "index": ROW_BITS,  # of the page's first row, or among the candidates
        "status": Status,  # of the line that the entry came in
        "entry": layout_of(ENTRY),
    }
)


class PageFeed(wiring.Component):
    """Walks the page-table entries of each pass and hands every page to the unit of its memory slice.

    Parameters
    ----------
    units : attention units, one per slice of the memory; a power of two.
    capacity_lines : lines of the device's memory, a power of two.
    pages_ahead : pages that may wait for each unit, at least 2.
    lines_ahead : lines of entries that the reader may have under way or waiting, at least 2.

    Members
    -------
    i : In(stream(PageWork)) : the work of the passes, each in one or more pieces.
    runs : In(stream(Run)) : the lines with the entries of the same pieces.
    reads : Out(stream(WalkRead)), lines : In(stream(WalkLine)) : reads of these lines, answered in order.
    o : Out(stream(PageItem)).array(units) : pages, and at the end of every pass `last` for every unit.
    selector : Out(SelectorPort) : which pages passes of selected pages have; see `Selector`.
    list : Out(ListPort) : the list of these pages, of the first such pass of a job; see `ListWriter`.
    outcomes : Out(stream(Outcome)) : one per pass: OK, DENIED or POISON of a line of entries, BAD_PAGE
        with the page, what the pass's last piece says, or RESULT_DENIED of the list of selected pages.

    A pass ends with its first fault: no later page is streamed, no more lines are read than those under way
    and one more, and these are dropped. Whatever the table says of its length, a fault ends the walk in a
    few cycles.

    In a pass of bounds an item is the two rows of a page's summary, with the page's number among the
    candidates as index; a page that two pieces share comes once. The passes behind take the same way, and of
    its pages hand on those that the selector names. Where a pass of bounds fails there is nothing to select
    from: the job's passes behind have no pages, and no list is written.

    Lines are asked for half of `lines_ahead` at a time: their row is another one than those that stream, and
    several reads together keep it open no longer than one.

    Latency is `latency_cycles` from line to page, throughput one entry per cycle with a cycle between pieces
    and two between passes.
    """

    latency_cycles = 1 + Buffer.latency_cycles

    def __init__(self, *, units, capacity_lines, pages_ahead, lines_ahead):
        for name, value in (("units", units), ("capacity_lines", capacity_lines)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value!r}")
        if capacity_lines < units << _EXTENT_LINES_SHIFT:
            raise ValueError(
                f"capacity_lines must be at least {units << _EXTENT_LINES_SHIFT}, an extent per slice, "
                f"not {capacity_lines!r}"
            )
        for name, value in (("pages_ahead", pages_ahead), ("lines_ahead", lines_ahead)):
            if not isinstance(value, int) or value < 2:
                raise ValueError(f"{name} must be an integer of at least 2, not {value!r}")
        self.units = units
        self.capacity_lines = capacity_lines
        self.pages_ahead = pages_ahead
        self.lines_ahead = lines_ahead
        super().__init__(
            {
                "i": In(stream.Signature(PageWork)),
                "runs": In(stream.Signature(Run)),
                "reads": Out(stream.Signature(WalkRead)),
                "lines": In(stream.Signature(WalkLine)),
                "o": Out(stream.Signature(PageItem)).array(units),
                "outcomes": Out(stream.Signature(Outcome)),
                "selector": Out(SelectorPort()),
                "list": Out(ListPort()),
            }
        )

    def elaborate(self, platform):
        m = Module()
        token = Signal(TOKEN, reset_less=True)
        full, free = Signal(), Signal()
        failure = Signal(Outcome)  # of the pass whose tokens are placed
        failed = Signal()  # the pass that is walked
        dropping = Signal()
        # Its pages' tokens have left when the next one is taken.
        work = Signal(PageWork, reset_less=True)
        last_within = Signal(signed(_EXTENT_LINES_SHIFT + 6), reset_less=True)  # where a page may start
        m.d.comb += failed.eq((failure.status != Status.OK) & ~(full & token.end))
        refused = Signal()  # the list of selected pages, of the pass whose tokens are placed
        unselected = Signal()  # the job whose passes come found no bounds to select by
        self._read(m, dropping)
        self._walk(m, work, token, full, free, failed, dropping, refused, unselected)
        self._place(m, work, last_within, token, full, free, failure, refused, unselected)
        with m.If(self.i.ready):
            m.d.sync += [
                work.eq(self.i.payload),
                last_within.eq((1 << _EXTENT_LINES_SHIFT) - self.i.payload.page_lines),
            ]
        return m

    def _read(self, m, dropping):
        """Asks for the lines of entries, and stops when the pass whose lines are dropped asks for more."""
        m.submodules.issue = issue = RunIssue()
        wiring.connect(m, wiring.flipped(self.runs), issue.i)
        ahead = Signal(_AHEAD_BITS)  # passes whose last line was asked for and has not come
        under_way, asks = Signal(range(self.lines_ahead + 1)), Signal(init=1)
        asked, come = self.reads.valid & self.reads.ready, self.lines.valid & self.lines.ready
        m.d.sync += [
            ahead.eq(ahead + (asked & self.reads.payload.last) - (come & self.lines.payload.last)),
            under_way.eq(under_way + asked - come),
        ]
        with m.If(under_way <= self.lines_ahead // 2):
            m.d.sync += asks.eq(1)
        with m.Elif(under_way == self.lines_ahead):
            m.d.sync += asks.eq(0)
        m.d.comb += [
            self.reads.payload.eq(issue.o.payload),
            self.reads.valid.eq(issue.o.valid & asks),
            issue.o.ready.eq(self.reads.ready & asks),
            issue.stop.eq(dropping & (ahead == 0)),
        ]

    def _walk(self, m, work, token, full, free, failed, dropping, refused, unselected):
        """Takes lines apart: one token per page, and one at the end of the pass."""
        selector, words = self.selector, self.list.words
        coming, selecting = self.i.payload.selecting, work.selecting
        begun, serve = Signal(), Signal()  # the pass
        listing, listed = Signal(), Signal()  # its list is being written; all of it was handed on
        seen, seen_page = Signal(), Signal(PAGE_BITS, reset_less=True)  # the last page that counted
        known, chosen, kept, go = Signal(), Signal(), Signal(reset_less=True), Signal()
        candidate = Signal(ROW_BITS)
        starts = coming.bounds & coming.first & ~begun  # a job that selects
        line = self.lines.payload
        page, index = Signal(PAGE_BITS, reset_less=True), Signal(ROW_BITS, reset_less=True)
        is_last = page == work.last_page
        m.d.comb += [
            selector.select_pages.eq(coming.pages),
            selector.serve.eq(serve),
            words.payload.tenant.eq(work.tenant),
            words.payload.line.eq(selecting.line),
            words.payload.word.eq(page),
            known.eq(seen & (page == seen_page)),
            chosen.eq(Mux(known, kept, selector.verdicts.payload)),
            go.eq(
                known | ~selecting.selects | (selector.verdicts.valid & (words.ready | ~(listing & chosen)))
            ),
        ]

        def after_piece(of, empty):
            """Where the walk of a piece goes on."""
            with m.If(~empty):
                m.next = "WALK"
            with m.Elif(of.last):
                m.next = "END"

        with m.If(free):
            m.d.sync += full.eq(0)
        with m.FSM():
            with m.State("START"):
                # the last token of the work before has left
                m.d.comb += self.i.ready.eq(free & (selector.idle | ~starts))
                m.d.sync += [page.eq(self.i.payload.first_page), index.eq(self.i.payload.first_index)]
                with m.If(self.i.valid & self.i.ready):
                    m.d.comb += selector.start.eq(starts)
                    m.d.sync += [begun.eq(1), serve.eq(coming.selects)]
                    after_piece(self.i.payload, self.i.payload.empty)
                    with m.If(coming.selects & coming.first & ~begun):
                        m.next = "COUNT"
            with m.State("COUNT"):
                m.d.comb += [
                    words.valid.eq(selector.idle & ~unselected),
                    words.payload.word.eq(selector.selected),
                ]
                with m.If(unselected | (words.valid & words.ready)):
                    m.d.sync += listing.eq(~unselected)
                    m.next = "START"
                    after_piece(work, work.empty)
            with m.State("WALK"):
                within = page[:_ENTRIES_SHIFT]
                ready = free & self.lines.valid
                stops = failed | (selecting.selects & unselected)
                with m.If(stops):
                    m.next = "DROP"
                with m.Elif(ready):
                    m.d.comb += words.valid.eq(listing & ~known & selector.verdicts.valid & chosen)
                with m.If(ready & go & ~stops):
                    m.d.comb += [
                        self.lines.ready.eq(within.all() | is_last),
                        selector.verdicts.ready.eq(selecting.selects & ~known),
                    ]
                    m.d.sync += [
                        full.eq(Mux(selecting.bounds, ~known, ~selecting.selects | chosen)),
                        seen.eq(1),
                        seen_page.eq(page),
                        kept.eq(chosen),
                        candidate.eq(candidate + ~known),
                        token.end.eq(0),
                        token.first.eq(page == work.first_page),
                        token.last.eq(is_last),
                        token.page.eq(page),
                        token.index.eq(Mux(selecting.bounds, candidate, index)),
                        token.status.eq(line_status(line.fault)),
                        token.entry.eq(line.data.word_select(within, ENTRY.width)),
                        page.eq(page + 1),
                        index.eq(index + work.page_rows),
                    ]
                    with m.If(is_last):
                        m.next = "START"
                        with m.If(work.last):
                            m.next = "END"
            with m.State("DROP"):
                m.d.comb += [dropping.eq(1), self.lines.ready.eq(1)]
                with m.If(self.lines.valid & line.last):
                    m.next = "START"
                    with m.If(work.last):
                        m.next = "END"
            with m.State("END"):
                m.d.comb += [words.valid.eq(listing & ~listed), words.payload.end.eq(1)]
                with m.If(listing):
                    with m.If(words.valid & words.ready):
                        m.d.sync += listed.eq(1)
                    with m.If(listed & self.list.idle):
                        m.d.sync += [listing.eq(0), listed.eq(0), refused.eq(self.list.refused)]
                with m.Elif(free):
                    m.d.sync += [
                        full.eq(1),
                        token.end.eq(1),
                        begun.eq(0),
                        serve.eq(0),
                        seen.eq(0),
                        candidate.eq(0),
                    ]
                    m.next = "START"

    def _place(self, m, work, last_within, token, full, free, failure, refused, unselected):
        """Checks an entry and sends its page to its unit.

        The last token of a work leaves before the next one is taken, so that `work` is its own.
        """
        entry = token.entry
        item, to = Signal(PageItem), Signal(self.units)
        emits, room = Signal(), Signal()
        blocked = []
        for n, out in enumerate(self.o):
            pages = m.submodules[f"pages{n}"] = Buffer(shape=PageItem, depth=self.pages_ahead)
            m.d.comb += [pages.i.payload.eq(item), pages.i.valid.eq(emits & room & to[n])]
            blocked.append(to[n] & ~pages.i.ready)
            wiring.connect(m, pages.o, wiring.flipped(out))

        outcome = Signal(Outcome, reset_less=True)
        told = Signal(init=1)  # the last pass's outcome is delivered
        status = Signal(Status)
        m.d.comb += [
            self.outcomes.valid.eq(~told),
            self.outcomes.payload.eq(outcome),
        ]
        with m.If(self.outcomes.ready):
            m.d.sync += told.eq(1)

        within = entry.line[:_EXTENT_LINES_SHIFT]
        unit_bits = self.units.bit_length() - 1
        unit = entry.line[_EXTENT_LINES_SHIFT:][:unit_bits]
        bad = (
            ~entry.valid
            | (entry.as_value() & ENTRY.reserved_mask()).any()
            | entry.line[self.capacity_lines.bit_length() - 1 :].any()
            | (within > last_within)
        )
        with m.If(failure.status != Status.OK):
            m.d.comb += status.eq(failure.status)
        with m.Elif(token.status != Status.OK):
            m.d.comb += status.eq(token.status)
        with m.Elif(bad):
            m.d.comb += status.eq(Status.BAD_PAGE)

        bounds = work.selecting.bounds
        first_row = Mux(token.first & ~bounds, work.first_begin, 0)
        m.d.comb += [
            item.last.eq(token.end),
            item.page.eq(token.page),
            item.row.eq(first_row),
            item.index.eq(token.index + first_row),
            item.rows.eq(Mux(bounds, 2, Mux(token.last, work.last_end, work.page_rows) - first_row)),
            emits.eq(full & (token.end | (status == Status.OK))),
            room.eq(~Cat(blocked).any() & (~token.end | told)),
            # What is dropped waits, too: the line's next entry must not hang on the check of this one.
            free.eq(~full | room),
            self.selector.asked.eq(full & room & emits & ~token.end & bounds),
        ]
        for line, offset in (
            (item.k_line, Mux(bounds, work.summary, Mux(token.first, work.k_first, 0))),
            (item.v_line, Mux(token.first, work.v_first, work.v_offset)),
            (item.k_scales, Mux(token.first, work.k_scales_first, work.k_scales)),
            (item.v_scales, Mux(token.first, work.v_scales_first, work.v_scales)),
        ):
            m.d.comb += [
                line[:_EXTENT_LINES_SHIFT].eq(within + offset),
                line[_EXTENT_LINES_SHIFT:].eq(entry.line[_EXTENT_LINES_SHIFT + unit_bits :]),
            ]
        m.d.comb += to.eq(Mux(token.end, (1 << self.units) - 1, 1 << unit))
        with m.If(full & free):
            with m.If(token.end):
                m.d.sync += [failure.eq(0), outcome.eq(failure), told.eq(0), refused.eq(0)]
                with m.If(failure.status == Status.OK):
                    m.d.sync += outcome.status.eq(
                        Mux(refused & (work.status == Status.OK), Status.RESULT_DENIED, work.status)
                    )
                with m.If(bounds):
                    good = (failure.status == Status.OK) & (work.status == Status.OK)
                    m.d.sync += unselected.eq(~good | (unselected & ~work.selecting.first))
            with m.Elif((failure.status == Status.OK) & (status != Status.OK)):
                m.d.sync += failure.status.eq(status)
                with m.If(status == Status.BAD_PAGE):
                    m.d.sync += failure.page.eq(token.page)
        return m
