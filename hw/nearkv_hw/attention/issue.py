"""What enters the array in each cycle: a query line, else the next line when what it needs is there."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.lines import LINE_BITS
from ..arithmetic.decode import CODE_BITS, CodeKind, CodeWidth
from ..common.pipeline import later
from ..common.queue import Queue
from ..interfaces import PAGE_BITS, Fault, ReadResponse
from .array import Array, array_operation
from .codes import Scales, parts_less_one, row_codes
from .loader import pass_parameters, query_load
from .scoring import SCORE_QUEUE_ROWS, WEIGHT_SLOTS
from .shape import BANKS, PASSES, LineParts, abreast_bits, chosen
from .streamer import LineKind, line_tag


def sums_read(shape):
    """Which line of sums to read."""
    return data.StructLayout(
        {
            "bank": range(BANKS),
            "query": range(shape.queries),
            "line": range(shape.row_lines),
            "groups": range(shape.groups),  # beats of it, less one
            "abreast": abreast_bits(shape),  # log2 of the rows abreast whose sums it is of
        }
    )


class Issue(wiring.Component):
    """Gives the array one line per cycle, in the order of `tags`.

    A line with codes for more elements than there are lanes, or with several rows, takes a cycle for each
    part of it.
    The two rows of a pair for a bound come as one row, of each of which the elements of one sign count.
    Where V lies in the K rows its lines are kept when they are taken for K, and are not read again.
    A K line waits until its pass is loaded and the score queue has room, a V line until its row's weights
    are there and the earlier pass of its bank is drained, any line while a query line enters. Reads of sums
    take cycles without a V line; one that is `urgent` goes before the V line.

    Parameters
    ----------
    shape : UnitShape.
    outstanding : lines whose tags may wait.

    Members
    -------
    tags, lines : In(stream) : what comes next, and the lines from memory.
    loads : In(stream) : query lines.
    reads, urgent : In(stream), In : lines of sums to read; a later pass waits for them.
    drained : In : the bank's sums have been read.
    loaded, passes : In : state and parameters of the passes.
    row_taken, row_weighed : In : a row has left the score queue; its weights are there.
    operation, line, scales, scale_kind : Out : for the array.
    slot, abreast : Out : the row whose weights the array needs, one cycle before it needs them; log2 of the
        rows abreast there. Rows abreast are counted as one here.
    taken : Out : a line of K, V or scales was taken in this cycle.
    taken_value, taken_number, taken_fault, taken_page : Out : what it was.
    k_ended : Out : the pass of that number has no more K.
    ended : Out : it has no more lines.
    waiting : Out : a line has come and was not taken, or some of its parts are still to come.
    """

    def __init__(self, *, shape, outstanding):
        self.shape = shape
        self.row_depth = 1 << (WEIGHT_SLOTS * shape.row_lines + outstanding).bit_length()
        super().__init__(
            {
                "tags": In(stream.Signature(line_tag(shape))),
                "lines": In(stream.Signature(ReadResponse)),
                "loads": In(stream.Signature(query_load(shape))),
                "reads": In(stream.Signature(sums_read(shape))),
                "urgent": In(1),
                "drained": In(BANKS),
                "loaded": In(PASSES),
                "passes": In(data.ArrayLayout(pass_parameters(shape), PASSES)),
                "row_taken": In(1),
                "row_weighed": In(1),
                "operation": Out(array_operation(shape)),
                "line": Out(CODE_BITS * shape.line_lanes),
                "scales": Out(data.ArrayLayout(CODE_BITS, shape.scale_groups)),
                "scale_kind": Out(CodeKind),
                "slot": Out(range(WEIGHT_SLOTS)),
                "abreast": Out(abreast_bits(shape)),
                "taken": Out(1),
                "taken_value": Out(1),
                "taken_number": Out(range(PASSES)),
                "taken_fault": Out(Fault),
                "taken_page": Out(PAGE_BITS),
                "k_ended": Out(PASSES),
                "ended": Out(PASSES),
                "waiting": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        tag = self.tags.payload
        is_kind = {kind: self.tags.valid & (tag.kind == kind) for kind in LineKind}
        k_number, v_number = Signal(range(PASSES)), Signal(range(PASSES))
        is_v = (tag.kind == LineKind.V) | (tag.kind == LineKind.V_SCALES)
        step, rows_done = Signal(range(self.shape.row_lines)), Signal(2)  # of the row, of the line
        largest = Signal()  # second row of a pair for a bound
        row_start = (step == 0) & ~largest
        k_loaded, v_loaded = (self.loaded.bit_select(number, 1) for number in (k_number, v_number))
        # sums that wait for the drain, by bank: nothing is added to them
        full = Signal(BANKS)
        v_bank = v_number[: exact_log2(BANKS)]
        v_room = Signal()
        m.d.comb += v_room.eq(~full.bit_select(v_bank, 1))

        room = Signal(range(SCORE_QUEUE_ROWS + 1), init=SCORE_QUEUE_ROWS)
        weighed = Signal(range(WEIGHT_SLOTS + 1))
        load, score, value, scales = self.loads.valid, Signal(), Signal(), Signal()
        k_now, v_now, load_now = (
            Signal(pass_parameters(self.shape), name=name) for name in ("k_pass", "v_pass", "load_pass")
        )
        k_end, v_end = Signal(), Signal()
        # registers: what a pass's lines depend on stands for a cycle before the first of them is taken
        for now, number, ends in ((k_now, k_number, k_end), (v_now, v_number, v_end)):
            m.d.sync += now.eq(Mux(ends, chosen(self.passes, number + 1), chosen(self.passes, number)))
        m.d.comb += load_now.eq(chosen(self.passes, self.loads.payload.number))
        codes = Signal(row_codes(self.shape))
        line_done, row_done, passes_on = Signal(), Signal(), Signal()
        # lines of K rows in which V lies, too; as many as there can be between K and V
        m.submodules.rows = rows = Queue(shape=LINE_BITS, depth=self.row_depth)
        m.submodules.next_row = next_row = Queue(shape=LINE_BITS, depth=2)  # a large memory is slow
        wiring.connect(m, rows.o, next_row.i)
        keep, kept_line = Signal(), Signal(LINE_BITS, reset_less=True)
        again, here, line = Signal(), Signal(), Signal(LINE_BITS)
        line_of_row, v_lines_last = Signal(range(self.shape.row_lines)), k_now.v.lines_last
        m.d.comb += again.eq(is_v & v_now.latent)
        with m.If(score & line_done):
            m.d.sync += line_of_row.eq(Mux(row_done, 0, line_of_row + 1))
        some_abreast = codes.abreast.any()
        short = codes.pitch.any() & ~some_abreast
        parts, part = Signal(2), Signal(2)
        m.d.comb += [
            codes.eq(Mux(is_v, v_now.v, k_now.k)),
            row_done.eq(step == codes.steps_last),
            parts.eq(parts_less_one(codes.parts)),
            line_done.eq(
                Mux(short, row_done & (rows_done == tag.rows), row_done | ((step & parts) == parts))
            ),
            part.eq(Mux(short, ((tag.place + rows_done) << codes.slot_shift) + step, step & parts)),
        ]
        bounds = k_now.bounds.some
        with m.If(score & row_done):
            m.d.sync += largest.eq(bounds & ~largest)
        with m.If(score | value):
            m.d.sync += [
                step.eq(Mux(row_done, 0, step + 1)),
                rows_done.eq(Mux(line_done, 0, rows_done + row_done)),
            ]
        m.d.comb += [
            self.loads.ready.eq(1),
            here.eq(Mux(again, next_row.o.valid, self.lines.valid)),
            line.eq(Mux(again, next_row.o.payload, self.lines.payload.data)),
            score.eq(is_kind[LineKind.K] & here & ~load & k_loaded & (~row_start | (room != 0))),
            value.eq(
                is_kind[LineKind.V]
                & here
                & ~load
                & ~(self.reads.valid & self.urgent)
                & v_room
                & (~row_start | (weighed != 0))
            ),
            scales.eq(
                here & ((is_kind[LineKind.K_SCALES] & k_loaded) | (is_kind[LineKind.V_SCALES] & v_loaded))
            ),
        ]
        m.d.sync += weighed.eq(weighed - (value & row_start) + self.row_weighed)

        # ends of passes need no line, but they come after the opening; that of K goes the way of the rows
        m.d.sync += [
            room.eq(room - ((score & row_start) | k_end) + self.row_taken),
            full.eq((full | Mux(v_end, 1 << v_bank, 0)) & ~self.drained),
        ]
        m.d.comb += [
            k_end.eq(is_kind[LineKind.K_END] & ~load & k_loaded & (room != 0)),
            v_end.eq(is_kind[LineKind.V_END] & v_loaded & v_room),
            passes_on.eq(((score | value) & line_done) | scales),
            self.taken.eq(passes_on & ~again),
            next_row.o.ready.eq(passes_on & again),
            keep.eq(passes_on & k_now.latent & ~is_v & (scales | (line_of_row <= v_lines_last))),
            rows.i.payload.eq(kept_line),
            self.tags.ready.eq(passes_on | k_end | v_end),
            self.lines.ready.eq(self.taken),
            self.waiting.eq(self.lines.valid & ~self.taken),
            *(self.k_ended[number].eq(k_end & (k_number == number)) for number in range(PASSES)),
            *(self.ended[number].eq(v_end & (v_number == number)) for number in range(PASSES)),
            self.taken_value.eq(is_v),
            self.taken_number.eq(Mux(is_v, v_number, k_number)),
            self.taken_fault.eq(self.lines.payload.fault),
            self.taken_page.eq(tag.page),
        ]
        m.d.sync += rows.i.valid.eq(keep)
        with m.If(keep):
            m.d.sync += kept_line.eq(self.lines.payload.data)
        v_first = Signal(init=1)
        slot = Signal(range(WEIGHT_SLOTS))
        m.d.sync += [k_number.eq(k_number + k_end), v_number.eq(v_number + v_end)]
        with m.If(v_end):
            m.d.sync += v_first.eq(1)
        with m.Elif(value & row_done):
            m.d.sync += v_first.eq(0)
        with m.If(value & row_done):
            m.d.sync += slot.eq(slot + 1)

        m.submodules.scales = kept = Scales(shape=self.shape)
        m.d.comb += [
            kept.load.eq(scales),
            kept.load_value.eq(is_v),
            kept.line.eq(line),
            kept.row.eq(tag.row),
            kept.second.eq(tag.second),
            kept.step.eq(score | value),
            kept.value.eq(is_v),
            kept.number.eq(step),
            kept.last.eq(row_done),
            kept.rows.eq(Mux(some_abreast, tag.rows, 0)),
            kept.codes.eq(codes),
            self.scales.eq(kept.scales),
            self.scale_kind.eq(kept.kind),
        ]
        count = Mux(row_done, codes.count_last, (1 << codes.step_shift)[: self.shape.lanes.bit_length()])
        m.d.comb += [
            self.operation.score.eq(score),
            self.operation.value.eq(value),
            self.operation.load.eq(load),
            self.operation.end.eq(k_end),
            self.operation.kind.eq(Mux(load, load_now.query_kind, codes.kind)),
            self.operation.width.eq(Mux(load, CodeWidth.WHOLE, codes.width)),
            self.operation.codebook.eq(~load & codes.codebook),
            self.operation.book.eq(is_v & ~v_now.latent),  # V in the K row has K's numbers
            self.operation.parts.eq(Mux(load | some_abreast, LineParts.ONE, codes.parts)),
            self.operation.abreast.eq(Mux(load, self.loads.payload.abreast, codes.abreast)),
            self.operation.place.eq(Mux(~load & some_abreast, tag.place, 0)),
            self.operation.rows.eq(Mux(~load & some_abreast, tag.rows, 0)),
            self.operation.part.eq(part),
            self.operation.count.eq(Mux(load, self.loads.payload.count, count)),
            self.operation.block.eq(self.loads.payload.block),
            self.operation.number.eq(Mux(load, self.loads.payload.number, self.taken_number)),
            self.operation.line.eq(Mux(load, self.loads.payload.line, step)),
            self.operation.last.eq(row_done & (largest | ~bounds)),
            self.operation.goes_on.eq(largest),
            self.operation.drop[1].eq(bounds & (k_now.factor.negative ^ largest)),
            self.operation.drop[0].eq(bounds & ~(k_now.factor.negative ^ largest)),
            self.operation.first.eq(v_first),
            self.operation.query.eq(self.loads.payload.query),
            self.reads.ready.eq(~value),
            self.operation.read.eq(self.reads.valid & ~value),
            self.operation.read_bank.eq(self.reads.payload.bank),
            self.operation.read_query.eq(self.reads.payload.query),
            self.operation.read_line.eq(self.reads.payload.line),
            self.operation.read_groups.eq(self.reads.payload.groups),
            self.operation.read_abreast.eq(self.reads.payload.abreast),
            self.line.eq(Mux(load, self.loads.payload.data, line)),
        ]
        m.d.comb += [
            self.slot.eq(later(m, slot, Array.weight_cycles - 1)),
            self.abreast.eq(later(m, codes.abreast, Array.weight_cycles - 1)),
        ]
        return m
