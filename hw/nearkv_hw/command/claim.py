"""Taking extents: all of a claim or none."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import CLAIM, Status
from ..interfaces import OwnerPort
from .records import Claim

CLAIM_END = data.StructLayout({"status": Status, "detail": CLAIM["first_extent"].width})
"""How a claim ended."""


class Claimer(wiring.Component):
    """Looks up the owner of every extent of a claim, then takes them all if nobody else has one.

    Parameters
    ----------
    slices : slices of the memory, a power of two; consecutive extents lie in consecutive slices.
    extents : extents of the device.

    Members
    -------
    i : In(stream(Claim)) : claims.
    owners : Out(OwnerPort).array(slices) : the slices' owner tables.
    o : Out(stream(CLAIM_END)) : how it ended; for EXTENT_TAKEN `detail` is the first extent of another
        tenant.

    One extent per cycle at best, in each of two rounds. What the tenant owns already counts as free.
    """

    def __init__(self, *, slices, extents):
        if slices < 1 or slices & (slices - 1):
            raise ValueError(f"slices must be a power of two, not {slices!r}")
        if extents < slices:
            raise ValueError(f"extents must be at least {slices}, not {extents!r}")
        self.slices = slices
        self.extents = extents
        super().__init__(
            {
                "i": In(stream.Signature(Claim)),
                "owners": Out(OwnerPort()).array(slices),
                "o": Out(stream.Signature(CLAIM_END)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        claim = Signal(Claim, reset_less=True)
        width = CLAIM["extent_count"].width + 1
        end = Signal(width, reset_less=True)
        asked, answered = Signal(width, reset_less=True), Signal(width, reset_less=True)
        running, taking = Signal(), Signal()
        result = Signal(CLAIM_END, reset_less=True)
        asking, asks, answers = Signal(), Signal(), Signal()
        foreign = Signal()
        shift = self.slices.bit_length() - 1

        m.d.comb += asking.eq(running & (asked != end))
        for n, owner in enumerate(self.owners):
            for_request = asked[:shift] == n if shift else 1
            for_response = answered[:shift] == n if shift else 1
            m.d.comb += [
                owner.request.valid.eq(asking & for_request),
                owner.request.payload.extent.eq(asked >> shift),
                owner.request.payload.tenant.eq(claim.tenant),
                owner.request.payload.claim.eq(taking),
                owner.response.ready.eq(running & for_response),
            ]
            with m.If(owner.request.valid & owner.request.ready):
                m.d.comb += asks.eq(1)
            with m.If(owner.response.valid & owner.response.ready):
                m.d.comb += [
                    answers.eq(1),
                    foreign.eq(
                        owner.response.payload.owned & (owner.response.payload.tenant != claim.tenant)
                    ),
                ]
        with m.If(asks):
            m.d.sync += asked.eq(asked + 1)
        with m.If(answers):
            m.d.sync += answered.eq(answered + 1)

        m.d.comb += self.o.payload.eq(result)
        with m.FSM():
            with m.State("START"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [
                    claim.eq(self.i.payload),
                    end.eq(self.i.payload.first_extent + self.i.payload.extent_count),
                    asked.eq(self.i.payload.first_extent),
                    answered.eq(self.i.payload.first_extent),
                    result.status.eq(Status.OK),
                    result.detail.eq(0),
                    taking.eq(0),
                ]
                with m.If(self.i.valid):
                    m.next = "BOUND"
            with m.State("BOUND"):
                with m.If((end > self.extents) | (claim.extent_count == 0)):
                    m.d.sync += result.status.eq(Status.BAD_EXTENT)
                    m.next = "END"
                with m.Else():
                    m.d.sync += running.eq(1)
                    m.next = "ROUND"
            with m.State("ROUND"):
                with m.If(answers & foreign & (result.status == Status.OK)):
                    m.d.sync += [
                        result.status.eq(Status.EXTENT_TAKEN),
                        result.detail.eq(answered),
                        # Ask no more; a request that stands already is waited for.
                        end.eq(asked + asking),
                    ]
                with m.If(answered == end):
                    m.d.sync += running.eq(0)
                    m.next = "TURN"
            with m.State("TURN"):
                with m.If(taking | (result.status != Status.OK)):
                    m.next = "END"
                with m.Else():
                    m.d.sync += [
                        asked.eq(claim.first_extent),
                        answered.eq(claim.first_extent),
                        taking.eq(1),
                        running.eq(1),
                    ]
                    m.next = "ROUND"
            with m.State("END"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "START"
        return m
