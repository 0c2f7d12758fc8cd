# amaranth: UnusedElaboratable=no
"""ALiBi's bias: S equals the contract's for any distance and slope, ties, saturation; latency."""

import cocotb
import pytest
from amaranth.hdl import Module, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from attention_golden import biased_score
from nearkv_hw.abi.numerics import SCORE_LIMIT
from nearkv_hw.arithmetic.bias import DISTANCE_BITS, Bias
from nearkv_hw.arithmetic.score import FLOAT_BITS, SCORE_BITS, FactorDecoder
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


class Biased(wiring.Component):
    """The bias, its slope given as float32, its score with the distance."""

    distance: In(signed(DISTANCE_BITS))
    code: In(FLOAT_BITS)
    score: In(signed(SCORE_BITS))
    biased: Out(signed(SCORE_BITS))
    latency_cycles = FactorDecoder.latency_cycles + Bias.latency_cycles

    def elaborate(self, platform):
        m = Module()
        m.submodules.factor = factor = FactorDecoder()
        m.submodules.bias = bias = Bias()
        score = self.score
        for _ in range(1 + Bias.score_cycles):
            later = Signal.like(score)
            m.d.sync += later.eq(score)
            score = later
        m.d.sync += bias.distance.eq(self.distance)
        m.d.comb += [
            factor.code.eq(self.code),
            bias.slope.eq(factor.factor),
            bias.score.eq(score),
            self.biased.eq(bias.biased),
        ]
        return m


@pytest.mark.rtl
def test_bias():
    run(Biased(), module=__file__)


@cocotb.test()
async def equals_the_contract(dut):
    await start(dut)
    rng = random("biases")

    def item():
        field = rng.choice([rng.randrange(255), rng.randrange(90, 160), rng.randrange(110, 130)])
        score = rng.getrandbits(43) >> rng.choice([0, rng.randrange(43)])
        return {
            "distance": rng.choice([-1, 1]) * (rng.getrandbits(25) >> rng.randrange(26)),
            "code": rng.choice([rng.getrandbits(32) & 0x807FFFFF | field << 23, 0, 0x3F800000, 0xB5000000]),
            "score": rng.choice([-1, 1]) * rng.choice([score, score, SCORE_LIMIT]),
        }

    inputs = {"distance": signed(DISTANCE_BITS), "code": FLOAT_BITS, "score": signed(SCORE_BITS)}
    met = set()
    items = [item() for _ in range(20_000)]
    async for given, out in through(
        dut, inputs, {"biased": signed(SCORE_BITS)}, items, Biased.latency_cycles
    ):
        expected = biased_score(given["score"], given["distance"], given["code"])
        met.add(abs(expected) == SCORE_LIMIT)
        assert out["biased"] == expected, given
    assert met == {True, False}
