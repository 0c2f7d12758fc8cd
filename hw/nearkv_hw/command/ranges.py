"""The rows of a pass: ranges of them, one after the other, each with the pages it lies in."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import MAX_PAGE_ROWS_LOG2, RANGE, Status
from ..abi.lines import LINE_BITS, LINE_SHIFT
from ..abi.memory import ENTRIES_PER_LINE
from ..common.buffer import Buffer
from ..common.fork import Fork
from ..interfaces import LINE_ADDRESS_BITS, PAGE_BITS, ROW_BITS, TENANT_BITS
from ..structs import layout_of
from .passes import line_or_last
from .queries import line_status
from .reader import RunIssue
from .records import PAGE_LINE_BITS, PageLines, PageWork, RangeWork, Run, Selecting, WalkLine, WalkRead

_RANGES_PER_LINE = LINE_BITS // RANGE.width
_RANGES_SHIFT = _RANGES_PER_LINE.bit_length() - 1
_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1

_LISTED = data.StructLayout({"range": layout_of(RANGE), "status": Status, "last": 1})
"""A range as it lies in a list; `status` is of its line."""
_CHECKED = data.StructLayout({"begin": ROW_BITS, "end": ROW_BITS, "status": Status, "last": 1})
"""A range that was checked."""
_PART = data.StructLayout(
    {
        "tenant": TENANT_BITS,
        "entry_line": LINE_ADDRESS_BITS,
        "pages": PageLines,
        "selecting": Selecting,
        "begin": ROW_BITS,
        "end": ROW_BITS,
        "empty": 1,
        "last": 1,
        "status": Status,
    }
)
"""Rows to read."""
_MEASURED = data.StructLayout(
    {
        "part": _PART,
        "first_page": PAGE_BITS,
        "last_page": PAGE_BITS,
        "first_begin": MAX_PAGE_ROWS_LOG2,
        "last_end": 14,
        **{f"{rows}_{what}": PAGE_LINE_BITS for rows in "kv" for what in ("codes", "scales")},
    }
)
"""And where they lie: lines before those of the first row, in its page's area."""


