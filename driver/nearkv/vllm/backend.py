"""vLLM's attention backend on the device: rows go there as the engine writes them, and stay there.

The engine's own scheduler, prefix cache and block tables are used as they are. What it calls the KV cache, a
tensor in host memory, is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from nearkv.attention import Options

from .residence import Place, residence

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class NearKVBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The CPU backend with rows and attention elsewhere; encoders, which keep no rows, stay with it."""

    supported_kv_cache_dtypes = ("auto", "bfloat16", "float16")

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether query rows may see later rows."""
        return False

    @staticmethod
    def get_impl_cls() -> type[NearKVImpl]:
        """The class that layers make."""
        return NearKVImpl


class NearKVImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer.

    Raises
    ------
    ValueError : for what the device does not do: cross attention, and KV caches of fp8.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.attn_type not in (AttentionType.DECODER, *_ENCODERS):
            raise ValueError(
                f"nearkv has no attention of type {self.attn_type!r}: run this model without NEARKV_VLLM"
            )
        if self.is_fp8_kv_cache:
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: rows on the device are of bf16 or fp16; leave it"
            )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Put rows [tokens, kv_heads, dim] into the engine's slots [tokens]."""
        if self.attn_type in _ENCODERS:
            return
        place = _place(layer)
        tokens = len(slot_mapping)  # what stands behind them is padding
        place.blocks.write(
            slot_mapping,
            layer=place.layer,
            k=key[:tokens].to(place.dtype),
            v=value[:tokens].to(place.dtype),
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [tokens, q_heads, head_dim] into output, one call on the device for all
        sequences with the same number of query rows: decode steps are one."""
        if attn_metadata is None or self.attn_type in _ENCODERS or output_scale is not None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return output
        if not attn_metadata.causal:
            raise ValueError("nearkv has causal attention alone: run this model without NEARKV_VLLM")
        place = _place(layer)
        options = self._options()
        for sequences, tokens in _by_query_rows(attn_metadata.query_start_loc):
            out = place.blocks.attend(
                attn_metadata.block_table[sequences],
                attn_metadata.seq_lens[sequences],
                layer=place.layer,
                q=query[tokens].to(place.dtype),
                places=sequences.tolist(),
                **options,
            )
            output[tokens] = out.to(output.dtype).view(*tokens.shape, *output.shape[1:])
        return output

    def _options(self) -> Options:
        return {
            "scale": self.scale,
            "window": None if self.sliding_window < 0 else self.sliding_window,
            "sinks": None if self.sinks is None else self.sinks.detach().float(),
            "softcap": self.logits_soft_cap or None,
            "alibi_slopes": self.alibi_slopes,
        }


def _place(layer: Any) -> Place:
    """Where a layer's rows are; those of one that shares another's rows are there."""
    layers = get_forward_context().no_compile_layers
    shared = layer.impl.kv_sharing_target_layer_name
    with_rows = {
        name: one
        for name, one in layers.items()
        if isinstance(getattr(one, "impl", None), NearKVImpl)
        and one.impl.attn_type not in _ENCODERS
        and one.impl.kv_sharing_target_layer_name is None
    }
    return residence().place(layer if shared is None else layers[shared], with_rows)


def _by_query_rows(query_start: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sequences [n] that have the same number of query rows, and their tokens [n, query_rows]; those
    without are left out."""
    counts = query_start.diff()
    for count in sorted(set(counts.tolist())):
        if count:
            sequences = (counts == count).nonzero()[:, 0]
            yield sequences, query_start[sequences, None].to(torch.int64) + torch.arange(count)
