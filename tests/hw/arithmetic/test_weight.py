# amaranth: UnusedElaboratable=no
"""Weight: p and n equal the contract's at every table index, over interpolation and signs; latency."""

import cocotb
import pytest
from amaranth.hdl import signed
from attention_golden import weight_of
from nearkv_hw.abi.numerics import SCORE_FRACTION_BITS, SCORE_LIMIT, TABLE_INDEX_BITS, TABLE_STEP_BITS
from nearkv_hw.arithmetic.score import SCORE_BITS
from nearkv_hw.arithmetic.weight import Weight, WeightPipe
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


@pytest.mark.rtl
def test_weight():
    run(WeightPipe(), module=__file__)


@cocotb.test()
async def equals_the_contract(dut):
    await start(dut)
    rng = random("scores")
    top = (1 << TABLE_STEP_BITS) - 1
    scores = [SCORE_LIMIT, -SCORE_LIMIT, 0, -1, 1]
    for index in range(1 << TABLE_INDEX_BITS):
        for step in (0, 1, top // 2, top - 1, top, *(rng.randint(0, top) for _ in range(25))):
            whole = rng.choice([0, -1, 1, rng.randrange(-(1 << 23), 1 << 23)])
            scores.append(whole << SCORE_FRACTION_BITS | index << TABLE_STEP_BITS | step)
    items = [{"score": score, "dropped": int(rng.random() < 0.1)} for score in scores]
    inputs = {"score": signed(SCORE_BITS), "dropped": 1}
    async for item, out in through(dut, inputs, {"weight": Weight}, items, WeightPipe.latency_cycles):
        p, n = weight_of(item["score"])
        weight = out["weight"]
        if item["dropped"]:
            assert weight["significand"] == 0
        else:
            assert (weight["significand"], weight["exponent"]) == (p, n), item


def test_the_contracts_weight_always_has_its_leading_one_at_the_top():
    """Which the multipliers count on, and which makes a zero significand free to mean "no weight"."""
    for index in range(1 << TABLE_INDEX_BITS):
        for step in (0, (1 << TABLE_STEP_BITS) - 1):
            p, _ = weight_of(index << TABLE_STEP_BITS | step)
            assert p.bit_length() == 18
