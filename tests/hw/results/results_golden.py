"""Golden model of merge, finish and write-back: docs/numerics.md sections 2, 5 and 6 in plain integers.

A state is None when empty, else (T, H, L). It is written from the contract's text, not from the RTL.
"""

from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import DENOMINATOR, ResultLayout
from nearkv_hw.abi.numerics import TOP_NONE

W = 32
FORMATS = {  # exponent bits, fraction bits, NaN
    OutputForm.FP32: (8, 23, 0x7FC00000),
    OutputForm.BF16: (8, 7, 0x7FC0),
    OutputForm.FP16: (5, 10, 0x7E00),
}
NAN, POSITIVE, NEGATIVE = 1, 2, 4  # lane flags


def merge_states(a, b):
    """Binned merge of two states."""
    if a is None or b is None:
        return b if a is None else a
    top = max(a[0], b[0])
    high = low = 0
    for t, h, low_limb in (a, b):
        if t == top:
            high, low = high + h, low + low_limb
        elif t == top - 1:
            low += h
    return top, high, low


def truncate(magnitude, exponent, bits=31):
    """trunc_k of the contract."""
    excess = max(magnitude.bit_length() - bits, 0)
    return magnitude >> excess, exponent + excess


def round_number(negative, significand, exponent, form):
    """The code of (-1)^negative * significand * 2^exponent, significand not zero, rounded to nearest even."""
    exponent_bits, fraction_bits, _ = FORMATS[form]
    bias = (1 << exponent_bits - 1) - 1
    sign = negative << exponent_bits + fraction_bits
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    leading = significand.bit_length() - 1 + exponent
    if leading > bias:
        return sign | infinity
    field = max(leading + bias, 1)
    quantum = field - bias - fraction_bits
    drop = quantum - exponent
    if drop <= 0:
        units = significand << -drop
    elif drop > significand.bit_length() + 1:
        units = 0
    else:
        units, rest = significand >> drop, significand & ((1 << drop) - 1)
        half = 1 << drop - 1
        units += rest > half or (rest == half and units & 1)
    return sign | min(units + ((field - 1) << fraction_bits), infinity)


def finish_lane(state, flags, denominator, nan, form, output_scale=0):
    """A lane's output code; `output_scale` is float32 bits, 0 for none."""
    if output_scale:
        code = finish_lane(state, flags, denominator, nan, OutputForm.FP32)
        return convert(multiply(code, output_scale), form)
    exponent_bits, fraction_bits, nan_code = FORMATS[form]
    if nan or flags & NAN or (flags & POSITIVE and flags & NEGATIVE):
        return nan_code
    if flags:
        infinity = ((1 << exponent_bits) - 1) << fraction_bits
        return infinity | (flags == NEGATIVE) << exponent_bits + fraction_bits
    if denominator is None or state is None:
        return 0
    value = (state[1] << W) + state[2]
    if value == 0:
        return 0
    a, xa = truncate(abs(value), W * (state[0] - 1))
    total = (denominator[1] << W) + denominator[2]
    surplus = total.bit_length() - 31
    divisor = total >> surplus if surplus > 0 else total << -surplus
    xl = W * (denominator[0] - 1) + surplus
    return round_number(int(value < 0), a * ((1 << 61) // divisor), xa - xl - 61, form)


def multiply(code, scale):
    """The fp32 code of the product of two: one IEEE multiplication."""
    first, second = parts(code), parts(scale)
    negative = first[0] ^ second[0]
    sizes = {first[1], second[1]}
    if "nan" in sizes or sizes == {"infinity", 0}:
        return FORMATS[OutputForm.FP32][2]
    if "infinity" in sizes:
        return negative << 31 | 0x7F800000
    if 0 in sizes:
        return negative << 31
    return round_number(negative, first[1] * second[1], first[2] + second[2], OutputForm.FP32)


def convert(code, form):
    """An fp32 code in another format."""
    exponent_bits, fraction_bits, nan_code = FORMATS[form]
    negative, size, exponent = parts(code)
    sign = negative << exponent_bits + fraction_bits
    if size == "nan":
        return nan_code
    if size == "infinity":
        return sign | ((1 << exponent_bits) - 1) << fraction_bits
    return round_number(negative, size, exponent, form) if size else sign


def parts(code):
    """Sign, significand (or "nan" or "infinity") and exponent of an fp32 code."""
    field, fraction = code >> 23 & 0xFF, code & 0x7FFFFF
    size = fraction | (field > 0) << 23
    if field == 0xFF:
        size = "nan" if fraction else "infinity"
    return code >> 31, size, max(field, 1) - 150


def denominator_line(state, nan):
    """The 64 bytes of a denominator line."""
    top, high, low = state or (TOP_NONE, 0, 0)
    return DENOMINATOR.pack_bytes(top=top, high=high, low=low, flags=int(nan))


def query_lines(lanes, denominator, nan, form, output_scale=0):
    """The lines of one query head's result: `lanes` is a list of (state, flags)."""
    layout = ResultLayout(len(lanes), form)
    if form is OutputForm.PARTIAL:
        states = [state or (TOP_NONE, 0, 0) for state, _ in lanes]
        planes = [
            b"".join(t.to_bytes(4, "little", signed=True) for t, _, _ in states),
            b"".join(h.to_bytes(8, "little", signed=True) for _, h, _ in states),
            b"".join(low.to_bytes(8, "little", signed=True) for _, _, low in states),
            bytes(flags for _, flags in lanes),
        ]
    else:
        codes = [finish_lane(*lane, denominator, nan, form, output_scale) for lane in lanes]
        planes = [b"".join(code.to_bytes(form.lane_bytes, "little") for code in codes)]
    content = b""
    for plane, lines in zip(planes, layout.planes, strict=True):
        content += plane.ljust(64 * lines, b"\0")
    content += denominator_line(denominator, nan)
    assert len(content) == 64 * layout.lines
    return [content[at : at + 64] for at in range(0, len(content), 64)]
