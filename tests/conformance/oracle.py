"""The numerics contract in plain Python integers, one term at a time: slow, short, independent.

Written from docs/numerics.md alone, section by section, for tests to compare against. It shares no constant,
no table and no algorithm with the reference, the model or the RTL.
"""

import struct
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction
from math import isqrt

W = 32
EMPTY = (None, 0, 0)

# --- 1. Elements

NAN, INF = "nan", "inf"
FLOATS = {  # bits of exponent and fraction, subtracted from max(x, 1)
    "bf16": (8, 7, 134),
    "fp16": (5, 10, 25),
    "fp8_e4m3": (4, 3, 10),
    "e4m3": (4, 3, 10),
    "fp8_e5m2": (5, 2, 17),
    "fp4_e2m1": (2, 1, 2),
    "fp32": (8, 23, 150),
}


def decode(name, code):
    """(sign, m, e), with m "nan" or "inf" for what is no number."""
    if name in ("int8", "int4"):
        bits = int(name[3:])
        value = code - (1 << bits) if code >> (bits - 1) else code
        return int(value < 0), abs(value), 0
    if name == "e8m0":
        return (0, NAN, 0) if code == 255 else (0, 1, code - 127)
    exponent_bits, fraction_bits, bias = FLOATS[name]
    fraction = code % (1 << fraction_bits)
    x = (code >> fraction_bits) % (1 << exponent_bits)
    sign = code >> (exponent_bits + fraction_bits)
    if name in ("fp8_e4m3", "e4m3"):
        if x == 15 and fraction == 7:
            return sign, NAN, 0
    elif name != "fp4_e2m1" and x == (1 << exponent_bits) - 1:
        return sign, NAN if fraction else INF, 0
    return sign, fraction + ((1 << fraction_bits) if x else 0), max(x, 1) - bias


def multiply(first, second):
    """The exact product of two elements."""
    sign = first[0] ^ second[0]
    if NAN in (first[1], second[1]):
        return sign, NAN, 0
    if INF in (first[1], second[1]):
        return (sign, NAN, 0) if 0 in (first[1], second[1]) else (sign, INF, 0)
    return sign, first[1] * second[1], first[2] + second[2]


