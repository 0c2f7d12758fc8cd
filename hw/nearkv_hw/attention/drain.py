"""The end of a pass: its sums leave as partial beats while later passes stream."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.descriptor import Status
from ..common.queue import Queue
from ..interfaces import PAGE_BITS, BeatKind, Fault, LanePartial, State, partial_beat
from .issue import sums_read
from .loader import pass_parameters
from .scoring import denominator_read
from .shape import BANKS, PASSES, chosen

BEATS = 64
"""Beats that are under way to `partials` or wait there: units wait for each other where partials are merged,
and each reads its sums while it streams K."""


class Drain(wiring.Component):
    """Sends a pass's denominators, lanes and end, a beat per cycle at best; waits when `partials` does.

    Denominators leave as soon as the pass's last row is scored, while its last V still streams.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    row_ended : In : the pass of that number has its denominators, as of `Scoring`.
    ended : In : it has no more lines; passes end in turn.
    drained : Out : the last of the bank's sums are being read: what enters the array next may change them.
    freed : Out : the pass's partial has left.
    loaded : In : passes that stream or wait to.
    passes : In : parameters of the passes.
    taken, taken_value, taken_number, taken_fault, taken_page : In : a line was taken, as of `Issue`.
    denominator_reads, denominator_valid, denominator, query_nan : the denominators, as of `Scoring`.
    lane_reads, urgent, lanes_valid, lanes_read : the way to the lanes' sums, as of `Issue` and `Array`.
    partials : Out(stream) : partial beats.
    """

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "row_ended": In(PASSES),
                "ended": In(PASSES),
                "drained": Out(BANKS),
                "freed": Out(PASSES),
                "loaded": In(PASSES),
                "passes": In(data.ArrayLayout(pass_parameters(shape), PASSES)),
                "taken": In(1),
                "taken_value": In(1),
                "taken_number": In(range(PASSES)),
                "taken_fault": In(Fault),
                "taken_page": In(PAGE_BITS),
                "denominator_reads": Out(stream.Signature(denominator_read(shape.queries))),
                "denominator_valid": In(1),
                "denominator": In(State),
                "query_nan": In(1),
                "lane_reads": Out(stream.Signature(sums_read(shape))),
                "urgent": Out(1),
                "lanes_valid": In(1),
                "lanes_read": In(data.ArrayLayout(LanePartial, shape.finish_lanes)),
                "partials": Out(stream.Signature(partial_beat(shape.finish_lanes))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.denominators = denominators = Denominators(queries=self.shape.queries)
        wiring.connect(m, denominators.reads, wiring.flipped(self.denominator_reads))
        m.d.comb += [
            denominators.row_ended.eq(self.row_ended),
            denominators.valid.eq(self.denominator_valid),
            denominators.state.eq(self.denominator),
            denominators.nan.eq(self.query_nan),
        ]
        for number in range(PASSES):
            m.d.comb += denominators.counts[number].eq(self.passes[number].queries)

        # the pass that leaves
        number = Signal(range(PASSES))
        own = Signal(PASSES, init=1)
        now = Signal(pass_parameters(self.shape))
        ended = Signal(PASSES)
        m.d.comb += now.eq(chosen(self.passes, number))
        m.d.sync += [
            ended.eq((ended | self.ended) & ~self.freed),
            # the next pass of the bank has begun
            self.urgent.eq((self.loaded.rotate_right(BANKS) & own).any()),
        ]
        records = self._records(m)

        def recorded(name):
            return chosen([getattr(record, name) for record in records], number)

        # places in the queue of beats are set aside before anything is read
        groups = self.shape.groups
        depth = max(BEATS, 2 * groups)
        m.submodules.beats = beats = Queue(shape=partial_beat(self.shape.finish_lanes), depth=depth)
        wiring.connect(m, beats.o, wiring.flipped(self.partials))
        promised = Signal(range(depth + 1))
        groups_last = Signal(range(groups))  # beats of a step, less one
        m.d.sync += groups_last.eq(((1 << now.v.step_shift) >> exact_log2(self.shape.finish_lanes)) - 1)
        line_asked, one_pushed, one_dropped, space = Signal(), Signal(), Signal(), Signal()
        m.d.sync += [
            promised.eq(
                promised
                + Mux(line_asked, groups_last + 1, one_pushed)
                - (beats.o.valid & beats.o.ready)
                - one_dropped
            ),
            space.eq(promised <= depth - groups - 2),  # what was set aside in the last two cycles
        ]

        # reads of lines, as far apart as their beats take
        query = Signal(range(self.shape.queries))
        last_query = query + 1 == now.queries
        line = Signal(range(self.shape.row_lines))
        last_line = now.v.steps_last
        pace = Signal(range(groups))
        reading = Signal()
        m.d.comb += [
            self.lane_reads.payload.bank.eq(number[: exact_log2(BANKS)]),
            self.lane_reads.payload.query.eq(query),
            self.lane_reads.payload.line.eq(line),
            self.lane_reads.payload.groups.eq(groups_last),
            self.lane_reads.payload.abreast.eq(now.v.abreast),
            self.lane_reads.valid.eq(reading & space & (pace == 0)),
            line_asked.eq(self.lane_reads.valid & self.lane_reads.ready),
        ]
        with m.If(line_asked):
            m.d.sync += pace.eq(Mux(groups_last == 0, 1, groups_last))
        with m.Elif(pace != 0):
            m.d.sync += pace.eq(pace - 1)

        # what comes of them; lanes beyond value_dim are dropped
        beat = Signal(range(self.shape.max_dim // self.shape.finish_lanes))
        last_beat = Signal.like(beat, reset_less=True)
        lines_left = Signal(range(self.shape.queries * self.shape.row_lines + 1))
        group, step = Signal(range(groups)), Signal(range(self.shape.row_lines))
        group_last = group == groups_last
        kept = Signal()
        m.d.sync += last_beat.eq((now.value_dim - 1) >> exact_log2(self.shape.finish_lanes))
        m.d.comb += [
            kept.eq(self.lanes_valid & (beat <= last_beat)),
            one_dropped.eq(self.lanes_valid & ~kept),
        ]
        with m.If(self.lanes_valid):
            m.d.sync += [group.eq(Mux(group_last, 0, group + 1)), beat.eq(beat + 1)]
            with m.If(group_last):
                m.d.sync += step.eq(step + 1)
                with m.If(step == last_line):
                    m.d.sync += [step.eq(0), beat.eq(0)]
        m.d.sync += lines_left.eq(lines_left + line_asked - (self.lanes_valid & group_last))

        beat_now = beats.i.payload
        m.d.comb += [
            beat_now.kind.eq(BeatKind.LANES),
            beats.i.valid.eq(kept | one_pushed),
            beat_now.status.eq(recorded("status")),
            beat_now.page.eq(recorded("page")),
            beat_now.lines.eq(recorded("lines")),
        ]
        some = recorded("some")
        for lane, read in zip(beat_now.lanes, self.lanes_read, strict=True):
            m.d.comb += [
                lane.eq(read),
                # a pass without rows has left the sums of an earlier one
                lane.state.some.eq(read.state.some & some),
                lane.flags.eq(Mux(some, read.flags, 0)),
            ]
        with m.FSM():
            with m.State("denominators"):
                m.d.comb += [
                    beat_now.kind.eq(BeatKind.DENOMINATOR),
                    beat_now.lanes[0].state.eq(denominators.o.payload.state),
                    beat_now.lanes[0].flags.eq(denominators.o.payload.nan),
                    denominators.o.ready.eq(space),
                    one_pushed.eq(denominators.o.valid & space),
                ]
                with m.If(one_pushed):
                    m.d.sync += query.eq(Mux(last_query, 0, query + 1))
                    with m.If(last_query):
                        m.next = "last V"
            with m.State("last V"):
                with m.If((ended & own).any()):
                    m.next = "lanes"
            with m.State("lanes"):
                m.d.comb += reading.eq(1)
                with m.If(line_asked):
                    m.d.sync += line.eq(Mux(line == last_line, 0, line + 1))
                    with m.If(line == last_line):
                        m.d.sync += query.eq(Mux(last_query, 0, query + 1))
                        with m.If(last_query):
                            m.d.comb += self.drained.eq(1 << number[: exact_log2(BANKS)])
                            m.next = "end"
            with m.State("end"):
                m.d.comb += [
                    one_pushed.eq((lines_left == 0) & space),
                    self.freed.eq(Mux(one_pushed, own, 0)),
                ]
                with m.If(one_pushed):
                    m.d.comb += beat_now.kind.eq(BeatKind.END)
                    m.d.sync += [number.eq(number + 1), own.eq(own.rotate_left(1))]
                    m.next = "denominators"
        return m

    def _records(self, m):
        """What each pass has met; from registers: a line's fate is known late in the cycle."""
        taken = {
            name: Signal.like(getattr(self, name), name=f"{name}_before")
            for name in ("taken", "taken_value", "taken_number", "taken_fault", "taken_page")
        }
        m.d.sync += [register.eq(getattr(self, name)) for name, register in taken.items()]
        records = [_PassRecord() for _ in range(PASSES)]
        for number, record in enumerate(records):
            m.submodules[f"record_{number}"] = record
            m.d.comb += [
                record.taken.eq(taken["taken"] & (taken["taken_number"] == number)),
                record.value.eq(taken["taken_value"]),
                record.fault.eq(taken["taken_fault"]),
                record.fault_page.eq(taken["taken_page"]),
                record.clear.eq(self.freed[number]),
            ]
        return records


