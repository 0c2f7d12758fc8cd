"""Models: KV bytes and parameters against published figures, and what a configuration must have."""

import json

import pytest
from nearkv.errors import ArgumentError
from nearkv.estimate import CONFIGS, FORMATS, from_config, model

BF16 = FORMATS["bf16"]

KV = {  # layers, group, bytes per token and layer, KiB per token, GiB at 32K and 128K
    "llama-2-7b": (32, 1, 16384, 512, 16.0, 64.0),
    "llama-3.1-8b": (32, 4, 4096, 128, 4.0, 16.0),
    "llama-3.1-70b": (80, 8, 4096, 320, 10.0, 40.0),
    "llama-3.1-405b": (126, 16, 4096, 504, 15.8, 63.0),
    "qwen2.5-7b": (28, 7, 2048, 56, 1.75, 7.0),
    "qwen2.5-72b": (80, 8, 4096, 320, 10.0, 40.0),
    "qwen3-8b": (36, 4, 4096, 144, 4.5, 18.0),
    "qwen3-32b": (64, 8, 4096, 256, 8.0, 32.0),
    "qwen3-30b-a3b": (48, 8, 2048, 96, 3.0, 12.0),
    "qwen3-235b-a22b": (94, 16, 2048, 188, 5.9, 23.5),
    "mistral-7b-v0.1": (32, 4, 4096, 128, 0.5, 0.5),
    "gemma-2-9b": (42, 2, 8192, 336, None, None),
    "gemma-2-27b": (46, 2, 8192, 368, None, None),
    "gemma-3-12b": (48, 2, 8192, 384, 2.3, 8.3),
    "gemma-3-27b": (62, 2, 8192, 496, 2.9, 10.4),
    "gpt-oss-20b": (24, 8, 2048, 48, 0.75, 3.0),
    "gpt-oss-120b": (36, 8, 2048, 72, 1.1, 4.5),
    "deepseek-v3": (61, 128, 1152, 68.6, 2.1, 8.6),
}

PARAMETERS = {  # billions: all, and active per token, from the model cards and reports
    "llama-2-7b": (6.74, 6.74),
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.6, 70.6),
    "llama-3.1-405b": (405.9, 405.9),
    "qwen2.5-7b": (7.61, 7.61),
    "qwen2.5-72b": (72.7, 72.7),
    "qwen3-8b": (8.2, 8.2),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "mistral-7b-v0.1": (7.24, 7.24),
    "gemma-2-9b": (9.24, 9.24),
    "gemma-2-27b": (27.2, 27.2),
    "gemma-3-12b": (11.77, 11.77),
    "gemma-3-27b": (27.0, 27.0),
    "deepseek-v3": (671, 37),
}


def test_every_model_of_the_table_is_checked():
    assert set(KV) == set(CONFIGS)


@pytest.mark.parametrize("name", KV)
def test_kv_bytes(name):
    layers, group, per_layer, kib, at_32k, at_128k = KV[name]
    found = model(name)
    assert found.layers == found.attention_layers == layers
    assert {kind.group for kind in found.attention} == {group}
    assert {kind.row_bytes(BF16) for kind in found.attention} == {per_layer}
    assert found.kv_bytes_per_token(BF16) == layers * per_layer
    assert found.kv_bytes_per_token(BF16) / 1024 == pytest.approx(kib, abs=0.05)
    for context, gib in ((32768, at_32k), (131072, at_128k)):
        if gib is not None:
            assert found.kv_bytes(context, BF16) / 2**30 == pytest.approx(gib, abs=0.051)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    found = model(name)
    assert found.parameters / 1e9 == pytest.approx(PARAMETERS[name][0], rel=0.005)
    assert found.active_parameters / 1e9 == pytest.approx(PARAMETERS[name][1], rel=0.02)


