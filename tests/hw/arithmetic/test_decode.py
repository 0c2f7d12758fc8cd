# amaranth: UnusedElaboratable=no
"""Element decode: every bf16 and fp16 code gives the contract's sign, value or special; latency."""

import cocotb
import pytest
from nearkv_hw.abi.formats import BF16, FP16, Special
from nearkv_hw.arithmetic.decode import SIGNIFICAND_BITS, Element, ElementDecoder
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


@pytest.mark.rtl
def test_decode():
    run(ElementDecoder(), module=__file__)


def odd(significand, exponent):
    """The same value with an odd significand, or (0, 0)."""
    if significand == 0:
        return 0, 0
    zeros = (significand & -significand).bit_length() - 1
    return significand >> zeros, exponent + zeros


@cocotb.test()
@cocotb.parametrize(format=[BF16, FP16])
async def decodes_every_code(dut, format):
    await start(dut)
    rng = random("codes", format.name)
    codes = list(range(1 << format.bits))
    rng.shuffle(codes)
    items = (
        {"code": code, "half": int(format is FP16), "present": int(rng.random() < 0.95)} for code in codes
    )
    inputs = {"code": 16, "half": 1, "present": 1}
    outputs = {"element": Element, "negative": 1, "nan": 1, "infinite": 1}
    async for item, out in through(dut, inputs, outputs, items, ElementDecoder.latency_cycles):
        decoded = format.decode(item["code"])
        special = decoded.special if item["present"] else None
        significand = out["element"]["significand"]
        assert significand == 0 or significand >> SIGNIFICAND_BITS - 1 == 1, "not normalised"
        assert odd(significand, out["element"]["exponent"] - (SIGNIFICAND_BITS - 1)) == (
            odd(decoded.significand, decoded.exponent) if item["present"] else (0, 0)
        ), hex(item["code"])
        assert out["negative"] == item["code"] >> 15
        assert out["nan"] == (special is Special.NAN)
        assert out["infinite"] == (special is Special.INFINITY)
