"""One direction of the link: how much may pass, so that it carries its rate and no more."""

from operator import add

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..common.trees import reduce_tree

SAVED_CYCLES = 2
"""As many as make up for the time until a message is counted: with fewer a full link would lose tokens."""


class Pace(wiring.Component):
    """Counts tokens: every cycle brings some, every message takes some.

    What messages took and cycles have not brought yet is owed. While no more is owed than `SAVED_CYCLES`
    bring, a message of each kind may begin to pass; one that has begun may pass whenever it is taken. So what
    passes in the long run is `per_cycle` tokens per cycle, to a token, however much is owed at times; and
    what idle cycles bring is lost, but for `SAVED_CYCLES` of it: a link cannot save time.

    Parameters
    ----------
    per_cycle : tokens that a cycle brings, at least 1.
    costs : tokens that each message takes, each at least 1.

    Members
    -------
    passed : In(len(costs)) : which messages pass in this cycle.
    open : Out(1) : messages may begin to pass. From a register.

    A message is counted `latency_cycles` after it passed.
    """

    latency_cycles = 2

    def __init__(self, *, per_cycle, costs):
        for name, values in (("per_cycle", [per_cycle]), ("costs", costs)):
            if not values or any(not isinstance(value, int) or value < 1 for value in values):
                raise ValueError(f"{name} must be positive integers, not {values!r}")
        self.per_cycle = per_cycle
        self.costs = tuple(costs)
        super().__init__({"passed": In(len(self.costs)), "open": Out(1, init=1)})

    def elaborate(self, platform):
        m = Module()
        saved = SAVED_CYCLES * self.per_cycle
        # Every stream may pass a message in each of the cycles before it is counted, and one that waited.
        most = saved + (self.latency_cycles + 1) * sum(self.costs)
        owed, later = Signal(range(most + 1)), Signal(signed(most.bit_length() + 1))
        change = Signal(range(-self.per_cycle, sum(self.costs)))
        prices = [Mux(passed, cost, 0) for passed, cost in zip(self.passed, self.costs, strict=True)]
        m.d.comb += later.eq(owed + change)
        m.d.sync += [
            change.eq(reduce_tree(prices, add) - self.per_cycle),
            owed.eq(Mux(later < 0, 0, later)),
            self.open.eq(later <= saved),
        ]
        return m
