"""Tiny random models through transformers' generate: device and reference choose the same tokens.

Greedy, a left-padded batch, beam search (sequences copied and reordered) and prompt lookup (rows cropped).
"""

import nearkv
import pytest
import torch
from nearkv import hf
from nearkv.errors import ArgumentError
from nearkv.hf.tiered import TieredRows, tiers_of
from nearkv_hw.abi import Feature

transformers = pytest.importorskip("transformers")

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
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
    "smollm3": {},
    "olmo2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0},
}


def make_model(family):
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def generate(model, store, ids, mask, **options):
    cache = hf.attach_store(model, store)
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            **options,
        )


def batch():
    """Two prompts of different length, the shorter one padded on the left."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(2, 96, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids * mask, mask


OPTIONS = {"greedy": {}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("kv_format", ["fp8", "int8", "q4_0", "mxfp4", "nvfp4"])
def test_quantised_rows_choose_the_reference_s_tokens(kv_format, how, tmp_path):
    """F13: prompts, steps, copies and new orders of sequences, all over quantised rows, each call equal."""
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16", kv_format=kv_format)
        checked = hf.CheckedRows(rows, tmp_path)
        on_device = generate(model, checked, ids, mask, **OPTIONS[how])
    by_reference = generate(model, hf.ReferenceRows("fp16", kv_format), ids, mask, **OPTIONS[how])
    assert torch.equal(on_device, by_reference)
    assert checked.tally.calls == checked.tally.equal == rows.device_calls > 0


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_device_and_reference_choose_the_same_tokens(family, how):
    model = make_model(family)
    ids, mask = batch()
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16")
        on_device = generate(model, rows, ids, mask, **OPTIONS[how])
        assert rows.device_calls > 0
    by_reference = generate(model, hf.ReferenceRows("fp16"), ids, mask, **OPTIONS[how])
    assert on_device.tolist() == by_reference.tolist()


TIERS = ["torch=2,host=5,device", "host=3,device=6,file", "device"]


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_three_tiers_choose_the_tokens_of_one(family, tiers, how):
    """Prompts, steps and beams over rows that move, each call held against the reference."""
    model = make_model(family)
    ids, mask = batch()
    with nearkv.open("model") as device:
        rows = TieredRows(tiers, device, hf.row_shape(model.config), "fp16")
        in_tiers = generate(model, rows, ids, mask, **OPTIONS[how])
        assert all(tier.rows for tier in rows.cache.stats())
        rows.cache.close()
    by_reference = generate(model, hf.ReferenceRows("fp16"), ids, mask, **OPTIONS[how])
    assert in_tiers.tolist() == by_reference.tolist()
    assert rows.tally.calls == rows.tally.equal == rows.calls > 0


@pytest.mark.parametrize("spec", ["", "torch", "disk=3,host", "host=3", "host,device", "host=2,host"])
def test_tiers_that_are_none(spec):
    with nearkv.open("model") as device:
        if spec == "torch":
            assert len(tiers_of(spec, device)[0]) == 1
            return
        with pytest.raises(ArgumentError, match="must be like torch=16,host=64,device"):
            tiers_of(spec, device)
    with pytest.raises(ArgumentError, match="there is no device to have a tier on"):
        tiers_of("host=1,device", None)


def test_prompt_lookup_crops_rows():
    model = make_model("llama")
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
    mask = torch.ones_like(ids)
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16")
        on_device = generate(model, rows, ids, mask, prompt_lookup_num_tokens=3)
    assert on_device.tolist() == generate(model, hf.ReferenceRows("fp16"), ids, mask).tolist()


def test_every_call_of_a_batch_is_checked(tmp_path):
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model", channels=1) as device:
        store = hf.CheckedRows(hf.DeviceRows(device, hf.row_shape(model.config), "bf16"), tmp_path)
        generate(model, store, ids, mask)
        assert store.tally.calls == store.tally.equal == 11 * 3
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_bit_is_reported_with_the_command_that_replays_it(tmp_path):
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model") as device:
        store = hf.CheckedRows(hf.DeviceRows(device, hf.row_shape(model.config), "fp16"), tmp_path)
        honest = store.own._append
        store.own._append = lambda layer, k, v: honest(layer, k, v + (layer == 1))
        generate(model, store, ids, mask)
    assert store.tally.calls - store.tally.equal == 11
    assert store.tally.commands[0].startswith("nearkv replay ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "this device has no dropout"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "must be bool, not torch.float32"),
    ],
)
def test_what_the_device_lacks_is_refused(options, message):
    store = hf.ReferenceRows("fp16")
    cache = hf.NearKVCache(store, 1)
    states = torch.zeros(1, 1, 1, 8)
    keys, values = cache.update(states, states, 0)
    options = {"attention_mask": None, **options}
    with pytest.raises(ValueError, match=message):
        hf.nearkv_attention(torch.nn.Module(), states, keys, values, **options)


def test_a_softcap_needs_a_device_that_has_one():
    states = torch.zeros(1, 1, 1, 8)
    with nearkv.open("model", features=Feature(0)) as device:
        cache = hf.NearKVCache(hf.DeviceRows(device, hf.RowShape(1, 1, 8, 8), "fp16"), 1)
        keys, values = cache.update(states, states, 0)
        with pytest.raises(ValueError, match="this device has no softcap"):
            hf.nearkv_attention(torch.nn.Module(), states, keys, values, None, softcap=5.0)


def test_rows_of_another_cache_are_refused():
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="needs its own cache"):
        hf.nearkv_attention(torch.nn.Module(), states, states, states, None)


def test_a_positive_crop_is_refused():
    with pytest.raises(ValueError, match="as a negative number or 0, not 3"):
        hf.NearKVCache(hf.ReferenceRows("fp16"), 1).crop(3)


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="must be one of fp16, bf16, not 'fp32'"):
        hf.ReferenceRows("fp32")
