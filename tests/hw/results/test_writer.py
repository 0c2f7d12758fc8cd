# amaranth: UnusedElaboratable=no
"""The writer puts results in memory where the layout says, and reports a pass when they are there.

Proved here: finished lanes of both widths and partials (planes, empty states, lanes beyond value_dim zero),
denominator lines, several query heads; a pass is reported only after its last answer, in order, even when
later passes' answers come first; a fabric that takes nothing for a while loses nothing; no more passes open
than the id tells apart; refused writes; a fault writes nothing; a beat of codes per cycle and the promised
latencies.
"""

from itertools import pairwise

import cocotb
import pytest
from amaranth.lib import data
from nearkv_hw.abi.descriptor import Status
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import ResultLayout
from nearkv_hw.interfaces import Fault, LanePartial, PassDone, ResultJob
from nearkv_hw.results.packer import Packer
from nearkv_hw.results.passes import Passes
from nearkv_hw.results.shapes import Denominator, PassEnd
from nearkv_hw.results.writer import Writer
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start
from results_golden import denominator_line, query_lines
from results_stimulus import (
    FINISHED,
    WriteFabric,
    lane_fields,
    random_denominator,
    random_state,
    state_fields,
)

PASSES = 4


@pytest.mark.rtl
@pytest.mark.parametrize("finish_lanes", [2, 8])
def test_writer(finish_lanes):
    component = Writer(finish_lanes=finish_lanes, passes=PASSES)
    given = {
        "finish_lanes": finish_lanes,
        "latency": component.latency_cycles,
        "line_cycles": component.line_cycles,
        "done": component.done_cycles,
    }
    run(component, module=__file__, parameters=given)


@pytest.mark.parametrize(
    ("component", "given", "message"),
    [
        (Writer, {"finish_lanes": 5}, r"finish_lanes must be one of \(2, 4, 8\), not 5"),
        (Writer, {"finish_lanes": 2, "passes": 3}, "passes must be 2, 4 or 8, not 3"),
        (Passes, {"passes": 16, "count_bits": 8}, "passes must be 2, 4 or 8, not 16"),
        (Passes, {"passes": 2, "count_bits": 0}, "count_bits must be a positive integer, not 0"),
        (Packer, {"word_bits": 48}, "word_bits must divide a line of 512 bits, not 48"),
    ],
)
def test_parameters_are_checked(component, given, message):
    with pytest.raises(ValueError, match=message):
        component(**given)


class Bench:
    """Everything around a `Writer`: `send` queues passes, `check` waits for them."""

    def __init__(self, dut, name, *, idle=0.0, backpressure=0.0, latency=(5, 5)):
        lanes = parameters()["finish_lanes"]
        self.lanes = lanes
        self.rng = random(name)
        self.jobs = StreamSource(dut, "jobs", shape=ResultJob, idle=idle)
        self.denominators = StreamSource(dut, "denominators", shape=Denominator, idle=idle)
        self.codes = StreamSource(dut, "codes", shape=data.ArrayLayout(32, lanes), idle=idle)
        self.partials = StreamSource(dut, "partials", shape=data.ArrayLayout(LanePartial, lanes), idle=idle)
        self.ends = StreamSource(dut, "ends", shape=PassEnd, idle=idle)
        self.done = StreamSink(dut, "done", shape=PassDone, backpressure=backpressure)
        self.fabric = WriteFabric(dut, backpressure=backpressure, latency=latency)
        self.expected = []  # per pass: (done, {line: (tenant, content)})
        self.line = 0

    def send(self, form, queries, value_dim, *, status=Status.OK, fault=0, refuse=0):
        """Queue one pass; `refuse` of its lines are refused by the fabric."""
        rng, tenant = self.rng, self.rng.randrange(8)
        job = {"tenant": tenant, "queries": queries, "value_dim": value_dim, "form": int(form)}
        self.jobs.send([{**job, "line": self.line, "output_scale": rng.getrandbits(32), "fault": fault}])
        writes = {}
        for q in range(0 if fault else queries):
            denominator, nan = random_denominator(rng), rng.getrandbits(1)
            self.denominators.send([{"state": state_fields(denominator, rng), "nan": nan}])
            if form is OutputForm.PARTIAL:
                lanes = [(random_state(rng), rng.randrange(8)) for _ in range(value_dim)]
                content = query_lines(lanes, denominator, nan, form)
                beats = [lane_fields(*lane, rng) for lane in lanes]
                noise = lane_fields(None, 7, rng)
            else:
                beats = [rng.getrandbits(8 * form.lane_bytes) for _ in range(value_dim)]
                plane = b"".join(code.to_bytes(form.lane_bytes, "little") for code in beats)
                plane = plane.ljust(64 * (ResultLayout(value_dim, form).lines - 1), b"\0")
                content = [plane[at : at + 64] for at in range(0, len(plane), 64)]
                content.append(denominator_line(denominator, nan))
                noise = 0xFFFFFFFF
            beats += [noise] * (-len(beats) % self.lanes)
            beats = [beats[at : at + self.lanes] for at in range(0, len(beats), self.lanes)]
            (self.partials if form is OutputForm.PARTIAL else self.codes).send(beats)
            for k, line in enumerate(content):
                writes[self.line + q * ResultLayout(value_dim, form).lines + k] = (tenant, line)
        page, lines = rng.getrandbits(21), rng.getrandbits(32)
        self.ends.send([{"status": int(status), "page": page, "lines": lines}])
        for line in rng.sample(sorted(writes), min(refuse, len(writes))):
            self.fabric.denied[line] = rng.choice((Fault.DENIED, Fault.OUTSIDE))
            del writes[line]
            if status == Status.OK:
                status, page = Status.RESULT_DENIED, 0
        page = 0 if status == Status.OK else page
        self.expected.append(({"status": int(status), "page": page, "lines": lines}, writes))
        self.line += queries * ResultLayout(value_dim, form).lines

    async def check(self):
        everything = {}
        for done, writes in self.expected:
            assert await self.done.receive() == [done]
            for line, content in writes.items():
                assert self.fabric.memory.get(line) == content, f"line {line}"
            everything |= writes
        assert self.fabric.memory == everything
        self.expected = []
        self.fabric.memory.clear()


