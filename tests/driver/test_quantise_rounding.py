"""Numbers to codes and back: every code of every format, every boundary between two, and beyond the last."""

from fractions import Fraction

import oracle
import pytest
import torch
from contract_cases import seed_of_run
from nearkv.errors import ArgumentError
from nearkv.quantise import decode, encode
from nearkv.quantise.rounding import encode_power, largest, largest_code, nan_code
from nearkv_hw.abi.formats import BF16, E8M0, ELEMENT_FORMATS, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, INT4, INT8

FORMS = list(ELEMENT_FORMATS.values())
by_name = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
double = torch.float64


def finite_codes(form):
    """The codes of numbers, in the order of their numbers, -0 left out."""
    codes = [c for c in range(1 << form.bits) if form.decode(c).special is None]
    codes = [c for c in codes if form.decode(c).significand or not form.decode(c).sign]
    codes = torch.tensor(codes)
    return codes[decode(codes, form).argsort()]


def encoded(values, form):
    codes, saturated = encode(torch.as_tensor(values, dtype=double), form)
    return codes.tolist(), saturated.tolist()


@by_name
def test_every_code_is_that_of_its_number(form):
    codes = torch.tensor([c for c in range(1 << form.bits) if form.decode(c).special is None])
    found, saturated = encode(decode(codes, form), form)
    assert torch.equal(found, codes)  # -0 among them
    assert not saturated.any()


@by_name
def test_decoding_is_the_oracles(form):
    codes = range(1 << form.bits) if form.bits < 16 else range(0, 1 << 16, 7)
    values = decode(torch.tensor(codes), form).tolist()
    for code, value in zip(codes, values, strict=True):
        sign, m, e = oracle.decode(form.name, code)
        if m == oracle.NAN:
            assert value != value
        else:
            assert value == (-1) ** sign * (float("inf") if m == oracle.INF else float(m * Fraction(2) ** e))


@by_name
def test_every_boundary(form):
    """Between two neighbours the middle goes to the even code, and what is beside it to the nearer."""
    codes = finite_codes(form)
    values = decode(codes, form)
    low, high = codes[:-1], codes[1:]
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(low % 2 == 0, low, high)
    below, above = (torch.nextafter(middle, middle + side) for side in (-1e300, 1e300))
    for places, wanted in ((middle, even), (below, low), (above, high)):
        found, saturated = encode(places, form)
        zero = (wanted == 0) & (places < 0) & (not form.integer)  # a zero keeps its sign
        assert torch.equal(found, torch.where(zero, 1 << (form.bits - 1), wanted))
        assert not saturated.any()


BEYOND = {  # the last magnitude that is not beyond the largest, and whether itself is
    FP8_E4M3: (464.0, False),
    FP8_E5M2: (61440.0, True),
    FP4_E2M1: (7.0, True),
    FP16: (65520.0, True),
    BF16: (float.fromhex("0x1.FFp127"), True),
}


@pytest.mark.parametrize("form", BEYOND, ids=lambda form: form.name)
def test_beyond_the_largest(form):
    edge, saturates = BEYOND[form]
    top, sign = largest_code(form), 1 << (form.bits - 1)
    inside = torch.nextafter(torch.tensor(edge, dtype=double), torch.tensor(0.0, dtype=double)).item()
    outside = torch.nextafter(torch.tensor(edge, dtype=double), torch.tensor(1e300, dtype=double)).item()
    values = [inside, edge, outside, 1e39, float("inf")]
    assert encoded(values, form) == ([top] * 5, [False, saturates, True, True, True])
    assert encoded([-value for value in values], form) == (
        [top | sign] * 5,
        [False, saturates, True, True, True],
    )


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
def test_beyond_the_largest_integer(form):
    top, mask = largest_code(form), (1 << form.bits) - 1
    values = [top + 0.49, top + 0.5, 1e30, float("inf"), -top - 1.5, -top - 1.51, float("-inf")]
    low = (-top - 1) & mask
    assert encoded(values, form) == ([top] * 4 + [low] * 3, [False, True, True, True, False, True, True])


def test_d11_casts_of_e4m3():
    values = [449.0, 464.0, 480.0, float("inf"), float("nan"), float("-inf")]
    codes, saturated = encoded(values, FP8_E4M3)
    assert codes == [0x7E, 0x7E, 0x7E, 0x7E, 0x7F, 0xFE]
    assert saturated == [False, False, True, True, False, True]


@by_name
def test_largest(form):
    codes = finite_codes(form)
    assert largest_code(form) == int(codes[-1])
    assert largest(form) == float(decode(codes[-1:], form))


def test_nan():
    for form in FORMS:
        if nan_code(form) is None:
            with pytest.raises(ArgumentError, match=f"{form.name} has no NaN, and 2 of the values are NaN"):
                encode(torch.tensor([1.0, torch.nan, torch.nan], dtype=double), form)
        else:
            assert decode(torch.tensor([nan_code(form)]), form).isnan().all()
            assert encoded([torch.nan], form) == ([nan_code(form)], [False])


TORCH = {
    BF16: torch.bfloat16,
    FP16: torch.float16,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}


@pytest.mark.parametrize("form", TORCH, ids=lambda form: form.name)
def test_torch_rounds_alike_below_the_largest(form):
    generator = torch.Generator().manual_seed(seed_of_run())
    numbers = (
        torch.randn(100_000, generator=generator) * torch.randn(100_000, generator=generator).mul(6).exp()
    )
    numbers = numbers[numbers.abs() <= largest(form)]
    storage = torch.int16 if form.bits == 16 else torch.uint8
    theirs = numbers.to(TORCH[form]).view(storage).to(torch.int64) & ((1 << form.bits) - 1)
    assert torch.equal(encode(numbers.double(), form)[0], theirs)


def test_powers():
    values = [0.0, 2.0**-130, 2.0**-127, 1.0, 1.999, 2.0, 3.0, 2.0**127, 1e300, float("inf")]
    codes = [0, 0, 0, 127, 127, 128, 128, 254, 254, 254]
    assert encode_power(torch.tensor(values, dtype=double)).tolist() == codes
    with pytest.raises(ArgumentError, match="use encode_power"):
        encode(torch.ones(1, dtype=double), E8M0)
