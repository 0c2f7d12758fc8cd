# amaranth: UnusedElaboratable=no
"""Softcap: S equals the contract's in every segment of the table and beyond, caps of all sizes; latency."""

import cocotb
import pytest
from amaranth.hdl import Module, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from attention_golden import capped_score
from nearkv_hw.abi.numerics import SCORE_LIMIT, SOFTCAP_LIMIT
from nearkv_hw.arithmetic.score import FLOAT_BITS, SCORE_BITS, FactorDecoder
from nearkv_hw.arithmetic.softcap import Softcap
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


class Cap(wiring.Component):
    """The softcap, its cap given as float32, the same for some scores in turn."""

    score: In(signed(SCORE_BITS))
    capped: In(1)
    code: In(FLOAT_BITS)
    capped_score: Out(signed(SCORE_BITS))
    latency_cycles = Softcap.latency_cycles

    def elaborate(self, platform):
        m = Module()
        m.submodules.factor = factor = FactorDecoder()
        m.submodules.softcap = softcap = Softcap()
        m.d.comb += [
            factor.code.eq(self.code),
            softcap.cap.eq(factor.factor),
            softcap.score.eq(self.score),
            softcap.capped.eq(self.capped),
            self.capped_score.eq(softcap.capped_score),
        ]
        return m


@pytest.mark.rtl
def test_softcap():
    run(Cap(), module=__file__)


@cocotb.test()
async def equals_the_contract(dut):
    await start(dut)
    rng = random("caps")
    for code in [
        SOFTCAP_LIMIT,
        1,
        0x00400000,
        *(rng.randrange(0x3A000000, SOFTCAP_LIMIT) for _ in range(12)),
    ]:
        edges = [edge + near for edge in (1 << n for n in range(19, 31)) for near in (-1, 0, 1)]
        segments = [rng.randrange(1 << 20) + (n << 20) for n in range(1 << 10)]
        others = [rng.getrandbits(43) >> rng.randrange(43) for _ in range(300)]
        scores = [0, SCORE_LIMIT, *edges, *segments, *others]
        rng.shuffle(scores)
        items = [
            {
                "score": rng.choice([-1, 1]) * score,
                "capped": int(rng.random() < 0.95),
                "code": code,
            }
            for score in scores
        ]
        warm = [items[0]] * 3  # the cap comes before its scores
        inputs = {"score": signed(SCORE_BITS), "capped": 1, "code": FLOAT_BITS}
        outputs = {"capped_score": signed(SCORE_BITS)}
        seen = 0
        async for item, out in through(dut, inputs, outputs, warm + items, Cap.latency_cycles):
            seen += 1
            if seen > len(warm):
                expected = capped_score(item["score"], code) if item["capped"] else item["score"]
                assert out["capped_score"] == expected, item