@cocotb.test()
async def random_passes(dut):
    """Passes of every form and size, refused writes, faults; idle and backpressure on every interface."""
    await start(dut)
    bench = Bench(dut, "random", idle=0.2, backpressure=0.3, latency=(2, 50))
    rng = random("passes")
    for _ in range(60):
        bench.send(
            rng.choice(list(OutputForm)),
            rng.choice((1, 2, 3, 16)),
            rng.choice((1, 2, 7, 8, 9, 16, 31, 32, 33, 64)),
            status=rng.choice((Status.OK, Status.OK, Status.POISON, Status.PAGE_DENIED)),
            fault=int(rng.random() < 0.1),
            refuse=rng.choice((0, 0, 0, 1, 3)),
        )
    await bench.check()


@cocotb.test()
async def every_value_dim(dut):
    """Every value dimension from 1 to 256, forms in turn."""
    await start(dut)
    bench = Bench(dut, "dims")
    for dim in range(1, 257):
        bench.send(list(OutputForm)[dim % 4], 1, dim)
    for form in OutputForm:
        bench.send(form, 2, 255)
        bench.send(form, 1, 256)
    await bench.check()


@cocotb.test()
async def waits_for_answers(dut):
    """With answers far away `PASSES` passes are written and no more; none is reported before its answers."""
    await start(dut)
    bench = Bench(dut, "answers", latency=(300, 300))
    for _ in range(2 * PASSES):
        bench.send(OutputForm.BF16, 1, 4)
    await cycles(dut, 200)
    assert len(bench.fabric.writes) == 2 * PASSES
    assert len(bench.done) == 0
    await bench.check()
    last_writes = [taken for taken, _ in bench.fabric.writes][1::2]
    assert all(done >= write + 300 for done, write in zip(bench.done.cycles, last_writes, strict=True))


@cocotb.test()
async def fabric_that_stands_still(dut):
    """While the fabric takes nothing nothing is lost, and beats stop coming in."""
    await start(dut)
    bench = Bench(dut, "still", backpressure=1.0)
    bench.send(OutputForm.FP32, 2, 256)
    bench.send(OutputForm.PARTIAL, 2, 100)
    await cycles(dut, 300)
    assert bench.fabric.writes == []
    assert len(bench.codes.cycles) == 0
    bench.fabric.backpressure = 0.0
    bench.done.backpressure = 0.0
    await bench.check()


@cocotb.test()
async def keeps_its_time(dut):
    """Codes come in one beat per cycle; the last line and `done` follow at the promised distance."""
    await start(dut)
    latency = 7
    bench = Bench(dut, "time", latency=(latency, latency))
    bench.send(OutputForm.FP32, 1, 128)
    await bench.check()
    beats = bench.codes.cycles
    assert beats == list(range(beats[0], beats[0] + 128 // bench.lanes))
    last_write = bench.fabric.writes[-1][0]
    assert last_write == beats[-1] + parameters()["latency"]
    assert bench.fabric.answered[-1] == last_write + latency
    assert bench.done.cycles[-1] == bench.fabric.answered[-1] + parameters()["done"]

    # Partials: a beat that completes lines holds up the next one until the last of them can go.
    bench.send(OutputForm.PARTIAL, 1, 256)
    bench.partials.cycles.clear()
    await bench.check()
    pace = parameters()["line_cycles"]
    now = bench.partials.cycles[0]
    gone = now - pace
    for beat, taken in enumerate(bench.partials.cycles):
        assert taken == now
        lines = sum((beat + 1) * bench.lanes * size % 64 == 0 for size in (4, 8, 8, 1))
        gone = max(now + 1, gone + pace) + pace * (lines - 1) if lines else gone
        now = max(now + 1, gone)


@cocotb.test()
async def passes_follow_each_other(dut):
    """Small passes: the next one's lines follow a few cycles after those of the one before."""
    await start(dut)
    bench = Bench(dut, "follow", latency=(3, 3))
    for _ in range(10):
        bench.send(FINISHED[0], 1, 2 * bench.lanes)
    await bench.check()
    first_lines = [taken for taken, _ in bench.fabric.writes][::2]
    assert max(b - a for a, b in pairwise(first_lines)) <= 10
