"""The cocotb runner and streams: failures show, seeds repeat, broken stream contracts are seen."""

import re

import cocotb
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import Out
from nearkv_hw.common.queue import Queue
from nearkv_sim.cocotb.runner import SimulationFailed, parameters, ports, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start

pytestmark = pytest.mark.rtl


class Unsteady(wiring.Component):
    """A source that breaks the contract: it lets valid fall, or changes the payload, every eighth cycle."""

    o: Out(stream.Signature(4))

    def __init__(self, *, drops_valid):
        self.drops_valid = drops_valid
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        count = Signal(4)
        m.d.sync += count.eq(count + 1)
        m.d.comb += [
            self.o.valid.eq(count[:3] != 7 if self.drops_valid else 1),
            self.o.payload.eq(0 if self.drops_valid else count[3]),
        ]
        return m


def test_failure_names_the_test_and_the_seed():
    with pytest.raises(SimulationFailed, match=r"failed: fails \(seed 77; repeat with NEARKV_SEED=77\)") as e:
        run(Queue(shape=8, depth=2), module=__file__, tests=r"\.fails$", seed=77)
    assert "AssertionError: this is why" in str(e.value)


def test_no_test_is_a_failure():
    with pytest.raises(SimulationFailed, match="no test ran"):
        run(Queue(shape=8, depth=2), module=__file__, tests="there is no such test")


def test_hanging_simulation_is_stopped():
    with pytest.raises(SimulationFailed, match="stopped after 3 s"):
        run(Queue(shape=8, depth=2), module=__file__, tests=r"\.hangs$", timeout_s=3)


def test_seed_decides_everything():
    drawn = []
    for seed in (5, 5, 6):
        with pytest.raises(SimulationFailed) as e:
            run(
                Queue(shape=8, depth=2),
                module=__file__,
                tests=r"\.draws$",
                seed=seed,
                parameters={"count": 20},
            )
        drawn.append(re.search(r"AssertionError: drawn: .*", str(e.value))[0])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("drops_valid", "message"),
    [(True, "o: valid fell before"), (False, r"o: payload (0x0 became 0x1|0x1 became 0x0) before")],
)
def test_broken_contract_is_seen(drops_valid, message):
    with pytest.raises(SimulationFailed, match=message):
        run(Unsteady(drops_valid=drops_valid), module=__file__, tests=r"\.listens$")


@cocotb.test()
async def fails(dut):
    raise AssertionError("this is why")


@cocotb.test()
async def hangs(dut):
    await start(dut)
    await cycles(dut, 10**9)


@cocotb.test()
async def draws(dut):
    assert ports()["i_payload"] == {"direction": "in", "width": 8}
    await start(dut)
    source = StreamSource(dut, "i", idle=0.5)
    sink = StreamSink(dut, "o", backpressure=0.5)
    rng = random("items")
    items = [rng.randrange(256) for _ in range(parameters()["count"])]
    source.send(items)
    assert await sink.receive(len(items)) == items
    raise AssertionError(f"drawn: {items} {source.cycles} {sink.cycles}")


@cocotb.test()
async def listens(dut):
    await start(dut)
    StreamSink(dut, "o", backpressure=0.9)
    await cycles(dut, 200)
