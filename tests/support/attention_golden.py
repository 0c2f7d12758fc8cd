"""The contract's sums in plain integers, stage by stage, for the tests of the attention unit and its blocks.

Written from docs/numerics.md, sections 1 to 5, as directly as it reads. A state is (top, high, low), or None.
"""

import struct
from dataclasses import dataclass, field

from nearkv_hw.abi import numerics
from nearkv_hw.abi.formats import Decoded, Format, Special
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY

W = numerics.BIN_BITS
MASK = (1 << W) - 1


def term(sign, m, e):
    """The state of one term ±m * 2^e."""
    if m == 0:
        return None
    top = (e + m.bit_length() - 1) // W
    shift = e - W * (top - 1)
    a = m << shift if shift >= 0 else m >> -shift
    high, low = a >> W, a & MASK
    return (top, -high, -low) if sign else (top, high, low)


def merge(a, b):
    """The merge of two states."""
    if a is None or b is None:
        return a or b
    top = max(a[0], b[0])
    high = low = 0
    for state in (a, b):
        if state[0] == top:
            high, low = high + state[1], low + state[2]
        elif state[0] == top - 1:
            low += state[1]
    return top, high, low


def float32(bits):
    """(sign, m, e) of a finite float32."""
    field_ = bits >> 23 & 255
    return bits >> 31, (bits & 0x7FFFFF) | (bool(field_) << 23), max(field_, 1) - 150


def float32_bits(value):
    """The bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def round_score(sign, m, mc, e):
    """±m * mc * 2^(e + 20) to the nearest integer, ties away from zero, saturated."""
    product, e = m * mc, e + numerics.SCORE_FRACTION_BITS
    magnitude = product << e if e >= 0 else (product + (1 << -e - 1)) >> -e
    magnitude = min(magnitude, numerics.SCORE_LIMIT)
    return -magnitude if sign else magnitude


def score_of(dot, factor_bits):
    """S of a dot product's state."""
    sign, mc, ec = float32(factor_bits)
    if dot is None:
        return 0
    v, x = dot[1] * (1 << W) + dot[2], W * (dot[0] - 1)
    m = abs(v)
    drop = max(m.bit_length() - numerics.DOT_KEPT_BITS, 0)
    return round_score(sign ^ (v < 0), m >> drop, mc, x + drop + ec)


def score_of_sink(bits):
    """S of a finite sink."""
    sign, m, e = float32(bits)
    return round_score(sign, m, numerics.SINK_FACTOR, e + numerics.SINK_FACTOR_EXPONENT)


def capped_score(argument, cap_bits):
    """S under a softcap, of its argument U; `cap_bits` are the float32 bits of C2."""
    _, m, e = float32(cap_bits)
    a = abs(argument)
    tanh = 1 << 26
    for bits, k, first in numerics.TANH_OCTAVES:
        if a < 1 << bits:
            t, b, c = numerics.TANH_TABLE[first + (a >> k)]
            y = a >> k - 20 & (1 << 20) - 1
            g = b + (c * (y >> 4) + (1 << 15) >> 16)
            tanh = t + (g * y + (1 << 19) >> 20)
            break
    return round_score(argument < 0, tanh, m, e - 26)


def biased_score(score, distance, slope_bits):
    """S with ALiBi's bias; `slope_bits` are the float32 bits of a."""
    sign, m, e = float32(slope_bits)
    total = score + round_score(sign ^ (distance < 0), abs(distance), m, e)
    return max(min(total, numerics.SCORE_LIMIT), -numerics.SCORE_LIMIT)


def weight_of(score):
    """(p, n) of a score; the weight is p * 2^(n - 17)."""
    n, f = score >> numerics.SCORE_FRACTION_BITS, score & ((1 << numerics.SCORE_FRACTION_BITS) - 1)
    h, low = f >> 12, f & 0xFFF
    t = numerics.EXP2_TABLE
    return min(((t[h] << 12) + (t[h + 1] - t[h]) * low + (1 << 15)) >> 16, (1 << 18) - 1), n


@dataclass
class DotGolden:
    """A row's dot product: its state, and whether the query becomes NaN or the row is dropped."""

    state: tuple | None = None
    nan: bool = False
    positive: bool = False
    negative: bool = False

    def add(self, q, k):
        """Add the product of two decoded elements."""
        sign = q.sign ^ k.sign
        infinite = [x for x in (q, k) if x.special is Special.INFINITY]
        if Special.NAN in (q.special, k.special):
            self.nan = True
        elif infinite:
            if len(infinite) == 1 and any(x.special is None and x.significand == 0 for x in (q, k)):
                self.nan = True
            elif sign:
                self.negative = True
            else:
                self.positive = True
        else:
            self.state = merge(self.state, term(sign, q.significand * k.significand, q.exponent + k.exponent))


