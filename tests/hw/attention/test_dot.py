# amaranth: UnusedElaboratable=no
"""Dot products: lines of aligned limbs become rows' binned sums at one line per cycle; flags; latency."""

import cocotb
import pytest
from amaranth.lib import data
from amaranth.utils import exact_log2
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
@pytest.mark.parametrize(("lanes", "rows"), [(2, 1), (8, 1), (32, 1), (16, 4), (32, 4)])
def test_dot(lanes, rows):
    run(
        DotProducts(lanes=lanes, rows=rows),
        module=__file__,
        parameters={"lanes": lanes, "rows": rows},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lanes": 1}, "lanes must be an integer of at least 2, not 1"),
        ({"lanes": 8, "rows": 2}, "rows must be 1 or 4 and divide lanes=8, not 2"),
        ({"lanes": 6, "rows": 4}, "rows must be 1 or 4 and divide lanes=6, not 4"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        DotProducts(**arguments)


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

    most = parameters()["rows"]
    lines = []  # per cycle: None, or (terms, first, last, flags of rows, log2 of the rows abreast)
    while len(lines) < 1500:
        abreast = rng.choice([0, 1, 2]) if most > 1 else 0
        length = 1 if abreast else rng.choice([1, 1, 2, 3, 8])
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
            flags = [
                {name: int(rng.random() < 0.05) for name in ("nan", "positive", "negative")}
                for _ in range(most)
            ]
            lines.append((terms, number == 0, number == length - 1, flags, abreast))

    def at(cycle):
        return lines[cycle] if 0 <= cycle < len(lines) else None

    def split(line):
        """The line's terms, row by row."""
        return [line[0][n:][: lanes >> line[4]] for n in range(0, lanes, lanes >> line[4])]

    expected, count = {}, 0
    states, row_flags = [], []
    for cycle, line in enumerate(lines):
        if line is None:
            continue
        _, first, last, flags, abreast = line
        if first:
            states, row_flags = [None] * (1 << abreast), [0] * (1 << abreast)
        for row, terms in enumerate(split(line)):
            for one in terms:
                states[row] = merge(states[row], one)
            row_flags[row] |= pack(LineFlags, flags[row])
        if last:
            expected[cycle] = list(states), [unpack(LineFlags, bits) for bits in row_flags]
            count += 1
    assert count > 200

    edge = RisingEdge(dut.clk)
    for cycle in range(len(lines) + to_dot):
        line = at(cycle)
        dut.valid.value = line is not None
        if most > 1:
            dut.abreast.value = line[4] if line else rng.randrange(3)
        bins = [
            0 if line is None or one is None else 1 << one[0] + 16 - DOT_BINS.start
            for one in (line[0] if line else [None] * lanes)
        ]
        dut.bins.value = pack(data.ArrayLayout(len(DOT_BINS), lanes), bins)
        line = at(cycle - to_limb)
        dut.limb_valid.value = line is not None
        rows = split(line) if line else [[None] * lanes]
        tops = [max((one[0] for one in terms if one), default=0) for terms in rows]
        limbs = [aligned(one, top) for terms, top in zip(rows, tops, strict=True) for one in terms]
        if line is None:
            limbs = [(rng.getrandbits(W), rng.getrandbits(W)) for _ in range(lanes)]
        dut.high.value = pack(data.ArrayLayout(BIN_BITS, lanes), [high for high, _ in limbs])
        dut.low.value = pack(data.ArrayLayout(BIN_BITS, lanes), [low for _, low in limbs])
        dut.negative.value = sum(
            bool(one and (one[1] < 0 or one[2] < 0)) << lane
            for lane, one in enumerate(one for terms in rows for one in terms)
        )
        line = at(cycle - to_row)
        dut.row_valid.value = line is not None
        dut.row_first.value = line[1] if line else rng.getrandbits(1)
        layout = data.ArrayLayout(LineFlags, most)
        dut.flags.value = pack(layout, line[3]) if line else rng.getrandbits(3 * most)
        await edge
        line = at(cycle - 1)
        if line:
            shown = unpack(data.ArrayLayout(DOT_TOP_BITS, most), value(dut.line_tops))
            for block, top in enumerate(shown):
                terms = split(line)[block >> exact_log2(most) - line[4]]
                if any(terms):
                    assert top == max(one[0] for one in terms if one) + 16
        if cycle - to_dot in expected:
            states, flags = expected[cycle - to_dot]
            dots = unpack(data.ArrayLayout(DotProduct, most), value(dut.dots))
            for dot, state, own in zip(dots, states, flags, strict=False):
                assert (dot["top"] == empty_top(DOT_TOP_BITS)) == (state is None)
                if state is not None:
                    assert (dot["top"], dot["high"], dot["low"]) == state
                assert {name: dot[name] for name in own} == own
