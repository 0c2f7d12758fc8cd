"""Tiny random models of every family, and transformers' generate on them."""

import nearkv
import torch
import transformers
from nearkv import hf

SEED = 20260
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
FAMILIES = {
    "llama": {},
    "qwen2": {**SLIDING, "use_sliding_window": True},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
    "gemma2": {**SLIDING, "head_dim": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**SLIDING, "head_dim": 32, "query_pre_attn_scalar": 20},
    "gpt2": {"n_inner": 96, "num_key_value_heads": 4},
    "gpt_oss": {**SLIDING, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": 8},
    "smollm3": {},
    "olmo2": {},
    "cohere2": SLIDING,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
}


def make_model(family, seed=SEED, **options):
    """A model of a family with weights that make attention matter."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                parameter.normal_(std=0.2)
    return model.eval()


def batch():
    """Two prompts of different length, the shorter one padded on the left."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(2, 96, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids * mask, mask


def generate(model, store, ids, mask=None, *, cache=None, **options):
    """What `generate` returns with its rows in a store, or in a cache that is there already."""
    cache = cache or hf.attach_store(model, store)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, **options}
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            **{hf.cache_argument(): cache},
            **options,
        )


def on_both(model, run, tmp_path, **rows):
    """The results of `run(store)` on a device, every call of which is held against the reference, and on the
    reference alone."""
    with nearkv.open("model") as device:
        checked = hf.CheckedRows(hf.DeviceRows(device, hf.row_shape(model.config), "fp16", **rows), tmp_path)
        on_device = run(checked)
        assert device.stats().host_lines == 0
    assert checked.tally.calls == checked.tally.equal > 0
    return on_device, run(hf.ReferenceRows("fp16", rows.get("kv_format")))
