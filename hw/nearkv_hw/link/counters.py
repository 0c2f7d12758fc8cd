"""What both ends of a link have counted since reset."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.flits import Retry, Side
from ..abi.window import LINK_LAYER_COUNTERS
from ..structs import layout_of
from .layer import EVENTS

SIDES = (Side.DEVICE, Side.HOST)
"""Whose counters these are, in their order."""
_COUNTERS = {"crc_error": "crc_errors", "stalled": "stalled_cycles"}
"""The counter of an event, where it has another name."""


class LinkCounters(wiring.Component):
    """Counters of 64 bits for each end, beside a `Link`.

    Members
    -------
    {side}_{event}, {side}_stalled : In(1), {side}_state : In(Retry), up : In(1) : as the link tells them.
    counters : Out(LINK_LAYER_COUNTERS) x 2 : of `SIDES`.

    An event is counted `latency_cycles` later.
    """

    latency_cycles = 2

    def __init__(self):
        super().__init__(
            {
                **{f"{side.name.lower()}_{event}": In(1) for side in SIDES for event in (*EVENTS, "stalled")},
                **{f"{side.name.lower()}_state": In(Retry) for side in SIDES},
                "up": In(1),
                "counters": Out(layout_of(LINK_LAYER_COUNTERS)).array(len(SIDES)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        was_up = Signal(init=1)
        m.d.sync += was_up.eq(self.up)
        for side, counters in zip(SIDES, self.counters, strict=True):
            name = side.name.lower()
            state, normal = getattr(self, f"{name}_state"), Signal(name=f"{name}_normal", init=1)
            m.d.sync += normal.eq(state == Retry.NORMAL)
            happened = {event: getattr(self, f"{name}_{event}") for event in (*EVENTS, "stalled")}
            happened |= {"retries": normal & (state != Retry.NORMAL), "retrainings": was_up & ~self.up}
            for event, now in happened.items():
                before = Signal(name=f"{name}_{event}_before")
                m.d.sync += before.eq(now)
                counter = counters[_COUNTERS.get(event, event)]
                with m.If(before):
                    m.d.sync += counter.eq(counter + 1)
        return m
