"""Decode attention by the numerics contract (docs/numerics.md), on plain tensors of any torch device.

Nothing here is rounded by a float unit: every operation is an integer add, multiply, shift, compare, gather
or reduction, so CPU and CUDA give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import torch
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.abi.numerics import WEIGHT_BITS
from torch import Tensor

from nearkv.reference.arguments import Attention, check
from nearkv.reference.binned import State, binned_sum, merge_states
from nearkv.reference.elements import Elements, decode
from nearkv.reference.finish import finish, log_sum_exp, output_target
from nearkv.reference.partial import Partial, merge
from nearkv.reference.rows import Blocks, Names
from nearkv.reference.score import Change, Weights, sink_weights, weigh
from nearkv.reference.threads import threads_for
from nearkv.reference.visibility import Asked, Ranges

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Products that one block of rows makes at most (one row at least), by kind of device: this bounds the memory
that temporaries take, and on a CPU keeps them in its caches."""


class Options(TypedDict, total=False):
    """The keywords of `decode_attention` that leave the type of its result alone."""

    value_dim: int | None
    visible: Tensor | None
    causal: bool
    window: int | None
    kept_rows: int
    ranges: Ranges | None
    tree: Tensor | None
    pages: Tensor | None
    page_rows: int | None
    query_positions: Tensor | None
    row_positions: Tensor | None
    sinks: Tensor | None
    k_format: str
    v_format: str | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    k_lut: Tensor | None
    v_lut: Tensor | None
    scale_block: Blocks
    scale_format: Names
    k_scale: Tensor | None
    v_scale: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    out_dtype: torch.dtype


@overload
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    scale: float,
    partial: Literal[True],
    **options: Unpack[Options],
) -> Partial: ...


