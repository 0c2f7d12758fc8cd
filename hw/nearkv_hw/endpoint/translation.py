"""Messages of host addresses to messages of the device's own addresses."""

from amaranth.hdl import Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..common.buffer import Buffer
from .decode import Message
from .hdm.decoders import Decoders
from .hdm.translate import LINE_BITS, Translated

NOWHERE = (1 << LINE_BITS) - 1
"""A line of no device: the last one that a message can name. What no decoder has leads there."""


class Translation(wiring.Component):
    """Asks the decoders where each message's address leads, and waits for the answer; messages keep their
    order.

    Members
    -------
    i : In(stream(Message)) : messages.
    o : Out(stream(Message)) : the same, addresses translated; `NOWHERE` where no decoder has them.
    asked : Out(stream(LINE_BITS), always_ready), found : In(stream(Translated), always_ready) : to the
        decoders and back, `Decoders.latency_cycles` later.

    Latency is `latency_cycles`, throughput one message per cycle; `depth` messages are under way at most.
    """

    latency_cycles = Decoders.latency_cycles + Buffer.latency_cycles
    depth = latency_cycles + 2

    def __init__(self):
        super().__init__(
            {
                "i": In(stream.Signature(Message)),
                "o": Out(stream.Signature(Message)),
                "asked": Out(stream.Signature(LINE_BITS, always_ready=True)),
                "found": In(stream.Signature(Translated, always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.messages = messages = Buffer(shape=Message, depth=self.depth)
        m.submodules.places = places = Buffer(shape=Translated, depth=self.depth)
        wiring.connect(m, wiring.flipped(self.i), messages.i)
        place = places.o.payload
        m.d.comb += [
            self.asked.valid.eq(self.i.valid & self.i.ready),
            self.asked.payload.eq(self.i.payload.address),
            # There is a place for each of the messages under way.
            places.i.valid.eq(self.found.valid),
            places.i.payload.eq(self.found.payload),
            self.o.valid.eq(places.o.valid),
            self.o.payload.eq(messages.o.payload),
            self.o.payload.address.eq(Mux(place.hit, place.line, NOWHERE)),
            messages.o.ready.eq(self.o.valid & self.o.ready),
            places.o.ready.eq(self.o.ready),
        ]
        return m
