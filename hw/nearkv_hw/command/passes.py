"""Jobs into passes."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import QUERY_CHOICES
from ..abi.descriptor import MAX_PAGE_ROWS_LOG2
from ..abi.formats import OutputForm
from ..abi.lines import LINE_BYTES
from ..abi.memory import ENTRIES_PER_LINE, ResultLayout
from ..interfaces import LINE_ADDRESS_BITS, ResultJob, UnitJob
from .records import RUN_BITS, Job, PageWork, QueryWork, Run

PASS = data.StructLayout(
    {
        "unit": UnitJob,
        "result": ResultJob,
        "query_run": Run,
        "query_work": QueryWork,
        "entry_run": Run,
        "page_work": PageWork,
    }
)
"""All that the blocks behind need to know of a pass."""

_ELEMENT_BYTES = 2  # version 1 has bf16 and fp16
_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1
_SINKS_SHIFT = (LINE_BYTES // 4).bit_length() - 1


class Passes(wiring.Component):
    """Splits jobs into passes of at most `queries` query heads and works out where everything of a pass lies.

    Parameters
    ----------
    queries : query heads that a unit keeps per pass: 1, 2, 4, 8 or 16.

    Members
    -------
    i : In(stream(Job)) : good jobs.
    o : Out(stream(PASS)) : their passes, in order.

    Latency is 4 cycles; passes of a job follow each other every second cycle.
    """

    latency_cycles = 4

    def __init__(self, *, queries):
        if queries not in QUERY_CHOICES:
            raise ValueError(f"queries must be 1, 2, 4, 8 or 16, not {queries!r}")
        self.queries = queries
        super().__init__({"i": In(stream.Signature(Job)), "o": Out(stream.Signature(PASS))})

    def elaborate(self, platform):
        m = Module()
        job = self.i.payload
        head = Signal(8)  # first query head of the pass
        heads = Signal(5)
        k_lines, v_lines = Signal(4, reset_less=True), Signal(4, reset_less=True)
        result_lines = Signal(8, reset_less=True)
        entry_offset = Signal(job.kv_head.shape().width + job.entry_lines.shape().width, reset_less=True)
        page_rows, last_row = Signal(14, reset_less=True), Signal(32, reset_less=True)
        query_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        result_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        entry_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        entry_count = Signal(RUN_BITS, reset_less=True)
        work = Signal(PageWork, reset_less=True)

        self._describe(m, head, heads, k_lines, query_line, result_line, entry_line, entry_count, work)
        heads_left = (job.group - head)[:8]
        m.d.comb += heads.eq(Mux(heads_left > self.queries, self.queries, heads_left))
        shift = self.queries.bit_length() - 1

        with m.FSM():
            with m.State("START"):
                m.d.sync += [
                    head.eq(0),
                    k_lines.eq(_lines(job.head_dim, _ELEMENT_BYTES)),
                    v_lines.eq(_lines(job.value_dim, _ELEMENT_BYTES)),
                    result_lines.eq(_result_lines(job)),
                    entry_offset.eq(job.kv_head * job.entry_lines),
                    page_rows.eq(1 << job.page_rows_log2),
                    last_row.eq(job.row_end - 1),
                    query_line.eq(job.queries_line),
                    result_line.eq(job.result_line),
                ]
                with m.If(self.i.valid):
                    m.next = "PAGES"
            with m.State("PAGES"):
                mask = (page_rows - 1)[:MAX_PAGE_ROWS_LOG2]
                begin = job.row_begin[:MAX_PAGE_ROWS_LOG2] & mask
                m.d.sync += [
                    work.empty.eq(job.row_begin == job.row_end),
                    work.first_page.eq(job.row_begin >> job.page_rows_log2),
                    work.last_page.eq(last_row >> job.page_rows_log2),
                    work.first_begin.eq(begin),
                    work.last_end.eq((last_row[:MAX_PAGE_ROWS_LOG2] & mask) + 1),
                    work.page_rows.eq(page_rows),
                    work.page_lines.eq((k_lines + v_lines) << job.page_rows_log2),
                    work.v_offset.eq(k_lines << job.page_rows_log2),
                    work.k_first.eq(begin * k_lines),
                    work.v_first.eq(begin * v_lines),
                ]
                m.next = "ENTRIES"
            with m.State("ENTRIES"):
                first = work.first_page >> _ENTRIES_SHIFT
                line = job.table_line + 1 + entry_offset + first
                m.d.sync += [
                    # What lies beyond every address lies beyond the memory: the fabric refuses it.
                    entry_line.eq(Mux(line >> LINE_ADDRESS_BITS, (1 << LINE_ADDRESS_BITS) - 1, line)),
                    entry_count.eq(Mux(work.empty, 0, (work.last_page >> _ENTRIES_SHIFT) - first + 1)),
                    work.v_first.eq(work.v_offset + work.v_first),
                ]
                m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += [
                        head.eq(head + heads),
                        query_line.eq(query_line + (k_lines << shift)),
                        result_line.eq(result_line + (result_lines << shift)),
                    ]
                    m.next = "NEXT"
            with m.State("NEXT"):
                with m.If(head == job.group):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"
                with m.Else():
                    m.next = "SEND"
        return m

    def _describe(self, m, head, heads, k_lines, query_line, result_line, entry_line, entry_count, work):
        """The pass that stands in the registers, as the blocks behind want it."""
        job, out = self.i.payload, self.o.payload
        unit, result = out.unit, out.result
        lines_of_heads = Signal(8)
        m.d.comb += lines_of_heads.eq(k_lines * heads)
        for name in (
            "head_dim",
            "value_dim",
            "k_format",
            "v_format",
            "query_format",
            "score_factor",
            "sinks",
        ):
            m.d.comb += unit[name].eq(job[name])
        m.d.comb += [
            unit.tenant.eq(job.tenant),
            unit.queries.eq(heads),
            result.tenant.eq(job.tenant),
            result.queries.eq(heads),
            result.value_dim.eq(job.value_dim),
            result.form.eq(job.form),
            result.line.eq(result_line),
            out.query_run.tenant.eq(job.tenant),
            out.query_run.line.eq(query_line),
            out.query_run.count.eq(lines_of_heads),
            out.query_run.extra.eq(job.sinks),
            out.query_run.extra_line.eq(job.sinks_line + (head >> _SINKS_SHIFT)),
            out.query_work.lines.eq(lines_of_heads),
            out.query_work.sinks.eq(job.sinks),
            out.query_work.sink_slot.eq(head),
            out.entry_run.tenant.eq(job.tenant),
            out.entry_run.line.eq(entry_line),
            out.entry_run.count.eq(entry_count),
            out.page_work.eq(work),
        ]


def _lines(elements, element_bytes):
    """Lines of that many elements."""
    return (elements * element_bytes + LINE_BYTES - 1) >> (LINE_BYTES.bit_length() - 1)


def _result_lines(job):
    """Lines of one query head's result in the job's form."""
    chosen = 0
    for form in OutputForm:
        bytes_per_lane = ResultLayout(LINE_BYTES, form).planes  # as many lines as one lane has bytes
        lines = sum(_lines(job.value_dim, plane) for plane in bytes_per_lane) + 1
        chosen = Mux(job.form == form, lines, chosen)
    return chosen
