# amaranth: UnusedElaboratable=no
"""The attention unit: contract vectors and random passes bit for bit, faults, sinks, counters, rate."""

import json
import math
from collections import deque
from pathlib import Path

import cocotb
import pytest
from attention_golden import float32_bits
from cocotb.triggers import RisingEdge
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import LANE_CHOICES
from nearkv_hw.abi.descriptor import MAX_LARGE_DIM, Status
from nearkv_hw.abi.formats import BF16, ELEMENT_FORMATS, FP4_E2M1, FP16, INT8, LUT4, QUERY_FORMATS
from nearkv_hw.attention.bounds import Bounds
from nearkv_hw.attention.shape import MAX_DIM, UnitShape
from nearkv_hw.attention.unit import COUNTERS, AttentionUnit
from nearkv_hw.interfaces import (
    BeatKind,
    Bound,
    Fault,
    PageItem,
    QueryLine,
    ReadRequest,
    ReadResponse,
    UnitJob,
    partial_beat,
)
from nearkv_sim.cocotb.payload import pack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycle, cycles, random, start, value
from unit_cases import Passes, RowScales, codes, random_bounds, random_pass

VECTORS = Path(__file__).parents[2] / "conformance" / "data" / "contract.json"
LATENCY_CYCLES = 40


@pytest.mark.rtl
@pytest.mark.parametrize(
    "shape",
    [
        {"lanes": 8, "queries": 2, "finish_lanes": 2, "max_dim": 128},
        {"lanes": 8, "queries": 4, "finish_lanes": 4, "weight_pipes": 2, "max_dim": 256},
        {"lanes": 32, "queries": 4, "finish_lanes": 2},
        {"lanes": 16, "line_lanes": 8, "queries": 2, "finish_lanes": 2, "max_dim": 128},
        {"lanes": 32, "line_lanes": 8, "queries": 2, "finish_lanes": 4, "max_dim": 128},
    ],
    ids=lambda shape: f"{shape['lanes']}x{shape['queries']}",
)
def test_attention_unit(shape):
    unit = AttentionUnit(**shape, outstanding=LATENCY_CYCLES + 8)
    run(unit, module=__file__, parameters={**shape, "row_cycles": unit.row_cycles})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"line_lanes": 12}, "line_lanes must be 4, 8, 16 or 32, not 12"),
        ({"line_lanes": 8, "lanes": 64}, "lanes must be 8, 16 or 32 with line_lanes=8, not 64"),
        ({"queries": 3}, "queries must be 1, 2, 4, 8 or 16, not 3"),
        ({"finish_lanes": 3}, "finish_lanes must be 2, 4 or 8 and at most half of line_lanes=32, not 3"),
        (
            {"lanes": 4, "finish_lanes": 4},
            "finish_lanes must be 2, 4 or 8 and at most half of line_lanes=4, not 4",
        ),
        ({"max_dim": 96}, "max_dim must be 64, 128, 256 or 1024, not 96"),
        ({"outstanding": 3}, "outstanding must be an integer of at least 4, not 3"),
        ({"weight_pipes": 3}, "weight_pipes must divide queries=4, not 3"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionUnit(**arguments)


@pytest.mark.parametrize("lanes", LANE_CHOICES)
def test_a_device_knows_how_many_rows_its_units_take_at_once(lanes):
    assert configure("card", lanes=lanes).rows_abreast == UnitShape(lanes=lanes, line_lanes=32).rows_abreast


def test_pipes_of_bounds_are_checked():
    with pytest.raises(ValueError, match="pipes must be a positive integer, not 0"):
        Bounds(pipes=0)


class Bench:
    """A unit with a memory behind it, and the passes that it gets."""

    def __init__(self, dut, name, *, idle=0.0, backpressure=0.0):
        self.dut = dut
        self.rng = random(name)
        self.line_lanes = parameters().get("line_lanes", parameters()["lanes"])
        self.passes = Passes(self.line_lanes, min(parameters().get("max_dim", MAX_DIM), MAX_LARGE_DIM))
        self.finish_lanes = parameters()["finish_lanes"]
        self.idle = idle
        self.responses = []  # cycles in which answers were taken
        self._sources = {
            name: StreamSource(dut, name, idle=idle, shape=shape)
            for name, shape in (("jobs", UnitJob), ("queries", QueryLine), ("pages", PageItem))
        }
        self._asked = deque()
        StreamSink(dut, "memory_request", backpressure=backpressure, shape=ReadRequest, deliver=self._request)
        self.partials = StreamSink(
            dut, "partials", backpressure=backpressure, shape=partial_beat(self.finish_lanes)
        )
        self.bounds = StreamSink(dut, "bounds", backpressure=backpressure, shape=Bound)
        cocotb.start_soon(self._memory())

    def _request(self, request):
        assert request["tenant"] == 1
        late = self.rng.randrange(60) if self.rng.random() < self.idle / 10 else 0
        due = max(cycle() + LATENCY_CYCLES - 1 + late, self._asked[-1][0] + 1 if self._asked else 0)
        self._asked.append((due, request["line"]))

    async def _memory(self):
        """Answers hold until the unit takes them."""
        edge, ready = RisingEdge(self.dut.clk), self.dut.memory_response_ready
        while True:
            here = bool(self._asked) and self._asked[0][0] <= cycle()
            self.dut.memory_response_valid.value = here
            if here:
                _, line = self._asked.popleft()
                response = {"data": self.passes.memory[line], "fault": self.passes.faults.get(line, 0)}
                self.dut.memory_response_payload.value = pack(ReadResponse, response)
                await edge
                while not ready.value:
                    await edge
                self.responses.append(cycle() - 1)
                continue
            if self.idle:
                self.dut.memory_response_payload.value = self.rng.getrandbits(514)
            await edge

    async def run(self):
        """Send everything, check every beat of every pass."""
        for name, source in self._sources.items():
            source.send(getattr(self.passes, name))
        for number, (job, expected) in enumerate(zip(self.passes.jobs, self.passes.expected, strict=True)):
            await self._check_pass(f"pass {number}", job, expected)
        assert len(self.partials) == 0
        for number, bound in enumerate(self.passes.bounds):
            assert await self.bounds.receive(1) == [bound], number
        assert len(self.bounds) == 0

    def rate(self):
        """Lines per cycle, from the first answer to the last."""
        took = self.responses[-1] - self.responses[0] + 1
        rate = len(self.responses) / took
        print(f"{len(self.responses)} lines in {took} cycles, {rate:.4f} per cycle")
        return rate

    async def _check_pass(self, name, job, expected):
        denominators = await self.partials.receive(job["queries"])
        per_query = -(-expected.value_dim // self.finish_lanes)
        lanes = await self.partials.receive(job["queries"] * per_query)
        (end,) = await self.partials.receive(1)
        assert {beat["kind"] for beat in denominators} == {BeatKind.DENOMINATOR.value}
        assert {beat["kind"] for beat in lanes} == {BeatKind.LANES.value}
        assert end["kind"] == BeatKind.END.value
        got = end["status"], end["page"], end["lines"]  # of a pass of bounds all that counts
        assert got == (expected.status, expected.page, expected.lines), name
        for query, golden in enumerate(expected.partials):
            where = f"{name} {job} query {query}"
            beat = denominators[query]["lanes"][0]
            assert beat["flags"] & 1 == golden.nan, where
            if golden.nan:
                continue
            assert state(beat) == golden.denominator, where
            own = [x for beat in lanes[query * per_query : (query + 1) * per_query] for x in beat["lanes"]]
            own = own[: expected.value_dim]
            assert [lane["flags"] for lane in own] == golden.flags, where
            assert [state(lane) for lane in own] == golden.lanes, where


def state(lane):
    """The golden's form of a lane's state."""
    held = lane["state"]
    return (held["top"], held["high"], held["low"]) if held["some"] else None


def vector_state(numbers):
    """The golden's form of a vector's state."""
    return None if numbers[0] is None else tuple(numbers)


@cocotb.test()
async def passes_the_contract_vectors(dut):
    await start(dut)
    bench = Bench(dut, "vectors", idle=0.3, backpressure=0.3)
    count = 0
    for vector in json.loads(VECTORS.read_text()):
        visible = vector["visible"] or [True] * len(vector["k"])

        def seen(name, vector=vector, visible=visible):
            return [row for row, seen in zip(vector[name], visible, strict=True) if seen]

        rows, values = seen("k"), seen("v")
        scales = {kind: seen(f"{kind}_scales") for kind in ("k", "v") if vector[f"{kind}_scales"]}
        how = RowScales(vector["scale_format"], vector["block"]) if vector["scale_format"] else None
        bench.passes.add(
            [vector["q"]],
            rows,
            values,
            value_dim=len(vector["v"][0]) if vector["v"] else 8,
            q_format=QUERY_FORMATS[vector["q_format"]],
            k_format=ELEMENT_FORMATS[vector["k_format"]],
            v_format=ELEMENT_FORMATS[vector["v_format"]],
            k_scales=how if "k" in scales else None,
            v_scales=how if "v" in scales else None,
            scale_codes=scales,
            factor_bits=float32_bits(vector["scale"] * math.log2(math.e)),
            sinks=None if vector["sink"] is None else [float32_bits(float(vector["sink"]))],
            page_rows=bench.rng.choice([4, 16]),
        )
        # the vector's own states, not the golden's, are what must come out
        (golden,) = bench.passes.expected[-1].partials
        assert golden.nan == vector["query_nan"], vector["name"]
        if not golden.nan:
            golden.denominator = vector_state(vector["denominator"])
            golden.lanes = [vector_state(numbers) for numbers in vector["numerators"]] or golden.lanes
        count += 1
    assert count == 60
    await bench.run()


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.7])
async def random_passes_equal_the_contract(dut, idle, backpressure):
    await start(dut)
    bench = Bench(dut, f"random {idle} {backpressure}", idle=idle, backpressure=backpressure)
    for _ in range(8):
        random_pass(bench.passes, bench.rng, parameters()["queries"])
    await bench.run()
    await cycles(dut, 2)
    counters = {name: value(getattr(dut, name)) for name in COUNTERS}
    lines = sum(expected.lines for expected in bench.passes.expected)
    assert counters["unit_lines"] == lines
    assert counters["unit_lines"] + counters["unit_no_data"] + counters["unit_wait"] == counters["unit_busy"]
    assert counters["partial_beats"] == len(bench.partials.cycles)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.4], backpressure=[0.0, 0.9])
