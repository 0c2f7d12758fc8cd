"""Credits: what may still be sent, and what has to be returned."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import CREDIT_CODES, CREDIT_MEM

POOL_BITS = 10


def _code_bits(codes):
    """Bits of a credit field."""
    return max(codes).bit_length()


class CreditPool(wiring.Component):
    """Messages of one kind that may be sent. Other codes are dropped; the count saturates.

    Parameters
    ----------
    most : messages that a cycle may send.
    codes : what a credit field's codes return of the kind, as in `abi.flits.CREDIT_CODES`.

    Members
    -------
    code : In : a credit field that was received in this cycle, zero for none.
    spent : In(range(most + 1)) : messages sent in this cycle; at most `available`.
    available : Out(range(most + 1)) : credits, no more than can be spent. From a register.
    left : Out : all of them.

    A credit can be spent `latency_cycles` after its field.
    """

    latency_cycles = 2

    def __init__(self, *, most, codes=CREDIT_CODES):
        if not isinstance(most, int) or most < 1:
            raise ValueError(f"most must be a positive integer, not {most!r}")
        self.most = most
        self.codes = dict(codes)
        super().__init__(
            {
                "code": In(_code_bits(codes)),
                "spent": In(range(most + 1)),
                "available": Out(range(most + 1)),
                "left": Out(POOL_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        step, count = Signal(range(max(self.codes.values()) + 1)), Signal(POOL_BITS)
        later = Signal(POOL_BITS + 1)
        full = (1 << POOL_BITS) - 1
        m.d.sync += step.eq(0)
        with m.Switch(self.code):
            for code, credits in self.codes.items():
                with m.Case(code):
                    m.d.sync += step.eq(credits)
        m.d.comb += [later.eq(count - self.spent + step), self.left.eq(count)]
        m.d.sync += count.eq(Mux(later > full, full, later))
        m.d.sync += self.available.eq(Mux(later > self.most, self.most, later))
        return m


class CreditReturn(wiring.Component):
    """Places of one kind that became free and whose credits have not been returned.

    Parameters
    ----------
    places : places that are free after reset.
    codes : what a credit field's codes return of the kind; one of them a single place.
    idle : the field that returns nothing.

    Members
    -------
    freed : In(1) : a place became free in this cycle.
    code : Out : the credit field that returns the most.
    take : In(1) : the field is sent in this cycle.
    some : Out(1) : there are credits to return.
    owed : Out : how many.
    """

    def __init__(self, *, places, codes=CREDIT_CODES, idle=CREDIT_MEM):
        if not isinstance(places, int) or not 1 <= places < 1 << POOL_BITS:
            raise ValueError(f"places must be an integer from 1 to {(1 << POOL_BITS) - 1}, not {places!r}")
        self.places = places
        self.codes = dict(codes)
        self.idle = idle
        super().__init__(
            {
                "freed": In(1),
                "code": Out(_code_bits(codes)),
                "take": In(1),
                "some": Out(1),
                "owed": Out(POOL_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        owed = Signal(range(self.places + 1), init=self.places)
        step = Signal(range(max(self.codes.values()) + 1))
        m.d.comb += [self.some.eq(owed != 0), self.code.eq(self.idle), self.owed.eq(owed)]
        for code, credits in self.codes.items():  # the last that applies is the largest
            if credits <= self.places:
                with m.If(owed >= credits):
                    m.d.comb += [self.code.eq(code), step.eq(credits)]
        m.d.sync += owed.eq(owed + self.freed - Mux(self.take, step, 0))
        return m


def told_of(m, packer, queues):
    """Tell of a packer's credits: those that are left of each kind, and whether messages wait for some.

    Parameters
    ----------
    packer : the component, with members as `credit_members` has them.
    queues : of each kind the `LaneQueue` of its headers and its `CreditPool`.
    """
    m.d.comb += packer.stalled.eq(
        Cat((queue.level != 0) & (pool.available == 0) for queue, pool in queues.values()).any()
    )
    m.d.comb += [getattr(packer, f"{name}_left").eq(pool.left) for name, (_, pool) in queues.items()]


def credit_members(kinds):
    """Members of a packer of messages of these kinds: credits left of each, and whether messages wait for
    some."""
    return {**{f"{name}_left": Out(POOL_BITS) for name in kinds}, "stalled": Out(1)}