@overload
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    scale: float,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor | None, *, scale: float, **options: Unpack[Options]
) -> Tensor: ...


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    scale: float,
    value_dim: int | None = None,
    visible: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    kept_rows: int = 0,
    ranges: Ranges | None = None,
    tree: Tensor | None = None,
    pages: Tensor | None = None,
    page_rows: int | None = None,
    query_positions: Tensor | None = None,
    row_positions: Tensor | None = None,
    sinks: Tensor | None = None,
    k_format: str = "bf16",
    v_format: str | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_lut: Tensor | None = None,
    v_lut: Tensor | None = None,
    scale_block: Blocks = None,
    scale_format: Names = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    partial: bool = False,
    return_lse: bool = False,
) -> Tensor | Partial | tuple[Tensor, Tensor]:
    """Attention of a few query rows over many K and V rows, to the bit as the contract has it.

    Parameters
    ----------
    q : bfloat16 or float16 [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim]. Query head h
        uses KV head h // (q_heads / kv_heads).
    k, v : [batch, rows, kv_heads, head_dim] and [batch, rows, kv_heads, value_dim]: bfloat16 or float16
        values, or codes (uint8 for formats of 8 bits and fewer, one a byte; int16 for bf16 and fp16). Without
        v, a row's V is the first `value_dim` elements of its K (latent attention), block scales included;
        k_scale is no part of it.
    scale : multiplies q·k before the softmax (natural base).
    value_dim : elements of a V row; needed only without v.
    visible : bool [batch, rows] or [batch, query_rows, rows], True where a row may be attended. A row is
        attended where this and all that follows, to `pages`, allow it; where nothing is said, all rows are.
        What an invisible row holds never matters.
    causal : no row whose position is after the query row's.
    window : rows up to the query row, itself included, by position; implies `causal`.
    kept_rows : first rows that stay visible under a window.
    ranges : (begin, end) pairs of row indices, or such a list per sequence; their union.
    tree : bool [query_rows, query_rows] or [batch, query_rows, query_rows]: the last rows are those of the
        query rows, which see them as it says. Their positions are the query rows'.
    pages : bool [batch, kv_heads, pages], as `select_pages` finds them; pages of `page_rows` rows.
    query_positions : int64 [query_rows] or [batch, query_rows] ([batch] for q without query rows), from 0 to
        2^23 - 1. Without them the last query row has the position of the last row, rows - 1.
    row_positions : int64 [rows] or [batch, rows]; without them a row's position is its index. They need
        query_positions.
    sinks : float32 [q_heads], one more logit per query head, in the denominator alone.
    k_format, v_format : formats of codes, names of `nearkv_hw.abi.formats.ROW_FORMATS`; V's is K's when not
        given. Values bring their own.
    k_scales, v_scales : codes [batch, rows, kv_heads, blocks] of one scale per block of elements of a row.
    k_lut, v_lut : float16 (values or codes) [kv_heads, 16], the numbers that codes of lut4 stand for.
    scale_block : 16, 32, 64 or 128 elements to a block, None for the whole row; the last block may be short.
    scale_format : "fp16", "bf16", "e4m3" or "e8m0". Both may be pairs, K's and V's.
    k_scale, v_scale : float32 [kv_heads], one number for all rows of a head: K's multiplies `scale`, V's the
        result.
    softcap : scores become softcap * tanh(score / softcap), after `scale` and before everything else; above 0
        and at most 709.78. It adds at most softcap * 1.5e-7 to the relative error of a weight.
    alibi_slopes : float32 [q_heads]; slope * (row's position - query row's position) is added to a score of
        natural base, after the softcap. Sinks have no bias.
    out_dtype : torch.float32, torch.bfloat16 or torch.float16.
    partial : return the partial result, for `merge` and `finish`.
    return_lse : return (result, natural-base log-sum-exp float32 [..., q_heads]).

    Returns
    -------
    Tensor [batch, q_heads, value_dim] or [batch, query_rows, q_heads, value_dim], or a `Partial` of these
    queries. A query without any visible row gives +0 and the log-sum-exp -Inf.

    Raises
    ------
    ValueError, TypeError : for shapes, types or formats that do not fit, more than 2^23 - 1 rows, a scale or
        slope that is not finite in float32, or a softcap out of its range.
    """
    output_target(out_dtype)
    if partial and (v_scale is not None or return_lse):
        raise ValueError("v_scale and return_lse belong to a finished result: use finish() and log_sum_exp()")
    call = check(
        q,
        k,
        v,
        scale=scale,
        value_dim=value_dim,
        sinks=sinks,
        k_format=k_format,
        v_format=v_format,
        k_scales=k_scales,
        v_scales=v_scales,
        k_lut=k_lut,
        v_lut=v_lut,
        scale_block=scale_block,
        scale_format=scale_format,
        k_scale=k_scale,
        v_scale=v_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        asked=Asked(
            visible, causal, window, kept_rows, ranges, tree, pages, page_rows, query_positions, row_positions
        ),
    )
    with threads_for(_products(call), q.device):
        result = _attend(call)
    if q.dim() == 3:
        result = _mapped(result, lambda plane: plane.squeeze(1))
    if partial:
        return result
    output = finish(result, out_dtype, v_scale)
    return (output, log_sum_exp(result)) if return_lse else output


def _attend(call: Attention) -> Partial:
    """The partial of a call, queries [batch, query_rows, q_heads]."""
    batch, query_rows, q_heads, head_dim = call.q.shape
    heads, group = call.kv_heads, q_heads // call.kv_heads
    # From here to the end, the query rows and the group of a KV head are one dimension, T * g long.
    folded = call.q.reshape(batch, query_rows, heads, group, head_dim).transpose(1, 2)
    q = decode(folded.reshape(batch, heads, query_rows * group, 1, head_dim), call.q_format)
    factor = call.factors.view(heads, 1, 1)
    result = Partial.empty((batch, heads, query_rows * group), call.value_dim, call.q.device)
    if call.sinks is not None:
        result = with_sinks(result, call.sinks.view(heads, 1, group).expand(heads, query_rows, group))
    for begin, end in _blocks(call):
        visible = call.visibility.of(begin, end)
        if visible is not None:
            if not bool(visible.any()):
                continue
            if visible.shape[2] > 1:
                visible = visible.repeat_interleave(group, dim=2)
        k = call.k.decode(begin, end)
        v = k.first(call.value_dim) if call.v is None else call.v.decode(begin, end)
        weights = weigh(q, k.unsqueeze(2), factor, visible, _change(call, begin, end))
        result = merge(result, _weighted(weights, v.unsqueeze(2)))

    def unfold(plane: Tensor) -> Tensor:
        lanes = plane.shape[3:]
        plane = plane.view(batch, heads, query_rows, group, *lanes).transpose(1, 2)
        return plane.reshape(batch, query_rows, q_heads, *lanes)

    return _mapped(result, unfold)


