"""The endpoint's way in: two streams of messages become one, in the order in which they came."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS, LINE_BYTES
from ..common.buffer import Buffer
from .decode import Message, message_of
from .messages import REQ, RWD

_WAITING = 2
"""Messages of each kind that wait for their turn."""


class Content(data.Struct):
    """What an RwD message brings beside its header."""

    data: LINE_BITS
    enable: LINE_BYTES


class Arrivals(wiring.Component):
    """Registers messages and merges M2S Req and RwD, first come, first served.

    Of two messages that arrive in the same cycle the first is of the kind that was second the last time. When
    both streams always have a message, they get every other cycle each. A message whose valid bit is clear is
    taken, and is none.

    Parameters
    ----------
    content_depth : contents that are kept, at least as many as messages with data between `m2s_rwd` and
        whoever takes `contents`.

    Members
    -------
    m2s_req : In(stream(REQ)), m2s_rwd : In(stream(RWD)) : messages from the host; their ready depends on
        registers.
    req_room, rwd_room : In(1) : a message may be accepted.
    req_accepted, rwd_accepted : Out(1) : one is.
    messages : Out(stream(Message)) : headers of both kinds, in order of arrival.
    contents : Out(stream(Content)) : what the messages with data brought, in order; there when the message
        is.

    Latency is 1 cycle (`latency_cycles`), throughput one message per cycle.
    """

    latency_cycles = Buffer.latency_cycles

    def __init__(self, *, content_depth):
        if not isinstance(content_depth, int) or content_depth < _WAITING:
            raise ValueError(
                f"content_depth must be an integer of at least {_WAITING}, not {content_depth!r}"
            )
        self.content_depth = content_depth
        super().__init__(
            {
                "m2s_req": In(stream.Signature(REQ)),
                "m2s_rwd": In(stream.Signature(RWD)),
                "req_room": In(1),
                "rwd_room": In(1),
                "req_accepted": Out(1),
                "rwd_accepted": Out(1),
                "messages": Out(stream.Signature(Message)),
                "contents": Out(stream.Signature(Content)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.req = req = Buffer(shape=Message, depth=_WAITING)
        m.submodules.rwd = rwd = Buffer(shape=Message, depth=_WAITING)
        m.submodules.contents = contents = Buffer(shape=Content, depth=self.content_depth)
        wiring.connect(m, contents.o, wiring.flipped(self.contents))
        rwd_ready = rwd.i.ready & contents.i.ready
        for waiting, arriving, header, ready, room, accepted in (
            (req, self.m2s_req, self.m2s_req.payload, req.i.ready, self.req_room, self.req_accepted),
            (rwd, self.m2s_rwd, self.m2s_rwd.payload.header, rwd_ready, self.rwd_room, self.rwd_accepted),
        ):
            m.d.comb += [
                arriving.ready.eq(ready & room),
                accepted.eq(arriving.valid & arriving.ready & header.valid),
                waiting.i.valid.eq(accepted),
                *(waiting.i.payload[name].eq(value) for name, value in message_of(header).items()),
            ]
        m.d.comb += [
            contents.i.valid.eq(self.rwd_accepted),
            contents.i.payload.enable.eq(self.m2s_rwd.payload.enable),
            contents.i.payload.data.eq(self.m2s_rwd.payload.data),
        ]

        # The kinds (1 with data) of the waiting messages, the first at bit 0.
        kinds, count = Signal(2 * _WAITING), Signal(range(2 * _WAITING + 1))
        leaves, left_kinds, left_count = Signal(), Signal.like(kinds), Signal.like(count)
        with_data_first = Signal()
        both = self.req_accepted & self.rwd_accepted
        m.d.comb += [
            self.messages.valid.eq(count != 0),
            self.messages.payload.eq(Mux(kinds[0], rwd.o.payload, req.o.payload)),
            leaves.eq(self.messages.valid & self.messages.ready),
            req.o.ready.eq(leaves & ~kinds[0]),
            rwd.o.ready.eq(leaves & kinds[0]),
            left_kinds.eq(Mux(leaves, kinds >> 1, kinds)),
            left_count.eq(count - leaves),
        ]
        arrived = Mux(both, Cat(with_data_first, ~with_data_first), self.rwd_accepted)
        m.d.sync += count.eq(left_count + self.req_accepted + self.rwd_accepted)
        with m.Switch(left_count):
            for n in range(2 * _WAITING):
                with m.Case(n):
                    m.d.sync += kinds.eq(Cat(left_kinds[:n], arrived))
            with m.Default():
                m.d.sync += kinds.eq(left_kinds)
        with m.If(both):
            m.d.sync += with_data_first.eq(~with_data_first)
        return m
