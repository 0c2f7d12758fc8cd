# amaranth: UnusedElaboratable=no
"""Finished lanes have the bits of the contract's section 6, in every output format.

Proved here: random quotients over all formats; exact ties, subnormals, overflow and the borders between them,
steered there by choosing the numerator for a given denominator; numerators whose limbs cancel wholly (+0) or
almost; sums that round to zero keep their sign; every combination of lane flags with the query's flag, an
empty denominator and an empty sum; queries one lane short after another; random idle and backpressure;
latency, throughput and the time of the first lanes after their denominator.
"""

from itertools import pairwise

import cocotb
import pytest
from amaranth.lib import data
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.arithmetic.reciprocal import Reciprocal
from nearkv_hw.results.finish import Finish
from nearkv_hw.results.scaling import ScaleLane
from nearkv_hw.results.shapes import finish_beat
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start
from results_golden import FORMATS, W, finish_lane
from results_stimulus import (
    FINISHED,
    lane_fields,
    random_denominator,
    random_limb,
    random_scale,
    random_state,
)

LANES = 2


@pytest.mark.rtl
def test_finish():
    component = Finish(finish_lanes=LANES)
    given = {
        "latency": component.latency_cycles,
        "scaled_latency": component.scaled_latency_cycles,
        "denominator": component.denominator_cycles,
        "interval": Reciprocal.interval_cycles,
    }
    run(component, module=__file__, parameters=given)


def test_parameters_are_checked():
    with pytest.raises(ValueError, match=r"finish_lanes must be one of \(2, 4, 8\), not 16"):
        Finish(finish_lanes=16)


class Query:
    """One query: its denominator, its lanes, and the codes that must come out."""

    def __init__(self, form, denominator, nan, lanes, scale=0):
        self.form = form
        self.denominator = denominator
        self.nan = nan
        self.scale = scale
        self.lanes = lanes + [(None, 0)] * (-len(lanes) % LANES)

    def beats(self, rng):
        state = lane_fields(self.denominator, self.nan, rng)
        noise = lane_fields(random_state(rng), 7, rng)
        job = {"form": int(self.form), "output_scale": self.scale}
        beats = [{**job, "denominator": 1, "lanes": [state] + [noise] * (LANES - 1)}]
        for at in range(0, len(self.lanes), LANES):
            lanes = [lane_fields(*lane, rng) for lane in self.lanes[at : at + LANES]]
            beats.append({**job, "denominator": 0, "first": int(at == 0), "lanes": lanes})
        return beats

    def codes(self):
        query = (self.denominator, self.nan, self.form, self.scale)
        codes = [finish_lane(*lane, *query) for lane in self.lanes]
        return [codes[at : at + LANES] for at in range(0, len(codes), LANES)]


def ordered(queries, rng):
    """The beats of passes of up to 16 queries: all denominators, then all lanes."""
    beats, at = [], 0
    while at < len(queries):
        count = rng.choice((1, 2, 4, 16))
        parts = [query.beats(rng) for query in queries[at : at + count]]
        beats += [part[0] for part in parts] + [beat for part in parts for beat in part[1:]]
        at += count
    return beats


async def check(dut, queries, name, *, idle=0.0, backpressure=0.0):
    """Send the queries; their codes must come out."""
    source = StreamSource(dut, "beats", shape=finish_beat(LANES), idle=idle)
    sink = StreamSink(dut, "codes", shape=data.ArrayLayout(32, LANES), backpressure=backpressure)
    source.send(ordered(queries, random(name, "order")))
    for query in queries:
        for expected in query.codes():
            (codes,) = await sink.receive()
            assert codes == expected, (query.form, query.denominator, query.scale, query.lanes)
    return source, sink


def limbs(value, rng):
    """Limbs H, L with H * 2^W + L = value, with a random uncarried part in L."""
    low = random_limb(rng, 50)
    low += (value - low) % (1 << W)
    return (value - low) >> W, low