def _change(call: Attention, begin: int, end: int) -> Change:
    """What becomes of the scores [B, Hkv, T * g, rows] of some rows."""
    if call.slopes is None:
        return Change(call.softcap)
    group = call.q.shape[2] // call.kv_heads
    distances = call.visibility.distances(begin, end).repeat_interleave(group, dim=1).unsqueeze(1)
    slopes = call.slopes.view(call.kv_heads, 1, group).expand(-1, call.q.shape[1], -1)
    return Change(call.softcap, slopes.reshape(call.kv_heads, -1, 1), distances)


def _products(call: Attention) -> int:
    """Products of elements that a call makes, of K or of V, whichever are more."""
    return call.q[..., 0].numel() * call.rows * max(call.q.shape[-1], call.value_dim)


def _blocks(call: Attention) -> list[tuple[int, int]]:
    """Ranges of rows whose products stay within `BLOCK_ELEMENTS`."""
    batch, query_rows, q_heads, head_dim = call.q.shape
    row_elements = max(batch * query_rows * q_heads * max(head_dim, call.value_dim), 1)
    budget = BLOCK_ELEMENTS.get(call.q.device.type, BLOCK_ELEMENTS["cuda"])
    step = max(budget // row_elements, 1)
    return [(begin, min(begin + step, call.rows)) for begin in range(0, call.rows, step)]


def _weighted(weights: Weights, v: Elements) -> Partial:
    """The partial of rows with weights [B, Hkv, queries, rows] and v [B, Hkv, 1, rows, value_dim]."""
    significand, exponent = weights.significand.unsqueeze(-1), weights.exponent.unsqueeze(-1)
    numerators = binned_sum(
        significand * v.significand, exponent + v.exponent, v.sign, width=WEIGHT_BITS + v.width, dim=-2
    )
    flags = torch.zeros_like(numerators.top, dtype=torch.uint8)
    if v.nan is not None and v.infinite is not None:
        present, minus = significand != 0, v.sign < 0
        for bit, rows in (
            (LANE_NAN, v.nan),
            (LANE_POSITIVE_INFINITY, v.infinite & ~minus),
            (LANE_NEGATIVE_INFINITY, v.infinite & minus),
        ):
            flags |= (present & rows).any(-2).to(torch.uint8) * bit
    return Partial(weights.sum(), numerators, weights.query_nan, flags)


def with_sinks(result: Partial, sinks: Tensor) -> Partial:
    """A partial whose denominators have the sinks [kv_heads, query_rows, group] in them."""
    weights = sink_weights(sinks.reshape(sinks.shape[0], -1))
    state = weights.sum()
    shape = result.query_nan.shape
    denominator = State(state.top.expand(shape), state.high.expand(shape), state.low.expand(shape))
    return Partial(
        merge_states(result.denominator, denominator),
        result.numerators,
        result.query_nan | weights.query_nan,
        result.lane_flags,
    )


def _mapped(partial: Partial, change: Callable[[Tensor], Tensor]) -> Partial:
    """A partial with every plane in another shape."""

    def states(state: State) -> State:
        return State(change(state.top), change(state.high), change(state.low))

    return Partial(
        states(partial.denominator),
        states(partial.numerators),
        change(partial.query_nan),
        change(partial.lane_flags),
    )
