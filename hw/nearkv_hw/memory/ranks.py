"""A channel's bus, which the ranks of a module share where units stand at the ranks."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..common.arbiter import RoundRobin
from ..common.buffer import Buffer
from ..interfaces import FabricPort, FabricRequest, FabricResponse


class RankBus(wiring.Component):
    """Lets the fabric's traffic of a channel pass to its ranks, one request and one answer per cycle in all.

    Units at the ranks do not use it: each streams from its own rank.

    Parameters
    ----------
    ranks : 2 or 4.

    Members
    -------
    fabric : In(FabricPort) x ranks : from the fabric.
    ranks : Out(FabricPort) x ranks : to the ranks' memories.

    Requests and answers take 1 cycle (`latency_cycles`). Ranks that want the bus are served in turn; an
    answer that is left lying holds up its own rank's.
    """

    latency_cycles = Buffer.latency_cycles

    def __init__(self, *, ranks):
        if ranks not in (2, 4):
            raise ValueError(f"ranks must be 2 or 4, not {ranks!r}")
        super().__init__({"fabric": In(FabricPort()).array(ranks), "ranks": Out(FabricPort()).array(ranks)})

    def elaborate(self, platform):
        m = Module()
        for kind, shape, sources, targets in (
            (
                "request",
                FabricRequest,
                [port.request for port in self.fabric],
                [port.request for port in self.ranks],
            ),
            (
                "response",
                FabricResponse,
                [port.response for port in self.ranks],
                [port.response for port in self.fabric],
            ),
        ):
            m.submodules[f"{kind}_turns"] = turns = RoundRobin(count=len(sources))
            buffers = []
            for n, target in enumerate(targets):
                buffer = m.submodules[f"{kind}_{n}"] = Buffer(shape=shape)
                wiring.connect(m, buffer.o, wiring.flipped(target))
                buffers.append(buffer)
            # only those whose buffer has room take part, so that none holds the bus
            wants = Cat(
                source.valid & buffer.i.ready for source, buffer in zip(sources, buffers, strict=True)
            )
            m.d.comb += [turns.requests.eq(wants), turns.accept.eq(turns.grant.any())]
            for n, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
                granted = Signal(name=f"{kind}_granted_{n}")
                m.d.comb += [
                    granted.eq(turns.grant[n]),
                    buffer.i.payload.eq(source.payload),
                    buffer.i.valid.eq(granted),
                    source.ready.eq(granted),
                ]
        return m
