"""The end of a pass: its sums leave as partial beats while the next pass streams."""

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
from .shape import BANKS

BEATS = 16
"""Beats that are under way to `partials` or wait there."""


class Drain(wiring.Component):
    """Sends a pass's denominators, lanes and end, a beat per cycle at best; waits when `partials` does.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    ended : In : the bank's pass has no more lines; passes end in turn.
    freed : Out : the bank's partial has left.
    passes : In : parameters of each bank's pass.
    taken, taken_value, taken_bank, taken_fault, taken_page : In : a line was taken, as of `Issue`.
    denominator_reads, denominator_valid, denominator, query_nan : the denominators, as of `Scoring`.
    lane_reads, lanes_valid, lanes_read : the way to the lanes' sums, as of `Issue` and `Array`.
    partials : Out(stream) : partial beats.
    """

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "ended": In(BANKS),
                "freed": Out(BANKS),
                "passes": In(data.ArrayLayout(pass_parameters(shape), BANKS)),
                "taken": In(1),
                "taken_value": In(1),
                "taken_bank": In(1),
                "taken_fault": In(Fault),
                "taken_page": In(PAGE_BITS),
                "denominator_reads": Out(stream.Signature(denominator_read(shape.queries))),
                "denominator_valid": In(1),
                "denominator": In(State),
                "query_nan": In(1),
                "lane_reads": Out(stream.Signature(sums_read(shape))),
                "lanes_valid": In(1),
                "lanes_read": In(data.ArrayLayout(LanePartial, shape.finish_lanes)),
                "partials": Out(stream.Signature(partial_beat(shape.finish_lanes))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.beats = beats = Queue(shape=partial_beat(self.shape.finish_lanes), depth=BEATS)
        wiring.connect(m, beats.o, wiring.flipped(self.partials))
        under_way = Signal(range(BEATS + 1))
        arrived = Signal()
        asked = Signal()
        m.d.comb += arrived.eq(self.denominator_valid | self.lanes_valid)
        m.d.sync += under_way.eq(under_way + asked - arrived)
        space = Signal()
        m.d.sync += space.eq(under_way + beats.level < BEATS - 2)

        # registers: a line's fate is known late in the cycle, and the end of a pass is far
        taken = {
            name: Signal.like(getattr(self, name), name=f"{name}_before")
            for name in ("taken", "taken_value", "taken_bank", "taken_fault", "taken_page")
        }
        m.d.sync += [register.eq(getattr(self, name)) for name, register in taken.items()]
        records = [_PassRecord() for _ in range(BANKS)]
        for bank, record in enumerate(records):
            m.submodules[f"record_{bank}"] = record
            m.d.comb += [
                record.taken.eq(taken["taken"] & (taken["taken_bank"] == bank)),
                record.value.eq(taken["taken_value"]),
                record.fault.eq(taken["taken_fault"]),
                record.fault_page.eq(taken["taken_page"]),
                record.clear.eq(self.freed[bank]),
            ]

        waiting = Signal(BANKS)
        m.d.sync += waiting.eq((waiting | self.ended) & ~self.freed)
        bank = Signal()
        now = Signal(pass_parameters(self.shape))
        m.d.comb += now.eq(Mux(bank, self.passes[1], self.passes[0]))

        def of_bank(name):
            return Mux(bank, getattr(records[1], name), getattr(records[0], name))

        query = Signal(range(self.shape.queries))
        last_query = query + 1 == now.queries
        groups = self.shape.groups
        beat = Signal(range(self.shape.row_lines * groups))
        last_beat = Signal.like(beat, reset_less=True)
        m.d.sync += last_beat.eq((now.value_dim - 1) >> exact_log2(self.shape.finish_lanes))
        m.d.comb += [
            self.denominator_reads.payload.bank.eq(bank),
            self.denominator_reads.payload.query.eq(query),
            self.lane_reads.payload.bank.eq(bank),
            self.lane_reads.payload.query.eq(query),
            self.lane_reads.payload.line.eq(beat >> exact_log2(groups)),
            self.lane_reads.payload.group.eq(beat[: exact_log2(groups)]),
        ]
        beat_now = beats.i.payload
        with m.If(self.denominator_valid):
            m.d.comb += [
                beat_now.kind.eq(BeatKind.DENOMINATOR),
                beat_now.lanes[0].state.eq(self.denominator),
                beat_now.lanes[0].flags.eq(self.query_nan),
                beats.i.valid.eq(1),
            ]
        with m.Else():
            m.d.comb += [beat_now.kind.eq(BeatKind.LANES), beats.i.valid.eq(self.lanes_valid)]
            for index in range(self.shape.finish_lanes):
                m.d.comb += [
                    beat_now.lanes[index].eq(self.lanes_read[index]),
                    # a pass without rows has left the sums of an earlier one
                    beat_now.lanes[index].state.some.eq(self.lanes_read[index].state.some & of_bank("some")),
                    beat_now.lanes[index].flags.eq(Mux(of_bank("some"), self.lanes_read[index].flags, 0)),
                ]
        m.d.comb += [
            beat_now.status.eq(of_bank("status")),
            beat_now.page.eq(of_bank("page")),
            beat_now.lines.eq(of_bank("lines")),
        ]
        with m.FSM():
            with m.State("idle"):
                with m.If(Mux(bank, waiting[1], waiting[0])):
                    m.next = "denominators"
            with m.State("denominators"):
                m.d.comb += self.denominator_reads.valid.eq(space)
                with m.If(space & self.denominator_reads.ready):
                    m.d.comb += asked.eq(1)
                    m.d.sync += query.eq(Mux(last_query, 0, query + 1))
                    with m.If(last_query):
                        m.next = "denominators leave"
            with m.State("denominators leave"):
                with m.If(under_way == 0):
                    m.next = "lanes"
            with m.State("lanes"):
                m.d.comb += self.lane_reads.valid.eq(space)
                with m.If(space & self.lane_reads.ready):
                    m.d.comb += asked.eq(1)
                    m.d.sync += beat.eq(Mux(beat == last_beat, 0, beat + 1))
                    with m.If(beat == last_beat):
                        m.d.sync += query.eq(Mux(last_query, 0, query + 1))
                        with m.If(last_query):
                            m.next = "lanes leave"
            with m.State("lanes leave"):
                with m.If((under_way == 0) & beats.i.ready):
                    m.next = "end"
            with m.State("end"):
                m.d.comb += [beat_now.kind.eq(BeatKind.END), beats.i.valid.eq(1)]
                with m.If(beats.i.ready):
                    m.d.comb += self.freed.eq(Mux(bank, 2, 1))
                    m.d.sync += bank.eq(~bank)
                    m.next = "idle"
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
            m.d.sync += [self.some.eq(self.some | self.value), self.lines.eq(self.lines + 1)]
            with m.If((self.status == Status.OK) & (self.fault != Fault.NONE)):
                m.d.sync += [
                    self.status.eq(Mux(self.fault == Fault.POISON, Status.POISON, Status.PAGE_DENIED)),
                    self.page.eq(self.fault_page),
                ]
        return m
