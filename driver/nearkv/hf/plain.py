"""Attention over rows that are in no cache: a forward pass without one."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import causal


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Tensor | None,
    is_causal: bool,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention in the tensors' own type, as the model would do it without a device.

    Parameters
    ----------
    q : [batch, q_heads, rows, head_dim].
    k, v : [batch, kv_heads, rows, dim].
    visible : bool, broadcasts to [batch, 1, rows, rows]; None leaves it to is_causal.

    Returns
    -------
    [batch, rows, q_heads, value_dim]; zero where no row is seen.
    """
    batch, q_heads, rows = q.shape[:3]
    group = q_heads // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is None and is_causal and rows > 1:
        visible = causal(batch, rows, rows, q.device)[:, None]
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)
