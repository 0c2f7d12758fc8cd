"""What a job's geometry comes to, worked out while the header of its page table is read."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import EXTENT_BYTES
from ..abi.descriptor import MAX_CANDIDATES, MAX_PAGE_ROWS_LOG2
from ..abi.formats import OutputForm
from ..abi.lines import LINE_BYTES, LINE_SHIFT
from ..abi.memory import ResultLayout
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
    RowLines,
)
from .selection import check_candidates

_QUERY_BYTES = 2  # of an element

_AREAS = ("codes", "scales")
_KEPT = sorted({name for name, _ in data.Layout.cast(Job)} & {name for name, _ in data.Layout.cast(Plan)})
"""What a plan has from its job as it is."""
_MEASURED = data.StructLayout(
    {
        "checked": Checked,
        "query_lines": ROW_LINES_BITS,
        "k": RowLines,
        "v": RowLines,
        "scaled": 2,  # whether K has scales, and V
        "result_lines": RESULT_LINES_BITS,
        "last_row": 32,
        "first_page": 32,
        "bad_rows": 1,
    }
)
"""A descriptor's rows worked out."""
_DIVIDED = data.StructLayout(
    {
        "measured": _MEASURED,
        "last_page": 32,
        **{f"{rows}_{what}": PAGE_LINE_BITS for rows in "kv" for what in _AREAS},
    }
)
"""And the lines of its pages' areas."""


class Planner(wiring.Component):
    """Works out where a job's rows, entries and results lie, in three stages.

    Parameters
    ----------
    candidates : pages that a job may select from.

    Members
    -------
    i : In(stream(Checked)) : descriptors, whatever they ask for.
    o : Out(stream(Planned)) : the same; `entry_lines` is left for the one who knows the table.

    Latency is 3 cycles, throughput one descriptor per cycle; holds up to six.
    """

    latency_cycles = 3 * Buffer.latency_cycles

    def __init__(self, *, candidates=MAX_CANDIDATES):
        check_candidates(candidates)
        self.candidates = candidates
        super().__init__({"i": In(stream.Signature(Checked)), "o": Out(stream.Signature(Planned))})

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
        own_rows = Mux(job.tree, job.query_rows, 0)  # the query rows' own
        m.d.comb += [
            out.checked.eq(checked),
            out.query_lines.eq(_lines(job.head_dim, _QUERY_BYTES)),
            out.result_lines.eq(_result_lines(job)),
            out.last_row.eq(job.row_end - 1),
            out.first_page.eq(job.row_begin >> job.page_rows_log2),
            out.bad_rows.eq(
                (job.row_begin > job.row_end) | (job.row_end > MAX_ROWS) | (own_rows > job.row_end)
            ),
        ]
        for number, (rows, dim) in enumerate((("k", job.head_dim), ("v", job.value_dim))):
            scale, block = job[f"{rows}_scale"], job[f"{rows}_block"]
            m.d.comb += [
                out[rows].lines.eq(lines_less_one(dim, code_width(job[f"{rows}_format"])) + 1),
                out[rows].pitch.eq(job[f"{rows}_pitch"]),
                out[rows].shift.eq(scale_shift(dim, scale, block)),
                out.scaled[number].eq(scale.any()),
            ]

    def _divide(self, m, measured, out):
        """Lines of the areas of a page."""
        log2 = measured.checked.job.page_rows_log2
        m.d.comb += [out.measured.eq(measured), out.last_page.eq(measured.last_row >> log2)]
        for number, rows in enumerate("kv"):
            given = measured[rows]
            size_bytes = Signal(MAX_PAGE_ROWS_LOG2 + LINE_SHIFT + 1, name=f"{rows}_scale_bytes")
            m.d.comb += [
                size_bytes.eq(Mux(measured.scaled[number], 1 << (log2 + given.shift), 0)),
                out[f"{rows}_codes"].eq((given.lines << log2) >> given.pitch),
                out[f"{rows}_scales"].eq((size_bytes >> LINE_SHIFT) + size_bytes[:LINE_SHIFT].any()),
            ]

    def _place(self, m, divided, out):
        measured = divided.measured
        checked, job, plan = measured.checked, measured.checked.job, out.plan
        pages, latent = plan.pages, job.latent
        k_lines, v_lines = (divided[f"{rows}_codes"] + divided[f"{rows}_scales"] for rows in "kv")
        page_lines, summary = Signal(PAGE_LINE_BITS), Signal(PAGE_LINE_BITS)
        apart = Signal(signed(33))  # first and last page
        m.d.comb += [
            *(out[name].eq(checked[name]) for name in ("ticket", "attends", "claims", "claim")),
            out.row_end.eq(job.row_end),
            out.last_page.eq(divided.last_page),
            out.bad_rows.eq(measured.bad_rows),
            apart.eq(divided.last_page - measured.first_page),
            out.bad_page.eq(
                (page_lines > EXTENT_BYTES // LINE_BYTES)
                | (job.select & job.row_end.any() & (apart >= self.candidates))
            ),
            *(plan[name].eq(job[name]) for name in _KEPT),
            plan.queries.eq(job.group * job.query_rows),
            plan.query_lines.eq(measured.query_lines),
            plan.result_lines.eq(measured.result_lines),
            pages.page_rows_log2.eq(job.page_rows_log2),
            summary.eq(k_lines + Mux(latent, 0, v_lines)),
            # a row of a summary takes as many lines as a query
            page_lines.eq(summary + Mux(job.summaries, measured.query_lines << 1, 0)),
            pages.summary.eq(summary),
            pages.page_lines.eq(page_lines),
            pages.k.eq(measured.k),
            pages.v.eq(Mux(latent, measured.k, measured.v)),
            pages.k_scales.eq(divided.k_codes),
            pages.v_offset.eq(Mux(latent, 0, k_lines)),
            pages.v_scales.eq(Mux(latent, divided.k_codes, k_lines + divided.v_codes)),
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
