# amaranth: UnusedElaboratable=no
"""The results side as a whole: what the units send ends in memory, bit for bit as the contract says.

Proved here for 1, 2, 4 and 16 units, under random idle and backpressure on every interface: random passes of
every output form, query count and odd value dimension, with and without an output scale, with flags, empty
sums, cancellation and far exponents, end in memory as the golden model has them and nowhere else; each is
reported once, in order, after its last write was answered, with the right status, page and lines (refused
writes and faults included). Without idle or backpressure the promised latency and throughput are kept.
"""

import cocotb
import pytest
from nearkv_hw.abi.descriptor import Status
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import ResultLayout
from nearkv_hw.interfaces import Fault, PassDone, ResultJob, partial_beat
from nearkv_hw.results.finish import Finish
from nearkv_hw.results.results import Results
from nearkv_hw.results.scaling import ScaleLane
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, random, start
from results_stimulus import WriteFabric, random_pass, random_scale


@pytest.mark.rtl
@pytest.mark.parametrize(("units", "finish_lanes"), [(1, 2), (2, 2), (4, 4), (16, 2)])
def test_results(units, finish_lanes):
    component = Results(units=units, finish_lanes=finish_lanes)
    given = {"units": units, "finish_lanes": finish_lanes, "end_cycles": component.end_cycles}
    run(component, module=__file__, parameters=given)


def test_parameters_are_checked():
    with pytest.raises(ValueError, match=r"units must be one of \(1, 2, 4, 8, 16\), not 3"):
        Results(units=3, finish_lanes=2)
    with pytest.raises(ValueError, match=r"finish_lanes must be one of \(2, 4, 8\), not 1"):
        Results(units=2, finish_lanes=1)


class Bench:
    """Sources, sinks and fabric of a `Results`, all passes of one test sent at once."""

    def __init__(self, dut, passes, name, *, idle=0.0, backpressure=0.0, latency=(5, 5)):
        self.passes = passes
        self.units = parameters()["units"]
        finish_lanes = parameters()["finish_lanes"]
        shape = partial_beat(finish_lanes)
        self.sources = [
            StreamSource(dut, f"partials_{c}", shape=shape, idle=idle * (c + 1) / self.units)
            for c in range(self.units)
        ]
        self.jobs = StreamSource(dut, "jobs", shape=ResultJob, idle=idle)
        self.done = StreamSink(dut, "done", shape=PassDone, backpressure=backpressure)
        self.fabric = WriteFabric(dut, backpressure=backpressure, latency=latency)
        rng = random(name, "noise")
        for item in passes:
            item.expect()
            for c, source in enumerate(self.sources):
                source.send(item.beats(c, finish_lanes, rng))
            self.jobs.send([item.job])

    async def finished(self):
        """Wait for every pass; its results must be in memory by then, and at the end nothing else."""
        expected = {}
        for item in self.passes:
            (done,) = await self.done.receive()
            assert done == item.done
            for line, content in item.writes.items():
                if line not in self.fabric.denied:
                    assert line in self.fabric.memory, f"line {line:#x} is not there"
                    assert self.fabric.memory[line] == (item.job["tenant"], content), (line, item.job)
                    expected[line] = content
        assert set(self.fabric.memory) == set(expected)
        assert len(self.fabric.writes) == sum(len(item.writes) for item in self.passes)
        assert len(self.fabric.answered) == len(self.fabric.writes)


def make_passes(name, count, **fixed):
    rng = random(name)
    passes, line = [], rng.getrandbits(33)
    for _ in range(count):
        passes.append(random_pass(rng, parameters()["units"], line=line, **fixed))
        job = passes[-1].job
        line += job["queries"] * ResultLayout(job["value_dim"], OutputForm(job["form"])).lines
    return passes


def place(passes):
    """Give passes result areas that follow each other."""
    line = 0
    for item in passes:
        item.job["line"] = line
        line += item.job["queries"] * ResultLayout(item.job["value_dim"], OutputForm(item.job["form"])).lines


