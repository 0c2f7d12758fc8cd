"""From a Hugging Face `config.json` to a `Model`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearkv.errors import ArgumentError

from .models import AttentionLayers, Model, grouped

Config = Mapping[str, Any]

_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""What older configurations call a field."""
_PLAIN_MLP = ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2")
"""Model types whose MLP has two matrices; all others have a gate as a third."""
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2")
"""Model types that tie input and output embeddings where the configuration says nothing."""
_FULL = ("full_attention", "attention")
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "float8_e4m3fn": 8.0}
_QUANTISED_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "awq": 4.5, "gptq": 4.5, "bitsandbytes": 4.5}
"""Stored bits of a weight, scales included (blocks of 32 or 128)."""


def from_config(config: Config | str | Path, *, name: str | None = None, source: str | None = None) -> Model:
    """The model that a Hugging Face configuration describes.

    Parameters
    ----------
    config : the configuration, or the path of a `config.json`.
    name, source : of the model, for people; taken from the configuration if not given.

    Raises
    ------
    ArgumentError : naming the field that is missing or makes no sense, and what would help.
    OSError : the file cannot be read.
    """
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{path} is no JSON: {error}; give a model's config.json") from error
        source = source or str(path)
    if not isinstance(config, Mapping):
        raise ArgumentError(f"a configuration is a dict of fields, not {type(config).__name__}")
    for inner in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(inner), Mapping):
            config = {**{k: v for k, v in config.items() if k not in config[inner]}, **config[inner]}
    fields = _Fields(config)
    attention, other = _attention(fields)
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
    return Model(
        name=name,
        source=source or "a configuration given as a dict",
        hidden=fields.count("hidden_size"),
        attention=attention,
        other_layers=other,
        **_parameters(fields),
        **_bits(fields),
        max_context=fields.count("max_position_embeddings", 0),
    )


class _Fields:
    """A configuration whose fields are asked for by name."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def get(self, name: str) -> Any:
        """A field under any of its names, or None."""
        for known in (name, *_OTHER_NAMES.get(name, ())):
            if self.config.get(known) is not None:
                return self.config[known]
        return None

    def count(self, name: str, default: int | None = None) -> int:
        """A field that is a whole number."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            names = ", ".join((name, *_OTHER_NAMES.get(name, ())))
            raise ArgumentError(
                f"the configuration has no {name} (looked for {names}); add it, or give a model of the table"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"{name}={value!r} in the configuration: must be a whole number")
        return value

    @property
    def kind(self) -> str:
        """The model's type, "" if unknown."""
        return str(self.config.get("model_type") or "")

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers")

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        if self.kind == "falcon" and self.config.get("multi_query"):
            return 1
        return self.count("num_key_value_heads", self.count("num_kv_heads", self.heads))

    @property
    def head_dim(self) -> int:
        given = self.get("head_dim")
        if given is not None:
            return self.count("head_dim")
        hidden, heads = self.count("hidden_size"), self.heads
        if hidden % heads:
            raise ArgumentError(
                f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and the configuration "
                "has no head_dim; add it"
            )
        return hidden // heads

    @property
    def latent(self) -> bool:
        """Whether a latent vector is cached in place of K and V."""
        return self.get("kv_lora_rank") is not None


def _attention(fields: _Fields) -> tuple[tuple[AttentionLayers, ...], int]:
    """Layers with attention by kind, and how many have none."""
    if fields.heads < 1 or fields.heads % max(1, fields.kv_heads):
        raise ArgumentError(
            f"num_attention_heads={fields.heads} must be a multiple of num_key_value_heads={fields.kv_heads}"
        )
    shape: dict[str, Any]
    layers = []
    for windowed in _layer_windows(fields):
        if windowed is None:
            continue
        if fields.latent:
            rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
            shape = {"kv_heads": 1, "head_dim": rank + rope, "value_dim": rank, "shared_row": True}
        else:
            dim = fields.head_dim
            value = fields.count("v_head_dim", dim)
            shape = {"kv_heads": fields.kv_heads, "head_dim": dim, "value_dim": value, "shared_row": False}
        layers.append(AttentionLayers(count=1, q_heads=fields.heads, window=windowed or None, **shape))
    if not layers:
        raise ArgumentError("no layer of the configuration has attention; there is nothing to estimate")
    return grouped(layers), fields.layers - len(layers)


