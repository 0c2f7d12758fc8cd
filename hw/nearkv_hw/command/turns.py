"""Whose descriptor is next: tenants share the units by their jobs' lines, as the owner's weights say."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.descriptor import COMPLETION
from ..abi.owner import WEIGHT_BITS, WEIGHT_LINES_LOG2
from ..interfaces import TENANT_BITS

LINES_BITS = COMPLETION["lines"].width
CREDIT_BITS = LINES_BITS + 9
"""Of a signed number that holds the lines of all jobs that may be under way, 256 at most."""


class Turns(wiring.Component):
    """Chooses among the apertures with a descriptor, in turn, but for those that have used up their lines.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    waiting : In(apertures) : which apertures have a descriptor.
    weights : In(WEIGHT_BITS).array(apertures) : from 1 on.
    chosen : Out(TENANT_BITS) : whose descriptor is next, the one after the last that was taken first.
    valid : Out(1) : there is one.
    take : In(1) : it is taken; only while `valid`.
    used : In(1), user : In(TENANT_BITS), lines : In(LINES_BITS) : a job of this aperture took so many lines.

    This is deficit round robin with debits at the end of a job, when its lines are known. An aperture is left
    out while its credit is below zero. In a cycle in which nobody is left, each gets 1,024 lines times its
    weight; one that does not wait pays its debt by them and saves nothing. So over any time in which two
    apertures wait, their lines are as their weights, but for a grant and the jobs under way.

    A choice is seen in the cycle after `waiting` changed, a debit two cycles after `used`.
    """

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "waiting": In(config.apertures),
                "weights": In(WEIGHT_BITS).array(config.apertures),
                "chosen": Out(TENANT_BITS),
                "valid": Out(1),
                "take": In(1),
                "used": In(1),
                "user": In(TENANT_BITS),
                "lines": In(LINES_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        apertures = self.config.apertures
        used, user = Signal(), Signal(TENANT_BITS)
        lines = Signal(LINES_BITS, reset_less=True)
        m.d.sync += [used.eq(self.used), user.eq(self.user), lines.eq(self.lines)]

        credits = [Signal(signed(CREDIT_BITS), name=f"credit{n}") for n in range(apertures)]
        able = Signal(apertures)
        grant = Signal()
        m.d.comb += [
            able.eq(self.waiting & ~Cat(credit[-1] for credit in credits)),
            self.valid.eq(able.any()),
            grant.eq(~able.any() & ~used),  # what a debit changes is looked at first
        ]
        for n, credit in enumerate(credits):
            granted = Signal(signed(CREDIT_BITS), name=f"granted{n}")
            m.d.comb += granted.eq(credit + (self.weights[n] << WEIGHT_LINES_LOG2))
            with m.If(used & (user == n)):
                m.d.sync += credit.eq(credit - lines)
            with m.If(grant):
                m.d.sync += credit.eq(Mux(self.waiting[n] | granted[-1], granted, 0))

        turn = Signal(TENANT_BITS)
        with m.Switch(turn):
            for first in range(apertures):
                with m.Case(first):
                    for n in reversed(range(apertures)):
                        candidate = (first + n) % apertures
                        with m.If(able[candidate]):
                            m.d.comb += self.chosen.eq(candidate)
        with m.If(self.take):
            m.d.sync += turn.eq(Mux(self.chosen == apertures - 1, 0, self.chosen + 1))
        return m