@cocotb.test()
async def random_quotients(dut):
    """All formats, random states, flags and output scales, idle and backpressure."""
    await start(dut)
    rng = random("quotients")
    queries = []
    for _ in range(150):
        around = rng.choice((0, 0, 3, -200000))
        lanes = [
            (random_state(rng, around), rng.choice((0, 0, 0, 0, 0, 0, 0, rng.randrange(8))))
            for _ in range(rng.choice((1, 2, 5, 16)))
        ]
        denominator = random_denominator(rng, around)
        scale = rng.choice((0, random_scale(rng)))
        queries.append(Query(rng.choice(FINISHED), denominator, int(rng.random() < 0.05), lanes, scale))
    await check(dut, queries, "quotients", idle=0.2, backpressure=0.3)


def quotient_lane(significand, exponent, total, sign, rng):
    """The lane that is sign * significand * 2^exponent when divided by `total` * 2^-W (top 0)."""
    numerator, scale = significand * total, exponent - W
    top = -(-(scale + numerator.bit_length() - 54) // W)  # at most 86 bits of H * 2^W + L
    shift = scale - W * (top - 1)
    value = numerator << shift if shift >= 0 else numerator >> -shift
    return (top, *limbs(sign * value, rng)), 0


@cocotb.test()
async def rounding_edges(dut):
    """Quotients at and one unit around every kind of border; denominators that divide exactly and others."""
    await start(dut)
    rng = random("edges")
    queries = []
    for form in FINISHED:
        exponent_bits, fraction_bits, _ = FORMATS[form]
        bias = (1 << exponent_bits - 1) - 1
        smallest = 1 - bias - fraction_bits
        leadings = [smallest - 2, smallest - 1, smallest, smallest + 1, -bias, 1 - bias, 0, bias, bias + 1]
        leadings += [smallest + rng.randrange(fraction_bits) for _ in range(4)]
        for denominator in (
            (0, 1 << rng.randrange(20), 0),
            (0, rng.getrandbits(20) | 1, rng.getrandbits(40)),
        ):
            total = (denominator[1] << W) + denominator[2]
            lanes = []
            for leading in leadings:
                for _ in range(4):
                    # fraction_bits + 1 bits and the half below, exactly so or one unit further below off.
                    low = rng.choice((0, 1, 2, 3, -1, -2)) % (1 << fraction_bits + 1)
                    significand = ((1 << fraction_bits + 1 | low) << 4) + rng.choice((0, 0, 1, -1))
                    lane = (significand, leading - fraction_bits - 5, total)
                    lanes += [quotient_lane(*lane, sign, rng) for sign in (1, -1)]
            queries.append(Query(form, denominator, 0, lanes))
    codes = {code for query in queries for pair in query.codes() for code in pair}
    assert {0x80000000, 0x8000, 0x7F800000, 0x7F80, 0x7C00} <= codes, "the edges are not reached"
    await check(dut, queries, "edges", idle=0.1, backpressure=0.1)


@cocotb.test()
async def cancellation(dut):
    """Sums from zero to all 88 bits, either sign; the extremes of the limbs."""
    await start(dut)
    rng = random("cancellation")
    queries = []
    least, most = -(1 << 55), (1 << 55) - 1
    for form in FINISHED:
        lanes = []
        for bits in range(88):
            value = rng.choice((1, -1)) * (1 << bits | rng.getrandbits(bits) if bits else 1)
            high, low = limbs(value, rng)
            if least <= high <= most:
                lanes.append(((rng.choice((-1, 0, 1)), high, low), 0))
        for zero in range(8):
            lanes.append(((0, *limbs(0, rng)), 0))
            lanes.append(((zero, 0, 0), 0))
        for high in (least, most, 0, -1):
            for low in (least, most, 0, -1):
                lanes.append(((0, high, low), 0))
        rng.shuffle(lanes)
        queries.append(Query(form, random_denominator(rng) or (0, 1, 0), 0, lanes))
        queries.append(Query(form, (0, 1 << rng.randrange(54), 0), 0, lanes[:20]))
        queries.append(Query(form, (0, most, most), 0, lanes[20:40]))
    await check(dut, queries, "cancellation")


@cocotb.test()
async def flags(dut):
    """Every combination of lane flags, query flag, empty denominator, empty sum and kind of output scale, in
    every format."""
    await start(dut)
    rng = random("flags")
    queries = []
    for form in FINISHED:
        for nan in (0, 1):
            for denominator in (None, (3, 5, 7)):
                lanes = [
                    (state, lane_flags)
                    for state in (None, (3, 4, -5), (3, -4, 5), (3, 1, -(1 << W)))
                    for lane_flags in range(8)
                ]
                for scale in (0, 0xBFC00000, 0x80000000, 0x7F800000, 0x7FC00000):
                    queries.append(Query(form, denominator, nan, lanes, scale))
    rng.shuffle(queries)
    await check(dut, queries, "flags", idle=0.1)


@cocotb.test()
async def far_exponents(dut):
    """Tops at opposite ends of their range: Inf or zero, never a wrapped exponent."""
    await start(dut)
    rng = random("far")
    ends = (-(1 << 19), -(1 << 18), -40, -32, -31, -30, 0, 30, 31, 32, 33, 40, 1 << 18, (1 << 19) - 1)
    queries = []
    for form in FINISHED:
        for top in ends:
            lanes = [((other, rng.choice((1, -1)) * rng.randint(1, 99), 0), 0) for other in ends]
            queries.append(Query(form, (top, rng.randint(1, 99), 0), 0, lanes))
    await check(dut, queries, "far")


@cocotb.test()
async def output_that_stands_still(dut):
    """While no codes are taken, lanes stop coming in and none is lost; later at any pace of the output."""
    await start(dut)
    rng = random("still")
    query = Query(OutputForm.BF16, (0, 5, 5), 0, [(random_state(rng), 0) for _ in range(400)])
    source = StreamSource(dut, "beats", shape=finish_beat(LANES))
    sink = StreamSink(dut, "codes", shape=data.ArrayLayout(32, LANES), backpressure=1.0)
    source.send(query.beats(rng))
    await cycles(dut, 150)
    assert 1 < len(source.cycles) < 40
    for sink.backpressure in (0.8, 0.2):
        await cycles(dut, 100)
    assert await sink.receive(200) == query.codes()


@cocotb.test()
async def denominators_without_lanes(dut):
    """Sixteen wait and one is divided by; more are not taken, so that none is lost."""
    await start(dut)
    rng = random("many")
    source = StreamSource(dut, "beats", shape=finish_beat(LANES))
    source.send(Query(OutputForm.FP32, (0, 5, 5), 0, []).beats(rng)[0] for _ in range(40))
    await cycles(dut, 200)
    assert len(source.cycles) == 17


@cocotb.test()
async def keeps_its_time(dut):
    """First lanes, latency, a beat per cycle, with and without an output scale; queries of one beat come at
    the divider's pace."""
    await start(dut)
    rng = random("time")
    long = Query(OutputForm.FP32, (0, 77, 5), 0, [(random_state(rng), 0) for _ in range(80)])
    source = StreamSource(dut, "beats", shape=finish_beat(LANES))
    sink = StreamSink(dut, "codes")
    source.send(long.beats(rng))
    await sink.receive(40)
    assert source.cycles[1] - source.cycles[0] == parameters()["denominator"]
    assert source.cycles[1:] == list(range(source.cycles[1], source.cycles[1] + 40))
    assert sink.cycles == [taken + parameters()["latency"] for taken in source.cycles[1:]]

    short = [Query(OutputForm.FP16, (0, 9, 5), 0, [((0, 3, 1), 0)]) for _ in range(6)]
    parts = [query.beats(rng) for query in short]
    scaled = Query(OutputForm.BF16, (0, 77, 5), 0, [(random_state(rng), 0) for _ in range(80)], 0x40490FDB)
    source.cycles.clear()
    sink.cycles.clear()
    # Behind them come lanes without a scale, which must not overtake them.
    (first, *scaled_lanes), (second, *lanes) = scaled.beats(rng), long.beats(rng)
    source.send([first, second, *scaled_lanes, *lanes])
    await sink.receive(80)
    lanes = source.cycles[2:42]
    assert lanes == list(range(lanes[0], lanes[0] + 40))
    assert sink.cycles[:40] == [taken + parameters()["scaled_latency"] for taken in lanes]
    assert source.cycles[42] - lanes[-1] == ScaleLane.latency_cycles + 1
    assert sink.cycles[40:] == [taken + parameters()["latency"] for taken in source.cycles[42:]]

    source.cycles.clear()
    source.send([part[0] for part in parts] + [part[1] for part in parts])
    await sink.receive(6)
    lanes = source.cycles[6:]
    assert {b - a for a, b in pairwise(lanes)} == {parameters()["interval"]}