@cocotb.test()
async def random_passes(dut):
    """Everything random, with idle and backpressure everywhere."""
    await start(dut)
    bench = Bench(dut, make_passes("busy", 60), "busy", idle=0.3, backpressure=0.4, latency=(3, 60))
    await bench.finished()


@cocotb.test()
async def random_passes_at_full_rate(dut):
    """Everything random, nothing idle: passes follow each other in the pipeline."""
    await start(dut)
    bench = Bench(dut, make_passes("fast", 60), "fast", latency=(40, 40))
    await bench.finished()


@cocotb.test()
async def every_value_dim(dut):
    """Value dimensions that end in a line differently, up to the largest, in every form; 16 queries."""
    await start(dut)
    passes = []
    for dim in (1, 7, 8, 9, 15, 17, 33, 63, 127, 129, 255, 256):
        form = list(OutputForm)[dim % 4]
        passes += make_passes(f"dim {dim}", 1, value_dim=dim, queries=2, form=form, fault=False)
    passes += make_passes("sixteen", 2, value_dim=3, queries=16, fault=False, form=OutputForm.FP32)
    passes += make_passes("widest", 1, value_dim=256, queries=1, fault=False, form=OutputForm.PARTIAL)
    place(passes)
    bench = Bench(dut, passes, "dims", idle=0.1, backpressure=0.1, latency=(10, 12))
    await bench.finished()


@cocotb.test()
async def refused_writes_and_faults(dut):
    """A refused write makes RESULT_DENIED unless the pass failed before; a fault writes nothing."""
    await start(dut)
    rng = random("refused")
    passes = make_passes("refused", 12, errors=0.0, fault=False) + make_passes("failing", 12, errors=0.3)
    place(passes)
    faults = {}
    for k, item in enumerate(passes):
        item.expect()
        if k % 2 and item.writes:
            item.denied = True
            for line in rng.sample(sorted(item.writes), rng.randint(1, len(item.writes))):
                faults[line] = rng.choice((Fault.DENIED, Fault.OUTSIDE))
    bench = Bench(dut, passes, "refused", backpressure=0.2, latency=(5, 30))
    bench.fabric.denied = faults
    await bench.finished()
    seen = {item.done["status"] for item in passes}
    assert Status.RESULT_DENIED in seen


@cocotb.test()
@cocotb.parametrize(form=list(OutputForm))
@cocotb.parametrize(scaled=[False, True])
async def last_beat_to_done(dut, form, scaled):
    """One query of 128 lanes: END to done takes what `end_cycles` says besides the fabric's latency."""
    await start(dut)
    scale = random_scale(random("scale")) if scaled else 0
    end_cycles = parameters()["end_cycles"] + scaled * ScaleLane.latency_cycles
    latency = 5
    bench = Bench(
        dut,
        make_passes("end", 1, queries=1, value_dim=128, form=form, fault=False, scale=scale),
        "end",
        latency=(latency, latency),
    )
    await bench.finished()
    taken = bench.done.cycles[-1] - bench.sources[0].cycles[-1] - latency
    if form is OutputForm.PARTIAL:
        assert taken <= end_cycles
    else:
        assert taken == end_cycles


@cocotb.test()
@cocotb.parametrize(scaled=[False, True])
async def one_beat_per_cycle(dut, scaled):
    """Four queries of 256 lanes: no pause but for the first reciprocal, and a few cycles between passes."""
    await start(dut)
    scale = random_scale(random("scale")) if scaled else 0
    bench = Bench(
        dut,
        make_passes("rate", 3, queries=4, value_dim=256, form=OutputForm.FP32, fault=False, scale=scale),
        "rate",
        latency=(40, 40),
    )
    await bench.finished()
    taken = bench.sources[0].cycles
    beats = 4 + 4 * 256 // parameters()["finish_lanes"] + 1
    for k in range(3):
        of_pass = taken[k * beats : (k + 1) * beats]
        assert of_pass[-1] - of_pass[0] <= beats + Finish.denominator_cycles
        # The first beats wait in queues for the reciprocal; then lanes and END follow each other.
        assert of_pass[16:] == list(range(of_pass[16], of_pass[16] + beats - 16))
        if k:
            assert of_pass[0] - taken[k * beats - 1] <= 8