def decode_row(name, codes, scale_name=None, scale_codes=None, block=None, lut=None):
    """A row's elements, scales multiplied in; block None is the whole row, `lut` the fp16 codes of lut4."""
    elements = [decode("fp16", lut[code]) if name == "lut4" else decode(name, code) for code in codes]
    if scale_codes is None:
        return elements
    scales = [decode(scale_name, code) for code in scale_codes]
    return [multiply(x, scales[i // block if block else 0]) for i, x in enumerate(elements)]


# --- 2. The binned sum


def shifted(m, e):
    """floor(m * 2^e)."""
    return m << e if e >= 0 else m >> -e


def term(sign, m, e):
    if m == 0:
        return EMPTY
    top = (e + m.bit_length() - 1) // W
    a = shifted(m, e - W * (top - 1))
    return (top, -(a >> W), -(a % (1 << W))) if sign else (top, a >> W, a % (1 << W))


def merge(first, second):
    if first[0] is None:
        return second
    if second[0] is None:
        return first
    top = max(first[0], second[0])
    high = low = 0
    for t, h, x in (first, second):
        if t == top:
            high, low = high + h, low + x
        elif t == top - 1:
            low += h
    return top, high, low


def value(state):
    """The state as (v, x), standing for v * 2^x."""
    top, high, low = state
    return (0, 0) if top is None else (high * (1 << W) + low, W * (top - 1))


def trunc(k, m, e):
    drop = max(m.bit_length() - k, 0)
    return m >> drop, e + drop


# --- 3. Score, 4. weight

LIMIT = 2**43 - 1


def float32_code(number):
    return int.from_bytes(struct.pack("<f", number), "little")


def factor(scale, k_scale=1.0):
    """c as a float32 element."""
    return decode("fp32", float32_code(scale * 1.4426950408889634 * k_scale))


def nearest(m, e):
    """m * 2^e to the nearest integer, ties away from zero, saturated."""
    return min(m << e if e >= 0 else (m + (1 << (-e - 1))) >> -e, LIMIT)


def score(q, k, c):
    """S of a row, or "nan", "+inf" or "-inf"."""
    products = [multiply(x, y) for x, y in zip(q, k, strict=True)]
    infinities = {sign for sign, m, _ in products if m == INF}
    if any(m == NAN for _, m, _ in products) or len(infinities) == 2 or (infinities and c[1] == 0):
        return "nan"
    if infinities:
        return "-inf" if infinities.pop() ^ c[0] else "+inf"
    state = EMPTY
    for product in products:
        state = merge(state, term(*product))
    v, x = value(state)
    m, x = trunc(32, abs(v), x)
    s = nearest(m * c[1], x + c[2] + 20)
    return -s if (v < 0) ^ c[0] else s


# floor(2^(22 + i/256)) by eight exact integer square roots, then halved to the nearest.
TABLE = []
for _i in range(257):
    _root = 1 << (22 * 256 + _i)
    for _ in range(8):
        _root = isqrt(_root)
    TABLE.append((_root + 1) // 2)


def weight(s):
    """(p, n) of a score: the weight is p * 2^(n - 17)."""
    n, f = s >> 20, s % (1 << 20)
    h, x = f >> 12, f % (1 << 12)
    return min((TABLE[h] * 2**12 + (TABLE[h + 1] - TABLE[h]) * x + 2**15) >> 16, 2**18 - 1), n


def sink_score(sink):
    """S of a sink (a float that is a float32), or "nan" or "drop"."""
    sign, m, e = decode("fp32", float32_code(sink))
    if m in (NAN, INF):
        return "drop" if m == INF and sign else "nan"
    s = nearest(m * 12102203, e - 23 + 20)
    return -s if sign else s


# --- 8. Softcap


def capped_factor(scale, cap, k_scale=1.0):
    """c of a capped score as a float32 element."""
    return decode("fp32", float32_code(scale / cap * 64 * k_scale))


def cap_factor(cap):
    """C2 as a float32 element."""
    return decode("fp32", float32_code(cap * 1.4426950408889634))


def tanh_node(x):
    """The integer nearest to 2^26 tanh(x), for a fraction x."""
    with localcontext(Context(prec=80)):
        e = (-2 * Decimal(x.numerator) / x.denominator).exp()
        return int((2**26 * (1 - e) / (1 + e)).to_integral_value(ROUND_HALF_EVEN))


SEGMENTS = []  # (begin, width, t, b, c), begin and width in units of 2^-26
for _begin, _end, _parts in ((0, 2, 64), (2, 4, 32), (4, 8, 8), (8, 16, 4)):
    for _i in range(_begin * _parts, _end * _parts):
        _t, _m, _u = (tanh_node(Fraction(2 * _i + half, 2 * _parts)) for half in range(3))
        SEGMENTS.append(
            (_i * 2**26 // _parts, 2**26 // _parts, _t, 4 * _m - 3 * _t - _u, 2 * (_t - 2 * _m + _u))
        )


def tanh(a):
    """2^26 tanh(a / 2^26) for an integer a >= 0, as the contract interpolates it."""
    if a >= 16 * 2**26:
        return 2**26
    begin, width, t, b, c = next(segment for segment in reversed(SEGMENTS) if segment[0] <= a)
    s = (a - begin) * 2**20 // width
    g = b + (c * (s // 16) + 2**15) // 2**16
    return t + (g * s + 2**19) // 2**20


def capped(u, cap):
    """S of an argument U, a number or an infinity; `cap` is C2."""
    u = {"+inf": LIMIT, "-inf": -LIMIT}.get(u, u)
    s = nearest(tanh(abs(u)) * cap[1], cap[2] - 6)
    return -s if u < 0 else s


# --- 9. ALiBi


def slope_factor(slope):
    """A slope in base 2 as a float32 element."""
    return decode("fp32", float32_code(slope * 1.4426950408889634))


def biased(s, slope, distance):
    """S with the bias of a row, `distance` its position less the query row's."""
    bias = nearest(abs(distance) * slope[1], slope[2] + 20)
    s += -bias if (distance < 0) ^ slope[0] else bias
    return max(-LIMIT, min(s, LIMIT))


# --- 10. Visible rows


def sees(position, rows, *, causal=False, window=None, kept_rows=0):
    """Which rows a query row at a position sees, of rows at these positions."""
    found = []
    for index, row in enumerate(rows):
        seen = row <= position or not (causal or window)
        if window and row <= position - window and index >= kept_rows:
            seen = False
        found.append(seen)
    return found


# --- 13. Pages


def outward(name, element, up):
    """The code of an element rounded up or down to bf16 or fp16; no NaN."""
    sign, m, e = element
    exponent_bits, fraction_bits, bias = FLOATS[name]
    minus = sign << (exponent_bits + fraction_bits)
    if m == INF:
        return minus | infinity(name)
    unit = max(e + m.bit_length() - 1 - fraction_bits, 1 - bias) if m else 1 - bias
    kept = Fraction(m) * Fraction(2) ** (e - unit)
    away = up != bool(sign)
    kept = int(kept) + (away and kept.denominator > 1)
    if kept >> (fraction_bits + 1):
        kept, unit = kept >> 1, unit + 1
    if not kept >> fraction_bits:
        return minus | kept
    x = unit + bias
    if x >= (1 << exponent_bits) - 1:
        return minus | infinity(name) - (not away)
    return minus | x << fraction_bits | kept - (1 << fraction_bits)


def summary(name, rows):
    """(least, largest): codes per channel of decoded rows."""
    return tuple([_extreme(name, column, up) for column in zip(*rows, strict=True)] for up in (False, True))


def _extreme(name, column, up):
    if any(m == NAN for _, m, _ in column):
        return NANS[name]

    def order(element):
        sign, m, e = element
        size = Fraction(2) ** 10_000 if m == INF else m * Fraction(2) ** e
        return (-size, 0) if sign else (size, 1)  # -0 below +0

    return outward(name, (max if up else min)(column, key=order), up)


def bound(q, least, largest, c):
    """The bound of a page for one query; `least` and `largest` are decoded summaries."""
    row = [low if x[0] ^ c[0] else high for x, low, high in zip(q, least, largest, strict=True)]
    s = score(q, row, c)
    return LIMIT if s in ("nan", "+inf") else -LIMIT if s == "-inf" else s


def select(bounds, count, candidates):
    """The selected pages, in their order, of those that are candidates."""
    ranked = sorted(candidates, key=lambda page: (-bounds[page], page))
    newest = candidates[-1:]
    return sorted(newest + [page for page in ranked if page not in newest][: count - 1])


# --- 5. Partial result


@dataclass
class Partial:
    """Λ, A per lane, and flags: a set of "nan", "+inf", "-inf" per lane."""

    denominator: tuple = EMPTY
    numerators: list = field(default_factory=list)
    query_nan: bool = False
    lanes: list = field(default_factory=list)


def attend(q, k, v, c, visible=None, sink=None, value_dim=None, cap=None, slope=None, distances=None):
    """The partial of one query over rows of decoded elements; `value_dim` where there are no rows.

    `c` is that of section 8 where there is a `cap`.
    """
    dim = len(v[0]) if v else value_dim
    result = Partial(EMPTY, [EMPTY] * dim, False, [set() for _ in range(dim)])
    for i, (k_row, v_row) in enumerate(zip(k, v, strict=True)):
        if visible is not None and not visible[i]:
            continue
        s = score(q, k_row, c)
        if cap is not None and s != "nan":
            s = capped(s, cap)
        if s in ("nan", "+inf"):
            result.query_nan = True
        elif s != "-inf":
            if slope is not None:
                s = biased(s, slope, distances[i])
            p, n = weight(s)
            result.denominator = merge(result.denominator, term(0, p, n - 17))
            for j, (sign, m, e) in enumerate(v_row):
                if m in (NAN, INF):
                    result.lanes[j].add(NAN if m == NAN else "-inf" if sign else "+inf")
                else:
                    result.numerators[j] = merge(result.numerators[j], term(sign, p * m, e + n - 17))
    if sink is not None:
        s = sink_score(sink)
        if s == "nan":
            result.query_nan = True
        elif s != "drop":
            p, n = weight(s)
            result.denominator = merge(result.denominator, term(0, p, n - 17))
    return result


# --- 6. Final result

NANS = {"fp32": 0x7FC00000, "bf16": 0x7FC0, "fp16": 0x7E00}


def infinity(name):
    exponent_bits, fraction_bits, _ = FLOATS[name]
    return ((1 << exponent_bits) - 1) << fraction_bits


def round_to(name, m, e):
    """The code of m * 2^e rounded once, nearest even, without its sign."""
    exponent_bits, fraction_bits, bias = FLOATS[name]
    if m == 0:
        return 0
    unit = max(e + m.bit_length() - 1 - fraction_bits, 1 - bias)
    if unit <= e:
        kept = m << (e - unit)
    else:
        kept, rest = divmod(m, 1 << (unit - e))
        half = 1 << (unit - e - 1)
        kept += rest > half or (rest == half and kept % 2 == 1)
    if kept >> (fraction_bits + 1):
        kept, unit = kept >> 1, unit + 1
    if not kept >> fraction_bits:
        return kept
    x = unit + bias
    return (
        infinity(name) if x >= (1 << exponent_bits) - 1 else x << fraction_bits | kept - (1 << fraction_bits)
    )


def finish(partial, name, v_scale=None):
    """The codes of all lanes; `v_scale` is a float that is a float32."""
    return [_lane(partial, j, name, v_scale) for j in range(len(partial.numerators))]


def _lane(partial, j, name, v_scale):
    flags = partial.lanes[j]
    first = name if v_scale is None else "fp32"
    if partial.query_nan or NAN in flags or {"+inf", "-inf"} <= flags:
        return NANS[name]
    if flags:
        sign, code = int("-inf" in flags), infinity(first)
    elif partial.denominator[0] is None:
        sign, code = 0, 0
    else:
        v, x = value(partial.numerators[j])
        a, xa = trunc(31, abs(v), x)
        total, xl = value(partial.denominator)
        up = 31 - total.bit_length()
        length, xl = shifted(total, up), xl - up
        r = 2**61 // length
        sign, code = int(v < 0), round_to(first, a * r, xa - xl - 61)
    if v_scale is not None:
        product = multiply(decode("fp32", sign << 31 | code), decode("fp32", float32_code(v_scale)))
        if product[1] == NAN:
            return NANS[name]
        sign = product[0]
        code = infinity("fp32") if product[1] == INF else round_to("fp32", product[1], product[2])
        if name != "fp32":
            _, m, e = decode("fp32", code)
            code = infinity(name) if m == INF else round_to(name, m, e)
    exponent_bits, fraction_bits, _ = FLOATS[name]
    return sign << (exponent_bits + fraction_bits) | code
