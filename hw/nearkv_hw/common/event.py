"""A tap for timelines: it says in which cycles a signal was set."""

from amaranth.hdl import ClockSignal, Instance, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In

VALUE_BITS = 32


class Event(wiring.Component):
    """Tells the device's recorder of every cycle with `valid`; a black box `nearkv_event` that the simulator
    fills in (SystemVerilog and C++).

    It has no outputs, so leaving it out changes nothing in a design: Amaranth's own simulator and a device
    of hardware do just that, and a device that is not asked for events spends a test on each.

    Parameters
    ----------
    name : what happens, such as "unit.first_line".
    index : which of several equal blocks it happens in.

    Members
    -------
    valid : In(1) : it happens in this cycle.
    a, b : In(32) : what a reader of the timeline wants to know of it.
    """

    def __init__(self, *, name, index=0):
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string that is not empty, not {name!r}")
        if not isinstance(index, int) or index < 0:
            raise ValueError(f"index must be a non-negative integer, not {index!r}")
        self.name = name
        self.index = index
        super().__init__({"valid": In(1), "a": In(VALUE_BITS), "b": In(VALUE_BITS)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.event = Instance(
            "nearkv_event",
            p_NAME=self.name,
            p_INDEX=self.index,
            i_clk=ClockSignal(),
            i_valid=self.valid,
            i_a=self.a,
            i_b=self.b,
        )
        return m
