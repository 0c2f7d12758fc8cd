"""Fair choice among several that want the same thing."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class RoundRobin(wiring.Component):
    """Grant one request per cycle, each requester in its turn.

    A requester that was served comes last. A grant that is not accepted stays: a stream that is offered the
    chosen item sees it until it takes it. Requests must therefore hold until they are served.

    Parameters
    ----------
    count : requesters, at least 1.

    Members
    -------
    requests : In(count) : who wants.
    accept : In(1) : the granted request is served in this cycle.
    grant : Out(count) : at most one bit; none when nobody wants. Does not depend on `accept`.

    Latency is 0 cycles (`latency_cycles`). With n others that want, a request waits for at most n served
    ones.
    """

    latency_cycles = 0

    def __init__(self, *, count):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be a positive integer, not {count!r}")
        self.count = count
        super().__init__({"requests": In(count), "accept": In(1), "grant": Out(count)})

    def elaborate(self, platform):
        m = Module()
        if self.count == 1:
            m.d.comb += self.grant.eq(self.requests)
            return m
        later = Signal(self.count, init=(1 << self.count) - 1)  # those behind the one served last
        held = Signal(self.count)
        preferred = self.requests & later

        def lowest(bits):
            taken = bits[0]
            first = [bits[0]]
            for bit in bits[1:]:
                first.append(bit & ~taken)
                taken = taken | bit
            return Cat(first)

        with m.If(held.any()):
            m.d.comb += self.grant.eq(held)
        with m.Elif(preferred.any()):
            m.d.comb += self.grant.eq(lowest(preferred))
        with m.Else():
            m.d.comb += self.grant.eq(lowest(self.requests))
        with m.If(self.accept):
            m.d.sync += held.eq(0)
            for i in range(self.count):
                with m.If(self.grant[i]):
                    m.d.sync += later.eq(~((1 << i + 1) - 1))
        with m.Else():
            m.d.sync += held.eq(self.grant)
        return m
