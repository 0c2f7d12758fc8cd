"""Taking extents, all of a claim or none, and giving them back."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.config import LOGICAL_DEVICE_CHOICES, MAX_APERTURES
from ..abi.descriptor import CLAIM, Status
from ..interfaces import EXTENTS_BITS, OwnerPort
from .records import Claim

CLAIM_END = data.StructLayout({"status": Status, "detail": CLAIM["first_extent"].width})
"""How a claim or a release ended."""


class Claimer(wiring.Component):
    """Looks up the owner of every extent of a claim, then takes them all if each is free or the tenant's.

    A release gives back those of its extents that are the tenant's.

    Parameters
    ----------
    slices : slices of the memory, a power of two; consecutive extents lie in consecutive slices.
    extents : extents of the device.
    apertures : tenants of the device.
    logical_devices : each has a part of the extents, and its tenants can have no others; a power of two.

    Members
    -------
    i : In(stream(Claim)) : claims and releases.
    owners : Out(OwnerPort).array(slices) : the slices' owner tables.
    quotas, holdings : In, Out(EXTENTS_BITS) x apertures : extents that each tenant may own, and does own.
    o : Out(stream(CLAIM_END)) : how it ended; `detail` is the first extent that a claim cannot have, the
        quota that it goes beyond, or of a release how many extents it gave back.
    released : Out(1) : a release has ended.

    One extent per cycle at best, a claim in each of two rounds. What the tenant owns already counts as free.
    """

    def __init__(self, *, slices, extents, apertures, logical_devices=1):
        if slices < 1 or slices & (slices - 1):
            raise ValueError(f"slices must be a power of two, not {slices!r}")
        if extents < slices:
            raise ValueError(f"extents must be at least {slices}, not {extents!r}")
        if not isinstance(apertures, int) or not 1 <= apertures <= MAX_APERTURES:
            raise ValueError(f"apertures must be from 1 to {MAX_APERTURES}, not {apertures!r}")
        if logical_devices not in LOGICAL_DEVICE_CHOICES or apertures % logical_devices:
            raise ValueError(f"logical_devices must divide {apertures} apertures, not be {logical_devices!r}")
        self.slices = slices
        self.extents = extents
        self._part_shift = exact_log2(extents // logical_devices) if logical_devices > 1 else None
        self._tenant_shift = exact_log2(apertures // logical_devices) if logical_devices > 1 else None
        super().__init__(
            {
                "i": In(stream.Signature(Claim)),
                "owners": Out(OwnerPort()).array(slices),
                "quotas": In(EXTENTS_BITS).array(apertures),
                "holdings": Out(EXTENTS_BITS).array(apertures),
                "o": Out(stream.Signature(CLAIM_END)),
                "released": Out(1),
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
        foreign, own, busy = Signal(), Signal(), Signal()  # of the owner that an answer tells
        quota, holding, fresh = (
            Signal(EXTENTS_BITS, name=name, reset_less=True) for name in ("quota", "holding", "fresh")
        )
        over, changes = Signal(), Signal()
        shift = self.slices.bit_length() - 1

        m.d.comb += asking.eq(running & (asked != end))
        for n, owner in enumerate(self.owners):
            for_request = asked[:shift] == n if shift else 1
            for_response = answered[:shift] == n if shift else 1
            m.d.comb += [
                owner.request.valid.eq(asking & for_request),
                owner.request.payload.extent.eq(asked >> shift),
                owner.request.payload.tenant.eq(claim.tenant),
                owner.request.payload.claim.eq(taking & ~claim.release),
                owner.request.payload.release.eq(claim.release),
                owner.response.ready.eq(running & for_response),
            ]
            with m.If(owner.request.valid & owner.request.ready):
                m.d.comb += asks.eq(1)
            with m.If(owner.response.valid & owner.response.ready):
                told = owner.response.payload
                m.d.comb += [
                    answers.eq(1),
                    own.eq(told.owned & (told.tenant == claim.tenant)),
                    foreign.eq(told.owned & (told.tenant != claim.tenant)),
                    busy.eq(told.scrubbing),
                ]
        with m.If(asks):
            m.d.sync += asked.eq(asked + 1)
        with m.If(answers):
            m.d.sync += answered.eq(answered + 1)

        m.d.comb += self.o.payload.eq(result)
        m.d.sync += over.eq(holding + fresh > quota)
        for tenant, (allowed, owned) in enumerate(zip(self.quotas, self.holdings, strict=True)):
            with m.If(claim.tenant == tenant):
                m.d.sync += quota.eq(allowed)
                with m.If(changes):
                    m.d.sync += owned.eq(Mux(claim.release, holding - result.detail, holding + fresh))
                with m.Else():
                    m.d.sync += holding.eq(owned)
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
                    fresh.eq(0),
                    taking.eq(self.i.payload.release),  # it needs no look before
                ]
                with m.If(self.i.valid):
                    m.next = "BOUND"
            with m.State("BOUND"):
                beyond = (end > self.extents) | (claim.extent_count == 0)
                if self._part_shift is not None:
                    beyond |= self._of_another(claim, end)
                with m.If(beyond):
                    m.d.sync += result.status.eq(Status.BAD_EXTENT)
                    m.next = "END"
                with m.Else():
                    m.d.sync += running.eq(1)
                    m.next = "ROUND"
            with m.State("ROUND"):
                with m.If(claim.release):
                    m.d.sync += result.detail.eq(result.detail + (answers & own))
                with m.Elif(taking):
                    pass
                with m.Elif(answers & (foreign | busy) & (result.status == Status.OK)):
                    m.d.sync += [
                        result.status.eq(Mux(foreign, Status.EXTENT_TAKEN, Status.EXTENT_BUSY)),
                        result.detail.eq(answered),
                        # Ask no more; a request that stands already is waited for.
                        end.eq(asked + asking),
                    ]
                with m.Elif(answers & ~own):
                    m.d.sync += fresh.eq(fresh + 1)
                with m.If(answered == end):
                    m.d.sync += running.eq(0)
                    m.next = "COUNT"
            with m.State("COUNT"):
                m.next = "TURN"
            with m.State("TURN"):
                with m.If(taking | (result.status != Status.OK)):
                    m.d.comb += changes.eq(taking)
                    m.next = "END"
                with m.Elif(over):
                    m.d.sync += [result.status.eq(Status.OVER_QUOTA), result.detail.eq(quota)]
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
                m.d.comb += [self.o.valid.eq(1), self.released.eq(claim.release)]
                with m.If(self.o.ready):
                    m.next = "START"
        return m

    def _of_another(self, claim, end):
        """Whether a claim reaches into the extents of another logical device than its tenant's."""
        own, shift = claim.tenant >> self._tenant_shift, self._part_shift
        return (claim.first_extent >> shift != own) | ((end - 1)[: len(end)] >> shift != own)
