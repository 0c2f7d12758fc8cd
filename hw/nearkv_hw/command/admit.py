"""The page table's header, and the ticket of every descriptor."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import Status
from ..abi.memory import ENTRIES_PER_LINE, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from ..interfaces import Fault
from ..structs import layout_of
from .claim import CLAIM_END
from .records import Claim, Plan, Planned, Ticket, WalkLine

_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1


class Admit(wiring.Component):
    """Ends what needs no pass, and lets good attention jobs through once their table's header is checked.

    Parameters
    ----------
    queries : query heads that a unit keeps per pass, a power of two.

    Members
    -------
    i : In(stream(Planned)) : descriptors.
    tables : In(stream(WalkLine)) : the header of each attention job, in order.
    claims : Out(stream(Claim)), claimed : In(stream(CLAIM_END)) : the claimer.
    tickets : Out(stream(Ticket)) : one for every descriptor, in order.
    jobs : Out(stream(Plan)) : the good attention jobs.

    Latency is 1 cycle for a descriptor without a claim, for a job from its header on; throughput one
    descriptor in `interval_cycles`.
    """

    latency_cycles = 1
    interval_cycles = 2

    def __init__(self, *, queries):
        if queries < 1 or queries & (queries - 1):
            raise ValueError(f"queries must be a power of two, not {queries!r}")
        self.queries = queries
        super().__init__(
            {
                "i": In(stream.Signature(Planned)),
                "tables": In(stream.Signature(WalkLine)),
                "claims": Out(stream.Signature(Claim)),
                "claimed": In(stream.Signature(CLAIM_END)),
                "tickets": Out(stream.Signature(Ticket)),
                "jobs": Out(stream.Signature(Plan)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        planned, plan = self.i.payload, self.i.payload.plan
        header = data.View(layout_of(TABLE), self.tables.payload.data)
        fault = self.tables.payload.fault
        faults = {  # in the order in which they are reported
            Status.BAD_GEOMETRY: planned.bad_page,
            Status.DENIED: (fault == Fault.DENIED) | (fault == Fault.OUTSIDE),
            Status.POISON: fault == Fault.POISON,
            Status.BAD_TABLE: (header.magic != TABLE_MAGIC)
            | (header.version != LAYOUT_VERSION)
            | (header.heads <= plan.kv_head),
            Status.BAD_RANGE: planned.bad_rows
            | (planned.row_end > header.committed_rows)
            | ((planned.row_end != 0) & (planned.last_page >= header.entries)),
        }
        found = Signal(len(faults))
        entry_lines = Signal(plan.entry_lines.shape(), reset_less=True)
        kv_head = Signal(plan.kv_head.shape(), reset_less=True)  # from a register: its product is long
        status = Signal(Status)  # of all but a job's header
        detail = Signal(32, reset_less=True)
        judged, good = Signal(), Signal()
        told, passed = Signal(), Signal()
        shift = self.queries.bit_length() - 1

        m.d.comb += [
            good.eq(judged & ~found.any()),
            self.claims.payload.eq(planned.claim),
            self.tickets.payload.eq(planned.ticket),
            self.tickets.payload.status.eq(status),
            self.tickets.payload.detail.eq(detail),
            self.tickets.payload.passes.eq(Mux(good, (plan.queries + self.queries - 1) >> shift, 0)),
            self.tickets.payload.bounds.eq(good & plan.select),
            self.jobs.payload.eq(plan),
            self.jobs.payload.entry_lines.eq(entry_lines),
            self.jobs.payload.kv_head.eq(kv_head),
        ]
        for n, fault_status in reversed(list(enumerate(faults))):
            with m.If(judged & found[n]):
                m.d.comb += self.tickets.payload.status.eq(fault_status)

        with m.FSM():
            with m.State("START"):
                m.d.sync += [
                    status.eq(planned.ticket.status),
                    detail.eq(0),
                    judged.eq(planned.attends),
                    told.eq(0),
                    passed.eq(0),
                    found.eq(Cat(faults.values())),
                    kv_head.eq(plan.kv_head),
                    entry_lines.eq((header.entries + ENTRIES_PER_LINE - 1) >> _ENTRIES_SHIFT),
                ]
                with m.If(self.i.valid):
                    with m.If(planned.claims):
                        m.next = "CLAIM"
                    with m.Elif(planned.attends):
                        with m.If(self.tables.valid):
                            m.d.comb += self.tables.ready.eq(1)
                            m.next = "SEND"
                    with m.Else():
                        m.next = "SEND"
            with m.State("CLAIM"):
                m.d.comb += self.claims.valid.eq(1)
                with m.If(self.claims.ready):
                    m.next = "CLAIMED"
            with m.State("CLAIMED"):
                m.d.comb += self.claimed.ready.eq(1)
                m.d.sync += [status.eq(self.claimed.payload.status), detail.eq(self.claimed.payload.detail)]
                with m.If(self.claimed.valid):
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += [self.tickets.valid.eq(~told), self.jobs.valid.eq(good & ~passed)]
                with m.If(self.tickets.ready):
                    m.d.sync += told.eq(1)
                with m.If(self.jobs.ready):
                    m.d.sync += passed.eq(1)
                with m.If((told | self.tickets.ready) & (passed | ~good | self.jobs.ready)):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"
        return m
