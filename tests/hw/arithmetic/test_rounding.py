"""Rounding of a product to fp32, bf16 and fp16 is IEEE nearest even, subnormals kept, overflow to Inf.

Proved here against exact fractions: ties both ways, every place of the leading one in the subnormal range,
the borders to zero, to the smallest normal and to Inf, saturated exponents, random products; zero, Inf and
NaN; stages that load only when told, with other forms directly behind.
"""

from fractions import Fraction

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.numerics import NAN_BF16, NAN_FP16, NAN_FP32
from nearkv_hw.arithmetic.rounding import Outcome, Round
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start, value

FIELDS = {OutputForm.FP32: (8, 23), OutputForm.BF16: (8, 7), OutputForm.FP16: (5, 10)}
NANS = {OutputForm.FP32: NAN_FP32, OutputForm.BF16: NAN_BF16, OutputForm.FP16: NAN_FP16}
STAGES = Round.latency_cycles


@pytest.mark.rtl
def test_rounding():
    run(Round(), module=__file__)


def code_of(form, negative, number):
    """The code of a positive fraction: Python rounds a Fraction to the nearest integer, ties to even."""
    exponent_bits, fraction_bits = FIELDS[form]
    bias = (1 << exponent_bits - 1) - 1
    leading = number.numerator.bit_length() - number.denominator.bit_length()
    leading -= number < Fraction(2) ** leading
    field = max(leading + bias, 1)
    units = round(number / Fraction(2) ** (field - bias - fraction_bits))
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    return negative << exponent_bits + fraction_bits | min(((field - 1) << fraction_bits) + units, infinity)


def expected(case):
    form, product, exponent, negative, outcome = case
    exponent_bits, fraction_bits = FIELDS[form]
    if outcome is Outcome.NAN:
        return NANS[form]
    if outcome is Outcome.INFINITY:
        return negative << exponent_bits + fraction_bits | ((1 << exponent_bits) - 1) << fraction_bits
    if outcome is Outcome.ZERO:
        return negative << exponent_bits + fraction_bits
    return code_of(form, negative, product * Fraction(2) ** (exponent - 61))


def products(rng, form):
    """62-bit products whose bits below the kept ones are none, one unit, half, a unit off half, or all."""
    kept = FIELDS[form][1] + 1
    for place in (61, 60):
        for cut in {place + 1 - kept, place + 1 - rng.randint(1, kept)}:
            half = 1 << cut - 1
            for low in (0, 1, half - 1, half, half + 1, 2 * half - 1):
                for top in (1 << place, (1 << place + 1) - 1, 1 << place | rng.getrandbits(place)):
                    yield (top >> cut << cut) | low


def cases(rng):
    every = []
    for form, (exponent_bits, fraction_bits) in FIELDS.items():
        bias = (1 << exponent_bits - 1) - 1
        subnormal = range(1 - bias - fraction_bits - 4, 3 - bias)
        for exponent in (*subnormal, 0, 1, bias - 1, bias, bias + 1, bias + 2, -1079, 1079, -2047, 2047):
            for product in products(rng, form):
                every.append((form, product, exponent, rng.getrandbits(1), Outcome.NUMBER))
        for _ in range(1000):
            product = 1 << 60 | rng.getrandbits(60) | rng.getrandbits(1) << 61
            every.append((form, product, rng.randint(-170, 140), rng.getrandbits(1), Outcome.NUMBER))
        for outcome in (Outcome.ZERO, Outcome.INFINITY, Outcome.NAN):
            every += [(form, rng.getrandbits(62), rng.randint(-200, 200), sign, outcome) for sign in (0, 1)]
    rng.shuffle(every)
    return every


@cocotb.test()
async def rounds_every_case(dut):
    """All cases in random order, about one in three cycles empty with noise at the inputs."""
    await start(dut)
    rng = random("cases")
    pending = cases(rng)
    stages = [None] * (STAGES + 1)  # what each stage's registers hold
    checked = 0
    count = len(pending)
    while checked < count:
        enter = pending.pop() if pending and rng.random() < 0.7 else None
        _, product, exponent, negative, outcome = enter or (
            OutputForm.FP32,
            rng.getrandbits(62),
            rng.randrange(2048),
            rng.getrandbits(1),
            Outcome(rng.randrange(4)),
        )
        stages = [enter, *stages[:STAGES]]
        dut.step.value = sum((stage is not None) << k for k, stage in enumerate(stages[:STAGES]))
        dut.product.value = product
        dut.exponent.value = exponent
        dut.negative.value = negative
        dut.outcome.value = outcome.value
        dut.early_form.value = int(stages[1][0] if stages[1] else OutputForm.PARTIAL)
        dut.late_form.value = int(stages[3][0] if stages[3] else OutputForm.PARTIAL)
        await RisingEdge(dut.clk)
        if stages[STAGES] is not None:
            assert value(dut.code) == expected(stages[STAGES]), stages[STAGES]
            checked += 1
