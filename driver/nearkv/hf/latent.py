"""Latent attention: queries brought to where the latents are, results brought back.

A model with latent attention (DeepSeek-V3) keeps one row for all heads: a latent, from which a matrix makes
each head's K and V, and a part that carries positions. Instead of making K and V for every row of the
context, that matrix is applied to the query before and to the result after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NEEDED = ("kv_b_proj", "qk_nope_head_dim", "v_head_dim")


def _matrices(module: Any, heads: int) -> tuple[Tensor, Tensor]:
    """What makes K and V of a latent: [heads, dim, rank] each.

    Raises
    ------
    ValueError : for a module that names its parts differently.
    """
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"{type(module).__name__} has no {missing[0]}: latent attention is known of modules with "
            f"{', '.join(_NEEDED)} (DeepSeek-V3)"
        )
    of_k, of_v = module.qk_nope_head_dim, module.v_head_dim
    both: Tensor = module.kv_b_proj.weight.view(heads, of_k + of_v, -1)
    return both[:, :of_k], both[:, of_k:]


def queries_for_latents(module: Any, q: Tensor) -> Tensor:
    """Queries [batch, heads, rows, qk_head_dim] as [batch, heads, rows, rank + positional part]."""
    of_k, _ = _matrices(module, q.shape[1])
    own = q[..., : of_k.shape[1]]
    return torch.cat([own @ of_k.to(q.dtype), q[..., of_k.shape[1] :]], dim=-1)


def values_of_latents(module: Any, out: Tensor) -> Tensor:
    """Results over latents [batch, rows, heads, rank] as [batch, rows, heads, value_dim]."""
    _, of_v = _matrices(module, out.shape[2])
    return torch.einsum("bthr,hvr->bthv", out, of_v.to(out.dtype))
