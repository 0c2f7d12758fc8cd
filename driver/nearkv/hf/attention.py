"""The attention function and the mask function that transformers calls by the name "nearkv"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .cache import HANDLE
from .rows import RowStore

NAME = "nearkv"
"""The attention implementation's name. It must not hold the word that transformers takes for
FlashAttention."""


def nearkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it, over rows that a `NearKVCache` holds.

    Parameters
    ----------
    query : [batch, q_heads, query_rows, head_dim].
    key, value : the placeholders of `NearKVLayer.update`.
    attention_mask : None or bool [batch, 1, query_rows, rows], True where a row is seen.
    s_aux : one sink logit per query head.
    softcap : as in `KVCache.attend`; refused by a device that has none.

    Returns
    -------
    [batch, query_rows, q_heads, value_dim] in the query's type, and None.

    Raises
    ------
    ValueError : for rows that are not in a NearKVCache, and for variants that the device does not have.
    """
    handle: tuple[RowStore, int] | None = getattr(key, HANDLE, None)
    if handle is None:
        raise ValueError(
            "attn_implementation='nearkv' needs its own cache: pass cache=nearkv.hf.attach(model, device)"
        )
    for name, given in (("position_bias", position_bias), ("dropout", dropout or None)):
        if given is not None:
            raise ValueError(f"{name}={given!r}: this device has no {name}; use a model without it")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask must be bool, not {attention_mask.dtype}")
    store, layer = handle
    out = store.attend(
        layer,
        query.transpose(1, 2),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        visible=None if attention_mask is None else attention_mask[:, 0],
        sinks=s_aux,
        softcap=softcap,
    )
    return out.to(query.dtype).contiguous(), None


def register() -> None:
    """Make the name known to transformers; a second call changes nothing.

    The mask function is needed too: without one transformers passes no mask at all, and padded rows are seen.
    """
    AttentionInterface.register(NAME, nearkv_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