@dataclass
class PartialGolden:
    """A query's partial over a set of rows."""

    denominator: tuple | None = None
    lanes: list = field(default_factory=list)
    flags: list = field(default_factory=list)
    nan: bool = False


def dot_product(q, k):
    """The dot product of two lists of decoded elements."""
    dot = DotGolden()
    for a, b in zip(q, k, strict=True):
        dot.add(a, b)
    return dot


def bound(q_codes, q_format, least, largest, factor_bits):
    """The bound of a page for one query.

    Parameters
    ----------
    q_codes : element codes of the query, of 16 bits.
    least, largest : decoded elements of the page's summary.
    factor_bits : float32 bits of c.
    """
    factor_sign, factor_m, _ = float32(factor_bits)
    chosen = [
        up if code >> 15 == factor_sign else down
        for code, down, up in zip(q_codes, least, largest, strict=True)
    ]
    dot = dot_product(decode_all(q_codes, q_format), chosen)
    infinite = dot.positive or dot.negative
    if dot.nan or (dot.positive and dot.negative) or (infinite and factor_m == 0):
        return numerics.SCORE_LIMIT
    if infinite:
        rises = dot.negative if factor_sign else dot.positive
        return numerics.SCORE_LIMIT if rises else -numerics.SCORE_LIMIT
    return score_of(dot.state, factor_bits)


def partial(q, rows, values, *, factor_bits, value_dim, sink=None, cap_bits=0, slope_bits=0, distances=None):
    """The partial of one query.

    Parameters
    ----------
    q : decoded elements.
    rows, values : decoded K and V elements of every row.
    factor_bits : float32 bits of c.
    sink : float32 bits, or None.
    cap_bits : float32 bits of C2, zero without a softcap.
    slope_bits : float32 bits of ALiBi's a, zero without.
    distances : position of every row minus the query's, None where it is not seen; all 0 if not given.
    """
    result = PartialGolden(lanes=[None] * value_dim, flags=[0] * value_dim)
    factor_sign, factor_m, _ = float32(factor_bits)
    if sink is not None:
        if sink >> 23 & 255 == 255:
            result.nan |= sink != 0xFF800000
        else:
            p, n = weight_of(score_of_sink(sink))
            result.denominator = merge(result.denominator, term(0, p, n - 17))
    distances = [0] * len(rows) if distances is None else distances
    for k, v, distance in zip(rows, values, distances, strict=True):
        if distance is None:
            continue
        dot = dot_product(q, k)
        infinite = dot.positive or dot.negative
        if dot.nan or (dot.positive and dot.negative) or (infinite and factor_m == 0):
            result.nan = True
            continue
        up = dot.negative if factor_sign else dot.positive
        if infinite and not cap_bits:
            result.nan |= up
            continue
        score = score_of(dot.state, factor_bits)
        if infinite:
            score = numerics.SCORE_LIMIT if up else -numerics.SCORE_LIMIT
        score = capped_score(score, cap_bits) if cap_bits else score
        p, n = weight_of(biased_score(score, distance, slope_bits))
        result.denominator = merge(result.denominator, term(0, p, n - 17))
        for lane, x in enumerate(v):
            if x.special is Special.NAN:
                result.flags[lane] |= LANE_NAN
            elif x.special is Special.INFINITY:
                result.flags[lane] |= LANE_NEGATIVE_INFINITY if x.sign else LANE_POSITIVE_INFINITY
            else:
                result.lanes[lane] = merge(
                    result.lanes[lane], term(x.sign, p * x.significand, n - 17 + x.exponent)
                )
    return result


def scaled(element, scale):
    """A decoded element times a decoded scale, exactly."""
    specials = [x.special for x in (element, scale)]
    sign = element.sign ^ scale.sign
    zero = any(x.special is None and x.significand == 0 for x in (element, scale))
    if Special.NAN in specials or (Special.INFINITY in specials and zero):
        return Decoded(0, 0, 0, Special.NAN)
    if Special.INFINITY in specials:
        return Decoded(sign, 0, 0, Special.INFINITY)
    return Decoded(sign, element.significand * scale.significand, element.exponent + scale.exponent)


def decode_all(codes, format: Format):
    """Decode a list of codes."""
    return [format.decode(code) for code in codes]
