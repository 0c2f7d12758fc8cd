"""The queries of a pass and the lists that belong to them, on their way to the units."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import WORD_BYTES, Status
from ..abi.lines import LINE_BITS
from ..abi.numerics import POSITION_BITS
from ..arithmetic.float32 import is_special
from ..common.fork import Fork
from ..interfaces import Fault, QueryLine, QueryLineKind
from .records import QUERY_LINES_BITS, Outcome, QueryWork, Run, WalkLine

_WORD_BITS = 8 * WORD_BYTES
_PARTS = (  # in their order: kind, where its first line is, how many there are
    (QueryLineKind.QUERY, "line", lambda work: work.lines),
    (QueryLineKind.CODEBOOK, "codebook_line", lambda work: work.codebook),
    (QueryLineKind.SLOPES, "slopes_line", lambda work: Mux(work.slopes, work.list_lines, 0)),
    (QueryLineKind.POSITIONS, "tree_line", lambda work: Mux(work.tree, work.position_lines, 0)),
    (QueryLineKind.MASKS, "masks_line", lambda work: Mux(work.tree, work.mask_lines, 0)),
    (QueryLineKind.SINKS, "sinks_line", lambda work: Mux(work.sinks, work.list_lines, 0)),
)


class QueryRuns(wiring.Component):
    """Takes the work of passes apart into runs of lines to read.

    Members
    -------
    i : In(stream(QueryWork)) : the passes.
    o : Out(stream(Run)) : their runs, queries first, then the lists that there are.

    Latency is 0 cycles, throughput one run per cycle with one cycle more for each list that there is not.
    """

    i: In(stream.Signature(QueryWork))
    o: Out(stream.Signature(Run))

    def elaborate(self, platform):
        m = Module()
        work, part = self.i.payload, Signal(range(len(_PARTS)))
        empty = Signal()
        m.d.comb += self.o.payload.tenant.eq(work.tenant)
        with m.Switch(part):
            for number, (_, line, count) in enumerate(_PARTS):
                with m.Case(number):
                    m.d.comb += [
                        self.o.payload.line.eq(work[line]),
                        self.o.payload.count.eq(count(work)),
                        empty.eq(count(work) == 0),
                    ]
        last = part == len(_PARTS) - 1
        goes_on = self.i.valid & (self.o.ready | empty)
        m.d.comb += [self.o.valid.eq(self.i.valid & ~empty), self.i.ready.eq(goes_on & last)]
        with m.If(goes_on):
            m.d.sync += part.eq(Mux(last, 0, part + 1))
        return m


class QueryFeed(wiring.Component):
    """Hands every unit the query lines and lists of each pass, and only the first unit the sinks.

    Parameters
    ----------
    units : attention units, at least 1.

    Members
    -------
    i : In(stream(QueryWork)) : the passes.
    lines : In(stream(WalkLine)) : their lines, in order.
    o : Out(stream(QueryLine)).array(units)
    outcomes : Out(stream(Outcome)) : one per pass: OK, DENIED, POISON, or BAD_LIST for a slope that is NaN or
        infinite or a position of 2^23 or more; lines at fault are handed on too.

    Latency is 1 cycle, throughput one line per cycle with two cycles between passes.
    """

    latency_cycles = 1

    def __init__(self, *, units):
        if units < 1:
            raise ValueError(f"units must be a positive integer, not {units!r}")
        self.units = units
        super().__init__(
            {
                "i": In(stream.Signature(QueryWork)),
                "lines": In(stream.Signature(WalkLine)),
                "o": Out(stream.Signature(QueryLine)).array(units),
                "outcomes": Out(stream.Signature(Outcome)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        shape = data.StructLayout({"data": LINE_BITS, "kind": QueryLineKind, "last_of_all": 1, "last": 1})
        m.submodules.fork = fork = Fork(shape=shape, outputs=self.units)
        left = [Signal(QUERY_LINES_BITS, name=f"left_{kind.name}") for kind, _, _ in _PARTS]
        streaming = Signal()
        status, line_fault = Signal(Status), Signal(Status)
        words_left = Signal(8)  # of the list under way
        group, query_rows = Signal(8), Signal(8)  # words of either list that are still to come
        item = fork.i.payload.payload

        for n, (out, line) in enumerate(zip(self.o, fork.o, strict=True)):
            m.d.comb += [
                out.valid.eq(line.valid),
                line.ready.eq(out.ready),
                out.payload.data.eq(line.payload.data),
                out.payload.kind.eq(line.payload.kind),
                # The sinks come last, but only to the first unit.
                out.payload.last.eq(line.payload.last if n == 0 else line.payload.last_of_all),
            ]
        some = [count.any() for count in left]
        sinks = ~Cat(some[:-1]).any()
        total, for_all = Signal(QUERY_LINES_BITS + 1), Signal(QUERY_LINES_BITS + 1)
        m.d.comb += [
            for_all.eq(sum(left[:-1])),  # the sinks are the last part
            total.eq(for_all + left[-1]),
            fork.i.valid.eq(streaming & self.lines.valid),
            self.lines.ready.eq(streaming & fork.i.ready),
            fork.i.payload.to.eq(Mux(sinks, 1, (1 << self.units) - 1)),
            item.data.eq(self.lines.payload.data),
            item.last_of_all.eq(for_all == 1),
            item.last.eq(total == 1),
            self.outcomes.payload.status.eq(status),
        ]
        for number, (kind, _, _) in reversed(list(enumerate(_PARTS))):
            with m.If(some[number]):
                m.d.comb += item.kind.eq(kind)

        words = [self.lines.payload.data.word_select(n, _WORD_BITS) for n in range(LINE_BITS // _WORD_BITS)]
        bad_words = [
            (n < words_left)
            & Mux(item.kind == QueryLineKind.SLOPES, is_special(word), word[POSITION_BITS:].any())
            for n, word in enumerate(words)
        ]
        listed = (item.kind == QueryLineKind.SLOPES) | (item.kind == QueryLineKind.POSITIONS)
        m.d.comb += [
            words_left.eq(Mux(item.kind == QueryLineKind.SLOPES, group, query_rows)),
            line_fault.eq(line_status(self.lines.payload.fault)),
        ]
        with m.If((self.lines.payload.fault == Fault.NONE) & listed & Cat(bad_words).any()):
            m.d.comb += line_fault.eq(Status.BAD_LIST)

        with m.FSM():
            with m.State("START"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [
                    group.eq(self.i.payload.group),
                    query_rows.eq(self.i.payload.query_rows),
                    *(count.eq(of(self.i.payload)) for count, (_, _, of) in zip(left, _PARTS, strict=True)),
                    streaming.eq(self.i.valid),
                    status.eq(Status.OK),
                ]
                with m.If(self.i.valid):
                    m.next = "STREAM"
            with m.State("STREAM"):
                with m.If(self.lines.valid & self.lines.ready):
                    with m.If(status == Status.OK):
                        m.d.sync += status.eq(line_fault)
                    with m.If(item.kind == QueryLineKind.SLOPES):
                        m.d.sync += group.eq(group - len(words))
                    with m.If(item.kind == QueryLineKind.POSITIONS):
                        m.d.sync += query_rows.eq(query_rows - len(words))
                    for number, count in enumerate(left):
                        with m.If(item.kind == _PARTS[number][0]):
                            m.d.sync += count.eq(count - 1)
                    with m.If(item.last):
                        m.d.sync += streaming.eq(0)
                        m.next = "END"
            with m.State("END"):
                m.d.comb += self.outcomes.valid.eq(1)
                with m.If(self.outcomes.ready):
                    m.next = "START"
        return m


def line_status(fault):
    """The status of a job whose table, queries or lists met `fault`."""
    return Mux(fault == Fault.NONE, Status.OK, Mux(fault == Fault.POISON, Status.POISON, Status.DENIED))
