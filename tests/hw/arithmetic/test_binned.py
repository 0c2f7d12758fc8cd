# amaranth: UnusedElaboratable=no
"""The binned sum: states equal the contract's merge of terms, back to back, in any order; long sums."""

import cocotb
import pytest
from amaranth.hdl import Module, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from attention_golden import merge, term
from nearkv_hw.abi.numerics import LIMB_BITS
from nearkv_hw.arithmetic.binned import (
    HELD_TOP_BITS,
    OFFSET_BITS,
    BinnedAccumulator,
    TermAligner,
    empty_top,
    lowered,
    raised,
)
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through

EXPONENT_BITS = 25


class Held(data.Struct):
    top: signed(HELD_TOP_BITS)
    high: signed(LIMB_BITS)
    low: signed(LIMB_BITS)


class TermSums(wiring.Component):
    """Accumulator and aligner as a lane has them; `held` is the state before the term, two cycles later."""

    latency_cycles = 2

    def __init__(self, *, states, significand_bits):
        self.states = states
        self.significand_bits = significand_bits
        super().__init__(
            {
                "add": In(1),
                "first": In(1),
                "address": In(range(states)),
                "negative": In(1),
                "significand": In(significand_bits),
                "exponent": In(signed(EXPONENT_BITS)),
                "held": Out(Held),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.sums = sums = BinnedAccumulator(states=self.states, limb_delay_cycles=2)
        m.submodules.aligner = aligner = TermAligner(significand_bits=self.significand_bits)
        m.d.comb += [
            sums.add.eq(self.add),
            sums.first.eq(self.first),
            sums.address.eq(self.address),
            sums.top.eq(0),
            aligner.select.eq(sums.select),
            sums.high.eq(aligner.high),
            sums.low.eq(aligner.low),
        ]
        with m.If(self.significand[-1]):
            m.d.comb += sums.top.eq(raised(self.exponent >> OFFSET_BITS))
        m.d.sync += [
            aligner.significand.eq(self.significand),
            aligner.offset.eq(self.exponent[:OFFSET_BITS]),
        ]
        for source, target in (
            (self.add, sums.limb_add),
            (self.address, sums.limb_address),
            (self.negative, sums.negative),
            (lowered(sums.held_top), self.held.top),
        ):
            before = Signal.like(source)
            m.d.sync += before.eq(source)
            now = Signal.like(source)
            m.d.sync += now.eq(before)
            m.d.comb += target.eq(now)
        m.d.comb += [self.held.high.eq(sums.held_high), self.held.low.eq(sums.held_low)]
        return m


@pytest.mark.rtl
@pytest.mark.parametrize(("states", "significand_bits"), [(8, 36), (3, 18), (2, 33)])
def test_binned(states, significand_bits):
    run(
        TermSums(states=states, significand_bits=significand_bits),
        module=__file__,
        parameters={"states": states, "significand_bits": significand_bits},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": 0}, "states must be a positive integer, not 0"),
        ({"states": 1.5}, "states must be a positive integer, not 1.5"),
        ({"states": 2, "top_bits": 2}, "top_bits must be an integer of at least 3, not 2"),
        ({"states": 2, "limb_bits": 32}, "limb_bits must be an integer above 32, not 32"),
        ({"states": 2, "limb_delay_cycles": 0}, "limb_delay_cycles must be a positive integer, not 0"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        BinnedAccumulator(**arguments)


@pytest.mark.parametrize("bits", [0, 65, None])
def test_significand_is_checked(bits):
    with pytest.raises(ValueError, match=f"significand_bits must be 1 to 64, not {bits}"):
        TermAligner(significand_bits=bits)


def test_latency():
    assert BinnedAccumulator(states=2, limb_delay_cycles=2).latency_cycles == 3
    assert TermAligner.latency_cycles == 1


async def check(dut, items):
    """Apply items, compare every state that is seen; returns how often each distance of bins came."""
    await start(dut)
    bits = parameters()["significand_bits"]
    inputs = {
        "add": 1,
        "first": 1,
        "address": range(parameters()["states"]),
        "negative": 1,
        "significand": bits,
        "exponent": signed(EXPONENT_BITS),
    }
    states = {}
    distances = dict.fromkeys(range(-2, 3), 0)
    async for item, out in through(dut, inputs, {"held": Held}, items, TermSums.latency_cycles):
        address, held = item["address"], out["held"]
        if address in states:
            expected = states[address]
            assert (held["top"] == empty_top(HELD_TOP_BITS)) == (expected is None), item
            if expected is not None:
                assert (held["top"], held["high"], held["low"]) == expected, item
        if item["add"]:
            before = None if item["first"] else states[address]
            added = term(item["negative"], item["significand"], item["exponent"] - (bits - 1))
            if before and added:
                distances[max(-2, min(2, added[0] - before[0]))] += 1
            states[address] = merge(before, added)
    return distances


@cocotb.test()
async def equals_the_contract(dut):
    rng = random("terms")
    bits, states = parameters()["significand_bits"], parameters()["states"]

    def significand():
        low, high = 1 << bits - 1, (1 << bits) - 1
        return rng.choice([0, low, high, *(rng.randint(low, high) for _ in range(5))])

    limit = 1 << EXPONENT_BITS - 1
    items, started, around = [], set(), 0
    for _ in range(12_000):
        if rng.random() < 0.01:
            around = rng.choice([-limit + 300, limit - 300, 0, rng.randrange(-limit + 300, limit - 300)])
        address = rng.randrange(states)
        add = rng.random() < 0.8
        first = address not in started or rng.random() < 0.05
        if add:
            started.add(address)
        exponent = around + rng.choice([0, 0, rng.randrange(-40, 41), rng.randrange(-150, 151)])
        items.append(
            {
                "add": int(add),
                "first": int(first),
                "address": address,
                "negative": rng.getrandbits(1),
                "significand": significand(),
                "exponent": max(-limit, min(limit - 1, exponent)),
            }
        )
    distances = await check(dut, items)
    assert min(distances.values()) > 100, distances


@cocotb.test()
async def order_does_not_matter(dut):
    """The same terms in two orders give two equal states."""
    rng = random("orders")
    bits = parameters()["significand_bits"]
    terms = [
        {
            "negative": rng.getrandbits(1),
            "significand": rng.randrange(1 << bits - 1, 1 << bits),
            "exponent": rng.randrange(-60, 60),
        }
        for _ in range(300)
    ]
    items = []
    for address in (0, 1):
        rng.shuffle(terms)
        items += [{"add": 1, "first": int(i == 0), "address": address, **one} for i, one in enumerate(terms)]
    nothing = {"add": 0, "first": 0, "negative": 0, "significand": 0, "exponent": 0}
    await check(dut, [*items, {**nothing, "address": 0}, {**nothing, "address": 1}])


@cocotb.test()
async def a_long_sum_fills_the_limbs_and_cancels(dut):
    """Many largest terms of one sign, then of the other: tops stay, no limb carries into the other."""
    bits = parameters()["significand_bits"]
    largest = {"add": 1, "address": 0, "significand": (1 << bits) - 1, "exponent": 31}
    items = [{**largest, "first": int(i == 0), "negative": int(i >= 3000)} for i in range(6000)]
    items.append({**largest, "first": 0, "add": 0, "negative": 0})
    await check(dut, items)
