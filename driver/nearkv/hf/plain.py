"""Attention on the host in the model's own type: for a pass without a cache, and for who asks for weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import causal


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    visible: Tensor | None,
    window: int | None,
    is_causal: bool,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """What each query row makes of each row, [batch, q_heads, query_rows, rows]; zeros where it sees none.

    Parameters
    ----------
    q : [batch, q_heads, query_rows, head_dim], the last rows of the context.
    k : [batch, kv_heads, rows, head_dim].
    visible : bool, broadcasts to [batch, 1, query_rows, rows]; None leaves it to is_causal.
    window : rows that a query row sees at most, or None.
    sinks : one logit per query head, or None; they take their part and are not returned.
    """
    batch, q_heads, query_rows = q.shape[:3]
    scores = (q @ k.repeat_interleave(q_heads // k.shape[1], 1).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None and is_causal and (query_rows > 1 or window is not None):
        visible = causal(batch, query_rows, k.shape[2], q.device, window)[:, None]
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(batch, -1, query_rows, 1)
        scores = torch.cat([scores, extra], dim=-1)
    return scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]].to(q.dtype)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Rows v [batch, kv_heads, rows, value_dim] by their weights: [batch, query_rows, q_heads, value_dim]."""
    group = weights.shape[1] // v.shape[1]
    return (weights.to(v.dtype) @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous()
