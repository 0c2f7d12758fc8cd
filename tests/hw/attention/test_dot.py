# amaranth: UnusedElaboratable=no
"""Dot products: lines of aligned limbs become rows' binned sums at one line per cycle; flags; latency."""

import cocotb
import pytest
from amaranth.lib import data
from attention_golden import W, merge, term
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.numerics import BIN_BITS
from nearkv_hw.arithmetic.binned import empty_top
from nearkv_hw.arithmetic.score import DOT_TOP_BITS, DotProduct
from nearkv_hw.attention.cell import DOT_BINS, Cell
from nearkv_hw.attention.dot import DotProducts, LineFlags
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start, value


@pytest.mark.rtl
@pytest.mark.parametrize("lanes", [2, 8, 32])
def test_dot(lanes):
    run(DotProducts(lanes=lanes), module=__file__, parameters={"lanes": lanes})


def test_lanes_are_checked():
    with pytest.raises(ValueError, match="lanes must be an integer of at least 2, not 1"):
        DotProducts(lanes=1)


def aligned(state, top):
    """Magnitudes of a term's limbs under `top`."""
    if state is None or state[0] < top - 1:
        return 0, 0
    high, low = abs(state[1]), abs(state[2])
    return (high, low) if state[0] == top else (0, high)


@cocotb.test()
async def equals_the_contract(dut):
    await start(dut)
    rng = random("lines")
    lanes = parameters()["lanes"]
    to_limb = Cell.limb_cycles - Cell.top_cycles
    to_row = to_limb + DotProducts.tree_cycles_of(lanes)
    to_dot = to_row + DotProducts.row_cycles

    lines = []  # per cycle: None, or (terms, first, last, flags)
    while len(lines) < 1500:
        length = rng.choice([1, 1, 2, 3, 8])
        exponents = rng.choice([(-4, 4), (-60, 60), (-266, 255)])
        for number in range(length):
            while rng.random() < 0.2:
                lines.append(None)
            terms = [
                None
                if rng.random() < 0.2
                else term(rng.getrandbits(1), rng.randrange(1 << 28, 1 << 29), rng.randint(*exponents) - 28)
                for _ in range(lanes)
            ]
            if rng.random() < 0.05:
                terms = [None] * lanes
            flags = {name: int(rng.random() < 0.05) for name in ("nan", "positive", "negative")}
            lines.append((terms, number == 0, number == length - 1, flags))

    def at(cycle):
        return lines[cycle] if 0 <= cycle < len(lines) else None

    expected, rows = {}, 0
    state, row_flags = None, 0
    for cycle, line in enumerate(lines):
        if line is None:
            continue
        terms, first, last, flags = line
        if first:
            state, row_flags = None, 0
        for one in terms:
            state = merge(state, one)
        row_flags |= pack(LineFlags, flags)
        if last:
            expected[cycle] = state, unpack(LineFlags, row_flags)
            rows += 1
    assert rows > 200

    edge = RisingEdge(dut.clk)
    for cycle in range(len(lines) + to_dot):
        line = at(cycle)
        dut.valid.value = line is not None
        bins = [
            0 if line is None or one is None else 1 << one[0] + 16 - DOT_BINS.start
            for one in (line[0] if line else [None] * lanes)
        ]
        dut.bins.value = pack(data.ArrayLayout(len(DOT_BINS), lanes), bins)
        line = at(cycle - to_limb)
        dut.limb_valid.value = line is not None
        terms = line[0] if line else [None] * lanes
        top = max((one[0] for one in terms if one), default=0)
        limbs = [aligned(one, top) for one in terms]
        if line is None:
            limbs = [(rng.getrandbits(W), rng.getrandbits(W)) for _ in range(lanes)]
        dut.high.value = pack(data.ArrayLayout(BIN_BITS, lanes), [high for high, _ in limbs])
        dut.low.value = pack(data.ArrayLayout(BIN_BITS, lanes), [low for _, low in limbs])
        dut.negative.value = sum(
            bool(one and (one[1] < 0 or one[2] < 0)) << lane for lane, one in enumerate(terms)
        )
        line = at(cycle - to_row)
        dut.row_valid.value = line is not None
        dut.row_first.value = line[1] if line else rng.getrandbits(1)
        dut.flags.value = pack(LineFlags, line[3]) if line else rng.getrandbits(3)
        await edge
        line = at(cycle - 1)
        if line and any(line[0]):
            assert value(dut.line_top) == max(one[0] for one in line[0] if one) + 16
        if cycle - to_dot in expected:
            state, flags = expected[cycle - to_dot]
            dot = unpack(DotProduct, value(dut.dot))
            assert (dot["top"] == empty_top(DOT_TOP_BITS)) == (state is None)
            if state is not None:
                assert (dot["top"], dot["high"], dot["low"]) == state
            assert {name: dot[name] for name in flags} == flags
