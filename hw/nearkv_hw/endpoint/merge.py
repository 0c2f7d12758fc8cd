"""Several masters share one port."""

from functools import reduce

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..common.arbiter import RoundRobin
from ..common.buffer import Buffer
from ..interfaces import FabricPort, FabricRequest, FabricResponse

_UNDER_WAY = 4


class Merge(wiring.Component):
    """Hands the requests of several masters, in turn, to a port that answers in order. One master is wired
    through.

    Parameters
    ----------
    masters : how many, at least 1.

    Members
    -------
    masters : In(FabricPort) x masters : who asks.
    port : Out(FabricPort) : whom they ask; its answers keep the order of the requests.

    With several masters a request takes `latency_cycles`, and so does an answer. Throughput is one request
    per cycle while fewer than four wait for their answers. A master that does not take its answer stops the
    others.
    """

    latency_cycles = Buffer.latency_cycles

    def __init__(self, *, masters):
        if not isinstance(masters, int) or masters < 1:
            raise ValueError(f"masters must be a positive integer, not {masters!r}")
        super().__init__({"masters": In(FabricPort()).array(masters), "port": Out(FabricPort())})

    def elaborate(self, platform):
        m = Module()
        if len(self.masters) == 1:
            wiring.connect(m, wiring.flipped(self.masters[0]), wiring.flipped(self.port))
            return m
        m.submodules.turn = turn = RoundRobin(count=len(self.masters))
        m.submodules.order = order = Buffer(shape=len(self.masters), depth=_UNDER_WAY)
        m.submodules.requests = requests = Buffer(shape=FabricRequest)
        m.submodules.answers = answers = Buffer(shape=FabricResponse)
        wiring.connect(m, requests.o, wiring.flipped(self.port.request))
        wiring.connect(m, wiring.flipped(self.port.response), answers.i)
        room, taken = Signal(), Signal()
        payloads = [master.request.payload.as_value() for master in self.masters]
        m.d.comb += [
            room.eq(requests.i.ready & order.i.ready),
            turn.requests.eq(Cat(master.request.valid for master in self.masters)),
            turn.accept.eq(turn.grant.any() & room),
            requests.i.valid.eq(turn.accept),
            requests.i.payload.as_value().eq(
                reduce(
                    lambda rest, i: Mux(turn.grant[i], payloads[i], rest),
                    range(1, len(payloads)),
                    payloads[0],
                )
            ),
            order.i.valid.eq(turn.accept),
            order.i.payload.eq(turn.grant),
            taken.eq((order.o.payload & Cat(master.response.ready for master in self.masters)).any()),
            answers.o.ready.eq(taken & order.o.valid),
            order.o.ready.eq(taken & answers.o.valid),
        ]
        for i, master in enumerate(self.masters):
            m.d.comb += [
                master.request.ready.eq(turn.grant[i] & room),
                master.response.valid.eq(answers.o.valid & order.o.valid & order.o.payload[i]),
                master.response.payload.eq(answers.o.payload),
            ]
        return m
