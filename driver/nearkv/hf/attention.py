"""The attention function and the mask function that transformers calls by the name "nearkv"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .latent import queries_for_latents, values_of_latents
from .placeholder import Placeholder
from .plain import attention_weights, weighted

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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers asks for it, over rows that a `NearKVCache` holds.

    Rows that are in no cache, as many as there are queries, are the business of a forward pass without one:
    attention over them is the model's own, on the host and in its own type. Weights, for who asks for them
    (`output_attentions`), are worked out on the host too, from K that is read back: a device returns results.

    Parameters
    ----------
    query : [batch, q_heads, query_rows, head_dim].
    key, value : the placeholders of `NearKVLayer.update`, or what the model made of them.
    attention_mask : None or bool [batch, 1, query_rows, rows], True where a row is seen.
    sliding_window : rows that a query sees at most; the mask says it too, where there is one.
    s_aux : one sink logit per query head.
    softcap : as in `KVCache.attend`; refused by a device that has none.

    Returns
    -------
    [batch, query_rows, q_heads, value_dim] in the query's type, and the weights [batch, q_heads, query_rows,
    rows] or None.

    Raises
    ------
    ValueError : for rows that are in another cache, and for variants that the device does not have.
    """
    if position_bias is not None or dropout:
        name, given = ("dropout", dropout) if position_bias is None else ("position_bias", position_bias)
        raise ValueError(f"{name}={given!r}: this device has no {name}; use a model without it")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask must be bool, not {attention_mask.dtype}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def weights_on_host(query: Tensor, key: Tensor) -> Tensor:
        is_causal = kwargs.get("is_causal")
        return attention_weights(
            query,
            key,
            scale=scale,
            visible=attention_mask,
            window=sliding_window,
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
            sinks=s_aux,
            softcap=softcap,
        )

    if not isinstance(key, Placeholder):
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                "attn_implementation='nearkv' needs its own cache: pass cache=nearkv.hf.attach(model, device)"
            )
        weights = weights_on_host(query, key)
        return weighted(weights, value), weights
    layer = key.layer
    if layer.latent_dim:
        query = queries_for_latents(module, query)
    out = layer.store.attend(
        layer.index,
        query.transpose(1, 2),
        scale=scale,
        visible=None if attention_mask is None or layer.store.ragged else attention_mask[:, 0],
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
        value_dim=layer.latent_dim or None,
    )
    if layer.latent_dim:
        out = values_of_latents(module, out)
    if out.dtype != query.dtype:
        out = out.to(query.dtype)
    keys = layer.keys if kwargs.get("output_attentions", False) else None
    return out.contiguous(), None if keys is None else weights_on_host(query, keys)


def register() -> None:
    """Make the name known to transformers; a second call changes nothing.

    The mask function is needed too: without one transformers passes no mask at all, and padded rows are seen.
    """
    AttentionInterface.register(NAME, nearkv_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
