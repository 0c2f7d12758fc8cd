"""Which passes still wait for answers to their writes."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import Status
from ..interfaces import Fault, PassDone
from .shapes import PassEnd


def check_passes(passes):
    """ValueError unless `passes` is a number of passes that may be open at once."""
    if passes not in (2, 4, 8):
        raise ValueError(f"passes must be 2, 4 or 8, not {passes!r}")


class Passes(wiring.Component):
    """Counts each pass's writes and answers; reports a pass when it has ended and the last answer is there.

    Parameters
    ----------
    passes : passes that may be open at once: 2, 4 or 8.
    count_bits : bits of a pass's count of unanswered writes.

    Members
    -------
    free : Out(1) : `slot` may be used for a new pass.
    slot : Out : the pass that is being written, or the next one; the id of its writes.
    issued : In(1) : a write of `slot` was handed to the fabric.
    end : In(stream(PassEnd)) : `slot` has ended, all its writes have been counted; always taken.
    answered : In(1), answer_slot : In, answer_fault : In(Fault) : an answer of the fabric.
    done : Out(stream(PassDone)) : passes in order.

    `done` is valid 2 cycles after the later of the pass's end and its last answer (`latency_cycles`); a pass
    per cycle. A `done` that is not taken leaves passes open, and in the end `free` clear.
    """

    latency_cycles = 2

    def __init__(self, *, passes, count_bits):
        check_passes(passes)
        if not isinstance(count_bits, int) or count_bits < 1:
            raise ValueError(f"count_bits must be a positive integer, not {count_bits!r}")
        self.passes = passes
        self.count_bits = count_bits
        super().__init__(
            {
                "free": Out(1),
                "slot": Out(range(passes)),
                "issued": In(1),
                "end": In(stream.Signature(PassEnd, always_ready=True)),
                "answered": In(1),
                "answer_slot": In(range(passes)),
                "answer_fault": In(Fault),
                "done": Out(stream.Signature(PassDone)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        counts = [Signal(self.count_bits, name=f"count_{k}") for k in range(self.passes)]
        refused = Signal(self.passes)
        ended = Signal(self.passes)
        ends = [Signal(PassEnd, name=f"end_{k}", reset_less=True) for k in range(self.passes)]
        oldest = Signal(range(self.passes))
        move = Signal()
        report = Signal()
        oldest_end = Signal(PassEnd)
        oldest_refused = Signal()
        m.d.comb += [
            self.free.eq(~ended.bit_select(self.slot, 1)),
            move.eq(~self.done.valid | self.done.ready),
        ]
        with m.Switch(oldest):
            for k in range(self.passes):
                with m.Case(k):
                    m.d.comb += [
                        report.eq(ended[k] & (counts[k] == 0)),
                        oldest_end.eq(ends[k]),
                        oldest_refused.eq(refused[k]),
                    ]

        for k, count in enumerate(counts):
            up = self.issued & (self.slot == k)
            down = self.answered & (self.answer_slot == k)
            with m.If(up & ~down):
                m.d.sync += count.eq(count + 1)
            with m.Elif(down & ~up):
                m.d.sync += count.eq(count - 1)
            with m.If(down & (self.answer_fault != Fault.NONE)):
                m.d.sync += refused[k].eq(1)
            with m.If(self.end.valid & (self.slot == k)):
                m.d.sync += [ends[k].eq(self.end.payload), ended[k].eq(1)]
            with m.If(move & report & (oldest == k)):
                m.d.sync += [ended[k].eq(0), refused[k].eq(0)]
        with m.If(self.end.valid):
            m.d.sync += self.slot.eq(self.slot + 1)

        well = oldest_end.status == Status.OK
        with m.If(move):
            m.d.sync += self.done.valid.eq(report)
            with m.If(report):
                m.d.sync += [
                    oldest.eq(oldest + 1),
                    self.done.payload.status.eq(
                        Mux(well & oldest_refused, Status.RESULT_DENIED, oldest_end.status)
                    ),
                    self.done.payload.page.eq(Mux(well, 0, oldest_end.page)),
                    self.done.payload.lines.eq(oldest_end.lines),
                ]
        return m
