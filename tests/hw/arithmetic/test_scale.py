# amaranth: UnusedElaboratable=no
"""Codes times scales: exact, normalised, specials as in IEEE arithmetic; latency."""

import cocotb
import pytest
from attention_golden import scaled
from nearkv_hw.abi.formats import ELEMENT_FORMATS, LUT_SCALES, SCALE_FORMATS, Special
from nearkv_hw.abi.formats import Decoded as FormatCode
from nearkv_hw.arithmetic.decode import CODE_SIGNIFICAND_BITS
from nearkv_hw.arithmetic.scale import ELEMENT_BIAS, SIGNIFICAND_BITS, Decoded, Element, Scaler
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through

INPUTS = {"code": Decoded, "scale": Decoded}
ZERO = FormatCode(0, 0, 0)
OUTPUTS = {"element": Element, "negative": 1, "nan": 1, "infinite": 1}


@pytest.mark.rtl
def test_scale():
    run(Scaler(), module=__file__)


def wires(decoded, counts=True):
    """What a decoder makes of it."""
    bits = decoded.significand.bit_length()
    return {
        "element": {
            "significand": decoded.significand << CODE_SIGNIFICAND_BITS - bits if bits else 0,
            "exponent": decoded.exponent + bits - 1 if bits else 0,
        },
        "negative": decoded.sign,
        "nan": int(decoded.special is Special.NAN),
        "infinite": int(decoded.special is Special.INFINITY),
        "counts": int(counts),
    }


@cocotb.test()
async def multiplies_exactly(dut):
    await start(dut)
    rng = random("scales")
    narrow = [form for form in ELEMENT_FORMATS.values() if form.bits <= 8]
    pairs = [(form, scale) for form in narrow for scale in SCALE_FORMATS.values()]
    pairs += [(ELEMENT_FORMATS["fp16"], SCALE_FORMATS[name]) for name in LUT_SCALES]  # entries of a codebook
    items = []
    for _ in range(20_000):
        form, scale = rng.choice(pairs)
        code = form.decode(rng.choice([0, rng.getrandbits(form.bits), rng.getrandbits(form.bits)]))
        by = scale.decode(rng.choice([0, (1 << scale.bits) - 1, *(rng.getrandbits(scale.bits),) * 6]))
        counts = rng.random() < 0.9
        code = code if counts else ZERO
        items.append(
            {"code": wires(code, counts), "scale": wires(by), "pair": (code, by if counts else ZERO)}
        )
    met = set()
    async for item, out in through(dut, INPUTS, OUTPUTS, items, Scaler.latency_cycles):
        expected = scaled(*item["pair"])
        met.add((expected.special, expected.significand == 0))
        assert out["nan"] == (expected.special is Special.NAN)
        assert out["infinite"] == (expected.special is Special.INFINITY)
        if expected.special is Special.NAN:
            continue
        assert out["negative"] == expected.sign or not item["code"]["counts"]
        significand, exponent = out["element"]["significand"], out["element"]["exponent"]
        if expected.special or expected.significand == 0:
            assert significand == 0
            continue
        assert significand >> SIGNIFICAND_BITS - 1 == 1
        shift = SIGNIFICAND_BITS - expected.significand.bit_length()
        assert significand == (expected.significand << shift if shift > 0 else expected.significand >> -shift)
        assert exponent - ELEMENT_BIAS == expected.exponent + expected.significand.bit_length() - 1
    assert len(met) == 4
