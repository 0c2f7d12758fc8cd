"""What a job's geometry comes to, worked out while the header of its page table is read."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import EXTENT_BYTES
from ..abi.descriptor import MAX_PAGE_ROWS_LOG2
from ..abi.formats import OutputForm
from ..abi.lines import LINE_BYTES, LINE_SHIFT
from ..abi.memory import ENTRIES_PER_LINE, ResultLayout
from ..abi.numerics import MAX_ROWS
from ..arithmetic.decode import code_width
from ..common.buffer import Buffer
from ..row_layout import lines_less_one, scale_shift
from .records import (
    PAGE_LINE_BITS,
    RESULT_LINES_BITS,
    ROW_LINES_BITS,
    Checked,
    Job,
    Plan,
    Planned,
)

_QUERY_BYTES = 2  # of an element
_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1

_KEPT = sorted({name for name, _ in data.Layout.cast(Job)} & {name for name, _ in data.Layout.cast(Plan)})
"""What a plan has from its job as it is."""
_ROWS = data.StructLayout(
    {
        "lines": ROW_LINES_BITS,  # of a row's codes
        "pitch": 2,  # log2 of the rows that share a line
        "scaled": 1,
        "shift": 3,  # log2 of the bytes of a row's scales
    }
)
_AREAS = data.StructLayout(
    {
        "codes": PAGE_LINE_BITS,  # lines of a page
        "scales": PAGE_LINE_BITS,
        "codes_first": PAGE_LINE_BITS,  # lines before those of the first visible row
        "scales_first": PAGE_LINE_BITS,
    }
)
_MEASURED = data.StructLayout(
    {
        "checked": Checked,
        "query_lines": ROW_LINES_BITS,
        "k": _ROWS,
        "v": _ROWS,
        "result_lines": RESULT_LINES_BITS,
        "last_row": 32,
        "first_page": 32,
        "begin": MAX_PAGE_ROWS_LOG2,  # first visible row of the first page
        "bad_rows": 1,
        "empty": 1,
    }
)
"""A descriptor's rows worked out."""
_DIVIDED = data.StructLayout({"measured": _MEASURED, "k": _AREAS, "v": _AREAS})
"""And its pages."""


