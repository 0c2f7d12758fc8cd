"""Credits: what may still be sent, and what has to be returned."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import CREDIT_MEM, CREDIT_STEPS

POOL_BITS = 10
_MEM_BIT = CREDIT_MEM.bit_length() - 1


class CreditPool(wiring.Component):
    """Messages of one kind that may be sent. Credits of CXL.cache are dropped; the count saturates.

    Parameters
    ----------
    most : messages that a cycle may send.

    Members
    -------
    code : In(4) : a credit field that was received in this cycle, zero for none.
    spent : In(range(most + 1)) : messages sent in this cycle; at most `available`.
    available : Out(range(most + 1)) : credits, no more than can be spent. From a register.

    A credit can be spent `latency_cycles` after its field.
    """

    latency_cycles = 2

    def __init__(self, *, most):
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"most must be a positive integer, not {most!r}")
        self.most = most
        super().__init__({"code": In(4), "spent": In(range(most + 1)), "available": Out(range(most + 1))})

    def elaborate(self, platform):
        m = Module()
        step, count = Signal(range(CREDIT_STEPS[-1] + 1)), Signal(POOL_BITS)
        later = Signal(POOL_BITS + 1)
        full = (1 << POOL_BITS) - 1
        m.d.sync += step.eq(0)
        with m.If(self.code[_MEM_BIT]):
            with m.Switch(self.code[:_MEM_BIT]):
                for code, credits in enumerate(CREDIT_STEPS):
                    with m.Case(code):
                        m.d.sync += step.eq(credits)
        m.d.comb += later.eq(count - self.spent + step)
        m.d.sync += count.eq(Mux(later > full, full, later))
        m.d.sync += self.available.eq(Mux(later > self.most, self.most, later))
        return m


class CreditReturn(wiring.Component):
    """Places of one kind that became free and whose credits have not been returned.

    Parameters
    ----------
    places : places that are free after reset.

    Members
    -------
    freed : In(1) : a place became free in this cycle.
    code : Out(4) : the credit field that returns the most.
    take : In(1) : the field is sent in this cycle.
    some : Out(1) : there are credits to return.
    """

    def __init__(self, *, places):
        if not isinstance(places, int) or not 1 <= places < 1 << POOL_BITS:
            raise ValueError(f"places must be an integer from 1 to {(1 << POOL_BITS) - 1}, not {places!r}")
        self.places = places
        super().__init__({"freed": In(1), "code": Out(4), "take": In(1), "some": Out(1)})

    def elaborate(self, platform):
        m = Module()
        owed = Signal(range(self.places + 1), init=self.places)
        step = Signal(range(CREDIT_STEPS[-1] + 1))
        m.d.comb += [self.some.eq(owed != 0), self.code.eq(CREDIT_MEM)]
        for code, credits in list(enumerate(CREDIT_STEPS))[1:]:
            if credits <= self.places:
                with m.If(owed >= credits):
                    m.d.comb += [self.code.eq(CREDIT_MEM | code), step.eq(credits)]
        m.d.sync += owed.eq(owed + self.freed - Mux(self.take, step, 0))
        return m
