"""What a job's geometry comes to, worked out while the header of its page table is read."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import MAX_PAGE_ROWS_LOG2
from ..abi.formats import OutputForm
from ..abi.lines import LINE_BYTES
from ..abi.memory import ENTRIES_PER_LINE, ResultLayout
from ..abi.numerics import MAX_ROWS
from ..common.buffer import Buffer
from .records import Checked, Job, Plan, Planned

_ELEMENT_BYTES = 2  # version 1 has bf16 and fp16
_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1

_KEPT = sorted({name for name, _ in data.Layout.cast(Job)} & {name for name, _ in data.Layout.cast(Plan)})
"""What a plan has from its job as it is."""
_MEASURED = data.StructLayout(
    {
        "checked": Checked,
        "k_lines": 4,
        "v_lines": 4,
        "result_lines": 8,
        "last_row": 32,
        "first_page": 32,
        "begin": MAX_PAGE_ROWS_LOG2,  # first visible row of the first page
        "bad_rows": 1,
        "empty": 1,
    }
)
"""A descriptor half worked out."""


class Planner(wiring.Component):
    """Works out where a job's rows, entries and results lie, in two stages.

    Members
    -------
    i : In(stream(Checked)) : descriptors, whatever they ask for.
    o : Out(stream(Planned)) : the same; `entry_lines` is left for the one who knows the table, and
        `work.v_first` counts from the first V row.

    Latency is 2 cycles, throughput one descriptor per cycle; holds up to four.
    """

    latency_cycles = 2 * Buffer.latency_cycles

    i: In(stream.Signature(Checked))
    o: Out(stream.Signature(Planned))

    def elaborate(self, platform):
        m = Module()
        m.submodules.measured = measured = Buffer(shape=_MEASURED)
        m.submodules.planned = planned = Buffer(shape=Planned)
        m.d.comb += [
            measured.i.valid.eq(self.i.valid),
            self.i.ready.eq(measured.i.ready),
            planned.i.valid.eq(measured.o.valid),
            measured.o.ready.eq(planned.i.ready),
        ]
        wiring.connect(m, planned.o, wiring.flipped(self.o))
        self._measure(m, self.i.payload, measured.i.payload)
        self._place(m, measured.o.payload, planned.i.payload)
        return m

    def _measure(self, m, checked, out):
        job = checked.job
        m.d.comb += [
            out.checked.eq(checked),
            out.k_lines.eq(_lines(job.head_dim, _ELEMENT_BYTES)),
            out.v_lines.eq(_lines(job.value_dim, _ELEMENT_BYTES)),
            out.result_lines.eq(_result_lines(job)),
            out.last_row.eq(job.row_end - 1),
            out.first_page.eq(job.row_begin >> job.page_rows_log2),
            out.begin.eq(job.row_begin & ((1 << job.page_rows_log2) - 1)),
            out.bad_rows.eq((job.row_begin > job.row_end) | (job.row_end > MAX_ROWS)),
            out.empty.eq(job.row_begin == job.row_end),
        ]

    def _place(self, m, measured, out):
        checked, job, plan = measured.checked, measured.checked.job, out.plan
        work, page_rows = plan.work, Signal(14)
        in_page = Cat(n < job.page_rows_log2 for n in range(MAX_PAGE_ROWS_LOG2))  # page_rows - 1, but fast
        last_in_page = measured.last_row[:MAX_PAGE_ROWS_LOG2] & in_page
        m.d.comb += [
            page_rows.eq(1 << job.page_rows_log2),
            *(out[name].eq(checked[name]) for name in ("ticket", "attends", "claims", "claim")),
            out.row_end.eq(job.row_end),
            out.last_page.eq(measured.last_row >> job.page_rows_log2),
            out.bad_rows.eq(measured.bad_rows),
            *(plan[name].eq(job[name]) for name in _KEPT),
            plan.k_lines.eq(measured.k_lines),
            plan.result_lines.eq(measured.result_lines),
            plan.entry_base.eq(job.table_line + 1 + (measured.first_page >> _ENTRIES_SHIFT)),
            work.empty.eq(measured.empty),
            work.first_page.eq(measured.first_page),
            work.last_page.eq(out.last_page),
            work.first_begin.eq(measured.begin),
            work.last_end.eq(last_in_page + 1),
            work.page_rows.eq(page_rows),
            work.page_lines.eq((measured.k_lines + measured.v_lines) << job.page_rows_log2),
            work.v_offset.eq(measured.k_lines << job.page_rows_log2),
            work.k_first.eq(measured.begin * measured.k_lines),
            work.v_first.eq(measured.begin * measured.v_lines),
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