class Denominator(data.Struct):
    """A query's denominator, and whether its result is NaN."""

    state: State
    nan: 1


class Denominators(wiring.Component):
    """Fetches the denominators of passes in turn, ahead of their lanes.

    Parameters
    ----------
    queries : query heads kept.

    Members
    -------
    row_ended, counts : In : the pass of that number has its denominators; how many.
    reads, valid, state, nan : as of `Scoring`.
    o : Out(stream) : denominators, one per query.
    """

    def __init__(self, *, queries):
        self.queries = queries
        super().__init__(
            {
                "row_ended": In(PASSES),
                "counts": In(data.ArrayLayout(queries.bit_length(), PASSES)),
                "reads": Out(stream.Signature(denominator_read(queries))),
                "valid": In(1),
                "state": In(State),
                "nan": In(1),
                "o": Out(stream.Signature(Denominator)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = Queue(shape=Denominator, depth=self.queries)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        m.d.comb += [
            queue.i.valid.eq(self.valid),
            queue.i.payload.state.eq(self.state),
            queue.i.payload.nan.eq(self.nan),
        ]
        number = Signal(range(PASSES))
        own = Signal(PASSES, init=1)
        ready = Signal(PASSES)
        query = Signal(range(self.queries))
        asking = Signal()
        last = query + 1 == chosen(self.counts, number)
        free = Signal(range(self.queries + 1), init=self.queries)
        asked = Signal()
        left = queue.o.valid & queue.o.ready
        m.d.comb += [
            self.reads.payload.number.eq(number),
            self.reads.payload.query.eq(query),
            self.reads.valid.eq(asking & (free != 0)),
            asked.eq(self.reads.valid & self.reads.ready),
        ]
        m.d.sync += [
            ready.eq((ready | self.row_ended) & ~Mux(asked & last, own, 0)),
            asking.eq((ready & own).any() & ~(asked & last)),
            free.eq(free - asked + left),
        ]
        with m.If(asked):
            m.d.sync += query.eq(Mux(last, 0, query + 1))
            with m.If(last):
                m.d.sync += [number.eq(number + 1), own.eq(own.rotate_left(1))]
        return m


class _PassRecord(wiring.Component):
    """What a pass has met: lines, rows, and the first fault."""

    taken: In(1)
    value: In(1)
    fault: In(Fault)
    fault_page: In(PAGE_BITS)
    clear: In(1)
    some: Out(1)
    status: Out(8)
    page: Out(PAGE_BITS)
    lines: Out(32)

    def elaborate(self, platform):
        m = Module()
        with m.If(self.clear):
            m.d.sync += [
                self.some.eq(0),
                self.status.eq(Status.OK),
                self.page.eq(0),
                self.lines.eq(0),
            ]
        with m.Elif(self.taken):
            m.d.sync += [self.some.eq(1), self.lines.eq(self.lines + 1)]
            with m.If((self.status == Status.OK) & (self.fault != Fault.NONE)):
                m.d.sync += [
                    self.status.eq(Mux(self.fault == Fault.POISON, Status.POISON, Status.PAGE_DENIED)),
                    self.page.eq(self.fault_page),
                ]
        return m