class Ranges(wiring.Component):
    """Turns every pass into work for the page feed: one or more pieces, of which one is the last.

    Members
    -------
    i : In(stream(RangeWork)) : the passes.
    reads : Out(stream(WalkRead)), lines : In(stream(WalkLine)) : reads of lists, answered in order.
    o : Out(stream(PageWork)), runs : Out(stream(Run)) : the pieces, and their lines with entries.

    A list ends with its first fault: DENIED or POISON of a line, BAD_LIST for a range that is empty, does not
    rise, or goes beyond the pass's rows. What came before is read, what comes after is dropped.

    Latency is `latency_cycles` without a list, throughput a piece in two cycles.
    """

    latency_cycles = 2 * Buffer.latency_cycles + Fork.latency_cycles

    i: In(stream.Signature(RangeWork))
    reads: Out(stream.Signature(WalkRead))
    lines: In(stream.Signature(WalkLine))
    o: Out(stream.Signature(PageWork))
    runs: Out(stream.Signature(Run))

    def elaborate(self, platform):
        m = Module()
        self._asking, self._dropping = Signal(), Signal()
        m.submodules.listed = listed = Buffer(shape=_LISTED)
        m.submodules.checked = checked = Buffer(shape=_CHECKED)
        m.submodules.parts = parts = Buffer(shape=_PART)
        m.submodules.measured = measured = Buffer(shape=_MEASURED)
        pieces = data.StructLayout({"work": PageWork, "run": Run})
        m.submodules.fork = fork = Fork(shape=pieces, outputs=2, interval_cycles=2)
        for source, target in ((parts.o, measured.i), (measured.o, fork.i)):
            m.d.comb += [target.valid.eq(source.valid), source.ready.eq(target.ready)]
        self._read(m, listed)
        self._check(m, listed.o, checked.i)
        self._cut(m, checked.o, parts.i)
        self._measure(m, parts.o.payload, measured.i.payload)
        self._place(m, measured.o.payload, fork.i.payload.payload)
        m.d.comb += [
            fork.i.payload.to.eq(0b11),
            self.o.valid.eq(fork.o[0].valid),
            self.o.payload.eq(fork.o[0].payload.work),
            fork.o[0].ready.eq(self.o.ready),
            self.runs.valid.eq(fork.o[1].valid),
            self.runs.payload.eq(fork.o[1].payload.run),
            fork.o[1].ready.eq(self.runs.ready),
        ]
        return m

    def _read(self, m, listed):
        """Asks for the list of a pass and takes its lines apart; `_dropping` ends that soon."""
        m.submodules.issue = issue = RunIssue()
        wiring.connect(m, issue.o, wiring.flipped(self.reads))
        rows, line = self.i.payload, self.lines.payload
        left = Signal(rows.count.shape(), reset_less=True)
        place = Signal(range(_RANGES_PER_LINE), reset_less=True)
        last = (left == 1) | (place.all() & line.last)
        m.d.comb += [
            issue.i.valid.eq(self._asking),
            issue.i.payload.tenant.eq(rows.tenant),
            issue.i.payload.line.eq(rows.list_line),
            issue.i.payload.count.eq((rows.count + _RANGES_PER_LINE - 1) >> _RANGES_SHIFT),
            issue.stop.eq(self._dropping),
            listed.i.valid.eq(self.lines.valid),
            listed.i.payload.range.eq(line.data.word_select(place, RANGE.width)),
            listed.i.payload.status.eq(line_status(line.fault)),
            listed.i.payload.last.eq(last),
            self.lines.ready.eq(listed.i.ready & (last | place.all())),
        ]
        with m.If(self._asking):
            m.d.sync += [left.eq(rows.count), place.eq(0)]
        with m.Elif(listed.i.valid & listed.i.ready):
            m.d.sync += [left.eq(left - 1), place.eq(place + 1)]

    def _check(self, m, listed, checked):
        """Says of each range of a list whether it is good, given that those before it are."""
        rows, given = self.i.payload, listed.payload
        risen = Signal(ROW_BITS, reset_less=True)  # where a range may begin
        bad = (
            (given.range.begin < risen)
            | (given.range.begin >= given.range.end)
            | (given.range.end > rows.end)
        )
        m.d.comb += [
            checked.valid.eq(listed.valid),
            listed.ready.eq(checked.ready),
            checked.payload.begin.eq(given.range.begin),
            checked.payload.end.eq(given.range.end),
            checked.payload.last.eq(given.last),
            checked.payload.status.eq(
                Mux(given.status != Status.OK, given.status, Mux(bad, Status.BAD_LIST, Status.OK))
            ),
        ]
        with m.If(self._asking):
            m.d.sync += risen.eq(rows.begin)
        with m.Elif(listed.valid & listed.ready):
            m.d.sync += risen.eq(given.range.end)

    def _cut(self, m, listed, parts):
        """Cuts ranges down to the rows that are seen."""
        rows, given = self.i.payload, listed.payload
        of_list = rows.listed & rows.count.any()
        second = Signal()  # of two parts of a range
        valid, last, status = Signal(), Signal(), Signal(Status)
        begin, end = Signal(ROW_BITS), Signal(ROW_BITS)
        m.d.comb += [
            begin.eq(Mux(of_list, given.begin, rows.begin)),
            end.eq(Mux(of_list, given.end, Mux(rows.listed, rows.begin, rows.end))),
            status.eq(Mux(of_list, given.status, Status.OK)),
            last.eq(~of_list | given.last | (status != Status.OK)),
        ]

        # all comparisons at once: one after the other they are too long
        some, in_head, ends_in_head = begin < end, begin < rows.kept_end, end < rows.kept_end
        from_begin, ends_in_tail = begin > rows.tail_begin, end < rows.tail_end
        in_tail = (begin < rows.tail_end) & (rows.tail_begin < end) & (rows.tail_begin < rows.tail_end)
        is_head, is_tail, good = Signal(), Signal(), Signal()
        goes_on = Signal()  # to the next range
        m.d.comb += [
            good.eq((status == Status.OK) & some),
            is_head.eq(good & ~second & in_head),
            is_tail.eq(good & ~is_head & in_tail),
            parts.valid.eq(valid & (is_head | is_tail | last)),
            parts.payload.tenant.eq(rows.tenant),
            parts.payload.entry_line.eq(rows.entry_line),
            parts.payload.pages.eq(rows.pages),
            parts.payload.selecting.eq(rows.selecting),
            parts.payload.begin.eq(Mux(is_head | from_begin, begin, rows.tail_begin)),
            parts.payload.end.eq(
                Mux(
                    is_head,
                    Mux(ends_in_head, end, rows.kept_end),
                    Mux(ends_in_tail, end, rows.tail_end),
                )
            ),
            parts.payload.empty.eq(~is_head & ~is_tail),
            parts.payload.last.eq(~is_head & last),
            parts.payload.status.eq(status),
            goes_on.eq(valid & ~is_head & (parts.ready | ~(is_tail | last))),
        ]
        with m.If(parts.valid & parts.ready):
            m.d.sync += second.eq(is_head)
        with m.If(goes_on):
            m.d.sync += second.eq(0)

        with m.FSM():
            with m.State("START"):
                with m.If(self.i.valid & of_list):
                    m.d.comb += self._asking.eq(1)
                    m.next = "LIST"
                with m.Else():
                    m.d.comb += [valid.eq(self.i.valid), self.i.ready.eq(goes_on)]
            with m.State("LIST"):
                m.d.comb += [valid.eq(listed.valid), listed.ready.eq(goes_on)]
                with m.If(goes_on & given.last):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"
                with m.Elif(goes_on & last):
                    m.next = "DROP"
            with m.State("DROP"):
                m.d.comb += [self._dropping.eq(1), listed.ready.eq(1)]
                with m.If(listed.valid & given.last):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"

    def _measure(self, m, part, out):
        pages = part.pages
        in_page = Cat(n < pages.page_rows_log2 for n in range(MAX_PAGE_ROWS_LOG2))  # page_rows - 1, but fast
        first, last = part.begin & in_page, Signal(ROW_BITS)
        m.d.comb += [
            last.eq(part.end - 1),
            out.part.eq(part),
            out.first_page.eq(part.begin >> pages.page_rows_log2),
            out.last_page.eq(last >> pages.page_rows_log2),
            out.first_begin.eq(first),
            out.last_end.eq((last & in_page) + 1),
        ]
        for name in "kv":
            rows = pages[name]
            m.d.comb += [
                out[f"{name}_codes"].eq((first * rows.lines) >> rows.pitch),
                out[f"{name}_scales"].eq((first << rows.shift) >> LINE_SHIFT),
            ]

    def _place(self, m, measured, out):
        part, pages, work, run = measured.part, measured.part.pages, out.work, out.run
        first_line, last_line = (page >> _ENTRIES_SHIFT for page in (measured.first_page, measured.last_page))
        m.d.comb += [
            *(work[name].eq(part[name]) for name in ("tenant", "selecting", "empty", "last", "status")),
            *(
                work[name].eq(measured[name])
                for name in ("first_page", "last_page", "first_begin", "last_end")
            ),
            *(
                work[name].eq(pages[name])
                for name in ("page_lines", "k_scales", "v_offset", "v_scales", "summary")
            ),
            work.page_rows.eq(1 << pages.page_rows_log2),
            work.first_index.eq(measured.first_page << pages.page_rows_log2),
            work.k_first.eq(measured.k_codes),
            work.k_scales_first.eq(pages.k_scales + measured.k_scales),
            work.v_first.eq(pages.v_offset + measured.v_codes),
            work.v_scales_first.eq(pages.v_scales + measured.v_scales),
            run.tenant.eq(part.tenant),
            run.line.eq(line_or_last(part.entry_line + first_line)),
            run.count.eq(Mux(part.empty, 0, last_line - first_line + 1)),
        ]
