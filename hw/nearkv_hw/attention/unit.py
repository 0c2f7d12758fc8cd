"""The attention unit beside a memory channel: streams K and V rows, and sends exact partial sums."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..common.buffer import Buffer
from ..common.queue import Queue
from ..interfaces import Bound, PageItem, QueryLine, ReadResponse, UnitJob, UnitMemory, partial_beat
from .array import Array
from .drain import Drain
from .issue import Issue
from .loader import Loader
from .scoring import Scoring
from .shape import MAX_DIM, PASSES, UnitShape
from .streamer import LineKind, Streamer

COUNTER_BITS = 64
STAGES = data.StructLayout({"asked": 1, "loaded": 1, "first": 1, "ended": 1})
"""Stages of a pass that only the unit sees; `nearkv_hw.timeline` says what each is."""
COUNTERS = ("unit_lines", "unit_busy", "unit_no_data", "unit_wait", "partial_beats")


class AttentionUnit(wiring.Component):
    """Sums K and V rows of passes, one line per cycle; see docs/numerics.md sections 2 to 5 for the sums.

    Parameters
    ----------
    lanes, line_lanes : as of `UnitShape`; with fewer than 32 `line_lanes` only the low part of the memory's
        line is taken.
    queries : query heads kept per pass.
    finish_lanes : lanes of a partial beat.
    outstanding : lines asked for and not yet taken, at most; for full rate at least the memory's latency
        plus 8. They wait behind the memory port: the unit itself holds two.
    weight_pipes : score and weight pipes; by default one for four queries, which keeps pace with rows of
        two lines of K and two of V. A row takes them `row_cycles`: rows of one line each (up to 32 elements)
        run at half rate, unless there is a pipe for two queries.
    max_dim : largest head_dim and value_dim, as of `UnitShape`.

    Members
    -------
    jobs, queries, pages : In(stream) : passes, their query lines, their pages.
    memory : Out(UnitMemory) : the private read port.
    partials : Out(stream) : partial beats, passes in order; without meaning, but for the end, in passes of
        bounds.
    bounds : Out(stream(Bound)) : in these a bound for every page, in their order.
    unit_lines, unit_busy, unit_no_data, unit_wait, partial_beats : Out(64) : counters, see `abi.window`.
    stages : Out(STAGES) : set in the cycle in which a pass reaches a stage.

    The way of a line: `Streamer` asks for it, `Issue` takes it when queries (K) or weights (V) are there,
    and from there on nothing waits: `Array` multiplies and sums, rows of dot products go through `Scoring`,
    whose weights come back to the array with the row's V. Up to four passes are under way: `Loader` fills one
    bank of queries while the other is in use, `Drain` empties one bank of sums while the other is filled.
    Operations that meet in a memory (query lines, sinks, reads of sums) take the lines' own pipelines, so
    that their order is the order in which they entered.
    """

    def __init__(
        self,
        *,
        lanes=32,
        line_lanes=None,
        queries=4,
        finish_lanes=2,
        outstanding=64,
        weight_pipes=None,
        max_dim=MAX_DIM,
    ):
        if not isinstance(outstanding, int) or outstanding < 4:
            raise ValueError(f"outstanding must be an integer of at least 4, not {outstanding!r}")
        self.shape = UnitShape(
            lanes=lanes, line_lanes=line_lanes, queries=queries, finish_lanes=finish_lanes, max_dim=max_dim
        )
        self.outstanding = outstanding
        self.weight_pipes = -(-queries // 4) if weight_pipes is None else weight_pipes
        pipes = self.weight_pipes
        if not isinstance(pipes, int) or pipes < 1 or queries % pipes:
            raise ValueError(f"weight_pipes must divide queries={queries}, not {pipes!r}")
        super().__init__(
            {
                "jobs": In(stream.Signature(UnitJob)),
                "queries": In(stream.Signature(QueryLine)),
                "pages": In(stream.Signature(PageItem)),
                "memory": Out(UnitMemory()),
                "partials": Out(stream.Signature(partial_beat(finish_lanes))),
                "bounds": Out(stream.Signature(Bound)),
                **{name: Out(COUNTER_BITS) for name in COUNTERS},
                "stages": Out(STAGES),
            }
        )

    @property
    def row_cycles(self):
        """Cycles that a row of all query heads occupies the weight pipes; its lines take at least as long."""
        return self.shape.queries // self.weight_pipes

    def elaborate(self, platform):
        m = Module()
        shape = self.shape
        m.submodules.array = array = Array(shape=shape)
        m.submodules.scoring = scoring = Scoring(
            queries=shape.queries, pipes=self.weight_pipes, rows=shape.rows_abreast
        )
        m.submodules.loader = loader = Loader(shape=shape)
        m.submodules.streamer = streamer = Streamer(shape=shape, outstanding=self.outstanding)
        m.submodules.issue = issue = Issue(shape=shape, outstanding=self.outstanding)
        m.submodules.drain = drain = Drain(shape=shape)
        m.submodules.jobs = jobs = Queue(shape=UnitJob, depth=2)
        m.submodules.query_lines = query_lines = Queue(shape=QueryLine, depth=4)
        m.submodules.pages = pages = Queue(shape=PageItem, depth=4)
        m.submodules.lines = lines = Buffer(shape=ReadResponse)
        flipped = wiring.flipped
        wiring.connect(m, flipped(self.jobs), jobs.i)
        wiring.connect(m, flipped(self.queries), query_lines.i)
        wiring.connect(m, flipped(self.pages), pages.i)
        wiring.connect(m, jobs.o, loader.jobs)
        wiring.connect(m, query_lines.o, loader.queries)
        wiring.connect(m, pages.o, streamer.pages)
        wiring.connect(m, streamer.requests, flipped(self.memory.request))
        wiring.connect(m, streamer.tags, issue.tags)
        wiring.connect(m, flipped(self.memory.response), lines.i)
        wiring.connect(m, lines.o, issue.lines)
        wiring.connect(m, loader.loads, issue.loads)
        wiring.connect(m, loader.openings, scoring.openings)
        wiring.connect(m, streamer.rows, scoring.blocks)
        wiring.connect(m, drain.denominator_reads, scoring.reads)
        wiring.connect(m, drain.lane_reads, issue.reads)
        wiring.connect(m, drain.partials, flipped(self.partials))
        wiring.connect(m, scoring.bounds, flipped(self.bounds))
        m.d.comb += [
            loader.freed.eq(drain.freed),
            loader.k_ended.eq(issue.k_ended),
            streamer.start.eq(loader.start),
            streamer.loaded.eq(loader.loaded),
            issue.loaded.eq(loader.loaded),
            issue.drained.eq(drain.drained),
            issue.urgent.eq(drain.urgent),
            issue.passes.eq(loader.passes),
            issue.row_taken.eq(scoring.row_taken),
            issue.row_weighed.eq(scoring.row_weighed),
            array.operation.eq(issue.operation),
            array.line.eq(issue.line),
            array.book.eq(loader.book),
            array.scales.eq(issue.scales),
            array.scale_kind.eq(issue.scale_kind),
            array.weights.eq(scoring.weights),
            scoring.parameters.eq(loader.parameters),
            scoring.tree.eq(loader.tree),
            scoring.slot.eq(issue.slot),
            scoring.abreast.eq(issue.abreast),
            scoring.row_valid.eq(array.row_valid),
            scoring.row.eq(array.row),
            drain.row_ended.eq(scoring.row_ended),
            drain.ended.eq(issue.ended),
            drain.loaded.eq(loader.loaded),
            drain.passes.eq(loader.passes),
            drain.taken.eq(issue.taken),
            drain.taken_value.eq(issue.taken_value),
            drain.taken_number.eq(issue.taken_number),
            drain.taken_fault.eq(issue.taken_fault),
            drain.taken_page.eq(issue.taken_page),
            drain.denominator_valid.eq(scoring.denominator_valid),
            drain.denominator.eq(scoring.denominator),
            drain.query_nan.eq(scoring.query_nan),
            drain.lanes_valid.eq(array.read_valid),
            drain.lanes_read.eq(array.lanes_read),
        ]
        for number in range(PASSES):
            m.d.comb += [
                *_row_lines(streamer.geometry[number], loader.passes[number]),
                scoring.factors[number].eq(loader.passes[number].factor),
                scoring.capped[number].eq(loader.passes[number].capped),
                scoring.caps[number].eq(loader.passes[number].cap),
                scoring.sights[number].eq(loader.passes[number].sight),
                scoring.biased[number].eq(loader.passes[number].biased),
                scoring.bounded[number].eq(loader.passes[number].bounds),
                scoring.counts[number].eq(loader.passes[number].queries),
            ]
        self._tell_stages(m, loader, streamer, issue)

        busy = Signal()
        m.d.comb += busy.eq(streamer.busy | streamer.tags.valid)
        for name, event in (
            ("unit_lines", issue.taken),
            ("unit_busy", busy),
            ("unit_no_data", busy & ~lines.o.valid),
            ("unit_wait", issue.waiting),
            ("partial_beats", self.partials.valid & self.partials.ready),
        ):
            counter = getattr(self, name)
            counted = Signal(name=f"{name}_counted")  # a register: the event is late, the counter long
            m.d.sync += [counted.eq(event), counter.eq(counter + counted)]
        return m

    def _tell_stages(self, m, loader, streamer, issue):
        """`stages`, from what the blocks do anyway."""
        starting, k_first = Signal(), Signal(init=1)
        asked = self.memory.request.valid & self.memory.request.ready
        with m.If(streamer.starts):
            m.d.sync += starting.eq(1)
        with m.Elif(asked):
            m.d.sync += starting.eq(0)
        with m.If(issue.tags.valid & issue.tags.ready):
            with m.If(issue.tags.payload.kind == LineKind.K_END):
                m.d.sync += k_first.eq(1)
            with m.Elif(issue.tags.payload.kind == LineKind.K):
                m.d.sync += k_first.eq(0)
        m.d.comb += [
            self.stages.asked.eq(starting & asked),
            self.stages.loaded.eq(loader.openings.valid & loader.openings.ready),
            self.stages.first.eq(issue.taken & ~issue.taken_value & k_first),
            self.stages.ended.eq(issue.ended.any()),
        ]


def _row_lines(geometry, parameters):
    """Statements that give the order of lines what it depends on."""
    yield geometry.tenant.eq(parameters.tenant)
    yield geometry.latent.eq(parameters.latent)
    yield geometry.bounds.eq(parameters.bounds.some)
    yield geometry.abreast.eq(parameters.k.abreast.any())
    for kind in ("k", "v"):
        codes = parameters[kind]
        yield geometry[kind].last.eq(codes.lines_last)
        yield geometry[kind].pitch.eq(codes.pitch)
        yield geometry[kind].scaled.eq(codes.scale.any())
        yield geometry[kind].scale_shift.eq(codes.scale_shift)