class Planner(wiring.Component):
    """Works out where a job's rows, entries and results lie, in three stages.

    Members
    -------
    i : In(stream(Checked)) : descriptors, whatever they ask for.
    o : Out(stream(Planned)) : the same; `entry_lines` is left for the one who knows the table, and
        of `work` what is of the first visible row counts from the page's first row.

    Latency is 3 cycles, throughput one descriptor per cycle; holds up to six.
    """

    latency_cycles = 3 * Buffer.latency_cycles

    i: In(stream.Signature(Checked))
    o: Out(stream.Signature(Planned))

    def elaborate(self, platform):
        m = Module()
        m.submodules.measured = measured = Buffer(shape=_MEASURED)
        m.submodules.divided = divided = Buffer(shape=_DIVIDED)
        m.submodules.planned = planned = Buffer(shape=Planned)
        for source, target in ((self, measured), (measured.o, divided), (divided.o, planned)):
            source = source.i if source is self else source
            m.d.comb += [target.i.valid.eq(source.valid), source.ready.eq(target.i.ready)]
        wiring.connect(m, planned.o, wiring.flipped(self.o))
        self._measure(m, self.i.payload, measured.i.payload)
        self._divide(m, measured.o.payload, divided.i.payload)
        self._place(m, divided.o.payload, planned.i.payload)
        return m

    def _measure(self, m, checked, out):
        job = checked.job
        m.d.comb += [
            out.checked.eq(checked),
            out.query_lines.eq(_lines(job.head_dim, _QUERY_BYTES)),
            out.result_lines.eq(_result_lines(job)),
            out.last_row.eq(job.row_end - 1),
            out.first_page.eq(job.row_begin >> job.page_rows_log2),
            out.begin.eq(job.row_begin & ((1 << job.page_rows_log2) - 1)),
            out.bad_rows.eq((job.row_begin > job.row_end) | (job.row_end > MAX_ROWS)),
            out.empty.eq(job.row_begin == job.row_end),
        ]
        for rows, dim in (("k", job.head_dim), ("v", job.value_dim)):
            scale, block = job[f"{rows}_scale"], job[f"{rows}_block"]
            m.d.comb += [
                out[rows].lines.eq(lines_less_one(dim, code_width(job[f"{rows}_format"])) + 1),
                out[rows].pitch.eq(job[f"{rows}_pitch"]),
                out[rows].scaled.eq(scale.any()),
                out[rows].shift.eq(scale_shift(dim, scale, block)),
            ]

    def _divide(self, m, measured, out):
        """Lines of the areas of a page."""
        m.d.comb += out.measured.eq(measured)
        log2 = measured.checked.job.page_rows_log2
        for rows in ("k", "v"):
            given, areas = measured[rows], out[rows]
            size_bytes = Signal(MAX_PAGE_ROWS_LOG2 + LINE_SHIFT + 1, name=f"{rows}_scale_bytes")
            m.d.comb += [
                size_bytes.eq(Mux(given.scaled, 1 << (log2 + given.shift), 0)),
                areas.codes.eq((given.lines << log2) >> given.pitch),
                areas.scales.eq((size_bytes >> LINE_SHIFT) + size_bytes[:LINE_SHIFT].any()),
                areas.codes_first.eq((measured.begin * given.lines) >> given.pitch),
                areas.scales_first.eq((measured.begin << given.shift) >> LINE_SHIFT),
            ]

    def _place(self, m, divided, out):
        measured = divided.measured
        checked, job, plan = measured.checked, measured.checked.job, out.plan
        work, page_rows, page_lines = plan.work, Signal(14), Signal(PAGE_LINE_BITS)
        in_page = Cat(n < job.page_rows_log2 for n in range(MAX_PAGE_ROWS_LOG2))  # page_rows - 1, but fast
        k_lines, v_lines = (divided[rows].codes + divided[rows].scales for rows in ("k", "v"))
        latent = job.latent
        v_from = Signal(_AREAS)
        m.d.comb += v_from.eq(Mux(latent, divided.k, divided.v))
        last_in_page = measured.last_row[:MAX_PAGE_ROWS_LOG2] & in_page
        m.d.comb += [
            page_rows.eq(1 << job.page_rows_log2),
            *(out[name].eq(checked[name]) for name in ("ticket", "attends", "claims", "claim")),
            out.row_end.eq(job.row_end),
            out.last_page.eq(measured.last_row >> job.page_rows_log2),
            out.bad_rows.eq(measured.bad_rows),
            out.bad_page.eq(page_lines > EXTENT_BYTES // LINE_BYTES),
            *(plan[name].eq(job[name]) for name in _KEPT),
            plan.queries.eq(job.group * job.query_rows),
            plan.query_lines.eq(measured.query_lines),
            plan.result_lines.eq(measured.result_lines),
            plan.entry_base.eq(job.table_line + 1 + (measured.first_page >> _ENTRIES_SHIFT)),
            work.empty.eq(measured.empty),
            work.first_index.eq(measured.first_page << job.page_rows_log2),
            work.first_page.eq(measured.first_page),
            work.last_page.eq(out.last_page),
            work.first_begin.eq(measured.begin),
            work.last_end.eq(last_in_page + 1),
            work.page_rows.eq(page_rows),
            page_lines.eq(k_lines + Mux(latent, 0, v_lines)),
            work.page_lines.eq(page_lines),
            work.k_scales.eq(divided.k.codes),
            work.v_offset.eq(Mux(latent, 0, k_lines)),
            work.v_scales.eq(Mux(latent, divided.k.codes, k_lines + divided.v.codes)),
            work.k_first.eq(divided.k.codes_first),
            work.k_scales_first.eq(divided.k.scales_first),
            work.v_first.eq(v_from.codes_first),
            work.v_scales_first.eq(v_from.scales_first),
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
