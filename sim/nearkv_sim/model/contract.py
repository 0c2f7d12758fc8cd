"""The numerics contract (docs/numerics.md) for the model device, in plain torch.

Derived from the page alone, apart from the reference and from the RTL: three independent implementations
must agree to the bit. A term of a binned sum is a float64 here. Every operation on it is exact: products
have at most 36 significant bits, scaling is by powers of two well inside float64's exponents, and sums of
limbs are sums of integers below 2^53. Weights keep the bins of their exponent apart, as integers, because
float64 has no room for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from nearkv_hw.abi.formats import E8M0, Format
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.abi.numerics import (
    BIN_BITS,
    DOT_KEPT_BITS,
    EXP2_TABLE,
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    SINK_FACTOR,
    SINK_FACTOR_EXPONENT,
    TABLE_FRACTION_BITS,
    TABLE_STEP_BITS,
    TANH_CURVE_BITS,
    TANH_FRACTION_BITS,
    TANH_OCTAVES,
    TANH_STEP_BITS,
    TANH_TABLE,
    TOP_NONE,
    WEIGHT_BITS,
    WEIGHT_FRACTION_BITS,
)
from torch import Tensor

BIN_SHIFT = BIN_BITS.bit_length() - 1
LIMB_MASK = (1 << BIN_BITS) - 1

MAX_BLOCK_TERMS = 1 << 20
"""Terms of one `binned_sum`: limbs of 32 bits then sum exactly in float64."""
NEAR_BINS = 8
"""Weights at most this many bins below a query's largest share one float64 scale with it."""
DISTANCE_MIN, DISTANCE_MAX = -24, 28
"""Bins between a term's own scale and the top of its sum: less is no term, more leaves nothing of it."""


@dataclass(frozen=True)
class Sums:
    """Binned sums: top bin (TOP_NONE where empty) and the two limbs, int64 tensors of one shape."""

    top: Tensor
    high: Tensor
    low: Tensor

    def __getitem__(self, index: object) -> Sums:
        return Sums(self.top[index], self.high[index], self.low[index])  # type: ignore[index]


@dataclass(frozen=True)
class Partial:
    """Partial results of jobs over a set of rows.

    Members
    -------
    denominator : sums [jobs, queries].
    numerators : sums [jobs, queries, lanes].
    query_nan : bool [jobs, queries]; where set, everything else has no meaning.
    lane_flags : uint8 [jobs, queries, lanes], bits of abi.memory.LANE_*.
    """

    denominator: Sums
    numerators: Sums
    query_nan: Tensor
    lane_flags: Tensor


@dataclass(frozen=True)
class Block:
    """Some rows of every job, decoded.

    Members
    -------
    k : float64 [jobs, rows, head_dim].
    v : float64 [jobs, rows, lanes].
    visible : bool [jobs, 1 or queries, rows]; what an invisible row holds never matters.
    bias : int64 [jobs, queries, rows], what is added to S; or None.
    """

    k: Tensor
    v: Tensor
    visible: Tensor
    bias: Tensor | None = None


def attend(
    queries: Tensor, factor: Tensor, lanes: int, blocks: Iterable[Block], *, softcap: int = 0
) -> Partial:
    """The partial results of jobs over all rows of `blocks` (sections 3 to 5, 8 and 9), sinks not included.

    Parameters
    ----------
    queries : float64 [jobs, queries, head_dim].
    factor : int64 [jobs], the float32 bits of c, finite.
    lanes : value_dim.
    blocks : rows, at most MAX_BLOCK_TERMS each.
    softcap : float32 bits of C2, 0 for none.
    """
    jobs, group, _ = queries.shape
    sums = empty_sums(jobs, group, lanes + 1)
    query_nan = torch.zeros(jobs, group, dtype=torch.bool)
    lane_flags = torch.zeros(jobs, group, lanes, dtype=torch.uint8)
    for block in blocks:
        scores, alive, nan = _changed_scores(queries, factor, block, softcap)
        values, flags = _values(block, alive)
        query_nan |= nan
        if flags is not None:
            lane_flags |= flags
        sums = merge(sums, _weigh(scores, alive, values))
    return Partial(sums[..., lanes], sums[..., :lanes], query_nan, lane_flags)


