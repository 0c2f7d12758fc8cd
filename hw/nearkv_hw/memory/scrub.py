"""Zeros over extents that were given back, before anybody else can have them."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.config import EXTENT_SHIFT, SCRUB_INTERVAL_CYCLES, SCRUB_PATIENCE_CYCLES
from ..abi.lines import LINE_SHIFT
from ..interfaces import LINE_ADDRESS_BITS

EXTENT_LINES_LOG2 = EXTENT_SHIFT - LINE_SHIFT


class Scrubber(wiring.Component):
    """Names every line of an extent once, to be written with zeros.

    Parameters
    ----------
    extents : of the channel.

    Members
    -------
    extent : In(stream) : the extent; taken when all of its lines are zero.
    o : Out(stream) : lines of the channel.
    urgent : Out(1) : the line that is offered has waited for `SCRUB_PATIENCE_CYCLES`.
    written : In(1) : a line that was taken is zero for whoever reads it from now on.
    lines : Out(64) : lines taken.

    One line in `SCRUB_INTERVAL_CYCLES` at most; the first is offered the cycle after its extent.
    """

    def __init__(self, *, extents):
        if not isinstance(extents, int) or extents < 1:
            raise ValueError(f"extents must be a positive integer, not {extents!r}")
        super().__init__(
            {
                "extent": In(stream.Signature(range(extents))),
                "o": Out(stream.Signature(LINE_ADDRESS_BITS)),
                "urgent": Out(1),
                "written": In(1),
                "lines": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        line = Signal(EXTENT_LINES_LOG2)
        pause = Signal(range(SCRUB_INTERVAL_CYCLES))
        patience = Signal(range(SCRUB_PATIENCE_CYCLES), init=SCRUB_PATIENCE_CYCLES - 1)
        under_way = Signal(EXTENT_LINES_LOG2 + 1)
        taken, all_taken = Signal(), Signal()
        m.d.comb += [
            self.o.payload.eq(Cat(line, self.extent.payload)),
            taken.eq(self.o.valid & self.o.ready),
            self.extent.ready.eq(all_taken & (under_way == 0)),
        ]
        m.d.sync += under_way.eq(under_way + taken - self.written)
        with m.If(self.extent.ready):
            m.d.sync += all_taken.eq(0)
        with m.If(taken):
            m.d.sync += [
                self.lines.eq(self.lines + 1),
                line.eq(line + 1),
                all_taken.eq(line.all()),
                self.o.valid.eq(0),
                self.urgent.eq(0),
                pause.eq(SCRUB_INTERVAL_CYCLES - 2),
                patience.eq(SCRUB_PATIENCE_CYCLES - 1),
            ]
        with m.Elif(self.o.valid):
            m.d.sync += patience.eq(patience - (patience != 0))
            with m.If(patience == 0):
                m.d.sync += self.urgent.eq(1)
        with m.Elif(pause != 0):
            m.d.sync += pause.eq(pause - 1)
        with m.Elif(self.extent.valid & ~all_taken):
            m.d.sync += self.o.valid.eq(1)
        return m
