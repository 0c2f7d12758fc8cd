"""Finish: lanes divided by their query's denominator, rounded and scaled (docs/numerics.md section 6)."""

from amaranth.hdl import Cat, Module, Mux, Shape, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..abi.numerics import NUMERATOR_KEPT_BITS, TOP_BITS
from ..arithmetic.float32 import Unpack
from ..arithmetic.reciprocal import Reciprocal
from ..common.queue import Queue
from .lane import Divisor, FinishLane
from .normalise import SHIFT_BITS, Normalise
from .scaling import ScaleLane
from .shapes import check_finish_lanes, finish_beat

_MAX_QUERIES = 16
_QUEUE_CYCLES = 2  # latency of a queue deeper than two


class _Waiting(data.Struct):
    """A normalised denominator before its division."""

    significand: NUMERATOR_KEPT_BITS
    top: signed(TOP_BITS)
    shift: SHIFT_BITS
    some: 1
    nan: 1


class Finish(wiring.Component):
    """Turns lanes into output codes.

    Parameters
    ----------
    finish_lanes : lanes per beat, 2, 4 or 8.

    Members
    -------
    beats : In(stream(finish_beat)) : denominators in the order of the queries, at least one ahead of its
        lanes; a query's lanes, the first beat marked. A denominator has at least one beat of lanes.
    codes : Out(stream(32-bit array)) : one beat per beat of lanes, in order.

    A lane's latency is 14 cycles (`latency_cycles`), with an output scale 26 (`scaled_latency_cycles`),
    throughput one beat per cycle. Lanes without a scale, which would overtake those with one, are not taken
    for `ScaleLane.latency_cycles` after them. The first lanes of a query are not taken until its reciprocal
    is ready in time: `denominator_cycles` after its denominator, and not closer than
    `Reciprocal.interval_cycles` to the first lanes of the query before. What has been taken never stops:
    lanes are taken only while the output queue has room for them, denominators only while theirs has.
    """

    latency_cycles = FinishLane.latency_cycles + _QUEUE_CYCLES
    scaled_latency_cycles = latency_cycles + ScaleLane.latency_cycles
    denominator_cycles = 1 + Reciprocal.latency_cycles + 1
    """Cycles from a denominator to the first beat of its lanes, when nothing else is under way.

    The reciprocal is wanted when the lanes are normalised, which takes as long as normalising the denominator
    did.
    """

    def __init__(self, *, finish_lanes):
        check_finish_lanes(finish_lanes)
        self.finish_lanes = finish_lanes
        super().__init__(
            {
                "beats": In(stream.Signature(finish_beat(finish_lanes))),
                "codes": Out(stream.Signature(data.ArrayLayout(32, finish_lanes))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        stages = FinishLane.latency_cycles
        normal = Normalise.latency_cycles
        m.submodules.reciprocal = reciprocal = Reciprocal(notice_cycles=normal - 1)
        m.submodules.waiting = waiting = SyncFIFO(width=Shape.cast(_Waiting).width, depth=_MAX_QUERIES)
        # Room for all that may be under way from taking a beat until its place is free again.
        depth = 1 << self.scaled_latency_cycles.bit_length()
        m.submodules.queue = queue = Queue(shape=data.ArrayLayout(32, self.finish_lanes), depth=depth)

        beat = self.beats.payload
        taken = Signal()
        lanes_taken = Signal()
        first_taken = Signal()
        credits = Signal(range(depth + 1), init=depth)
        held = Signal(range(_MAX_QUERIES + 1))  # denominators taken whose division has not begun
        promised = Signal()  # the reciprocal under way belongs to lanes already taken
        has_scale = beat.output_scale.any()
        ahead = Signal(range(ScaleLane.latency_cycles + 1))  # how much later scaled lanes will be there
        with m.If(beat.denominator):
            m.d.comb += self.beats.ready.eq(held != _MAX_QUERIES)
        with m.Else():
            m.d.comb += self.beats.ready.eq(
                (credits != 0) & (~beat.first | (reciprocal.soon & ~promised)) & (has_scale | (ahead == 0))
            )
        m.d.comb += [
            taken.eq(self.beats.valid & self.beats.ready),
            lanes_taken.eq(taken & ~beat.denominator),
            first_taken.eq(lanes_taken & beat.first),
        ]

        # What travels beside the lanes. A denominator leaves the pipeline once it is normalised.
        valid = Signal(stages)  # bit k: stage k holds something
        scaled = Signal(stages)  # with an output scale
        scale_valid = Signal(ScaleLane.latency_cycles)
        dividing = Signal(normal)
        first = Signal(stages + Unpack.latency_cycles - 1)
        forms = [
            Signal(OutputForm, name=f"form_{k}", reset_less=True)
            for k in range(stages + ScaleLane.latency_cycles - 1)
        ]
        nan = Signal(normal, reset_less=True)
        step = Cat(taken, valid[: normal - 1], valid[normal - 1] & ~dividing[-1], valid[normal : stages - 1])
        scale_step = Cat(valid[-1] & scaled[-1], scale_valid[:-1])
        m.d.sync += [
            valid.eq(step),
            scaled.eq(Cat(lanes_taken & has_scale, scaled)),
            scale_valid.eq(scale_step),
            dividing.eq(Cat(beat.denominator, dividing)),
            first.eq(Cat(first_taken, first)),
            nan.eq(Cat(beat.lanes[0].flags[0], nan)),
        ]
        for k, form in enumerate(forms):
            with m.If(Cat(step, scale_step)[k]):
                m.d.sync += form.eq(forms[k - 1] if k else beat.form)
        with m.If(lanes_taken & has_scale):
            m.d.sync += ahead.eq(ScaleLane.latency_cycles)
        with m.Elif(ahead != 0):
            m.d.sync += ahead.eq(ahead - 1)

        # The scale of the lanes that come to be multiplied: another query's first lanes are not so near.
        assert len(first) < Reciprocal.interval_cycles
        output_scale = Signal(32, reset_less=True)
        m.submodules.scale = scale = Unpack()
        with m.If(first_taken):
            m.d.sync += output_scale.eq(beat.output_scale)
        m.d.comb += [scale.code.eq(output_scale), scale.step.eq(first[stages - 1 :])]

        divisor = Signal(Divisor, reset_less=True)
        lanes = []
        for k in range(self.finish_lanes):
            m.submodules[f"lane_{k}"] = lane = FinishLane()
            m.submodules[f"scale_{k}"] = scaling = ScaleLane()
            early, late = normal + FinishLane.multiply_cycles, stages - 2
            m.d.comb += [
                lane.step.eq(step),
                lane.lane.eq(beat.lanes[k]),
                lane.divisor.eq(divisor),
                lane.early_form.eq(Mux(scaled[early], OutputForm.FP32, forms[early])),
                lane.late_form.eq(Mux(scaled[late], OutputForm.FP32, forms[late])),
                scaling.step.eq(scale_step),
                scaling.code.eq(lane.code),
                scaling.scale.eq(scale.o),
                scaling.early_form.eq(forms[stages + ScaleLane.convert_stage]),
                scaling.late_form.eq(forms[stages + ScaleLane.latency_cycles - 2]),
                queue.i.payload[k].eq(Mux(scale_valid[-1], scaling.scaled, lane.code)),
            ]
            lanes.append(lane)
        m.d.comb += queue.i.valid.eq((valid[-1] & ~scaled[-1]) | scale_valid[-1])
        wiring.connect(m, queue.o, wiring.flipped(self.codes))

        written = Signal(_Waiting)
        read = Signal(_Waiting)
        under_way = Signal(_Waiting, reset_less=True)
        load = Signal()
        use = first[normal - 2]
        m.d.comb += [
            written.significand.eq(lanes[0].significand),
            written.top.eq(lanes[0].top),
            written.shift.eq(lanes[0].shift),
            written.some.eq(lanes[0].some),
            written.nan.eq(nan[-1]),
            waiting.w_data.eq(written),
            waiting.w_en.eq(valid[normal - 1] & dividing[-1]),
            read.eq(waiting.r_data),
            reciprocal.i.payload.eq(read.significand),
            reciprocal.i.valid.eq(waiting.r_rdy),
            load.eq(waiting.r_rdy & reciprocal.i.ready),
            waiting.r_en.eq(reciprocal.i.ready),
            reciprocal.o.ready.eq(use),
        ]
        with m.If(load):
            m.d.sync += under_way.eq(read)
        with m.If(use):
            m.d.sync += [
                divisor.reciprocal.eq(reciprocal.o.payload),
                divisor.top.eq(under_way.top),
                divisor.shift.eq(under_way.shift),
                divisor.some.eq(under_way.some),
                divisor.nan.eq(under_way.nan),
                promised.eq(0),
            ]
        with m.If(first_taken):
            m.d.sync += promised.eq(1)

        given_back = self.codes.valid & self.codes.ready
        with m.If(lanes_taken & ~given_back):
            m.d.sync += credits.eq(credits - 1)
        with m.Elif(given_back & ~lanes_taken):
            m.d.sync += credits.eq(credits + 1)
        denominator_taken = taken & beat.denominator
        with m.If(denominator_taken & ~load):
            m.d.sync += held.eq(held + 1)
        with m.Elif(load & ~denominator_taken):
            m.d.sync += held.eq(held - 1)
        return m
