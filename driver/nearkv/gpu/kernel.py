"""The contract's partial results in Triton: integers alone, so that nothing is contracted or flushed.

A program takes one query and a slab of rows, block by block, and keeps one state per lane. Elements come from
the tables that `nearkv.reference` decodes with; every other line is one of docs/numerics.md, sections 2 to 5.
"""

# Triton reads these functions itself: annotations and keyword-only arguments are not its language.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.abi.numerics import (
    BIN_BITS,
    SCORE_FRACTION_BITS,
    SCORE_LIMIT,
    TABLE_FRACTION_BITS,
    TABLE_STEP_BITS,
    TANH_CURVE_BITS,
    TANH_FRACTION_BITS,
    TANH_OCTAVES,
    TANH_STEP_BITS,
    TOP_NONE,
    WEIGHT_BITS,
    WEIGHT_FRACTION_BITS,
)

from nearkv.reference import elements
from nearkv.reference.fixed import FP32_EXPONENT_BIAS, FP32_FRACTION_BITS

_W = tl.constexpr(BIN_BITS)
_LIMB = tl.constexpr((1 << BIN_BITS) - 1)
_NONE = tl.constexpr(TOP_NONE)
_ZERO_EXPONENT = tl.constexpr(elements.ZERO_EXPONENT)
_INFINITY = tl.constexpr(elements.INFINITY)
_SIGN = tl.constexpr(elements.SIGN)
_NAN = tl.constexpr(elements.NAN)
_SIGNIFICAND_AT = tl.constexpr(elements.SIGNIFICAND_AT)
_EXPONENT_AT = tl.constexpr(elements.EXPONENT_AT)
_NO_EXPONENT = tl.constexpr(elements.ZERO_EXPONENT // 2)
_SCORE_BITS = tl.constexpr(SCORE_FRACTION_BITS)
_SCORE_LIMIT = tl.constexpr(SCORE_LIMIT)
_SCORE_MASK = tl.constexpr((1 << SCORE_FRACTION_BITS) - 1)
_STEP_BITS = tl.constexpr(TABLE_STEP_BITS)
_STEP_MASK = tl.constexpr((1 << TABLE_STEP_BITS) - 1)
_POWER_CUT = tl.constexpr(TABLE_STEP_BITS + TABLE_FRACTION_BITS - WEIGHT_FRACTION_BITS)
_POWER_HALF = tl.constexpr(1 << (_POWER_CUT.value - 1))
_WEIGHT_BITS = tl.constexpr(WEIGHT_BITS)
_WEIGHT_MOST = tl.constexpr((1 << WEIGHT_BITS) - 1)
_WEIGHT_FRACTION = tl.constexpr(WEIGHT_FRACTION_BITS)
_FP32_FRACTION = tl.constexpr(FP32_FRACTION_BITS)
_FP32_FRACTION_MASK = tl.constexpr((1 << FP32_FRACTION_BITS) - 1)
_FP32_BIAS = tl.constexpr(FP32_EXPONENT_BIAS)
_TANH_BITS = tl.constexpr(TANH_FRACTION_BITS)
_TANH_ONE = tl.constexpr(1 << TANH_FRACTION_BITS)
_TANH_STEP = tl.constexpr(TANH_STEP_BITS)
_TANH_STEP_MASK = tl.constexpr((1 << TANH_STEP_BITS) - 1)
_TANH_STEP_HALF = tl.constexpr(1 << (TANH_STEP_BITS - 1))
_TANH_CURVE = tl.constexpr(TANH_CURVE_BITS)
_TANH_CURVE_HALF = tl.constexpr(1 << (TANH_CURVE_BITS - 1))
_TANH_CURVE_DROPPED = tl.constexpr(TANH_STEP_BITS - TANH_CURVE_BITS)
_TANH_SCORE = tl.constexpr(SCORE_FRACTION_BITS - TANH_FRACTION_BITS)
(_END_A, _K_A, _FIRST_A), (_END_B, _K_B, _FIRST_B), (_END_C, _K_C, _FIRST_C), (_END_D, _K_D, _FIRST_D) = (
    (tl.constexpr(1 << bits), tl.constexpr(k), tl.constexpr(first)) for bits, k, first in TANH_OCTAVES
)
_LANE_NAN = tl.constexpr(LANE_NAN)
_LANE_UP = tl.constexpr(LANE_POSITIVE_INFINITY)
_LANE_DOWN = tl.constexpr(LANE_NEGATIVE_INFINITY)
_COUNT = tl.constexpr(20)
"""Bits of each of three counts that one sum has: more than a block's rows or a row's elements need."""
_COUNT_TWICE = tl.constexpr(40)
_COUNT_MASK = tl.constexpr((1 << 20) - 1)


@triton.jit
def _decoded(table, codes, valid, CODE_BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Elements as (sign, significand, exponent, nan, infinite); the number zero where not valid."""
    packed = tl.load(table + (codes.to(tl.int64) & ((1 << CODE_BITS) - 1)), mask=valid, other=0)
    sign = 1 - (packed & _SIGN)
    significand = (packed >> _SIGNIFICAND_AT) & ((1 << WIDTH) - 1)
    exponent = tl.where(valid, packed >> _EXPONENT_AT, _ZERO_EXPONENT)
    return sign, significand, exponent, (packed & _NAN) != 0, (packed & _INFINITY) != 0


@triton.jit
def _rows(
    codes,
    table,
    scales,
    scale_table,
    lut,
    row,
    head,
    lane,
    valid,
    kv_heads,
    DIM: tl.constexpr,
    CODE_BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    SCALE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LUT: tl.constexpr,
):
    """Rows of one KV head, [rows, lanes], scales multiplied in: (sign, significand, exponent, nan, infinite).

    With a codebook (LUT entries, else 0) codes are indices of it, and the table is that of its numbers. With
    scales (SCALE_BITS not 0) the significand's leading one is made the upper of its two places.
    """
    place = row[:, None] * kv_heads + head
    code = tl.load(codes + place * DIM + lane[None, :], mask=valid, other=0)
    if LUT:
        index = head * LUT + (code.to(tl.int64) & (LUT - 1))
        code = tl.load(lut + index, mask=valid, other=0)
    sign, significand, exponent, nan, infinite = _decoded(table, code, valid, CODE_BITS, WIDTH)
    if SCALE_BITS:
        code = tl.load(scales + place * BLOCKS + lane[None, :] // BLOCK, mask=valid, other=0)
        s_sign, s_significand, s_exponent, s_nan, s_infinite = _decoded(
            scale_table, code, valid, SCALE_BITS, SCALE_WIDTH
        )
        zero = (significand == 0) & ~nan & ~infinite
        s_zero = (s_significand == 0) & ~s_nan & ~s_infinite
        nan = nan | s_nan | (infinite & s_zero) | (zero & s_infinite)
        infinite = (infinite | s_infinite) & ~nan
        significand = significand * s_significand
        missing = 1 - (significand >> (WIDTH + SCALE_WIDTH - 1))
        significand = significand << missing
        exponent = exponent + s_exponent - missing
        sign = sign * s_sign
    return sign, significand, exponent, nan, infinite


@triton.jit
def _binned(significand, exponent, sign, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """The binned sum over an axis, of significands of WIDTH or WIDTH - 1 bits (or 0): top, high, low."""
    leading = tl.max((significand >> (WIDTH - 1)) + exponent, AXIS) + (WIDTH - 2)
    top = leading >> 5
    place = exponent - ((tl.expand_dims(top, AXIS) - 1) << 5)
    aligned = significand << tl.maximum(place, 0)
    aligned = aligned >> tl.minimum(tl.maximum(-place, 0), 63)
    high = tl.sum(((aligned >> _W) & _LIMB) * sign, AXIS)
    low = tl.sum((aligned & _LIMB) * sign, AXIS)
    return tl.where(leading < _NO_EXPONENT, _NONE, top), high, low


@triton.jit
def _merged(top, high, low, other_top, other_high, other_low):
    """The merge of two states."""
    both = tl.maximum(top, other_top)
    moved_high = tl.where(top == both, high, 0)
    moved_low = tl.where(top == both, low, 0) + tl.where(top == both - 1, high, 0)
    moved_high += tl.where(other_top == both, other_high, 0)
    moved_low += tl.where(other_top == both, other_low, 0) + tl.where(other_top == both - 1, other_high, 0)
    return both, moved_high, moved_low


@triton.jit
def _bit_length(value):
    """Bits of numbers that are not negative."""
    count = value * 0
    for halving in tl.static_range(6):
        more = (value >> (32 >> halving)) > 0
        count += tl.where(more, 32 >> halving, 0)
        value = tl.where(more, value >> (32 >> halving), value)
    return count + value


@triton.jit
def _float32(code):
    """A float32 code's significand and exponent; infinities and NaN look like numbers."""
    field = (code >> _FP32_FRACTION) & 0xFF
    significand = (code & _FP32_FRACTION_MASK) + (tl.minimum(field, 1) << _FP32_FRACTION)
    return significand, tl.maximum(field, 1) - _FP32_BIAS


@triton.jit
def _fixed_point(product, exponent):
    """The integer nearest to product * 2^exponent, ties away, saturated; product < 2^57."""
    left = tl.minimum(tl.maximum(exponent, 0), 43)
    right = tl.minimum(tl.maximum(-exponent, 0), 60)
    one = left * 0 + 1
    rounded = (product + ((one << right) >> 1)) >> right
    limit = one * _SCORE_LIMIT
    return tl.where(rounded <= (limit >> left), rounded << left, limit)


@triton.jit
def _scores(top, high, low, factor):
    """S from the states of dot products and the float32 code of c (section 3)."""
    negative = high + (low >> _W) < 0
    sign = tl.where(negative, -1, 1)
    low = low * sign
    high = high * sign + (low >> _W)
    low = low & _LIMB
    dropped = _bit_length(high)
    kept = ((high << tl.maximum(_W - dropped, 0)) >> tl.maximum(dropped - _W, 0)) | (low >> dropped)
    significand, exponent = _float32(factor)
    fixed = _fixed_point(kept * significand, ((top - 1) << 5) + dropped + exponent + _SCORE_BITS)
    return tl.where(negative ^ (factor < 0), -fixed, fixed)


@triton.jit
def _capped(argument, softcap, table):
    """Scores under a softcap (section 8), from U and the float32 code of C2; table: t, b and c by segment."""
    size = tl.abs(argument)
    inside = tl.where(size < _END_B, _K_B, tl.where(size < _END_C, _K_C, _K_D))
    k = tl.where(size < _END_A, _K_A, inside).to(tl.int64)
    inside = tl.where(size < _END_B, _FIRST_B, tl.where(size < _END_C, _FIRST_C, _FIRST_D))
    first = tl.where(size < _END_A, _FIRST_A, inside).to(tl.int64)
    beyond = size >= _END_D
    entry = table + 3 * tl.where(beyond, 0, first + (size >> k))
    step = (size >> (k - _TANH_STEP)) & _TANH_STEP_MASK
    curve = tl.load(entry + 2) * (step >> _TANH_CURVE_DROPPED)
    slope = tl.load(entry + 1) + ((curve + _TANH_CURVE_HALF) >> _TANH_CURVE)
    tanh = tl.load(entry) + ((slope * step + _TANH_STEP_HALF) >> _TANH_STEP)
    significand, exponent = _float32(softcap)
    fixed = _fixed_point(tl.where(beyond, _TANH_ONE, tanh) * significand, exponent + _TANH_SCORE)
    return tl.where(argument < 0, -fixed, fixed)


@triton.jit
def _biased(score, slope, distance):
    """Scores with the bias of ALiBi (section 9), from the float32 code of a slope in base 2."""
    significand, exponent = _float32(slope)
    bias = _fixed_point(significand * tl.abs(distance), exponent + _SCORE_BITS)
    score = score + tl.where((slope < 0) ^ (distance < 0), -bias, bias)
    return tl.minimum(tl.maximum(score, -_SCORE_LIMIT), _SCORE_LIMIT)


@triton.jit
def _counted(first, second, third, AXIS: tl.constexpr):
    """Whether any of three planes of truth values has one along an axis."""
    packed = first.to(tl.int64) + (second.to(tl.int64) << _COUNT) + (third.to(tl.int64) << _COUNT_TWICE)
    count = tl.sum(packed, AXIS)
    return (count & _COUNT_MASK) != 0, ((count >> _COUNT) & _COUNT_MASK) != 0, (count >> _COUNT_TWICE) != 0


@triton.jit
def partials(
    q,
    q_table,
    k,
    k_table,
    k_scales,
    k_scale_table,
    k_lut,
    v,
    v_table,
    v_scales,
    v_scale_table,
    v_lut,
    exp2,
    factors,
    tanh,
    softcap,
    slopes,
    query_positions,
    row_positions,
    visible,
    tops,
    highs,
    lows,
    nans,
    lane_tops,
    lane_highs,
    lane_lows,
    lane_flags,
    rows,
    slab,
    kv_heads,
    queries,
    visible_batch,
    visible_head,
    visible_query,
    query_positions_batch,
    row_positions_batch,
    group,
    DIM: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PITCH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_CODE_BITS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_SCALE_BITS: tl.constexpr,
    K_SCALE_WIDTH: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    K_LUT: tl.constexpr,
    V_CODE_BITS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_SCALE_BITS: tl.constexpr,
    V_SCALE_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_BLOCKS: tl.constexpr,
    V_LUT: tl.constexpr,
):
    """One query's partial over a slab of rows; programs [batch * kv_heads * queries, slabs].

    Parameters
    ----------
    q : codes [batch, kv_heads, queries, DIM].
    k, v : codes [batch, rows, kv_heads, DIM and V_PITCH]; V is the first VALUE_DIM of its row.
    exp2 : the table t, int64 [257].
    factors : float32 codes of c, int32 [kv_heads].
    tanh, softcap : with SOFTCAP its table, int64 [segments, 3], and the float32 code of C2, int64 [1].
    slopes : with ALIBI, float32 codes in base 2, int32 [kv_heads * group].
    query_positions, row_positions : int64 [1 or batch, query rows] and [1 or batch, rows].
    visible : uint8, with strides for batch, KV head and query row (a query of `group`); rows are adjacent.
    tops ... lane_flags : int64 results [slabs, batch * kv_heads * queries], and [..., VALUE_DIM] of lanes.
    K_DIM, V_DIM : DIM and VALUE_DIM, or the next powers of two.
    """
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query, head, batch = program % queries, program // queries % kv_heads, program // queries // kv_heads
    lane = tl.arange(0, K_DIM).to(tl.int64)
    own = lane < DIM
    q_sign, q_significand, q_exponent, q_nan, q_infinite = _decoded(
        q_table, tl.load(q + program * DIM + lane, mask=own, other=0), own, 16, Q_WIDTH
    )
    q_zero = ((q_significand == 0) & ~q_nan & ~q_infinite)[None, :]
    factor = tl.load(factors + head).to(tl.int64)
    factor_zero = (factor & 0x7FFFFFFF) == 0
    if SOFTCAP:
        cap = tl.load(softcap)
    if ALIBI:
        slope = tl.load(slopes + head * group + query % group).to(tl.int64)
        position = tl.load(query_positions + batch * query_positions_batch + query // group)
    out = tl.arange(0, V_DIM).to(tl.int64)
    written = out < VALUE_DIM
    seen = visible + batch * visible_batch + head * visible_head + query // group * visible_query

    top, high, low = program * 0 + _NONE, program * 0, program * 0
    lane_top, lane_high, lane_low, flags = out * 0 + _NONE, out * 0, out * 0, out * 0
    query_nan = program * 0
    begin = part * slab
    end = tl.minimum(begin + slab, rows)
    for first in range(begin, end, BLOCK_ROWS):
        index = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        there = index < end
        shown = tl.load(seen + index, mask=there, other=0) != 0
        row = batch * rows + index
        k_sign, k_significand, k_exponent, k_nan, k_infinite = _rows(
            k,
            k_table,
            k_scales,
            k_scale_table,
            k_lut,
            row,
            head,
            lane,
            there[:, None] & own[None, :],
            kv_heads,
            DIM,
            K_CODE_BITS,
            K_WIDTH,
            K_SCALE_BITS,
            K_SCALE_WIDTH,
            K_BLOCK,
            K_BLOCKS,
            K_LUT,
        )
        k_zero = (k_significand == 0) & ~k_nan & ~k_infinite
        sign = q_sign[None, :] * k_sign
        dot_top, dot_high, dot_low = _binned(
            q_significand[None, :] * k_significand,
            q_exponent[None, :] + k_exponent,
            sign,
            Q_WIDTH + K_WIDTH + K_SCALE_WIDTH,
            1,
        )
        score = _scores(dot_top, dot_high, dot_low, factor)
        nan = q_nan[None, :] | k_nan | (q_infinite[None, :] & k_zero) | (q_zero & k_infinite)
        infinite = q_infinite[None, :] | k_infinite
        nan, up, down = _counted(nan, infinite & (sign > 0), infinite & (sign < 0), 1)
        nan = nan | (up & down) | ((up | down) & factor_zero)
        up, down = tl.where(factor < 0, down, up), tl.where(factor < 0, up, down)
        if SOFTCAP:  # it makes numbers of infinities
            score = tl.where(up, _SCORE_LIMIT, tl.where(down, -_SCORE_LIMIT, score))
            score = _capped(score, cap, tanh)
        else:
            nan = nan | up
        if ALIBI:
            held = tl.load(row_positions + batch * row_positions_batch + index, mask=there, other=0)
            score = _biased(score, slope, held - position)
        query_nan = tl.maximum(query_nan, tl.max((nan & shown).to(tl.int64), 0))
        present = shown & ~nan
        if not SOFTCAP:
            present = present & ~down

        fraction = score & _SCORE_MASK
        entry = exp2 + (fraction >> _STEP_BITS)
        base = tl.load(entry)
        rise = tl.load(entry + 1) - base
        power = (base << _STEP_BITS) + rise * (fraction & _STEP_MASK)
        power = (power + _POWER_HALF) >> _POWER_CUT
        weight = tl.where(present, tl.minimum(power, _WEIGHT_MOST), 0)
        scale = tl.where(present, (score >> _SCORE_BITS) - _WEIGHT_FRACTION, _ZERO_EXPONENT)
        other_top, other_high, other_low = _binned(weight, scale, weight * 0 + 1, _WEIGHT_BITS, 0)
        top, high, low = _merged(top, high, low, other_top, other_high, other_low)

        v_sign, v_significand, v_exponent, v_nan, v_infinite = _rows(
            v,
            v_table,
            v_scales,
            v_scale_table,
            v_lut,
            row,
            head,
            out,
            there[:, None] & written[None, :],
            kv_heads,
            V_PITCH,
            V_CODE_BITS,
            V_WIDTH,
            V_SCALE_BITS,
            V_SCALE_WIDTH,
            V_BLOCK,
            V_BLOCKS,
            V_LUT,
        )
        other_top, other_high, other_low = _binned(
            weight[:, None] * v_significand,
            scale[:, None] + v_exponent,
            v_sign,
            _WEIGHT_BITS + V_WIDTH + V_SCALE_WIDTH,
            0,
        )
        lane_top, lane_high, lane_low = _merged(
            lane_top, lane_high, lane_low, other_top, other_high, other_low
        )
        counts = present[:, None]
        any_nan, any_up, any_down = _counted(
            counts & v_nan, counts & v_infinite & (v_sign > 0), counts & v_infinite & (v_sign < 0), 0
        )
        flags |= tl.where(any_nan, _LANE_NAN, 0)
        flags |= tl.where(any_up, _LANE_UP, 0) | tl.where(any_down, _LANE_DOWN, 0)

    at = part * tl.num_programs(0) + program
    tl.store(tops + at, top)
    tl.store(highs + at, high)
    tl.store(lows + at, low)
    tl.store(nans + at, query_nan)
    lanes = at * VALUE_DIM + out
    tl.store(lane_tops + lanes, lane_top, mask=written)
    tl.store(lane_highs + lanes, lane_high, mask=written)
    tl.store(lane_lows + lanes, lane_low, mask=written)
    tl.store(lane_flags + lanes, flags, mask=written)
