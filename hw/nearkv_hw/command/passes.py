"""Jobs into passes."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import QUERY_CHOICES
from ..abi.descriptor import WORD_BYTES
from ..abi.lines import LINE_BYTES
from ..abi.memory import ENTRIES_PER_LINE
from ..interfaces import LINE_ADDRESS_BITS, ResultJob, UnitJob
from .records import QUERIES_BITS, QUERY_LINES_BITS, RUN_BITS, PageWork, Plan, QueryWork, Run

PASS = data.StructLayout(
    {
        "unit": UnitJob,
        "result": ResultJob,
        "query_work": QueryWork,
        "entry_run": Run,
        "page_work": PageWork,
    }
)
"""All that the blocks behind need to know of a pass."""

_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1
_LISTS = [name + part for name in ("codebook", "slopes", "sinks") for part in ("", "_line")]
_LIST_SHIFT = (LINE_BYTES // WORD_BYTES).bit_length() - 1


class Passes(wiring.Component):
    """Splits jobs into passes of at most `queries` queries and works out where everything of a pass lies.

    Parameters
    ----------
    queries : queries that a unit keeps per pass: 1, 2, 4, 8 or 16.

    Members
    -------
    i : In(stream(Plan)) : good jobs.
    o : Out(stream(PASS)) : their passes, in order.

    Latency is 2 cycles; passes of a job follow each other every `interval_cycles`.
    """

    latency_cycles = 2
    interval_cycles = 2

    def __init__(self, *, queries):
        if queries not in QUERY_CHOICES:
            raise ValueError(f"queries must be 1, 2, 4, 8 or 16, not {queries!r}")
        self.queries = queries
        super().__init__({"i": In(stream.Signature(Plan)), "o": Out(stream.Signature(PASS))})

    def elaborate(self, platform):
        m = Module()
        plan, given = self.i.payload, self.i.payload.work
        done = Signal(QUERIES_BITS)  # first query of the pass
        now = Signal(5)  # queries of the pass
        entry_offset = Signal(plan.kv_head.shape().width + plan.entry_lines.shape().width, reset_less=True)
        query_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        result_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        entry_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        entry_count = Signal(RUN_BITS, reset_less=True)
        work = Signal(PageWork, reset_less=True)

        self._describe(m, done, now, query_line, result_line, entry_line, entry_count, work)
        shift = self.queries.bit_length() - 1

        with m.FSM():
            with m.State("START"):
                first, last = given.first_page >> _ENTRIES_SHIFT, given.last_page >> _ENTRIES_SHIFT
                m.d.sync += [
                    done.eq(0),
                    now.eq(self._at_most(plan.queries)),
                    entry_offset.eq(plan.kv_head * plan.entry_lines),
                    entry_count.eq(Mux(given.empty, 0, last - first + 1)),
                    query_line.eq(plan.queries_line),
                    result_line.eq(plan.result_line),
                    work.eq(given),
                    work.k_scales_first.eq(given.k_scales + given.k_scales_first),
                    work.v_first.eq(given.v_offset + given.v_first),
                    work.v_scales_first.eq(given.v_scales + given.v_scales_first),
                ]
                with m.If(self.i.valid):
                    m.next = "ENTRIES"
            with m.State("ENTRIES"):
                line = plan.entry_base + entry_offset
                # What lies beyond every address lies beyond the memory: the fabric refuses it.
                m.d.sync += entry_line.eq(Mux(line >> LINE_ADDRESS_BITS, (1 << LINE_ADDRESS_BITS) - 1, line))
                m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += [
                        done.eq(done + now),
                        query_line.eq(query_line + (plan.query_lines << shift)),
                        result_line.eq(result_line + (plan.result_lines << shift)),
                    ]
                    m.next = "NEXT"
            with m.State("NEXT"):
                m.d.sync += now.eq(self._at_most((plan.queries - done)[:QUERIES_BITS]))
                with m.If(done == plan.queries):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"
                with m.Else():
                    m.next = "SEND"
        return m

    def _at_most(self, left):
        return Mux(left > self.queries, self.queries, left)

    def _describe(self, m, done, now, query_line, result_line, entry_line, entry_count, work):
        """The pass that stands in the registers, as the blocks behind want it."""
        plan, out = self.i.payload, self.o.payload
        unit, result = out.unit, out.result
        lines_of_queries = Signal(QUERY_LINES_BITS)
        m.d.comb += lines_of_queries.eq(plan.query_lines * now)
        for name in (
            "head_dim",
            "value_dim",
            "k_format",
            "v_format",
            "k_scale",
            "v_scale",
            "k_block",
            "v_block",
            "k_pitch",
            "v_pitch",
            "query_format",
            "score_factor",
            "softcap",
            "sinks",
            "slopes",
            "codebook",
            "latent",
            "group",
            "position",
            "causal",
            "window",
            "kept",
        ):
            m.d.comb += unit[name].eq(plan[name])
        m.d.comb += [
            unit.tenant.eq(plan.tenant),
            unit.queries.eq(now),
            unit.first.eq(done == 0),
            result.tenant.eq(plan.tenant),
            result.queries.eq(now),
            result.value_dim.eq(plan.value_dim),
            result.form.eq(plan.form),
            result.output_scale.eq(plan.output_scale),
            result.line.eq(result_line),
            out.query_work.tenant.eq(plan.tenant),
            out.query_work.line.eq(query_line),
            out.query_work.lines.eq(lines_of_queries),
            out.query_work.list_lines.eq((plan.group + (1 << _LIST_SHIFT) - 1) >> _LIST_SHIFT),
            *(out.query_work[name].eq(plan[name]) for name in _LISTS),
            out.entry_run.tenant.eq(plan.tenant),
            out.entry_run.line.eq(entry_line),
            out.entry_run.count.eq(entry_count),
            out.page_work.eq(work),
        ]
