"""What a model's attention really sees: queries, K and V of every layer for a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .models import LoadedModel

_NAME = "nearkv_record"


@dataclass(frozen=True)
class LayerRows:
    """One layer's attention over a text, causal, as the model computes it.

    Parameters
    ----------
    q : [rows, q_heads, head_dim] of the model's type, positions already in it.
    k, v : [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim].
    scale : of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def record(loaded: LoadedModel, text: str) -> list[LayerRows]:
    """The rows of every layer when the model reads `text`.

    The model has its own attention implementation again afterwards.
    """
    kept: list[LayerRows] = []

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> Any:
        q, k, v = (x[0].transpose(0, 1).clone() for x in (query, key, value))
        scale = options.get("scaling")
        kept.append(LayerRows(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation(_NAME)
    try:
        with torch.inference_mode():
            loaded.model(loaded.tokenizer(text, return_tensors="pt").input_ids, use_cache=False)
    finally:
        loaded.model.set_attn_implementation(before)
    return kept
