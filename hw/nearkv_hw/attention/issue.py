"""What enters the array in each cycle: a query line, else the next line when what it needs is there."""

from amaranth.hdl import Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..arithmetic.decode import CODE_BITS
from ..interfaces import PAGE_BITS, Fault, ReadResponse
from .array import Array, array_operation
from .loader import pass_parameters, query_load
from .scoring import SCORE_QUEUE_ROWS, WEIGHT_SLOTS
from .shape import BANKS
from .streamer import LineKind, line_tag


def sums_read(shape):
    """Which sums to read."""
    return data.StructLayout(
        {
            "bank": 1,
            "query": range(shape.queries),
            "line": range(shape.row_lines),
            "group": range(shape.groups),
        }
    )


class Issue(wiring.Component):
    """Gives the array one line per cycle, in the order of `tags`.

    A K line waits until its pass is loaded and the score queue has room, a V line until its row's weights
    are there, any line while a query line enters. Reads of sums take cycles without a V line.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    tags, lines : In(stream) : what comes next, and the lines from memory.
    loads : In(stream) : query lines.
    reads : In(stream) : sums to read.
    loaded, passes : In : state and parameters of each bank's pass.
    row_taken, row_weighed : In : a row has left the score queue; its weights are there.
    operation, line, present : Out : for the array.
    slot : Out : the row whose weights the array needs, one cycle before it needs them.
    taken : Out : a K or V line was taken in this cycle.
    taken_value, taken_bank, taken_fault, taken_page : Out : what it was.
    ended : Out : the bank's pass has no more lines.
    waiting : Out : a line has come and was not taken.
    """

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "tags": In(stream.Signature(line_tag(shape))),
                "lines": In(stream.Signature(ReadResponse)),
                "loads": In(stream.Signature(query_load(shape))),
                "reads": In(stream.Signature(sums_read(shape))),
                "loaded": In(BANKS),
                "passes": In(data.ArrayLayout(pass_parameters(shape), BANKS)),
                "row_taken": In(1),
                "row_weighed": In(1),
                "operation": Out(array_operation(shape)),
                "line": Out(CODE_BITS * shape.lanes),
                "present": Out(shape.lanes),
                "slot": Out(range(WEIGHT_SLOTS)),
                "taken": Out(1),
                "taken_value": Out(1),
                "taken_bank": Out(1),
                "taken_fault": Out(Fault),
                "taken_page": Out(PAGE_BITS),
                "ended": Out(BANKS),
                "waiting": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        tag = self.tags.payload
        is_kind = {kind: self.tags.valid & (tag.kind == kind) for kind in LineKind}
        k_bank, v_bank = Signal(), Signal()
        row_start = tag.line == 0

        room = Signal(range(SCORE_QUEUE_ROWS + 1), init=SCORE_QUEUE_ROWS)
        weighed = Signal(range(WEIGHT_SLOTS + 1))
        load, score, value = self.loads.valid, Signal(), Signal()
        m.d.comb += [
            self.loads.ready.eq(1),
            score.eq(
                is_kind[LineKind.K]
                & self.lines.valid
                & ~load
                & _of(k_bank, self.loaded)
                & (~row_start | (room != 0))
            ),
            value.eq(is_kind[LineKind.V] & self.lines.valid & ~load & (~row_start | (weighed != 0))),
        ]
        m.d.sync += [
            room.eq(room - (score & row_start) + self.row_taken),
            weighed.eq(weighed - (value & row_start) + self.row_weighed),
        ]

        # ends of passes need no line; that of V also comes after the opening
        k_end, v_end = Signal(), Signal()
        m.d.comb += [
            k_end.eq(is_kind[LineKind.K_END]),
            v_end.eq(is_kind[LineKind.V_END] & _of(v_bank, self.loaded)),
            self.taken.eq(score | value),
            self.tags.ready.eq(self.taken | k_end | v_end),
            self.lines.ready.eq(self.taken),
            self.waiting.eq(self.lines.valid & ~self.taken),
            self.ended.eq(Mux(v_bank, v_end << 1, v_end)),
            self.taken_value.eq(value),
            self.taken_bank.eq(Mux(value, v_bank, k_bank)),
            self.taken_fault.eq(self.lines.payload.fault),
            self.taken_page.eq(tag.page),
        ]
        v_first = Signal(init=1)
        slot = Signal(range(WEIGHT_SLOTS))
        m.d.sync += [k_bank.eq(k_bank ^ k_end), v_bank.eq(v_bank ^ v_end)]
        with m.If(v_end):
            m.d.sync += v_first.eq(1)
        with m.Elif(value & tag.last):
            m.d.sync += v_first.eq(0)
        with m.If(value & tag.last):
            m.d.sync += slot.eq(slot + 1)

        k_pass = Mux(k_bank, self.passes[1], self.passes[0])
        half, present_last = Signal(), Signal(self.shape.lanes)
        k_now, v_now, load_now = (
            Signal(pass_parameters(self.shape), name=name) for name in ("k_pass", "v_pass", "load_pass")
        )
        m.d.comb += [
            k_now.eq(k_pass),
            v_now.eq(Mux(v_bank, self.passes[1], self.passes[0])),
            load_now.eq(Mux(self.loads.payload.bank, self.passes[1], self.passes[0])),
            half.eq(Mux(load, load_now.query_half, Mux(value, v_now.v_half, k_now.k_half))),
            present_last.eq(Mux(load, load_now.present, k_now.present)),
        ]
        last = Mux(load, self.loads.payload.last, tag.last)
        m.d.comb += [
            self.operation.score.eq(score),
            self.operation.value.eq(value),
            self.operation.load.eq(load),
            self.operation.half.eq(half),
            self.operation.bank.eq(Mux(load, self.loads.payload.bank, self.taken_bank)),
            self.operation.line.eq(Mux(load, self.loads.payload.line, tag.line)),
            self.operation.last.eq(last),
            self.operation.first.eq(v_first),
            self.operation.query.eq(self.loads.payload.query),
            self.reads.ready.eq(~value),
            self.operation.read.eq(self.reads.valid & ~value),
            self.operation.read_bank.eq(self.reads.payload.bank),
            self.operation.read_query.eq(self.reads.payload.query),
            self.operation.read_line.eq(self.reads.payload.line),
            self.operation.read_group.eq(self.reads.payload.group),
            self.line.eq(Mux(load, self.loads.payload.data, self.lines.payload.data)),
            self.present.eq(Mux(last & (load | ~value), present_last, Const(-1, self.shape.lanes))),
        ]
        shown = slot
        for _ in range(Array.weight_cycles - 1):
            delayed = Signal(range(WEIGHT_SLOTS), reset_less=True)
            m.d.sync += delayed.eq(shown)
            shown = delayed
        m.d.comb += self.slot.eq(shown)
        return m


def _of(bank, bits):
    return Mux(bank, bits[1], bits[0])