def _layer_windows(fields: _Fields) -> list[int | None]:
    """For each layer its window, 0 for all rows, None for a layer without attention."""
    count, kinds = fields.layers, fields.get("layer_types") or fields.get("layers_block_type")
    window = fields.get("sliding_window")
    if fields.get("use_sliding_window") is False:
        window = None
    if isinstance(kinds, list):
        if len(kinds) != count:
            raise ArgumentError(f"layer_types has {len(kinds)} entries for num_hidden_layers={count}")
        if window is None and any(kind in _WINDOWED for kind in kinds):
            window = fields.count("attention_chunk_size") if fields.get("attention_chunk_size") else None
            if window is None:
                raise ArgumentError("layer_types has sliding layers, and sliding_window is missing; add it")
        return [int(window) if k in _WINDOWED else 0 if k in _FULL else None for k in kinds]
    if window is None:
        return [0] * count
    window = fields.count("sliding_window")
    if fields.kind == "gemma2":
        return [window if layer % 2 == 0 else 0 for layer in range(count)]
    pattern = fields.get("sliding_window_pattern") or {"gemma3": 6, "gemma3_text": 6}.get(fields.kind)
    if pattern:
        return [0 if (layer + 1) % int(pattern) == 0 else window for layer in range(count)]
    if fields.kind == "gpt_oss":
        return [window if layer % 2 == 0 else 0 for layer in range(count)]
    if fields.get("use_sliding_window") and fields.get("max_window_layers") is not None:
        first = fields.count("max_window_layers")
        return [window if layer >= first else 0 for layer in range(count)]
    return [window] * count


def _parameters(fields: _Fields) -> dict[str, Any]:
    """Parameters by what a step reads of them, without norms and biases (below 0.1 %)."""
    hidden, layers = fields.count("hidden_size"), fields.layers
    embedding = fields.count("vocab_size") * hidden
    tied = fields.get("tie_word_embeddings")
    tied = fields.kind in _TIED if tied is None else bool(tied)
    matrices = 2 if fields.kind in _PLAIN_MLP else 3
    experts = next(
        (fields.count(n) for n in ("n_routed_experts", "num_local_experts", "num_experts") if fields.get(n)),
        0,
    )
    inner = fields.count("intermediate_size", 4 * hidden)
    expert_inner = fields.count("moe_intermediate_size", inner)
    dense_first = fields.count("first_k_dense_replace", 0)
    every = max(1, fields.count("decoder_sparse_step", 1))
    dense_layers = set(fields.get("mlp_only_layers") or ()) | set(range(dense_first))
    expert_layers = (
        sum(layer not in dense_layers and (layer + 1) % every == 0 for layer in range(layers))
        if experts
        else 0
    )
    shared = expert_inner * fields.count("n_shared_experts", 0) + fields.count(
        "shared_expert_intermediate_size", 0
    )
    dense = (
        layers * _attention_parameters(fields)
        + (layers - expert_layers) * matrices * hidden * inner
        + expert_layers * (matrices * hidden * shared + hidden * experts)
        + (0 if tied else embedding)
    )
    return {
        "embedding": embedding,
        "tied": tied,
        "dense": dense,
        "expert": matrices * hidden * expert_inner if experts else 0,
        "expert_layers": expert_layers,
        "experts": experts,
        "experts_per_token": fields.count("num_experts_per_tok") if experts else 0,
    }


def _attention_parameters(fields: _Fields) -> int:
    """Weights of one layer's projections."""
    hidden, heads = fields.count("hidden_size"), fields.heads
    if not fields.latent:
        value = fields.count("v_head_dim", fields.head_dim)
        per_kv = fields.kv_heads * (fields.head_dim + value)
        return hidden * (heads * (fields.head_dim + value) + per_kv)
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    q_rank = fields.get("q_lora_rank")
    query = heads * (nope + rope)
    queries = hidden * query if q_rank is None else fields.count("q_lora_rank") * (hidden + query)
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _bits(fields: _Fields) -> dict[str, Any]:
    """Stored bits of weights and of experts."""
    dtype = str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _WEIGHT_BITS:
        raise ArgumentError(f"torch_dtype={dtype!r}: there are {', '.join(_WEIGHT_BITS)}")
    bits = expert_bits = _WEIGHT_BITS[dtype]
    quantised = fields.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method"))
        if method not in _QUANTISED_BITS:
            raise ArgumentError(
                f"quant_method={method!r}: there are {', '.join(_QUANTISED_BITS)}; "
                "or leave quantization_config out"
            )
        expert_bits = _QUANTISED_BITS[method]
        if method != "mxfp4":  # gpt-oss keeps everything but its experts in bf16
            bits = expert_bits
    return {"weight_bits": bits, "expert_bits": expert_bits}
