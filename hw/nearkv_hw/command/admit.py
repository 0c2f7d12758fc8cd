"""The page table's header, and the ticket of every descriptor."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import Status
from ..abi.memory import ENTRIES_PER_LINE, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from ..abi.numerics import MAX_ROWS
from ..interfaces import Fault, ReadResponse
from ..structs import layout_of
from .claim import CLAIM_END
from .records import Checked, Claim, Job, Ticket

_ENTRIES_SHIFT = ENTRIES_PER_LINE.bit_length() - 1


class Admit(wiring.Component):
    """Ends what needs no pass, and lets good attention jobs through once their table's header is checked.

    Parameters
    ----------
    queries : query heads that a unit keeps per pass, a power of two.

    Members
    -------
    i : In(stream(Checked)) : descriptors.
    tables : In(stream(ReadResponse)) : the header of each attention job, in order.
    claims : Out(stream(Claim)), claimed : In(stream(CLAIM_END)) : the claimer.
    tickets : Out(stream(Ticket)) : one for every descriptor, in order.
    jobs : Out(stream(Job)) : the good attention jobs.

    Latency is 1 cycle for a descriptor without a header or claim, 2 cycles after the header for a job; one
    descriptor at a time.
    """

    latency_cycles = 1
    header_latency_cycles = 2

    def __init__(self, *, queries):
        if queries < 1 or queries & (queries - 1):
            raise ValueError(f"queries must be a power of two, not {queries!r}")
        self.queries = queries
        super().__init__(
            {
                "i": In(stream.Signature(Checked)),
                "tables": In(stream.Signature(ReadResponse)),
                "claims": Out(stream.Signature(Claim)),
                "claimed": In(stream.Signature(CLAIM_END)),
                "tickets": Out(stream.Signature(Ticket)),
                "jobs": Out(stream.Signature(Job)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        job = self.i.payload.job
        header = data.View(layout_of(TABLE), self.tables.payload.data)
        fault = self.tables.payload.fault
        last_page = (job.row_end - 1)[:32] >> job.page_rows_log2
        faults = {  # in the order in which they are reported
            Status.DENIED: (fault == Fault.DENIED) | (fault == Fault.OUTSIDE),
            Status.POISON: fault == Fault.POISON,
            Status.BAD_TABLE: (header.magic != TABLE_MAGIC)
            | (header.version != LAYOUT_VERSION)
            | (header.heads <= job.kv_head),
            Status.BAD_RANGE: (job.row_begin > job.row_end)
            | (job.row_end > header.committed_rows)
            | (job.row_end > MAX_ROWS)
            | ((job.row_end != 0) & (last_page >= header.entries)),
        }
        found = Signal(len(faults))
        entry_lines = Signal(job.entry_lines.shape(), reset_less=True)
        status = Signal(Status)
        detail = Signal(32, reset_less=True)
        good = Signal()
        told, passed = Signal(), Signal()
        shift = self.queries.bit_length() - 1

        m.d.comb += [
            self.claims.payload.eq(self.i.payload.claim),
            self.tickets.payload.eq(self.i.payload.ticket),
            self.tickets.payload.status.eq(status),
            self.tickets.payload.detail.eq(detail),
            self.jobs.payload.eq(job),
            self.jobs.payload.entry_lines.eq(entry_lines),
        ]
        with m.If(good):
            m.d.comb += self.tickets.payload.passes.eq((job.group + self.queries - 1) >> shift)

        with m.FSM():
            with m.State("START"):
                m.d.sync += [
                    status.eq(self.i.payload.ticket.status),
                    detail.eq(0),
                    good.eq(0),
                    told.eq(0),
                    passed.eq(1),
                    found.eq(Cat(faults.values())),
                    entry_lines.eq((header.entries + ENTRIES_PER_LINE - 1) >> _ENTRIES_SHIFT),
                ]
                with m.If(self.i.valid):
                    with m.If(self.i.payload.claims):
                        m.next = "CLAIM"
                    with m.Elif(self.i.payload.attends):
                        with m.If(self.tables.valid):
                            m.d.comb += self.tables.ready.eq(1)
                            m.next = "JUDGE"
                    with m.Else():
                        m.next = "SEND"
            with m.State("JUDGE"):
                for n, fault_status in reversed(list(enumerate(faults))):
                    with m.If(found[n]):
                        m.d.sync += status.eq(fault_status)
                with m.If(~found.any()):
                    m.d.sync += [good.eq(1), passed.eq(0)]
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
                m.d.comb += [self.tickets.valid.eq(~told), self.jobs.valid.eq(~passed)]
                with m.If(self.tickets.ready):
                    m.d.sync += told.eq(1)
                with m.If(self.jobs.ready):
                    m.d.sync += passed.eq(1)
                with m.If((told | self.tickets.ready) & (passed | self.jobs.ready)):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "START"
        return m
