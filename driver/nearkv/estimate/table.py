"""Models by name: the fields of their published configurations."""

from __future__ import annotations

from typing import Any

from nearkv.errors import ArgumentError

from .huggingface import from_config
from .models import Model

_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def _config(
    kind: str, shape: tuple[int, int, int, int, int], inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        **dict(zip(_FIELDS, shape, strict=True)),
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config(
        "gpt_oss",
        (layers, 2880, 64, 8, 64),
        2880,
        201088,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        max_position_embeddings=131072,
        quantization_config={"quant_method": "mxfp4"},
    )


_LLAMA = {"max_position_embeddings": 131072}
_QWEN3 = {"max_position_embeddings": 40960}
_GEMMA3 = {"sliding_window": 1024, "tie_word_embeddings": True, "max_position_embeddings": 131072}
_GEMMA2 = {"sliding_window": 4096, "tie_word_embeddings": True, "max_position_embeddings": 8192}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        _config("llama", (32, 4096, 32, 8, 128), 14336, 128256, **_LLAMA),
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        _config("llama", (80, 8192, 64, 8, 128), 28672, 128256, **_LLAMA),
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        _config("llama", (126, 16384, 128, 8, 128), 53248, 128256, **_LLAMA),
    ),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        _config("llama", (32, 4096, 32, 32, 128), 11008, 32000, max_position_embeddings=4096),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        _config("qwen2", (28, 3584, 28, 4, 128), 18944, 152064, max_position_embeddings=131072),
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B",
        _config("qwen2", (80, 8192, 64, 8, 128), 29568, 152064, max_position_embeddings=131072),
    ),
    "qwen3-8b": ("Qwen/Qwen3-8B", _config("qwen3", (36, 4096, 32, 8, 128), 12288, 151936, **_QWEN3)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _config("qwen3", (64, 5120, 64, 8, 128), 25600, 151936, **_QWEN3)),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        _config(
            "qwen3_moe",
            (48, 2048, 32, 4, 128),
            6144,
            151936,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            **_QWEN3,
        ),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _config(
            "qwen3_moe",
            (94, 4096, 64, 4, 128),
            12288,
            151936,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
            **_QWEN3,
        ),
    ),
    "gemma-2-9b": (
        "google/gemma-2-9b",
        _config("gemma2", (42, 3584, 16, 8, 256), 14336, 256000, **_GEMMA2),
    ),
    "gemma-2-27b": (
        "google/gemma-2-27b",
        _config("gemma2", (46, 4608, 32, 16, 128), 36864, 256000, **_GEMMA2),
    ),
    "gemma-3-12b": (
        "google/gemma-3-12b-pt, text_config",
        _config("gemma3_text", (48, 3840, 16, 8, 256), 15360, 262208, **_GEMMA3),
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-pt, text_config",
        _config("gemma3_text", (62, 5376, 32, 16, 128), 21504, 262208, **_GEMMA3),
    ),
    "mistral-7b-v0.1": (
        "mistralai/Mistral-7B-v0.1",
        _config(
            "mistral",
            (32, 4096, 32, 8, 128),
            14336,
            32000,
            sliding_window=4096,
            max_position_embeddings=32768,
        ),
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _config(
            "deepseek_v3",
            (61, 7168, 128, 128, 128),
            18432,
            129280,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            max_position_embeddings=163840,
            quantization_config={"quant_method": "fp8"},
        ),
    ),
}
"""Repository on Hugging Face whose `config.json` has these fields, and the fields."""


def model(name: str) -> Model:
    """A model of the table.

    Raises
    ------
    ArgumentError : there is none of that name.
    """
    if name not in CONFIGS:
        raise ArgumentError(
            f"no model {name!r} in the table; there are {', '.join(CONFIGS)}. "
            "For another one give its config.json"
        )
    source, config = CONFIGS[name]
    return from_config(config, name=name, source=f"{source} config.json")
