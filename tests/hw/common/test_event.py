"""Taps: their parameters, what they become in Verilog, and that leaving them out changes nothing."""

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from nearkv_hw.common.event import Event
from nearkv_hw.verilog import to_verilog


class Counter(wiring.Component):
    """Counts, and tells of every fourth cycle."""

    step: In(1)
    count: Out(8)

    def elaborate(self, platform):
        m = Module()
        m.submodules.event = event = Event(name="counter.four", index=2)
        value = Signal(8)
        m.d.sync += value.eq(value + self.step)
        m.d.comb += [
            self.count.eq(value),
            event.valid.eq(self.step & (value[:2] == 3)),
            event.a.eq(value),
        ]
        return m


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be a string that is not empty, not ''"),
        ({"name": 3}, "name must be a string that is not empty, not 3"),
        ({"index": -1}, "index must be a non-negative integer, not -1"),
        ({"index": "0"}, "index must be a non-negative integer, not '0'"),
    ],
)
def test_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        Event(**{"name": "x", **changes})


def test_verilog_names_the_source():
    text = to_verilog(Counter()).text
    assert '.NAME("counter.four")' in text
    assert ".INDEX(32'd2)" in text


def test_amaranths_simulator_goes_on_without_it():
    counter = Counter()

    async def bench(ctx):
        ctx.set(counter.step, 1)
        for n in range(20):
            assert ctx.get(counter.count) == n
            await ctx.tick()

    simulator = Simulator(counter)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
