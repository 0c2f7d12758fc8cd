"""Element formats against torch's own dtypes, and the weight table against exact decimals."""

from decimal import Decimal, localcontext

import pytest
import torch
from nearkv_hw.abi.formats import ELEMENT_FORMATS, SCALE_FORMATS, Special
from nearkv_hw.abi.numerics import EXP2_TABLE

TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@pytest.mark.parametrize("name", TORCH)
def test_every_code_decodes_to_torchs_value(name):
    codes = torch.arange(1 << ELEMENT_FORMATS[name].bits, dtype=torch.int32)
    stored = codes.to(torch.int16 if ELEMENT_FORMATS[name].bits == 16 else torch.uint8)
    values = stored.view(TORCH[name]).to(torch.float64).tolist()
    for code, value in zip(codes.tolist(), values, strict=True):
        element = ELEMENT_FORMATS[name].decode(code)
        if element.special is Special.NAN:
            assert value != value
        elif element.special is Special.INFINITY:
            assert value == (-1) ** element.sign * float("inf")
        else:
            assert value == (-1) ** element.sign * element.significand * 2.0**element.exponent


def test_fp4_values():
    values = [ELEMENT_FORMATS["fp4_e2m1"].decode(c) for c in range(16)]
    assert [(-1) ** e.sign * e.significand * 2.0**e.exponent for e in values] == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip


def test_e8m0_scale():
    e8m0 = SCALE_FORMATS["e8m0"]
    assert e8m0.decode(255).special is Special.NAN
    assert (e8m0.decode(0).significand, e8m0.decode(0).exponent) == (1, -127)


def test_a_code_too_large_is_refused():
    with pytest.raises(ValueError, match="a int4 code has 4 bits, got 0x10"):
        ELEMENT_FORMATS["int4"].decode(16)


def test_codes_are_distinct():
    assert len({f.code for f in ELEMENT_FORMATS.values()}) == len(ELEMENT_FORMATS)


def test_weight_table_is_the_nearest_integer():
    with localcontext() as context:
        context.prec = 60
        exact = [Decimal(2) ** (21 + Decimal(i) / 256) for i in range(257)]
        assert list(EXP2_TABLE) == [int(value.to_integral_value()) for value in exact]
