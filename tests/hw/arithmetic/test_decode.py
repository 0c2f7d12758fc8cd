# amaranth: UnusedElaboratable=no
"""Element decode: every code of every format gives the contract's sign, value or special; latency."""

import cocotb
import pytest
from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator
from nearkv_hw.abi.formats import ELEMENT_FORMATS, FP4_E2M1, FP8_E5M2, FP16, ROW_FORMATS, Special
from nearkv_hw.arithmetic.decode import (
    CODE_SIGNIFICAND_BITS,
    EXPANDED,
    CodeElement,
    CodeKind,
    ElementDecoder,
    code_kind,
    code_width,
)
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from pipe_bench import through


@pytest.mark.rtl
def test_decode():
    run(ElementDecoder(), module=__file__)


def test_formats_are_checked():
    with pytest.raises(ValueError, match="formats must be some of bf16, fp16"):
        ElementDecoder([FP4_E2M1, FP8_E5M2])


def odd(significand, exponent):
    """The same value with an odd significand, or (0, 0)."""
    if significand == 0:
        return 0, 0
    zeros = (significand & -significand).bit_length() - 1
    return significand >> zeros, exponent + zeros


@cocotb.test()
@cocotb.parametrize(format=list(ELEMENT_FORMATS.values()))
async def decodes_every_code(dut, format):
    await start(dut)
    rng = random("codes", format.name)
    codes = list(range(1 << format.bits))
    rng.shuffle(codes)
    upper = format is FP8_E5M2
    name = FP16.name if upper else format.name
    items = (
        {
            "code": code << 8 if upper else code | rng.getrandbits(16) >> format.bits << format.bits,
            "of": code,
            "kind": {name: 1},
            "present": int(rng.random() < 0.95),
        }
        for code in codes
    )
    inputs = {"code": 16, "kind": CodeKind, "present": 1}
    outputs = {"element": CodeElement, "negative": 1, "nan": 1, "infinite": 1, "counts": 1}
    async for item, out in through(dut, inputs, outputs, items, ElementDecoder.latency_cycles):
        decoded = format.decode(item["of"])
        special = decoded.special if item["present"] else None
        assert out["counts"] == item["present"]
        significand = out["element"]["significand"]
        assert significand == 0 or significand >> CODE_SIGNIFICAND_BITS - 1 == 1, "not normalised"
        assert odd(significand, out["element"]["exponent"] - (CODE_SIGNIFICAND_BITS - 1)) == (
            odd(decoded.significand, decoded.exponent) if item["present"] else (0, 0)
        ), hex(item["of"])
        assert out["negative"] == item["of"] >> format.bits - 1
        assert out["nan"] == (special is Special.NAN)
        assert out["infinite"] == (special is Special.INFINITY)


def test_numbers_of_formats():
    """A format's number in descriptors tells the kind and the width of its codes."""
    m = Module()
    number, kind, width = Signal(4), Signal(CodeKind), Signal(2)
    m.d.comb += [kind.eq(code_kind(number)), width.eq(code_width(number))]
    simulator = Simulator(m)
    found = {}

    async def testbench(ctx):
        for form in ROW_FORMATS.values():
            ctx.set(number, form.code)
            await ctx.delay(1e-9)
            found[form.name] = ctx.get(kind.as_value()), ctx.get(width)

    simulator.add_testbench(testbench)
    simulator.run()
    names = [form.name for form in EXPANDED]
    for form in ROW_FORMATS.values():
        name = "fp16" if form.name in ("fp8_e5m2", "lut4") else form.name
        assert found[form.name] == (1 << names.index(name), {16: 0, 8: 1, 4: 2}[form.bits]), form.name
