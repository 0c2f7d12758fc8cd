# amaranth: UnusedElaboratable=no
"""The merge of the units' partial streams is the contract's binned merge, whatever the units' pace.

Proved here for 2 to 16 units (one is wires alone): random and extreme states (tops apart by 0, 1, 2 and the
whole range, limbs at their limits, cancellation, empty states with noise in them), flags, end records; units
idle independently, backpressure behind; latency and throughput. That the golden merge itself has the laws
that make the tree's shape immaterial (associative, commutative, empty as identity) is a property test.
"""

import cocotb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearkv_hw.abi.descriptor import Status
from nearkv_hw.interfaces import BeatKind, partial_beat
from nearkv_hw.results.merge import Merge
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, random, start
from results_golden import merge_states
from results_stimulus import lane_fields, random_state

LANES = 2
SHAPE = partial_beat(LANES)
STATES = st.none() | st.tuples(st.integers(-4, 4), st.integers(-9, 9), st.integers(-9, 9))


@pytest.mark.rtl
@pytest.mark.parametrize("units", [2, 4, 8, 16])
def test_merge(units):
    component = Merge(units=units, finish_lanes=LANES)
    run(component, module=__file__, parameters={"units": units, "latency": component.latency_cycles})


@pytest.mark.parametrize(
    ("units", "finish_lanes", "message"),
    [
        (0, 2, r"units must be one of \(1, 2, 4, 8, 16\), not 0"),
        (6, 2, r"units must be one of \(1, 2, 4, 8, 16\), not 6"),
        (2, 3, r"finish_lanes must be one of \(2, 4, 8\), not 3"),
        (2, None, r"finish_lanes must be one of \(2, 4, 8\), not None"),
    ],
)
def test_parameters_are_checked(units, finish_lanes, message):
    with pytest.raises(ValueError, match=message):
        Merge(units=units, finish_lanes=finish_lanes)


@given(STATES, STATES, STATES)
def test_merge_has_its_laws(a, b, c):
    assert merge_states(a, b) == merge_states(b, a)
    assert merge_states(merge_states(a, b), c) == merge_states(a, merge_states(b, c))
    assert merge_states(a, None) == a


def random_lane(rng, units):
    """What the units hold of one lane: [(state, flags)] per unit."""
    kind = rng.random()
    limit = (1 << 55) // units
    if kind < 0.1:
        tops = [rng.choice((-(1 << 19), (1 << 19) - 1, 0)) for _ in range(units)]
        states = [(top, rng.choice((-limit, limit - 1)), rng.choice((-limit, limit - 1))) for top in tops]
    elif kind < 0.2:
        top, high, low = rng.randrange(-9, 9), rng.getrandbits(40), rng.getrandbits(40)
        states = [(top, high, -low) if c % 2 else (top, -high, low) for c in range(units)]
    else:
        around = rng.randrange(-100, 100)
        states = [random_state(rng, around, 50) for _ in range(units)]
    return [(state, rng.getrandbits(3) & rng.getrandbits(3)) for state in states]


def random_beats(rng, count):
    """`count` beats: for each its fields per unit, and the merged beat's fields that have a meaning."""
    units = parameters()["units"]
    beats = []
    for _ in range(count):
        kind = rng.choice((BeatKind.DENOMINATOR, BeatKind.LANES, BeatKind.LANES, BeatKind.END))
        lanes = [random_lane(rng, units) for _ in range(LANES)]
        ends = [
            (int(rng.choice((Status.OK, Status.OK, Status.POISON, Status.PAGE_DENIED))), rng.getrandbits(21))
            for _ in range(units)
        ]
        lines = [rng.getrandbits(32) for _ in range(units)]
        inputs = [
            {
                "kind": kind.value,
                "lanes": [lane_fields(*lane[c], rng) for lane in lanes],
                "status": ends[c][0],
                "page": ends[c][1],
                "lines": lines[c],
            }
            for c in range(units)
        ]
        if kind is BeatKind.END:
            status, page = min((end for end in ends if end[0]), key=lambda end: end[1], default=(0, None))
            merged = ("end", status, page, sum(lines) % (1 << 32))
        else:
            merged = [kind.value]
            for lane in lanes:
                state, flags = None, 0
                for other, more in lane:
                    state, flags = merge_states(state, other), flags | more
                merged.append((state, flags))
        beats.append((inputs, merged))
    return beats


def meaning(beat):
    """The fields of a merged beat that have a meaning, in the form of `random_beats`."""
    if beat["kind"] == BeatKind.END.value:
        return ("end", beat["status"], beat["page"] if beat["status"] else None, beat["lines"])
    lanes = []
    for lane in beat["lanes"]:
        state = lane["state"]
        lanes.append(((state["top"], state["high"], state["low"]) if state["some"] else None, lane["flags"]))
    return [beat["kind"], *lanes]


async def check(dut, name, count, idle, backpressure):
    units = parameters()["units"]
    sources = [
        StreamSource(dut, f"partials_{c}", shape=SHAPE, idle=idle * (c + 1) / units) for c in range(units)
    ]
    sink = StreamSink(dut, "merged", shape=SHAPE, backpressure=backpressure)
    beats = random_beats(random(name), count)
    for c, source in enumerate(sources):
        source.send(inputs[c] for inputs, _ in beats)
    merged = await sink.receive(count)
    assert [meaning(beat) for beat in merged] == [expected for _, expected in beats]
    return sources, sink


@cocotb.test()
async def merges_with_idle_and_backpressure(dut):
    """Channels at different paces, backpressure behind: every beat once, in order, exact."""
    await start(dut)
    await check(dut, "paces", 400, 0.4, 0.3)


@cocotb.test()
async def keeps_its_time(dut):
    """A beat per cycle, each after the promised latency."""
    await start(dut)
    sources, sink = await check(dut, "rate", 50, 0.0, 0.0)
    first = sources[0].cycles[0]
    assert all(source.cycles == list(range(first, first + 50)) for source in sources)
    assert sink.cycles == [taken + parameters()["latency"] for taken in sources[0].cycles]
