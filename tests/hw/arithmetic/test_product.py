# amaranth: UnusedElaboratable=no
"""The product: exact, normalised, with the exponent of its leading one, zero for a zero factor; latency."""

import cocotb
import pytest
from nearkv_hw.abi.numerics import WEIGHT_BITS
from nearkv_hw.arithmetic.product import (
    FACTOR_EXPONENT_BITS,
    PRODUCT_BITS,
    PRODUCT_EXPONENT_BITS,
    WEIGHT_BIAS,
    Product,
)
from nearkv_hw.arithmetic.scale import ELEMENT_BIAS, SIGNIFICAND_BITS, Element
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through

INPUTS = {"factor": WEIGHT_BITS, "factor_exponent": FACTOR_EXPONENT_BITS, "element": Element}
OUTPUTS = {"some": 1, "significand": PRODUCT_BITS, "exponent": PRODUCT_EXPONENT_BITS}


@pytest.mark.rtl
def test_product():
    run(Product(), module=__file__)


@cocotb.test()
async def multiplies_exactly(dut):
    await start(dut)
    rng = random("products")

    def significand(bits):
        low, high = 1 << bits - 1, (1 << bits) - 1
        return rng.choice([0, low, high, rng.randint(low, high), rng.randint(low, high)])

    limit = 1 << FACTOR_EXPONENT_BITS
    items = [
        {
            "factor": significand(WEIGHT_BITS),
            "factor_exponent": rng.choice(
                [0, limit - 1, rng.randrange(limit), WEIGHT_BIAS + rng.randrange(-9, 9)]
            ),
            "element": {
                "significand": significand(SIGNIFICAND_BITS),
                "exponent": ELEMENT_BIAS + rng.randrange(-149, 143),
            },
        }
        for _ in range(10_000)
    ]
    carried = set()
    async for item, out in through(dut, INPUTS, OUTPUTS, items, Product.latency_cycles):
        product = item["factor"] * item["element"]["significand"]
        assert (out["significand"] == 0) == (product == 0) == (not out["some"])
        if product:
            carry = product >> PRODUCT_BITS - 1
            carried.add(carry)
            assert out["significand"] == product << 1 - carry
            assert out["exponent"] == item["factor_exponent"] + item["element"]["exponent"] + carry
    assert carried == {0, 1}
