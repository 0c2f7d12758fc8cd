"""Completion records."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import COMPLETION, Status
from ..interfaces import PassDone
from ..structs import layout_of
from .records import Completed, Outcome, Ticket


class Completer(wiring.Component):
    """Writes the completion record of every descriptor, in order, when all its passes are over.

    Parameters
    ----------
    ring_slots : slots of a ring, a power of two: when a lap ends the phase bit turns.

    Members
    -------
    tickets : In(stream(Ticket)) : descriptors.
    query_outcomes, page_outcomes : In(stream(Outcome)) : the walker's part of each pass.
    passes : In(stream(PassDone)) : the results' part of each pass.
    now : In(32) : the cycle.
    o : Out(stream(Completed)) : the records.
    retired : Out(1) : a record was taken.

    A record's status is the first fault of its passes in order; within a pass queries come first, then pages,
    page-table entries, and results. As a pass streams no page behind the first entry at fault, this is the
    lowest page at fault. Latency is 1 cycle after the last pass, throughput one pass per cycle.
    """

    latency_cycles = 1

    def __init__(self, *, ring_slots):
        if ring_slots < 1 or ring_slots & (ring_slots - 1):
            raise ValueError(f"ring_slots must be a power of two, not {ring_slots!r}")
        self.ring_slots = ring_slots
        super().__init__(
            {
                "tickets": In(stream.Signature(Ticket)),
                "query_outcomes": In(stream.Signature(Outcome)),
                "page_outcomes": In(stream.Signature(Outcome)),
                "passes": In(stream.Signature(PassDone)),
                "now": In(32),
                "o": Out(stream.Signature(Completed)),
                "retired": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        ticket = self.tickets.payload
        status, detail = Signal(Status), Signal(32, reset_less=True)
        lines, left = Signal(32), Signal(len(ticket.passes) + 1)
        cycles = Signal(32, reset_less=True)
        record = data.View(layout_of(COMPLETION), self.o.payload.record)
        parts = (self.query_outcomes, self.page_outcomes, self.passes)
        streamed = self.passes.payload
        page_fault = Signal()
        m.d.comb += page_fault.eq((streamed.status != Status.OK) & (streamed.status != Status.RESULT_DENIED))
        together = Signal()
        m.d.comb += [
            together.eq(parts[0].valid & parts[1].valid & parts[2].valid),
            self.o.payload.tenant.eq(ticket.tenant),
            self.o.payload.index.eq(ticket.index),
            self.o.payload.failed.eq(status != Status.OK),
            record.phase.eq(~ticket.index[self.ring_slots.bit_length() - 1]),
            record.status.eq(status),
            record.passes.eq(ticket.passes),
            record.tag.eq(ticket.tag),
            record.cycles.eq(cycles),
            record.lines.eq(lines),
            record.detail.eq(detail),
        ]
        with m.FSM():
            with m.State("START"):
                m.d.sync += [
                    status.eq(ticket.status),
                    detail.eq(ticket.detail),
                    lines.eq(0),
                    left.eq(ticket.passes << ticket.bounds),
                    cycles.eq(self.now - ticket.fetched),
                ]
                with m.If(self.tickets.valid):
                    m.next = "SEND"
                    with m.If(ticket.passes != 0):
                        m.next = "PASSES"
            with m.State("PASSES"):
                m.d.sync += cycles.eq(self.now - ticket.fetched)
                with m.If(together):
                    m.d.comb += [part.ready.eq(1) for part in parts]
                    m.d.sync += [left.eq(left - 1), lines.eq(lines + self.passes.payload.lines)]
                    with m.If(status == Status.OK):
                        ranked = [
                            (self.query_outcomes.payload, self.query_outcomes.payload.status != Status.OK),
                            (streamed, page_fault),
                            (self.page_outcomes.payload, self.page_outcomes.payload.status != Status.OK),
                            (streamed, 1),
                        ]
                        for told, holds in reversed(ranked):
                            with m.If(holds):
                                m.d.sync += [status.eq(told.status), detail.eq(told.page)]
                    with m.If(left == 1):
                        m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.comb += [self.tickets.ready.eq(1), self.retired.eq(1)]
                    m.next = "START"
        return m