def add_sinks(partial: Partial, sinks: Tensor) -> Partial:
    """`partial` with a sink for each query (section 4), `sinks` the float32 bits as int64 [jobs, queries]."""
    field, fraction = sinks >> 23 & 0xFF, sinks & 0x7FFFFF
    negative = sinks >> 31 & 1 == 1
    special = field == 0xFF
    dropped = special & (fraction == 0) & negative
    significand = torch.where(field > 0, fraction + (1 << 23), fraction)
    exponent = field.clamp(min=1) - 150 + SINK_FACTOR_EXPONENT + SCORE_FRACTION_BITS
    magnitude = _round_scaled(significand * SINK_FACTOR, exponent)
    scores = torch.where(negative, -magnitude, magnitude)
    alive = ~special
    weights = _weigh(
        scores[..., None], alive[..., None], torch.ones(sinks.shape[0], 1, 1, dtype=torch.float64)
    )
    return Partial(
        merge(partial.denominator, weights[..., 0]),
        partial.numerators,
        partial.query_nan | (special & ~dropped),
        partial.lane_flags,
    )


def bounds(queries: Tensor, factor: int, least: Tensor, largest: Tensor) -> Tensor:
    """The largest bound over the queries of pages (section 13), int64 [pages].

    Parameters
    ----------
    queries : float64 [queries, dim].
    factor : float32 bits of c.
    least, largest : float64 [pages, dim], the pages' summaries.
    """
    up = torch.signbit(queries) == bool(factor >> 31)
    rows = torch.where(up[:, None], largest, least)
    everything = torch.ones(1, 1, 1, dtype=torch.bool).expand(len(queries), 1, rows.shape[1])
    factors = torch.full((len(queries),), factor)
    block = Block(rows, rows[..., :0], everything)
    scores, alive, nan = _scores(queries[:, None], factors, block)
    best = torch.where(nan, SCORE_LIMIT, torch.where(alive, scores, -SCORE_LIMIT))
    return best[:, 0].amax(0)


@cache
def decode_table(form: Format) -> Tensor:
    """Every code's value as float64, NaN and infinities included (section 1)."""
    codes = torch.arange(1 << form.bits, dtype=torch.int64)
    if form.integer:
        half = 1 << form.bits - 1
        return ((codes + half) % (1 << form.bits) - half).double()
    magnitude = codes & ((1 << form.exponent_bits + form.fraction_bits) - 1)
    field, fraction = magnitude >> form.fraction_bits, magnitude & ((1 << form.fraction_bits) - 1)
    significand = torch.where(field > 0, fraction + (1 << form.fraction_bits), fraction)
    value = significand.double() * _power_of_two(field.clamp(min=1) - form.exponent_bias)
    if form is E8M0:
        value = _power_of_two(field - form.exponent_bias)
        return torch.where(codes == codes[-1], torch.nan, value)
    if form.infinities:
        special = torch.where(fraction == 0, torch.inf, torch.nan)
        value = torch.where(field == (1 << form.exponent_bits) - 1, special, value)
    for code in form.nan_codes:
        value = torch.where(magnitude == code, torch.nan, value)
    if not form.signed:
        return value
    return torch.where(codes >> (form.bits - 1) == 1, -value, value)


def empty_sums(*shape: int) -> Sums:
    """Empty binned sums."""
    zero = torch.zeros(shape, dtype=torch.int64)
    return Sums(torch.full(shape, TOP_NONE, dtype=torch.int64), zero, zero)


