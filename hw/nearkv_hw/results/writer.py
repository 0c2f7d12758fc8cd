"""Writer: results into lines, lines into memory, and word of it when they are there."""

from itertools import combinations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import OutputForm
from ..abi.lines import LINE_BITS, LINE_BYTES
from ..abi.memory import DENOMINATOR, PARTIAL_LANE_BYTES, ResultLayout
from ..abi.numerics import TOP_NONE
from ..interfaces import (
    LINE_ADDRESS_BITS,
    TENANT_BITS,
    FabricPort,
    LanePartial,
    PassDone,
    ResultJob,
)
from ..structs import layout_of
from .packer import Packer
from .passes import Passes, check_passes
from .shapes import Denominator, PassEnd, check_finish_lanes

_MAX_LINES = ResultLayout(1023, OutputForm.PARTIAL).lines  # of a query head, by what the fields have room for
_OFFSET_BITS = (16 * _MAX_LINES).bit_length()


class _Phase(enum.Enum, shape=3):
    IDLE = 0
    MEASURE = 1
    DENOMINATORS = 2
    LANES = 3
    END = 4


class Writer(wiring.Component):
    """Writes the results of passes through the fabric and reports each pass once they are there.

    Parameters
    ----------
    finish_lanes : lanes per beat, 2, 4 or 8.
    passes : passes that may wait for answers at once, 2, 4 or 8.

    Members
    -------
    jobs : In(stream(ResultJob)) : one per pass.
    denominators : In(stream(Denominator)) : one per query, before the lanes.
    codes : In(stream(32-bit array)) : lanes of finished forms.
    partials : In(stream(LanePartial array)) : lanes of OutputForm.PARTIAL.
    ends : In(stream(PassEnd)) : one per pass. Of a pass with a fault nothing else comes, and nothing is
        written.
    fabric : Out(FabricPort) : whole-line writes; the id names the pass. Answers are always taken.
    done : Out(stream(PassDone)) : passes in order. RESULT_DENIED when a write was refused and the pass was
        well otherwise.

    A line is on the fabric 2 cycles after the beat that completes it (`latency_cycles`), `done` valid 2
    cycles after the last answer (`done_cycles`). Throughput is one line in two cycles (`line_cycles`) and one
    beat of codes per cycle; partials wait for their lines. A fabric that is not ready stops beats,
    denominators and ends; nothing is lost.
    """

    latency_cycles = Packer.latency_cycles + 1
    line_cycles = 2
    done_cycles = Passes.latency_cycles

    def __init__(self, *, finish_lanes, passes=4):
        check_finish_lanes(finish_lanes)
        self.finish_lanes = finish_lanes
        check_passes(passes)
        self.passes = passes
        super().__init__(
            {
                "jobs": In(stream.Signature(ResultJob)),
                "denominators": In(stream.Signature(Denominator)),
                "codes": In(stream.Signature(data.ArrayLayout(32, finish_lanes))),
                "partials": In(stream.Signature(data.ArrayLayout(LanePartial, finish_lanes))),
                "ends": In(stream.Signature(PassEnd)),
                "fabric": Out(FabricPort()),
                "done": Out(stream.Signature(PassDone)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.passes = passes = Passes(passes=self.passes, count_bits=_OFFSET_BITS)
        packers = [
            Packer(word_bits=8 * size * self.finish_lanes, narrow=plane == 0)
            for plane, size in enumerate(PARTIAL_LANE_BYTES)
        ]
        for plane, packer in enumerate(packers):
            m.submodules[f"packer_{plane}"] = packer

        phase = Signal(_Phase)
        job = Signal(ResultJob, reset_less=True)
        query = Signal(5, reset_less=True)
        last_query = query == job.queries - 1
        beat_taken, beat_last = self._take_beats(m, phase, job, packers)
        query_taken = Signal()  # a query's denominator, or its last lanes
        end_taken = Signal()
        m.d.comb += [
            query_taken.eq((self.denominators.valid & self.denominators.ready) | (beat_taken & beat_last)),
            self.jobs.ready.eq((phase == _Phase.IDLE) & passes.free),
            self.ends.ready.eq((phase == _Phase.END) & ~Cat(packer.full for packer in packers).any()),
            end_taken.eq(self.ends.valid & self.ends.ready),
            passes.end.valid.eq(end_taken),
            passes.end.payload.eq(self.ends.payload),
        ]
        wiring.connect(m, passes.done, wiring.flipped(self.done))

        with m.Switch(phase):
            with m.Case(_Phase.IDLE):
                with m.If(self.jobs.valid):
                    m.d.sync += job.eq(self.jobs.payload)
                    with m.If(passes.free):
                        m.d.sync += phase.eq(Mux(self.jobs.payload.fault, _Phase.END, _Phase.MEASURE))
            with m.Case(_Phase.MEASURE):
                m.d.sync += [query.eq(0), phase.eq(_Phase.DENOMINATORS)]
            with m.Case(_Phase.DENOMINATORS, _Phase.LANES):
                with m.If(query_taken):
                    m.d.sync += query.eq(query + 1)
                    with m.If(last_query):
                        m.d.sync += [
                            query.eq(0),
                            phase.eq(Mux(phase == _Phase.LANES, _Phase.END, _Phase.LANES)),
                        ]
            with m.Case(_Phase.END):
                with m.If(end_taken):
                    m.d.sync += phase.eq(_Phase.IDLE)

        self._write_lines(m, phase, job, packers, passes)
        return m

    def _take_beats(self, m, phase, job, packers):
        """Beats into the packers. Returns whether one is taken, and whether it is its query's last."""
        lanes = self.finish_lanes
        position = Signal(10, reset_less=True)
        last_position = Signal(10, reset_less=True)
        last_lane = Signal(range(lanes), reset_less=True)
        partial = Signal(reset_less=True)
        half = Signal(reset_less=True)
        with m.If(phase == _Phase.MEASURE):
            m.d.sync += [
                position.eq(0),
                Cat(last_lane, last_position).eq(job.value_dim - 1),
                partial.eq(job.form == OutputForm.PARTIAL),
                half.eq((job.form == OutputForm.BF16) | (job.form == OutputForm.FP16)),
            ]

        room = Signal()
        taken = Signal()
        last = Signal()
        full = Cat(packer.full for packer in packers)
        several = Cat(a.full & b.full for a, b in combinations(packers, 2)).any()
        m.d.comb += [
            # one line is taken in a cycle in which the request register is free
            room.eq((phase == _Phase.LANES) & (~full.any() | (~several & ~self.fabric.request.valid))),
            self.codes.ready.eq(room & ~partial),
            self.partials.ready.eq(room & partial),
            taken.eq(room & Mux(partial, self.partials.valid, self.codes.valid)),
            last.eq(position == last_position),
        ]
        with m.If(taken):
            m.d.sync += position.eq(Mux(last, 0, position + 1))

        # Lanes beyond value_dim have no meaning: they are written as zero.
        kept = [~last | (last_lane >= k) for k in range(lanes)]
        words = [Mux(kept[k], self.codes.payload[k], 0) for k in range(lanes)]
        planes = [_plane_fields(lane) for lane in self.partials.payload]
        planes = [Cat(Mux(kept[k], planes[k][p], 0) for k in range(lanes)) for p in range(4)]
        codes = Mux(half, Cat(word[:16] for word in words), Cat(words))
        for plane, packer in enumerate(packers):
            m.d.comb += [
                packer.push.eq(taken if plane == 0 else taken & partial),
                packer.last.eq(last),
                packer.data.eq(planes[plane] if plane else Mux(partial, planes[0], codes)),
                packer.half.eq(half),
            ]
        return taken, last

    def _write_lines(self, m, phase, job, packers, passes):
        """Complete lines and denominators, one in two cycles, into the request register and out."""
        request = self.fabric.request
        # Lines of each plane and of all planes; how far each plane's next line lies from the pass's first.
        planes = [Signal(range(_MAX_LINES), name=f"plane_{p}", reset_less=True) for p in range(4)]
        total = Signal(range(_MAX_LINES), reset_less=True)
        offsets = [Signal(_OFFSET_BITS, name=f"offset_{p}", reset_less=True) for p in range(4)]
        denominator_offset = Signal(_OFFSET_BITS, reset_less=True)
        lines = {size: _lines_of(job.value_dim, size) for size in (1, 2, 4, 8)}
        with m.If(phase == _Phase.MEASURE):
            for plane, size in zip(planes, PARTIAL_LANE_BYTES, strict=True):
                m.d.sync += plane.eq(lines[size])
            m.d.sync += [
                offsets[0].eq(0),
                offsets[1].eq(lines[4]),
                offsets[2].eq(lines[4] + lines[8]),
                offsets[3].eq(lines[4] + 2 * lines[8]),
            ]
            finished = Mux(job.form == OutputForm.FP32, lines[4], lines[2])
            everything = Mux(job.form == OutputForm.PARTIAL, lines[4] + 2 * lines[8] + lines[1], finished)
            with m.If(job.form != OutputForm.PARTIAL):
                m.d.sync += planes[0].eq(finished)
            m.d.sync += [total.eq(everything), denominator_offset.eq(everything)]

        # A line is loaded only when the one before has gone. That is half the fabric's rate, all that codes
        # need, and the fabric's ready reaches nothing here but this register.
        free = Signal()
        denominator_taken = Signal()
        m.d.comb += [
            free.eq(~request.valid),
            self.denominators.ready.eq((phase == _Phase.DENOMINATORS) & free),
            denominator_taken.eq(self.denominators.valid & self.denominators.ready),
        ]
        offset = Signal(_OFFSET_BITS)
        line = Signal(LINE_BITS)
        loaded = Signal()
        m.d.comb += [
            offset.eq(denominator_offset),
            line.eq(_denominator_line(m, self.denominators.payload)),
            loaded.eq(denominator_taken),
        ]
        with m.If(denominator_taken):
            m.d.sync += denominator_offset.eq(denominator_offset + total + 1)
        waiting = free
        for packer, next_offset, plane in zip(packers, offsets, planes, strict=True):
            m.d.comb += packer.take.eq(packer.full & waiting)
            waiting = waiting & ~packer.full
            with m.If(packer.take):
                m.d.comb += [offset.eq(next_offset), line.eq(packer.line), loaded.eq(1)]
                # After a query's last line of this plane comes the next query's first.
                m.d.sync += next_offset.eq(
                    Mux(packer.line_last, next_offset + total - plane + 2, next_offset + 1)
                )

        payload_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        payload_tenant = Signal(TENANT_BITS, reset_less=True)
        payload_slot = Signal.like(passes.slot, name="payload_slot", reset_less=True)
        payload_data = Signal(LINE_BITS, reset_less=True)
        with m.If(loaded):
            m.d.sync += [
                request.valid.eq(1),
                payload_line.eq(job.line + offset),
                payload_tenant.eq(job.tenant),
                payload_slot.eq(passes.slot),
                payload_data.eq(line),
            ]
        with m.Elif(request.ready):
            m.d.sync += request.valid.eq(0)
        response = self.fabric.response
        m.d.comb += [
            request.payload.line.eq(payload_line),
            request.payload.tenant.eq(payload_tenant),
            request.payload.id.eq(payload_slot),
            request.payload.write.eq(1),
            request.payload.enable.eq((1 << LINE_BYTES) - 1),
            request.payload.data.eq(payload_data),
            response.ready.eq(1),
            passes.issued.eq(loaded),
            passes.answered.eq(response.valid),
            passes.answer_slot.eq(response.payload.id),
            passes.answer_fault.eq(response.payload.fault),
        ]


def _lines_of(value_dim, lane_bytes):
    """Whole lines of `value_dim` lanes."""
    per_line = LINE_BYTES // lane_bytes
    return (value_dim + per_line - 1) >> (per_line.bit_length() - 1)


def _plane_fields(lane):
    """A lane's top, high, low and flags as they stand in the planes of a partial."""
    state = lane.state
    return (
        Mux(state.some, state.top, TOP_NONE)[:32],
        Mux(state.some, _extend(state.high, 64), 0),
        Mux(state.some, _extend(state.low, 64), 0),
        Cat(lane.flags, 0, 0, 0, 0, 0),
    )


def _extend(value, width):
    """A signed value's bits, sign-extended to `width`."""
    return Cat(value, value[-1].replicate(width - len(value)))


def _denominator_line(m, denominator):
    line = Signal(layout_of(DENOMINATOR))
    state = denominator.state
    m.d.comb += [
        line.top.eq(Mux(state.some, state.top, TOP_NONE)),
        line.flags.eq(denominator.nan),
        line.high.eq(Mux(state.some, state.high, 0)),
        line.low.eq(Mux(state.some, state.low, 0)),
    ]
    return line