async def random_passes_of_bounds_among_others(dut, idle, backpressure):
    await start(dut)
    bench = Bench(dut, f"bounds {idle} {backpressure}", idle=idle, backpressure=backpressure)
    for _ in range(14):
        add = bench.rng.choice([random_bounds, random_bounds, random_pass])
        add(bench.passes, bench.rng, parameters()["queries"])
    await bench.run()


@cocotb.test()
async def every_kind_of_element_meets_every_other_in_a_bound(dut):
    """Signs, zeros, infinities and NaN of queries, of the least and of the largest elements, and of c."""
    await start(dut)
    bench = Bench(dut, "kinds of elements")
    kinds = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x4120, 0xC120, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0]
    pairs = [(least, largest) for least in kinds for largest in kinds]
    for factor in (1.0, -1.0, 0.0, -0.0):
        for query in kinds:
            # one element alone, beside one that alone would give another score
            bench.passes.add_bounds(
                [[query, 0x3F80]],
                [[[least, 0x3F80], [largest, 0x4000]] for least, largest in pairs],
                factor_bits=float32_bits(factor),
            )
    await bench.run()


@cocotb.test()
async def a_page_at_fault_among_bounds_is_told(dut):
    await start(dut)
    bench = Bench(dut, "bounds at fault")
    for fault, status in ((Fault.DENIED, Status.PAGE_DENIED), (Fault.POISON, Status.POISON)):
        begin = len(bench.passes.memory)
        random_bounds(bench.passes, bench.rng, 1, pages=20)
        line = bench.rng.randrange(begin, len(bench.passes.memory))
        bench.passes.faults[line] = fault.value
        lines = (len(bench.passes.memory) - begin) // 20
        expected = bench.passes.expected[-1]
        expected.status, expected.page = status.value, 3 * ((line - begin) // lines)
    await bench.run()


@cocotb.test()
async def short_rows_follow_each_other_without_a_hazard(dut):
    """Rows of one line each, every sum changed in every cycle, tops rising and falling."""
    await start(dut)
    bench = Bench(dut, "short rows")
    lanes, queries = bench.line_lanes, parameters()["queries"]
    for format in (BF16, FP16):
        bench.passes.add(
            [codes(bench.rng, format, lanes) for _ in range(queries)],
            [codes(bench.rng, format, lanes, "wide" if format is FP16 else "plain") for _ in range(100)],
            [codes(bench.rng, format, lanes, "wide") for _ in range(100)],
            value_dim=lanes,
            q_format=format,
            k_format=format,
            v_format=format,
            factor_bits=float32_bits(3.0),
        )
    await bench.run()


@cocotb.test()
async def v_of_a_latent_row_has_the_codebook_of_k(dut):
    await start(dut)
    bench = Bench(dut, "latent codebooks")
    dim = 2 * bench.line_lanes
    for value_dim in (dim, dim // 2 - 1):
        bench.passes.add(
            [codes(bench.rng, BF16, dim)],
            [codes(bench.rng, LUT4, dim) for _ in range(20)],
            [],
            value_dim=value_dim,
            k_format=LUT4,
            books=[codes(bench.rng, FP16, 16) for _ in range(2)],
            latent=True,
        )
    await bench.run()


@cocotb.test()
async def faults_end_up_in_the_pass_that_met_them(dut):
    await start(dut)
    bench = Bench(dut, "faults", idle=0.2, backpressure=0.2)
    lanes = bench.line_lanes
    plans = [
        ({}, Status.OK, 0),
        ({1: Fault.DENIED}, Status.PAGE_DENIED, 1),
        ({2: Fault.OUTSIDE}, Status.PAGE_DENIED, 2),
        ({0: Fault.POISON, 2: Fault.DENIED}, Status.POISON, 0),
        ({3: Fault.POISON}, Status.POISON, 3),
        ({}, Status.OK, 0),
    ]
    for plan, status, page in plans:
        first_page, first_line = len(bench.passes.pages), len(bench.passes.memory)
        bench.passes.add(
            [codes(bench.rng, BF16, 2 * lanes)],
            [codes(bench.rng, BF16, 2 * lanes) for _ in range(16)],
            [codes(bench.rng, BF16, lanes) for _ in range(16)],
            value_dim=lanes,
            page_rows=4,
            golden=not plan,
        )
        for number, fault in plan.items():
            pages = bench.passes.pages[first_page:]
            area = bench.rng.choice(["k_line", "v_line"]) if len(plan) == 1 else "k_line"
            bench.passes.faults[pages[number][area] + bench.rng.randrange(4)] = fault.value
        expected = bench.passes.expected[-1]
        expected.status, expected.page = status.value, page
        assert len(bench.passes.memory) - first_line == expected.lines
    await bench.run()


@cocotb.test()
@cocotb.parametrize(row_lines=[1, 2, 4], format=[BF16, INT8, FP4_E2M1])
async def long_passes_take_a_line_per_cycle(dut, row_lines, format):
    """At least 98 % from the first line to the last, over several passes, where lanes and weight pipes keep
    pace."""
    await start(dut)
    bench = Bench(dut, "rate")
    lanes, line_lanes, queries = parameters()["lanes"], bench.line_lanes, parameters()["queries"]
    dim = row_lines * line_lanes * 16 // format.bits
    if dim > bench.passes.max_dim:
        return
    steps = max(line_lanes * 16 // format.bits // lanes, 1)  # of a line
    rows = [codes(bench.rng, format, dim) for _ in range(16)] * (1024 // row_lines // 16)
    for _ in range(3):
        bench.passes.add(
            [codes(bench.rng, BF16, dim) for _ in range(queries)],
            rows,
            rows,
            value_dim=dim,
            k_format=format,
            v_format=format,
            factor_bits=float32_bits(0.1),
            golden=False,
        )
    await bench.run()
    assert bench.rate() >= 0.98 * min(1 / steps, 2 * row_lines / parameters()["row_cycles"])


@cocotb.test()
@cocotb.parametrize(pitch=[1, 2], format=[BF16, INT8, FP4_E2M1], scales=[None, RowScales("e8m0", 16)])
async def rows_that_share_a_line_are_scored_in_its_cycle(dut, pitch, format, scales):
    """At least 98 % of a line per cycle where the lanes are four times the line's, for all queries."""
    await start(dut)
    bench = Bench(dut, "rate of short rows")
    lanes, line_lanes, queries = parameters()["lanes"], bench.line_lanes, parameters()["queries"]
    if lanes != 4 * line_lanes or (scales and format is BF16):
        return
    dim = line_lanes * 16 // format.bits >> pitch
    rows = [codes(bench.rng, format, dim) for _ in range(16)] * (64 << pitch)
    for _ in range(3):
        bench.passes.add(
            [codes(bench.rng, BF16, dim) for _ in range(queries)],
            rows,
            rows,
            value_dim=dim,
            k_format=format,
            v_format=format,
            k_scales=scales,
            v_scales=scales,
            k_pitch=pitch,
            v_pitch=pitch,
            factor_bits=float32_bits(0.1),
            page_rows=64,
            golden=False,
            rng=bench.rng,
        )
    await bench.run()
    assert bench.rate() >= 0.98 * min(1, 2 / parameters()["row_cycles"])


@cocotb.test()
@cocotb.parametrize(row_lines=[1, 2, 4])
async def long_passes_of_bounds_take_a_line_per_cycle(dut, row_lines):
    await start(dut)
    bench = Bench(dut, "rate of bounds")
    dim, queries = row_lines * bench.line_lanes, parameters()["queries"]
    rows = [codes(bench.rng, BF16, dim) for _ in range(2)]
    for _ in range(3):
        bench.passes.add_bounds([codes(bench.rng, BF16, dim)] * queries, [rows] * (512 // row_lines))
    await bench.run()
    assert bench.rate() >= 0.97 * min(1, 2 * row_lines / parameters()["row_cycles"])


@cocotb.test()
async def short_passes_follow_each_other(dut):
    """Passes of 32 rows of four lines have about as many beats as lines, where two lanes make a beat."""
    await start(dut)
    bench = Bench(dut, "short passes")
    queries = parameters()["queries"]
    dim = min(4 * bench.line_lanes, parameters().get("max_dim", MAX_DIM))
    rows = [codes(bench.rng, BF16, dim) for _ in range(32)]
    for _ in range(16):
        bench.passes.add(
            [codes(bench.rng, BF16, dim) for _ in range(queries)], rows, rows, value_dim=dim, golden=False
        )
    await bench.run()
    took = (bench.responses[-1] - bench.responses[0] + 1) / 16
    beats = queries * (dim // parameters()["finish_lanes"] + 1) + 1
    lines = 2 * 32 * 4
    print(f"{took:.1f} cycles a pass of {lines} lines, {4 * queries} query lines and {beats} beats")
    assert took <= 1.05 * max(lines + 4 * queries + 2, beats) + 4
