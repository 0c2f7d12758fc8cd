"""Numbers to element codes and back, rounded to nearest, ties to even, without any cast of a framework.

A number that rounds beyond a format's largest goes to that largest and is counted as saturated. All
arithmetic is in float64: scaling by powers of two and rounding to integers, which every device does exactly.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from nearkv_hw.abi.formats import E8M0, Format, Special
from torch import Tensor

from nearkv.errors import ArgumentError

_DOUBLE_FRACTION_BITS = 52
_DOUBLE_BIAS = 1023
_DOUBLE_FIELD_MASK = 0x7FF


def encode(values: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """The codes nearest to numbers.

    Parameters
    ----------
    values : float64, any shape. Infinities saturate; NaN becomes the format's NaN.
    form : an element or scale format; of e8m0, which has powers of two alone, use `encode_power`.

    Returns
    -------
    codes, int64 from 0, and which of them saturated, bool.

    Raises
    ------
    ArgumentError : a NaN, in a format that has none.
    """
    if form is E8M0:
        raise ArgumentError("e8m0 has powers of two alone; use encode_power")
    nan = values.isnan()
    if nan_code(form) is None and bool(nan.any()):
        raise ArgumentError(f"{form.name} has no NaN, and {int(nan.sum())} of the values are NaN")
    numbers = values.masked_fill(nan, 0.0)
    codes, saturated = _integers(numbers, form) if form.integer else _floats(numbers, form)
    return codes.masked_fill(nan, nan_code(form) or 0), saturated


def encode_power(values: Tensor) -> Tensor:
    """The e8m0 codes, int64, of the largest powers of two that are not above float64 values >= 0.

    2^-127 for what is less (zero, too), 2^127 for what is more.
    """
    return (_exponents(values) + E8M0.exponent_bias).clamp(0, nan_code(E8M0) - 1)  # type: ignore[operator]


def decode(codes: Tensor, form: Format) -> Tensor:
    """The float64 numbers that codes (any integer type, bit patterns of the format) stand for, exactly."""
    index = codes.reshape(-1).to(torch.int64) & ((1 << form.bits) - 1)
    return _numbers(form, codes.device).index_select(0, index).view(codes.shape)


def largest(form: Format) -> float:
    """The largest finite positive number of a format."""
    return _number(form, largest_code(form))


def largest_code(form: Format) -> int:
    """The code of `largest`."""
    if form.infinities:
        return (((1 << form.exponent_bits) - 1) << form.fraction_bits) - 1
    codes = 1 << (form.bits - 1 if form.signed else form.bits)
    return codes - 2 if nan_code(form) is not None else codes - 1


def nan_code(form: Format) -> int | None:
    """The code that NaN is written with, None where the format has none."""
    if form is E8M0:
        return (1 << form.bits) - 1
    if form.infinities:  # the quiet NaN: all of the exponent, and the fraction's top bit
        ones = (1 << form.exponent_bits) - 1
        return ones << form.fraction_bits | 1 << (form.fraction_bits - 1)
    return form.nan_codes[0] if form.nan_codes else None


def _integers(values: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    low, high = -(1 << (form.bits - 1)), (1 << (form.bits - 1)) - 1
    rounded = values.round()  # ties to even
    kept = rounded.clamp(low, high)
    return kept.to(torch.int64) & ((1 << form.bits) - 1), kept != rounded


def _floats(values: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    infinite = values.isinf()
    numbers = values.masked_fill(infinite, 0.0)
    lowest = 1 - form.exponent_bias
    unit = (_exponents(numbers) - form.fraction_bits).clamp(min=lowest)
    kept = (numbers.abs() * _powers(-unit)).round().to(torch.int64)  # ties to even
    # A kept leading one adds one to the exponent field, and so does a carry of the rounding.
    code = ((unit - lowest) << form.fraction_bits) + kept
    top = largest_code(form)
    saturated = infinite | (code > top)
    negative = (values.view(torch.int64) < 0).to(torch.int64)
    return code.masked_fill(saturated, top) | negative << (form.bits - 1), saturated


def _exponents(values: Tensor) -> Tensor:
    """floor(log2(|value|)) of float64 numbers; below -1,000 for zero, above 1,000 for infinities."""
    field = (values.contiguous().view(torch.int64) >> _DOUBLE_FRACTION_BITS) & _DOUBLE_FIELD_MASK
    return field - _DOUBLE_BIAS


def _powers(exponents: Tensor) -> Tensor:
    """2^exponent as float64, for int64 exponents that normal numbers have."""
    return ((exponents + _DOUBLE_BIAS) << _DOUBLE_FRACTION_BITS).view(torch.float64)


@lru_cache(maxsize=64)
def _numbers(form: Format, device: torch.device) -> Tensor:
    """The numbers of all codes of a format, float64."""
    if device.type != "cpu":
        return _numbers(form, torch.device("cpu")).to(device)
    return torch.tensor([_number(form, code) for code in range(1 << form.bits)], dtype=torch.float64)


def _number(form: Format, code: int) -> float:
    element = form.decode(code)
    sign = -1.0 if element.sign else 1.0
    if element.special is Special.NAN:
        return math.nan
    return sign * (math.inf if element.special else math.ldexp(element.significand, element.exponent))
