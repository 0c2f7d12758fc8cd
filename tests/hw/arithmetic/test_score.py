# amaranth: UnusedElaboratable=no
"""Score: S of any dot product, factor and sink equals the contract's; ties, saturation, specials; latency."""

import cocotb
import pytest
from amaranth.hdl import Module, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from attention_golden import round_score, score_of, score_of_sink
from nearkv_hw.abi.numerics import SCORE_LIMIT, SINK_FACTOR
from nearkv_hw.arithmetic.binned import empty_top
from nearkv_hw.arithmetic.score import (
    DOT_LIMB_BITS,
    DOT_TOP_BITS,
    FLOAT_BITS,
    SCORE_BITS,
    DotProduct,
    FactorDecoder,
    ScorePipe,
)
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


class Score(wiring.Component):
    """The score pipe, its factor given as float32."""

    dot: In(DotProduct)
    code: In(FLOAT_BITS)
    capped: In(1)
    is_sink: In(1)
    sink: In(FLOAT_BITS)
    score: Out(signed(SCORE_BITS))
    dropped: Out(1)
    nan: Out(1)
    latency_cycles = FactorDecoder.latency_cycles + ScorePipe.latency_cycles

    def elaborate(self, platform):
        m = Module()
        m.submodules.factor = factor = FactorDecoder()
        m.submodules.pipe = pipe = ScorePipe()
        m.d.comb += [
            factor.code.eq(self.code),
            pipe.factor.eq(factor.factor),
            self.score.eq(pipe.score),
            self.dropped.eq(pipe.dropped),
            self.nan.eq(pipe.nan),
        ]
        m.d.sync += [
            pipe.dot.eq(self.dot),
            pipe.capped.eq(self.capped),
            pipe.is_sink.eq(self.is_sink),
            pipe.sink.eq(self.sink),
        ]
        return m


INPUTS = {"dot": DotProduct, "code": FLOAT_BITS, "capped": 1, "is_sink": 1, "sink": FLOAT_BITS}
OUTPUTS = {"score": signed(SCORE_BITS), "dropped": 1, "nan": 1}


@pytest.mark.rtl
def test_score():
    run(Score(), module=__file__)


def expected(item):
    """(S or None, dropped, nan)."""
    if item["is_sink"]:
        if item["sink"] >> 23 & 255 == 255:
            return None, True, item["sink"] != 0xFF800000
        return score_of_sink(item["sink"]), False, False
    dot, code = item["dot"], item["code"]
    infinite = dot["positive"] or dot["negative"]
    if dot["nan"] or infinite:
        up = dot["negative"] if code >> 31 else dot["positive"]
        zero = code & 0x7FFFFFFF == 0
        undefined = dot["nan"] or (dot["positive"] and dot["negative"]) or (infinite and zero)
        if item["capped"] and not undefined:
            return SCORE_LIMIT if up else -SCORE_LIMIT, False, False
        return None, True, bool(undefined or up)
    empty = dot["top"] == empty_top(DOT_TOP_BITS)
    return score_of(None if empty else (dot["top"], dot["high"], dot["low"]), code), False, False


async def check(dut, items):
    """Compare all items; returns the scores."""
    await start(dut)
    scores = []
    async for item, out in through(dut, INPUTS, OUTPUTS, items, Score.latency_cycles):
        score, dropped, nan = expected(item)
        assert (out["dropped"], out["nan"]) == (dropped, nan), item
        if score is not None:
            assert out["score"] == score, item
            scores.append(score)
    return scores


@cocotb.test()
async def equals_the_contract(dut):
    rng = random("scores")

    def limb():
        value = rng.getrandbits(DOT_LIMB_BITS - 1) >> rng.choice([0, rng.randrange(DOT_LIMB_BITS)])
        return rng.choice([0, -1, value, -value, value, -value])

    def item():
        code = (
            rng.getrandbits(32) & 0x807FFFFF | rng.choice([rng.randrange(255), rng.randrange(100, 150)]) << 23
        )
        special = rng.random() < 0.1
        return {
            "dot": {
                "top": rng.choice([empty_top(DOT_TOP_BITS), *range(-9, 8), *[-1, 0, 1] * 9]),
                "high": limb(),
                "low": limb(),
                **{name: int(special and rng.random() < 0.4) for name in ("nan", "positive", "negative")},
            },
            "code": rng.choice([code] * 20 + [code & 1 << 31]),
            "capped": rng.getrandbits(1),
            "is_sink": int(rng.random() < 0.3),
            "sink": rng.choice(
                [rng.getrandbits(32)] * 2
                + [rng.getrandbits(32) & 0x807FFFFF | rng.randrange(110, 150) << 23] * 9
                + [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000]
            ),
        }

    scores = await check(dut, [item() for _ in range(12_000)])
    assert {min(scores), max(scores)} == {-SCORE_LIMIT, SCORE_LIMIT}
    assert sum(0 < abs(score) < SCORE_LIMIT for score in scores) > 2_000


@cocotb.test()
async def rounds_ties_away_and_saturates_exactly(dut):
    """Small and large dot products under powers of two: every right shift, ties, and the limit."""
    one = 0x3F800000

    def item(low, high=0, top=1, code=one):
        dot = {"top": top, "high": high, "low": low, "nan": 0, "positive": 0, "negative": 0}
        return {"dot": dot, "code": code, "capped": 0, "is_sink": 0, "sink": 0}

    def scaled(exponent):
        return one + (exponent << 23)

    items = []
    for sign in (1, -1):
        for exponent in range(-60, 30):
            for value in (1, 2, 3, 5, 7, (1 << 23) - 1, (1 << 24) - 1, (1 << 31) + 1, (1 << 32) - 1):
                items.append(item(sign * value, code=scaled(exponent)))
                items.append(item(-sign, high=sign * value, code=scaled(exponent) | 1 << 31))
        # S = value * 2^20 at the limit of 2^43: high limb 2^23 / 2^32 ...
        items += [item(sign * ((1 << 23) - 1)), item(sign << 23), item(sign * ((1 << 23) + 1))]
        items += [
            item(sign * ((1 << 32) - 1), code=scaled(-9)),
            item(sign * ((1 << 31) - 1), code=scaled(-8)),
        ]
    scores = await check(dut, items)
    assert round_score(0, 1, 1, -21) == 1
    assert round_score(1, 3, 1, -22) == -1
    assert {1, -1, SCORE_LIMIT, -SCORE_LIMIT} <= set(scores)
    assert SINK_FACTOR.bit_length() == 24
