# amaranth: UnusedElaboratable=no
"""Every merged beat goes exactly to those who want it, once and in order.

Proved here with receivers of different pace and idle sources: of finished forms denominators go to the writer
and to the divider and lanes to be finished, the first of each query marked; of partials denominators and
lanes go to the writer alone; of a pass with a fault only the end goes on; jobs are handed on in order, each
before its beats. No receiver sees a beat twice because another was late.
"""

import cocotb
import pytest
from amaranth.lib import data
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.interfaces import BeatKind, LanePartial, ResultJob, partial_beat
from nearkv_hw.results.distribute import Distribute
from nearkv_hw.results.shapes import Denominator, PassEnd, finish_beat
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start
from results_stimulus import random_pass

LANES = 4


@pytest.mark.rtl
def test_distribute():
    run(Distribute(finish_lanes=LANES), module=__file__)


def test_parameters_are_checked():
    with pytest.raises(ValueError, match=r"finish_lanes must be one of \(2, 4, 8\), not 1"):
        Distribute(finish_lanes=1)


@cocotb.test()
@cocotb.parametrize(slow=["finish", "denominators", "none"])
async def sorts_beats(dut, slow):
    """Forty random passes; one receiver much slower than the others, or all alike."""
    await start(dut)
    rng = random("passes", slow)
    lanes_shape = data.ArrayLayout(LanePartial, LANES)
    shapes = {
        "started": ResultJob,
        "denominators": Denominator,
        "finish": finish_beat(LANES),
        "partials": lanes_shape,
        "ends": PassEnd,
    }
    sinks = {
        name: StreamSink(dut, name, shape=shape, backpressure=0.8 if name == slow else 0.3)
        for name, shape in shapes.items()
    }
    jobs = StreamSource(dut, "jobs", shape=ResultJob, idle=0.3)
    merged = StreamSource(dut, "merged", shape=partial_beat(LANES), idle=0.3)
    expected = {name: [] for name in shapes}
    for _ in range(40):
        item = random_pass(rng, 1, queries=rng.randint(1, 3), value_dim=rng.randint(1, 3 * LANES), fault=None)
        beats = item.beats(0, LANES, rng)
        jobs.send([item.job])
        merged.send(beats)
        expected["started"].append(item.job)
        form = item.job["form"]
        per_query = -(-item.job["value_dim"] // LANES)
        position = 0
        for beat in beats:
            if beat["kind"] == BeatKind.END.value:
                expected["ends"].append({key: beat[key] for key in ("status", "page", "lines")})
                continue
            if item.job["fault"]:
                continue
            denominator = beat["kind"] == BeatKind.DENOMINATOR.value
            lanes = beat["lanes"]
            if denominator:
                nan = lanes[0]["flags"] & 1
                expected["denominators"].append({"state": lanes[0]["state"], "nan": nan})
            elif form == OutputForm.PARTIAL:
                expected["partials"].append(lanes)
            if form != OutputForm.PARTIAL:
                first = None if denominator else int(position % per_query == 0)
                expected["finish"].append((int(denominator), first, form, item.job["output_scale"], lanes))
            position += not denominator
    for name, items in expected.items():
        received = await sinks[name].receive(len(items))
        if name == "finish":
            received = [
                (
                    beat["denominator"],
                    None if beat["denominator"] else beat["first"],
                    beat["form"],
                    beat["output_scale"],
                    beat["lanes"],
                )
                for beat in received
            ]
        assert received == items, name
    await cycles(dut, 50)
    assert not any(len(sink) for sink in sinks.values())


@cocotb.test()
async def waits_for_the_job(dut):
    """Beats are not looked at before their pass's job is there."""
    await start(dut)
    rng = random("waits")
    item = random_pass(rng, 1, queries=1, value_dim=1, fault=True)
    jobs = StreamSource(dut, "jobs", shape=ResultJob)
    merged = StreamSource(dut, "merged", shape=partial_beat(LANES))
    started = StreamSink(dut, "started", shape=ResultJob)
    ends = StreamSink(dut, "ends", shape=PassEnd)
    merged.send(item.beats(0, LANES, rng))
    await cycles(dut, 20)
    assert merged.cycles == []
    jobs.send([item.job])
    await ends.receive()
    assert await started.receive() == [item.job]
    assert merged.cycles[0] == started.cycles[0] + 1
