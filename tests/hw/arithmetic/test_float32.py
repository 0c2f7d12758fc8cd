# amaranth: UnusedElaboratable=no
"""float32 multiplied and converted as IEEE 754 has it, against numpy.

Proved here: every pair of edge numbers (zeros, the ends of the subnormal and normal ranges, powers of two,
infinities, NaN, both signs); products steered to ties, to the subnormal range and to the borders to zero, to
the least normal number and to Inf; random codes; conversion to fp32, bf16 and fp16 of edges, ties and random
codes; stages that load only when told.
"""

import cocotb
import numpy as np
import pytest
import torch
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.numerics import NAN_BF16, NAN_FP16, NAN_FP32
from nearkv_hw.arithmetic.float32 import Convert, Multiply, Unpack
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start, value

MULTIPLY = Unpack.latency_cycles + Multiply.latency_cycles
STAGES = MULTIPLY + Convert.latency_cycles
FORMS = {  # how torch calls it, its bits, its NaN
    OutputForm.FP32: (torch.float32, 32, NAN_FP32),
    OutputForm.BF16: (torch.bfloat16, 16, NAN_BF16),
    OutputForm.FP16: (torch.float16, 16, NAN_FP16),
}
EDGES = [
    *(0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x7FFFFF),  # subnormal numbers
    *(0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x34000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FFFFFFF),
    *(0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000),  # where fp16 ends
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F000000, 0x7F7FFFFF),
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
]


class Chain(wiring.Component):
    """A product and its conversion, as finished lanes meet them."""

    def __init__(self):
        super().__init__(
            {
                "step": In(STAGES),
                "a": In(32),
                "b": In(32),
                "early_form": In(OutputForm),
                "late_form": In(OutputForm),
                "product": Out(32),
                "converted": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.multiply = multiply = Multiply()
        m.submodules.convert = convert = Convert()
        for name in ("a", "b"):
            m.submodules[name] = unpack = Unpack()
            m.d.comb += [
                unpack.step.eq(self.step[: Unpack.latency_cycles]),
                unpack.code.eq(getattr(self, name)),
                getattr(multiply, name).eq(unpack.o),
            ]
        m.d.comb += [
            multiply.step.eq(self.step[Unpack.latency_cycles : MULTIPLY]),
            self.product.eq(multiply.code),
            convert.step.eq(self.step[MULTIPLY:]),
            convert.code.eq(multiply.code),
            convert.early_form.eq(self.early_form),
            convert.late_form.eq(self.late_form),
            self.converted.eq(convert.o),
        ]
        return m


@pytest.mark.rtl
def test_float32():
    run(Chain(), module=__file__)


def product_of(a, b):
    """IEEE 754's product of two codes, every NaN the contract's."""
    with np.errstate(all="ignore"):
        product = np.uint32(a).view(np.float32) * np.uint32(b).view(np.float32)
    return NAN_FP32 if np.isnan(product) else int(product.view(np.uint32))


def converted(code, form):
    """A float32 code in an output format."""
    dtype, bits, nan = FORMS[form]
    number = torch.tensor(np.uint32(code).view(np.int32)).view(torch.float32)
    if number.isnan():
        return nan
    storage = torch.int32 if bits == 32 else torch.int16
    return int(number.to(dtype).view(storage)) & (1 << bits) - 1


def steered(rng):
    """Two codes whose product is near a border: a few bits wide, so that ties are met, or of any bits."""
    target = rng.choice([-151, -150, -149, -148, -140, -127, -126, -125, 0, 126, 127, 128, 129])
    codes = []
    first = rng.randint(max(-149, target - 127), min(127, target + 149))
    for exponent in (first, max(-149, min(127, target - first - rng.getrandbits(1)))):
        fraction = rng.choice([rng.getrandbits(23), rng.getrandbits(12) << 11, rng.choice([0, 1, 0x7FFFFF])])
        if exponent < -126:
            code = (1 << 23 | fraction) >> -126 - exponent
        else:
            code = (exponent + 127) << 23 | fraction
        codes.append(code | rng.getrandbits(1) << 31)
    return codes


def cases(rng):
    edges = [code | sign << 31 for code in EDGES for sign in (0, 1)]
    every = [[a, b] for a in edges for b in edges]
    every += [steered(rng) for _ in range(8000)]
    every += [[rng.getrandbits(32), rng.getrandbits(32)] for _ in range(2000)]
    one = 0x3F800000
    for code in (rng.getrandbits(32) for _ in range(2000)):
        # one unit around a tie of bf16 and of fp16
        every += [[code >> 16 << 16 | 0x8000 + rng.choice([-1, 0, 1]), one]]
        field = rng.randint(100, 144) << 23
        every += [[code & 0x807FE000 | field | 0x1000 + rng.choice([-1, 0, 1]), one]]
    every = [(*pair, form) for pair in every for form in rng.sample(list(FORMS), 2)]
    rng.shuffle(every)
    return every


@cocotb.test()
async def multiplies_and_converts(dut):
    """All cases in random order, about one in four cycles empty with noise at the inputs."""
    await start(dut)
    rng = random("cases")
    pending = cases(rng)
    count, checked = len(pending), 0
    stages = [None] * (STAGES + 1)  # what each stage's registers hold
    products = set()
    while checked < count:
        enter = pending.pop() if pending and rng.random() < 0.75 else None
        a, b, _ = enter or (rng.getrandbits(32), rng.getrandbits(32), None)
        stages = [enter, *stages[:STAGES]]
        dut.step.value = sum((stage is not None) << k for k, stage in enumerate(stages[:STAGES]))
        dut.a.value, dut.b.value = a, b
        for name, at in (("early_form", MULTIPLY + 1), ("late_form", MULTIPLY + 3)):
            getattr(dut, name).value = int(stages[at][2] if stages[at] else OutputForm.PARTIAL)
        await RisingEdge(dut.clk)
        if stages[MULTIPLY] is not None:
            a, b, _ = stages[MULTIPLY]
            assert value(dut.product) == product_of(a, b), f"{a:#x} * {b:#x}"
        if stages[STAGES] is not None:
            a, b, form = stages[STAGES]
            product = product_of(a, b)
            assert value(dut.converted) == converted(product, form), (f"{a:#x} * {b:#x}", form)
            products.add(product)
            checked += 1
    assert {0, 1 << 31, 1, 0x800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, NAN_FP32} <= products
