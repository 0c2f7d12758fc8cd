"""Sorts the merged stream: what is to be finished, what is written as it is, and how a pass ended."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..interfaces import BeatKind, LanePartial, ResultJob, partial_beat
from .shapes import Denominator, PassEnd, check_finish_lanes, finish_beat


class Distribute(wiring.Component):
    """Sends every merged beat where its pass wants it.

    Parameters
    ----------
    finish_lanes : lanes of a beat, 2, 4 or 8.

    Members
    -------
    jobs : In(stream(ResultJob)) : one per pass; handed on to `started` when the pass before it has ended.
    merged : In(stream(partial_beat)) : taken once the pass's job is known.
    started : Out(stream(ResultJob)) : to the writer.
    denominators : Out(stream(Denominator)) : every query's, to the writer.
    finish : Out(stream(finish_beat)) : denominators and lanes of passes whose lanes are finished.
    partials : Out(stream(LanePartial array)) : lanes of passes that ask for partials.
    ends : Out(stream(PassEnd)) : one per pass, after everything else.

    Of a pass with a fault only the end is sent on. Latency is zero cycles (`latency_cycles`), throughput one
    beat per cycle, and one cycle between passes. A beat waits until every receiver has taken it.
    """

    latency_cycles = 0

    def __init__(self, *, finish_lanes):
        check_finish_lanes(finish_lanes)
        self.finish_lanes = finish_lanes
        super().__init__(
            {
                "jobs": In(stream.Signature(ResultJob)),
                "merged": In(stream.Signature(partial_beat(finish_lanes))),
                "started": Out(stream.Signature(ResultJob)),
                "denominators": Out(stream.Signature(Denominator)),
                "finish": Out(stream.Signature(finish_beat(finish_lanes))),
                "partials": Out(stream.Signature(data.ArrayLayout(LanePartial, finish_lanes))),
                "ends": Out(stream.Signature(PassEnd)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        beat = self.merged.payload
        job = self.jobs.payload
        active = Signal()
        form = Signal(OutputForm, reset_less=True)
        output_scale = Signal(32, reset_less=True)
        fault = Signal(reset_less=True)
        last_beat = Signal(10, reset_less=True)
        position = Signal(10, reset_less=True)  # of the beat in its query

        m.d.comb += [
            self.started.payload.eq(job),
            self.started.valid.eq(self.jobs.valid & ~active),
            self.jobs.ready.eq(self.started.ready & ~active),
        ]
        with m.If(~active):
            m.d.sync += active.eq(self.jobs.valid & self.started.ready)
            with m.If(self.jobs.valid):
                m.d.sync += [
                    form.eq(job.form),
                    output_scale.eq(job.output_scale),
                    fault.eq(job.fault),
                    last_beat.eq((job.value_dim - 1) >> (self.finish_lanes.bit_length() - 1)),
                    position.eq(0),
                ]

        # A denominator goes to the writer and to be divided by; neither waits for the other.
        written = Signal()
        divided = Signal()
        valid = Signal()
        partial = form == OutputForm.PARTIAL
        first_lane = beat.lanes[0]
        m.d.comb += [
            valid.eq(self.merged.valid & active),
            self.denominators.payload.state.eq(first_lane.state),
            self.denominators.payload.nan.eq(first_lane.flags[0]),
            self.finish.payload.denominator.eq(beat.kind == BeatKind.DENOMINATOR),
            self.finish.payload.first.eq(position == 0),
            self.finish.payload.form.eq(form),
            self.finish.payload.output_scale.eq(output_scale),
            self.finish.payload.lanes.eq(beat.lanes),
            self.partials.payload.eq(beat.lanes),
            self.ends.payload.status.eq(beat.status),
            self.ends.payload.page.eq(beat.page),
            self.ends.payload.lines.eq(beat.lines),
        ]
        with m.If(beat.kind == BeatKind.END):
            m.d.comb += [self.ends.valid.eq(valid), self.merged.ready.eq(active & self.ends.ready)]
            with m.If(valid & self.ends.ready):
                m.d.sync += active.eq(0)
        with m.Elif(fault):
            m.d.comb += self.merged.ready.eq(active)
        with m.Elif(beat.kind == BeatKind.DENOMINATOR):
            done = Signal()
            m.d.comb += [
                self.denominators.valid.eq(valid & ~written),
                self.finish.valid.eq(valid & ~divided & ~partial),
                done.eq((written | self.denominators.ready) & (divided | partial | self.finish.ready)),
                self.merged.ready.eq(active & done),
            ]
            with m.If(valid):
                m.d.sync += [
                    written.eq(~done & (written | self.denominators.ready)),
                    divided.eq(~done & (divided | self.finish.ready)),
                ]
        with m.Else():
            with m.If(partial):
                m.d.comb += [
                    self.partials.valid.eq(valid),
                    self.merged.ready.eq(active & self.partials.ready),
                ]
            with m.Else():
                m.d.comb += [self.finish.valid.eq(valid), self.merged.ready.eq(active & self.finish.ready)]
            with m.If(valid & self.merged.ready):
                m.d.sync += position.eq(position + 1)
                with m.If(position == last_beat):
                    m.d.sync += position.eq(0)
        return m
