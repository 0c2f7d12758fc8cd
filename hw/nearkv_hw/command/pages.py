"""Page-table entries into rows to stream."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import EXTENT_SHIFT
from ..abi.descriptor import Status
from ..abi.lines import LINE_SHIFT
from ..abi.memory import ENTRIES_PER_LINE, ENTRY
from ..common.fork import Fork
from ..interfaces import PAGE_BITS, PageItem, ReadResponse
from ..structs import layout_of
from .queries import line_status
from .records import Outcome, PageWork

_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1
_EXTENT_LINES_SHIFT = EXTENT_SHIFT - LINE_SHIFT

TOKEN = data.StructLayout(
    {
        "end": 1,  # no page: the pass ends
        "first": 1,
        "last": 1,
        "page": PAGE_BITS,
        "status": Status,  # of the line that the entry came in
        "entry": layout_of(ENTRY),
    }
)


class PageFeed(wiring.Component):
    """Walks the page-table entries of each pass and hands every page to the unit of its channel.

    Parameters
    ----------
    channels : channels, each with one unit; a power of two.
    capacity_lines : lines of the device's memory, a power of two.

    Members
    -------
    i : In(stream(PageWork)) : the passes.
    lines : In(stream(ReadResponse)) : the lines with their entries, in order.
    o : Out(stream(PageItem)).array(channels) : pages, and at the end of every pass `last` for every unit.
    outcomes : Out(stream(Outcome)) : one per pass: OK, DENIED or POISON of a line of entries, or BAD_PAGE
        with the page; pages after the first fault of a pass are not streamed.

    Latency is 3 cycles from line to page, throughput one entry per cycle with two cycles between passes.
    """

    latency_cycles = 3

    def __init__(self, *, channels, capacity_lines):
        for name, value in (("channels", channels), ("capacity_lines", capacity_lines)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value!r}")
        if capacity_lines < channels << _EXTENT_LINES_SHIFT:
            raise ValueError(
                f"capacity_lines must be at least {channels << _EXTENT_LINES_SHIFT}, an extent per channel, "
                f"not {capacity_lines!r}"
            )
        self.channels = channels
        self.capacity_lines = capacity_lines
        super().__init__(
            {
                "i": In(stream.Signature(PageWork)),
                "lines": In(stream.Signature(ReadResponse)),
                "o": Out(stream.Signature(PageItem)).array(channels),
                "outcomes": Out(stream.Signature(Outcome)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        token = Signal(TOKEN, reset_less=True)
        full = Signal()
        free = Signal()
        self._entries(m, token, full, free)
        self._place(m, token, full, free)
        return m

    def _entries(self, m, token, full, free):
        """Takes lines apart: one token per page, and one at the end of the pass."""
        work = self.i.payload
        page = Signal(PAGE_BITS, reset_less=True)
        is_last = page == work.last_page
        with m.If(free):
            m.d.sync += full.eq(0)
        with m.FSM():
            with m.State("START"):
                m.d.sync += page.eq(work.first_page)
                with m.If(self.i.valid):
                    m.next = "WALK"
                    with m.If(work.empty):
                        m.next = "END"
            with m.State("WALK"):
                within = page[:_ENTRIES_SHIFT]
                m.d.comb += self.lines.ready.eq(free & (within.all() | is_last))
                with m.If(free & self.lines.valid):
                    m.d.sync += [
                        full.eq(1),
                        token.end.eq(0),
                        token.first.eq(page == work.first_page),
                        token.last.eq(is_last),
                        token.page.eq(page),
                        token.status.eq(line_status(self.lines.payload.fault)),
                        token.entry.eq(self.lines.payload.data.word_select(within, ENTRY.width)),
                        page.eq(page + 1),
                    ]
                    with m.If(is_last):
                        m.next = "END"
            with m.State("END"):
                with m.If(free):
                    m.d.sync += [full.eq(1), token.end.eq(1)]
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"

    def _place(self, m, token, full, free):
        """Checks an entry and sends its page to its unit.

        A page's token leaves before the end of its pass arrives, so that `i` still tells of its pass.
        """
        work, entry = self.i.payload, token.entry
        m.submodules.fork = fork = Fork(shape=PageItem, outputs=self.channels)
        for out, item in zip(self.o, fork.o, strict=True):
            wiring.connect(m, item, wiring.flipped(out))
        item, to = fork.i.payload.payload, fork.i.payload.to

        failure = Signal(Outcome)
        outcome = Signal(Outcome, reset_less=True)
        told = Signal(init=1)  # the last pass's outcome is delivered
        status = Signal(Status)
        emits = Signal()
        m.d.comb += [
            self.outcomes.valid.eq(~told),
            self.outcomes.payload.eq(outcome),
        ]
        with m.If(self.outcomes.ready):
            m.d.sync += told.eq(1)

        within = entry.line[:_EXTENT_LINES_SHIFT]
        channel_bits = self.channels.bit_length() - 1
        channel = entry.line[_EXTENT_LINES_SHIFT:][:channel_bits]
        bad = (
            ~entry.valid
            | (entry.as_value() & ENTRY.reserved_mask()).any()
            | entry.line[self.capacity_lines.bit_length() - 1 :].any()
            | (within + work.page_lines > 1 << _EXTENT_LINES_SHIFT)
        )
        with m.If(failure.status != Status.OK):
            m.d.comb += status.eq(failure.status)
        with m.Elif(token.status != Status.OK):
            m.d.comb += status.eq(token.status)
        with m.Elif(bad):
            m.d.comb += status.eq(Status.BAD_PAGE)

        first_row = Mux(token.first, work.first_begin, 0)
        m.d.comb += [
            item.last.eq(token.end),
            item.page.eq(token.page),
            item.rows.eq(Mux(token.last, work.last_end, work.page_rows) - first_row),
            emits.eq(full & (token.end | (status == Status.OK))),
            fork.i.valid.eq(emits & (~token.end | told)),
            # What is dropped waits, too: the line's next entry must not hang on the check of this one.
            free.eq(~full | (fork.i.ready & (~token.end | told))),
        ]
        for line, offset in (
            (item.k_line, Mux(token.first, work.k_first, 0)),
            (item.v_line, Mux(token.first, work.v_first, work.v_offset)),
        ):
            m.d.comb += [
                line[:_EXTENT_LINES_SHIFT].eq(within + offset),
                line[_EXTENT_LINES_SHIFT:].eq(entry.line[_EXTENT_LINES_SHIFT + channel_bits :]),
            ]
        m.d.comb += to.eq(Mux(token.end, (1 << self.channels) - 1, 1 << channel))
        with m.If(full & free):
            with m.If(token.end):
                m.d.sync += [failure.eq(0), outcome.eq(failure), told.eq(0)]
            with m.Elif((failure.status == Status.OK) & (status != Status.OK)):
                m.d.sync += failure.status.eq(status)
                with m.If(status == Status.BAD_PAGE):
                    m.d.sync += failure.page.eq(token.page)
        return m