def merge(a: Sums, b: Sums) -> Sums:
    """Exact sums of two equally shaped tensors of states (section 2)."""
    top = torch.maximum(a.top, b.top)
    (a_high, a_low), (b_high, b_low) = _lower(a, top), _lower(b, top)
    return Sums(top, a_high + b_high, a_low + b_low)


def binned_sum(terms: Tensor, dim: int, bins: Tensor | None = None) -> Sums:
    """Binned sums over one dimension (section 2).

    Parameters
    ----------
    terms : float64; zero is no term. Exponents within -700 ... 510. Overwritten.
    dim : the dimension, at most MAX_BLOCK_TERMS long.
    bins : int64, whole bins by which each term's exponent is larger than it says; none if not given.
    """
    if terms.shape[dim] > MAX_BLOCK_TERMS:
        raise ValueError(f"a block has at most {MAX_BLOCK_TERMS} terms, not {terms.shape[dim]}; split it")
    if bins is None:
        least, most = torch.aminmax(terms, dim=dim, keepdim=True)
        peak = torch.maximum(most, -least)
        top = torch.where(peak == 0, TOP_NONE, _bin(peak))
        distance = top
    else:
        top = torch.where(terms == 0, TOP_NONE, _bin(terms) + bins).amax(dim, keepdim=True)
        distance = top - bins
    scale = _power_of_two(-BIN_BITS * distance.clamp(DISTANCE_MIN, DISTANCE_MAX))
    scaled = terms.mul_(scale)  # the top bin's terms lie in [1, 2^32), those a bin below in [2^-32, 1)
    whole = scaled.trunc()
    high = whole.sum(dim)
    low = scaled.sub_(whole).mul_(float(1 << BIN_BITS)).trunc_().sum(dim)
    return Sums(top.squeeze(dim), high.long(), low.long())


def _changed_scores(
    queries: Tensor, factor: Tensor, block: Block, softcap: int
) -> tuple[Tensor, Tensor, Tensor]:
    """S after softcap and bias, which rows have weight, and which queries became NaN."""
    scores, alive, bad = _scores(queries, factor, block, capped=softcap != 0)
    if softcap:
        scores = _capped(scores, softcap)
    if block.bias is not None:
        scores = (scores + block.bias).clamp(-SCORE_LIMIT, SCORE_LIMIT)
    return scores, alive, bad.any(-1)


def alibi(slopes: Tensor, distances: Tensor) -> Tensor:
    """Section 9's bias of slopes (float32 bits) and distances, int64 tensors that broadcast."""
    significand, exponent, negative = decode_factor(slopes)
    magnitude = _round_scaled(distances.abs() * significand, exponent + SCORE_FRACTION_BITS)
    return torch.where(negative ^ (distances < 0), -magnitude, magnitude)


def _capped(argument: Tensor, softcap: int) -> Tensor:
    """Section 8: S of the argument U."""
    significand, exponent, _ = decode_factor(torch.tensor(softcap))
    size = argument.abs()
    octave = torch.bucketize(size, _OCTAVE_ENDS, right=True)
    beyond = octave == len(TANH_OCTAVES)
    octave = octave.clamp(max=len(TANH_OCTAVES) - 1)
    width, first = _OCTAVE_WIDTHS[octave], _OCTAVE_FIRSTS[octave]
    index = torch.where(beyond, 0, first + (size >> width))
    t, b, c = _tanh_table()[index].unbind(-1)
    place = (size >> (width - TANH_STEP_BITS)) & ((1 << TANH_STEP_BITS) - 1)
    curve = TANH_CURVE_BITS
    slope = b + ((c * (place >> (TANH_STEP_BITS - curve)) + (1 << curve - 1)) >> curve)
    tanh = t + ((slope * place + (1 << TANH_STEP_BITS - 1)) >> TANH_STEP_BITS)
    tanh = torch.where(beyond, 1 << TANH_FRACTION_BITS, tanh)
    shift = SCORE_FRACTION_BITS - TANH_FRACTION_BITS
    magnitude = _round_scaled(tanh * significand, exponent.expand_as(tanh) + shift)
    return torch.where(argument < 0, -magnitude, magnitude)