def test_experts_of_gpt_oss():
    # 116.8 billion, of which 5.1 are active without the embedding; 60.8 GiB of MXFP4 and bf16
    found = model("gpt-oss-120b")
    assert found.parameters / 1e9 == pytest.approx(116.8, rel=0.002)
    assert (found.active_parameters - found.embedding) / 1e9 == pytest.approx(5.13, rel=0.01)
    assert found.weight_bytes / 2**30 == pytest.approx(60.8, rel=0.01)
    small = model("gpt-oss-20b")
    assert small.parameters / 1e9 == pytest.approx(20.9, rel=0.001)
    assert (small.active_parameters - small.embedding) / 1e9 == pytest.approx(3.61, rel=0.002)


def test_weights_of_a_step():
    dense, sparse = model("llama-3.1-8b"), model("qwen3-30b-a3b")
    assert dense.weights_read_bytes(1) == dense.weights_read_bytes(64)
    assert dense.weights_read_bytes(1) == dense.weight_bytes - 2 * dense.embedding
    read = [sparse.weights_read_bytes(tokens) for tokens in (1, 2, 16, 256)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(2 * (sparse.active_parameters - sparse.embedding))
    assert read[-1] <= sparse.weight_bytes


@pytest.mark.parametrize(
    ("name", "row", "pitch"),
    [("bf16", 256, 256), ("fp8_e4m3", 128, 128), ("mxfp4", 68, 68), ("nvfp4", 72, 72), ("int4", 72, 72)],
)
def test_formats(name, row, pitch):
    assert FORMATS[name].row_bytes(128) == row
    assert FORMATS[name].pitch_bytes(128) == pitch


def test_short_rows_share_lines():
    assert FORMATS["mxfp4"].pitch_bytes(64) == 32 + 2
    assert FORMATS["bf16"].pitch_bytes(40) == 128
    assert FORMATS["fp8_e4m3"].pitch_bytes(10) == 16


def config(**more):
    return {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        **more,
    }


def test_file_and_nested_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": config(model_type="gemma3_text")}))
    found = from_config(path)
    assert found.name == "gemma3_text"
    assert found.source == str(path)
    assert found.attention[0].head_dim == 16
    assert found.tied


def test_layer_types():
    found = from_config(
        config(
            layer_types=["linear_attention", "sliding_attention", "full_attention", "full_attention"],
            sliding_window=8,
        )
    )
    assert [(k.count, k.window) for k in found.attention] == [(1, 8), (2, None)]
    assert found.other_layers == 1
    assert found.attention[0].rows(100) == 8
    assert found.kv_bytes(100, BF16) == (8 + 200) * 2 * 2 * 16 * 2


def test_old_names():
    found = from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    )
    assert found.attention[0].group == 1
    assert found.parameters / 1e6 == pytest.approx(123.5, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"no hidden_size \(looked for hidden_size, n_embd"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4' in the configuration: must be a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"hidden_size": 66}, "hidden_size=66 is no multiple of num_attention_heads=4"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({"layer_types": ["mamba"] * 4}, "no layer of the configuration has attention"),
        ({"torch_dtype": "int3"}, "torch_dtype='int3': there are float32"),
        ({"quantization_config": {"quant_method": "new"}}, "quant_method='new': there are fp8"),
        ({"num_local_experts": 4}, "no num_experts_per_tok"),
    ],
)
def test_what_a_configuration_lacks(change, message):
    with pytest.raises(ArgumentError, match=message):
        from_config(config(**change))


def test_no_such_thing(tmp_path):
    with pytest.raises(ArgumentError, match=r"no model 'llama-9' in the table; there are llama-3.1-8b"):
        model("llama-9")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"is no JSON.*give a model's config\.json"):
        from_config(tmp_path / "x.json")
    with pytest.raises(ArgumentError, match="a configuration is a dict of fields, not list"):
        from_config([])
    with pytest.raises(OSError, match="missing"):
        from_config(tmp_path / "missing.json")
