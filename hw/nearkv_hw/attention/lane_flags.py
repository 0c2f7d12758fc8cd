"""What the lanes of one query have met beside numbers."""

from amaranth.hdl import Module, Mux
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY

LANE_FLAGS = ("nan", "positive", "negative")
"""In the order of their bits in a lane's flags."""
assert (LANE_NAN, LANE_POSITIVE_INFINITY, LANE_NEGATIVE_INFINITY) == (1, 2, 4)


class LaneFlags(wiring.Component):
    """NaN and infinities met by each lane of one query; one line per cycle, kept from the next cycle on.

    Parameters
    ----------
    lanes : lanes of a line.
    states : lines that are kept.

    Members
    -------
    add, first, address : In : as of `BinnedAccumulator`.
    live : In : the row has weight; a row without is not looked at.
    nan, positive, negative : In : lanes whose element is NaN, +Inf, -Inf.
    held_nan, held_positive, held_negative : Out : flags kept at `address`.
    """

    def __init__(self, *, lanes, states):
        self.lanes = lanes
        self.states = states
        super().__init__(
            {
                "add": In(1),
                "first": In(1),
                "live": In(1),
                "address": In(range(states)),
                **{name: In(lanes) for name in LANE_FLAGS},
                **{f"held_{name}": Out(lanes) for name in LANE_FLAGS},
            }
        )

    def elaborate(self, platform):
        m = Module()
        for name in LANE_FLAGS:
            m.submodules[name] = kept = memory.Memory(shape=self.lanes, depth=self.states, init=[])
            read, write = kept.read_port(domain="comb"), kept.write_port()
            m.d.comb += [
                read.addr.eq(self.address),
                write.addr.eq(self.address),
                write.en.eq(self.add),
                write.data.eq(Mux(self.first, 0, read.data) | Mux(self.live, getattr(self, name), 0)),
                getattr(self, f"held_{name}").eq(read.data),
            ]
        return m
