"""Jobs into passes."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import QUERY_CHOICES
from ..abi.descriptor import TREE_ROW_BYTES, WORD_BYTES
from ..abi.formats import BF16, QUERY_FORMATS
from ..abi.lines import LINE_BYTES
from ..abi.numerics import MAX_ROWS
from ..interfaces import LINE_ADDRESS_BITS, POSITION_BITS, ResultJob, UnitJob
from ..structs import among
from .records import QUERIES_BITS, QUERY_LINES_BITS, Plan, QueryWork, RangeWork

PASS = data.StructLayout(
    {
        "unit": UnitJob,
        "result": ResultJob,
        "query_work": QueryWork,
        "range_work": RangeWork,
    }
)
"""All that the blocks behind need to know of a pass."""

_LISTS = [name + part for name in ("codebook", "slopes", "sinks") for part in ("", "_line")]
_NOT_FOR_BOUNDS = (
    *(f"{rows}_{what}" for rows in "kv" for what in ("scale", "block", "pitch")),
    *("v_format", "softcap", "sinks", "slopes", "codebook", "latent", "causal", "window", "kept", "tree"),
)
"""What the rows of a summary have not, and what does not change a bound."""
_LIST_SHIFT = (LINE_BYTES // WORD_BYTES).bit_length() - 1
_MASK_SHIFT = (LINE_BYTES // TREE_ROW_BYTES).bit_length() - 1


class Passes(wiring.Component):
    """Splits jobs into passes of at most `queries` queries and works out where everything of a pass lies.

    Parameters
    ----------
    queries : queries that a unit keeps per pass: 1, 2, 4, 8 or 16.

    Members
    -------
    i : In(stream(Plan)) : good jobs.
    o : Out(stream(PASS)) : their passes, in order.

    A job that selects pages has as many passes of bounds first: of the same queries, over the summaries of
    the same pages, without lists and without results.

    Of the rows those that no query row can see, by causality and window, are left out; not where there is a
    tree, whose positions are not known here.

    Latency is 2 cycles; passes of a job follow each other every `interval_cycles`. With a tree a pass takes a
    cycle more, and one for each query row that it goes on.
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
        plan = self.i.payload
        done = Signal(QUERIES_BITS)  # first query of the pass
        now = Signal(5)  # queries of the pass
        entry_offset = Signal(plan.kv_head.shape().width + plan.entry_lines.shape().width, reset_less=True)
        query_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        result_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        rows = Signal(RangeWork, reset_less=True)
        bounds, bounded = Signal(), Signal()  # a pass of bounds; they are behind
        # query row and head of the pass's first query, and of the next one's
        row, head = Signal(plan.query_rows.shape()), Signal(plan.group.shape())
        next_row, next_head = Signal.like(row), Signal(len(head) + 1)
        after, before = (  # the position after the last query row's, and the first one that a window shows
            Signal(signed(POSITION_BITS + 1), name=name, reset_less=True) for name in ("after", "before")
        )

        self._describe(m, done, now, bounds, query_line, result_line, rows, row, next_row, next_head)
        shift = self.queries.bit_length() - 1

        with m.FSM():
            with m.State("START"):
                m.d.sync += [
                    bounds.eq(plan.select & ~bounded),
                    done.eq(0),
                    now.eq(self._at_most(plan.queries)),
                    entry_offset.eq(plan.kv_head * plan.entry_lines),
                    query_line.eq(plan.queries_line),
                    result_line.eq(plan.result_line),
                    after.eq(plan.position + plan.query_rows),
                    before.eq(plan.position - plan.window + 1),
                    row.eq(0),
                    head.eq(0),
                    next_row.eq(0),
                    next_head.eq(self._at_most(plan.queries)),
                ]
                with m.If(self.i.valid):
                    m.next = "ROWS"
            with m.State("ROWS"):
                line = plan.table_line + 1 + entry_offset
                m.d.sync += [
                    rows.tenant.eq(plan.tenant),
                    rows.listed.eq(plan.ranges),
                    rows.list_line.eq(plan.ranges_line),
                    rows.count.eq(plan.range_count),
                    rows.begin.eq(plan.row_begin),
                    rows.end.eq(plan.row_end),
                    rows.pages.eq(plan.pages),
                    # What lies beyond every address lies beyond the memory: the fabric refuses it.
                    rows.entry_line.eq(line_or_last(line)),
                    rows.selecting.bounds.eq(bounds),
                    rows.selecting.selects.eq(bounded),
                    rows.selecting.pages.eq(plan.select_pages),
                    rows.selecting.line.eq(plan.selected_line),
                    *_seen(plan, after, before, rows),
                ]
                m.next = "SEND"
                with m.If(plan.tree):
                    m.next = "COUNT"
            with m.State("COUNT"):
                with m.If(next_head >= plan.group):
                    m.d.sync += [next_head.eq(next_head - plan.group), next_row.eq(next_row + 1)]
                with m.Else():
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += [
                        done.eq(done + now),
                        query_line.eq(query_line + (plan.query_lines << shift)),
                        result_line.eq(result_line + (plan.result_lines << shift)),
                        row.eq(next_row),
                        head.eq(next_head),
                    ]
                    m.next = "NEXT"
            with m.State("NEXT"):
                following = self._at_most((plan.queries - done)[:QUERIES_BITS])
                m.d.sync += [now.eq(following), next_head.eq(head + following)]
                with m.If(done == plan.queries):
                    m.d.comb += self.i.ready.eq(~bounds)
                    m.d.sync += bounded.eq(bounds)
                    m.next = "START"
                with m.Elif(plan.tree):
                    m.next = "COUNT"
                with m.Else():
                    m.next = "SEND"
        return m

    def _at_most(self, left):
        return Mux(left > self.queries, self.queries, left)

    def _describe(self, m, done, now, bounds, query_line, result_line, rows, row, next_row, next_head):
        """The pass that stands in the registers, as the blocks behind want it."""
        plan, out = self.i.payload, self.o.payload
        unit, result = out.unit, out.result
        lines_of_queries = Signal(QUERY_LINES_BITS)
        m.d.comb += lines_of_queries.eq(plan.query_lines * now)
        position_lines = (plan.query_rows + (1 << _LIST_SHIFT) - 1) >> _LIST_SHIFT
        last_row = next_row - (next_head == 0)
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
            "tree",
            "query_rows",
        ):
            m.d.comb += unit[name].eq(plan[name])
        m.d.comb += [
            unit.bounds.eq(bounds),
            unit.last.eq(done + now == plan.queries),
            unit.tenant.eq(plan.tenant),
            unit.queries.eq(now),
            unit.first.eq(done == 0),
            unit.own_row.eq(plan.row_end - plan.query_rows),
            result.tenant.eq(plan.tenant),
            result.queries.eq(now),
            result.value_dim.eq(plan.value_dim),
            result.form.eq(plan.form),
            result.output_scale.eq(plan.output_scale),
            result.line.eq(result_line),
            out.query_work.tenant.eq(plan.tenant),
            out.query_work.line.eq(query_line),
            out.query_work.lines.eq(lines_of_queries),
            out.query_work.group.eq(plan.group),
            out.query_work.query_rows.eq(plan.query_rows),
            out.query_work.list_lines.eq((plan.group + (1 << _LIST_SHIFT) - 1) >> _LIST_SHIFT),
            *(out.query_work[name].eq(plan[name]) for name in _LISTS),
            out.query_work.tree.eq(plan.tree),
            out.query_work.tree_line.eq(plan.tree_line),
            out.query_work.position_lines.eq(position_lines),
            out.query_work.masks_line.eq(plan.tree_line + position_lines + (row >> _MASK_SHIFT)),
            out.query_work.mask_lines.eq((last_row >> _MASK_SHIFT) - (row >> _MASK_SHIFT) + 1),
            out.range_work.eq(rows),
            out.range_work.selecting.first.eq((done == 0) & (rows.selecting.bounds | rows.selecting.selects)),
            result.fault.eq(bounds),
        ]
        codes = [form.code for form in QUERY_FORMATS.values()]
        with m.If(bounds):
            m.d.comb += [
                *(unit[name].eq(0) for name in _NOT_FOR_BOUNDS),
                *(out.query_work[name].eq(0) for name in ("codebook", "slopes", "sinks", "tree")),
                unit.k_format.eq(Mux(among(plan.k_format, codes), plan.k_format, BF16.code)),
                unit.value_dim.eq(1),
            ]


def line_or_last(line):
    """A line's address, or the last one there is for one beyond."""
    return Mux(line >> LINE_ADDRESS_BITS, (1 << LINE_ADDRESS_BITS) - 1, line)


def _seen(plan, after, before, rows):
    """Statements that say which rows some query row can see."""
    causal = plan.causal & ~plan.tree
    end = Mux(causal, _row(after, plan.row_end), plan.row_end)
    apart = causal & plan.window.any() & (before > plan.kept)
    return [
        rows.kept_end.eq(Mux(apart, Mux(plan.kept < end, plan.kept, end), 0)),
        rows.tail_begin.eq(Mux(apart, _row(before, MAX_ROWS), 0)),
        rows.tail_end.eq(end),
    ]


def _row(position, most):
    """A position as a row from 0 to `most`."""
    return Mux(position < 0, 0, Mux(position > most, most, position))
