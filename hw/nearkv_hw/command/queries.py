"""The queries and sinks of a pass, on their way to the units."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import QUERY_CHOICES
from ..abi.descriptor import Status
from ..abi.lines import LINE_BITS
from ..common.fork import Fork
from ..interfaces import Fault, QueryLine
from .records import Outcome, QueryWork, WalkLine

_SINK_BITS = 32


class QueryFeed(wiring.Component):
    """Hands every unit the query lines of each pass, and the first unit the sinks.

    Parameters
    ----------
    units : attention units, at least 1.
    queries : query heads per pass: 1, 2, 4, 8 or 16.

    Members
    -------
    i : In(stream(QueryWork)) : the passes.
    lines : In(stream(WalkLine)) : their lines, in order: queries, then the line with the sinks.
    o : Out(stream(QueryLine)).array(units)
    outcomes : Out(stream(Outcome)) : one per pass: OK, DENIED or POISON; lines at fault are handed on too.

    Latency is 1 cycle, throughput one line per cycle with two cycles between passes.
    """

    latency_cycles = 1

    def __init__(self, *, units, queries):
        if units < 1:
            raise ValueError(f"units must be a positive integer, not {units!r}")
        if queries not in QUERY_CHOICES:
            raise ValueError(f"queries must be 1, 2, 4, 8 or 16, not {queries!r}")
        self.units = units
        self.queries = queries
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
        shape = data.StructLayout({"data": LINE_BITS, "sink": 1, "last_query": 1, "last": 1})
        m.submodules.fork = fork = Fork(shape=shape, outputs=self.units)
        left = Signal(8)
        streaming, sinks_left = Signal(), Signal()
        slot = Signal(4, reset_less=True)
        status = Signal(Status)
        sink = left == 0
        item = fork.i.payload.payload

        for n, (out, line) in enumerate(zip(self.o, fork.o, strict=True)):
            m.d.comb += [
                out.valid.eq(line.valid),
                line.ready.eq(out.ready),
                out.payload.data.eq(line.payload.data),
                out.payload.sink.eq(line.payload.sink),
                # The sinks come last, but only to the first unit.
                out.payload.last.eq(line.payload.last if n == 0 else line.payload.last_query),
            ]
        m.d.comb += [
            fork.i.valid.eq(streaming & self.lines.valid),
            self.lines.ready.eq(streaming & fork.i.ready),
            fork.i.payload.to.eq(Mux(sink, 1, (1 << self.units) - 1)),
            item.data.eq(self.lines.payload.data),
            item.sink.eq(sink),
            item.last_query.eq(left == 1),
            item.last.eq(sink | ((left == 1) & ~sinks_left)),
            self.outcomes.payload.status.eq(status),
        ]
        with m.If(sink):
            with m.Switch(slot):
                for first in range(self.queries, LINE_BITS // _SINK_BITS, self.queries):
                    with m.Case(first):
                        m.d.comb += item.data.eq(self.lines.payload.data[first * _SINK_BITS :])

        with m.FSM():
            with m.State("START"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [
                    left.eq(self.i.payload.lines),
                    sinks_left.eq(self.i.payload.sinks),
                    slot.eq(self.i.payload.sink_slot),
                    streaming.eq(self.i.valid),
                    status.eq(Status.OK),
                ]
                with m.If(self.i.valid):
                    m.next = "STREAM"
            with m.State("STREAM"):
                with m.If(self.lines.valid & self.lines.ready):
                    with m.If(status == Status.OK):
                        m.d.sync += status.eq(line_status(self.lines.payload.fault))
                    m.d.sync += left.eq(left - ~sink)
                    with m.If(item.last):
                        m.d.sync += streaming.eq(0)
                        m.next = "END"
            with m.State("END"):
                m.d.comb += self.outcomes.valid.eq(1)
                with m.If(self.outcomes.ready):
                    m.next = "START"
        return m


def line_status(fault):
    """The status of a job whose table, queries or sinks met `fault`."""
    return Mux(fault == Fault.NONE, Status.OK, Mux(fault == Fault.POISON, Status.POISON, Status.DENIED))