_OCTAVE_ENDS = torch.tensor([1 << bits for bits, _, _ in TANH_OCTAVES])
_OCTAVE_WIDTHS = torch.tensor([width for _, width, _ in TANH_OCTAVES])
_OCTAVE_FIRSTS = torch.tensor([first for _, _, first in TANH_OCTAVES])


@cache
def _tanh_table() -> Tensor:
    return torch.tensor(TANH_TABLE, dtype=torch.int64)


def _scores(
    queries: Tensor, factor: Tensor, block: Block, *, capped: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Section 3: S and which rows have weight, and which make the query NaN, [jobs, queries, rows].

    Where scores are `capped` an infinite one is a number.
    """
    visible = block.visible
    terms = queries[:, :, None, :] * block.k[:, None, :, :]
    alive = visible.expand(terms.shape[:-1])
    bad = torch.zeros(terms.shape[:-1], dtype=torch.bool)
    down = up = bad
    significand, exponent, negative = decode_factor(factor[:, None, None])
    if not (queries.isfinite().all() and block.k.isfinite().all()):
        positive, less = (terms == torch.inf).any(-1), (terms == -torch.inf).any(-1)
        infinite = positive | less
        bad = terms.isnan().any(-1) | (positive & less) | (infinite & (significand == 0))
        up, down = torch.where(negative, less, positive), torch.where(negative, positive, less)
        if not capped:
            bad |= up
            alive = alive & ~infinite
        bad &= visible
        alive = alive & ~bad
        terms.nan_to_num_(0.0, 0.0, 0.0)
    sign, kept, scale = truncate(binned_sum(terms, -1), DOT_KEPT_BITS)
    magnitude = _round_scaled(kept * significand, scale + exponent + SCORE_FRACTION_BITS)
    scores = torch.where(sign ^ negative, -magnitude, magnitude)
    if capped:
        scores = torch.where(up, SCORE_LIMIT, torch.where(down, -SCORE_LIMIT, scores))
    return scores, alive, bad


def _values(block: Block, alive: Tensor) -> tuple[Tensor, Tensor | None]:
    """V's finite elements, then a lane of ones for the denominator; the lanes' flags, if there are any."""
    flags = None
    v = block.v
    if not v.isfinite().all():
        rows = alive.double()
        flags = torch.zeros(*alive.shape[:2], v.shape[2], dtype=torch.uint8)
        for bit, which in (
            (LANE_NAN, v.isnan()),
            (LANE_POSITIVE_INFINITY, v == torch.inf),
            (LANE_NEGATIVE_INFINITY, v == -torch.inf),
        ):
            flags |= (rows @ which.double() > 0).to(torch.uint8) * bit
        v = v.nan_to_num(0.0, 0.0, 0.0)
    return torch.cat([v, torch.ones(*v.shape[:2], 1, dtype=torch.float64)], dim=2), flags


def _weigh(scores: Tensor, alive: Tensor, values: Tensor) -> Sums:
    """Sections 4 and 5: binned sums over the rows of weight * value.

    `scores` int64 and `alive` bool [jobs, queries, rows], `values` float64 [jobs, rows, lanes]; the sums are
    [jobs, queries, lanes].
    """
    n, p = _weights(scores)
    base = torch.where(alive, n, TOP_NONE).amax(-1, keepdim=True) >> BIN_SHIFT
    bins = n >> BIN_SHIFT
    if not (alive & (base - bins > NEAR_BINS)).any():
        bins = base  # every weight is within reach of the query's largest: one scale for all rows
    exponent = torch.where(alive, n - (bins << BIN_SHIFT), 0) - WEIGHT_FRACTION_BITS
    weights = torch.where(alive, p, 0).double() * _power_of_two(exponent)
    terms = weights[..., None] * values[:, None, :, :]
    if bins is not base:
        return binned_sum(terms, 2, bins[..., None])
    sums = binned_sum(terms, 2)
    return Sums(torch.where(sums.top == TOP_NONE, TOP_NONE, sums.top + base), sums.high, sums.low)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Section 4: a weight is p * 2^(n - 17); (n, p)."""
    table, steps = _exp2_tables()
    fraction = scores & ((1 << SCORE_FRACTION_BITS) - 1)
    index, rest = fraction >> TABLE_STEP_BITS, fraction & ((1 << TABLE_STEP_BITS) - 1)
    drop = TABLE_FRACTION_BITS - WEIGHT_FRACTION_BITS + TABLE_STEP_BITS
    p = ((table[index] << TABLE_STEP_BITS) + steps[index] * rest + (1 << drop - 1)) >> drop
    return scores >> SCORE_FRACTION_BITS, p.clamp(max=(1 << WEIGHT_BITS) - 1)


@cache
def _exp2_tables() -> tuple[Tensor, Tensor]:
    table = torch.tensor(EXP2_TABLE, dtype=torch.int64)
    return table[:-1].contiguous(), table.diff()


def decode_factor(code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A finite float32's significand, exponent and sign (bool)."""
    field, fraction = code >> 23 & 0xFF, code & 0x7FFFFF
    return (
        torch.where(field > 0, fraction + (1 << 23), fraction),
        field.clamp(min=1) - 150,
        code >> 31 & 1 == 1,
    )


def _round_scaled(product: Tensor, exponent: Tensor) -> Tensor:
    """product * 2^exponent, 0 <= product < 2^57, to the nearest integer, ties away from zero, saturated."""
    bits = SCORE_LIMIT.bit_length()
    up = exponent.clamp(0, bits)
    large = product >= torch.ones_like(up) << (bits - up)
    grown = torch.where(large, SCORE_LIMIT, product << up)
    down = (-exponent).clamp(1, 60)
    shrunk = (product + (torch.ones_like(down) << (down - 1))) >> down
    return torch.where(exponent >= 0, grown, shrunk.clamp(max=SCORE_LIMIT))


def truncate(sums: Sums, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sums' sign (bool, false for zero), and trunc_bits of their magnitude: significand and exponent."""
    high = sums.high + (sums.low >> BIN_BITS)
    low = sums.low & LIMB_MASK
    negative = high < 0
    high = torch.where(negative, -high - (low != 0).long(), high)
    low = torch.where(negative, -low & LIMB_MASK, low)
    length = torch.where(high > 0, bit_length(high) + BIN_BITS, bit_length(low))
    shift = (length - bits).clamp(min=0)
    near = shift.clamp(max=BIN_BITS)
    kept = ((high << (BIN_BITS - near)) | (low >> near)) >> (shift - near)
    return negative, kept, BIN_BITS * (sums.top - 1) + shift


def _lower(sums: Sums, top: Tensor) -> tuple[Tensor, Tensor]:
    """The limbs of states seen from a top bin that is not below theirs."""
    distance = top - sums.top
    same = distance == 0
    high = torch.where(same, sums.high, 0)
    return high, torch.where(same, sums.low, torch.where(distance == 1, sums.high, 0))


def _bin(values: Tensor) -> Tensor:
    """The bin that holds a nonzero float64's leading one."""
    return ((values.view(torch.int64) >> 52 & 0x7FF) - 1023) >> BIN_SHIFT


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, -1022 <= exponent <= 1023."""
    return ((exponent + 1023) << 52).view(torch.float64)


def bit_length(value: Tensor) -> Tensor:
    """bits(value) for 0 <= value < 2^63."""
    upper = value >> 31
    part = torch.where(upper > 0, upper, value)
    length = ((part.double().view(torch.int64) >> 52) - 1022).clamp(min=0)
    return length + torch.where(upper > 0, 31, 0)
