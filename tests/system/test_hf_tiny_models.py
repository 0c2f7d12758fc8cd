"""Tiny random models through transformers' generate: what cache, attention function and checks do.

Quantised rows, prompt lookup, sampling, several turns, rows cropped and reordered, and what is refused.
"""

import gc
from functools import partial

import nearkv
import pytest
import torch
from nearkv import hf
from nearkv.errors import DeviceError
from nearkv.faults import Faults
from nearkv.hf.placeholder import Placeholder
from nearkv_hw.abi import Feature

pytest.importorskip("transformers")

from tiny_models import SEED, batch, generate, make_model, on_both

OPTIONS = {"greedy": {}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize(
    ("family", "kv_format"),
    [
        *(("llama", name) for name in ("fp8", "int8", "q4_0", "mxfp4", "nvfp4")),
        ("deepseek_v3", "fp8"),
        ("deepseek_v3", "q8_0"),
    ],
)
def test_quantised_rows_choose_the_reference_s_tokens(family, kv_format, how, tmp_path):
    """F13: prompts, steps, copies and new orders of sequences, all over quantised rows, each call equal."""
    model = make_model(family)
    run = partial(generate, model, ids=batch()[0], mask=batch()[1], **OPTIONS[how])
    on_device, by_reference = on_both(model, lambda store: run(store), tmp_path, kv_format=kv_format)
    assert torch.equal(on_device, by_reference)


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
def test_prompt_lookup_crops_rows(family, tmp_path):
    model = make_model(family)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
    on_device, by_reference = on_both(
        model, lambda store: generate(model, store, ids, prompt_lookup_num_tokens=3), tmp_path
    )
    assert on_device.tolist() == by_reference.tolist()
    assert on_device.tolist() == generate(model, hf.ReferenceRows("fp16"), ids).tolist()


def test_sampling_draws_the_same_tokens(tmp_path):
    model = make_model("qwen3")

    def run(store):
        torch.manual_seed(SEED)
        return generate(model, store, *batch(), do_sample=True, temperature=0.8, top_k=20)

    on_device, by_reference = on_both(model, run, tmp_path)
    assert on_device.tolist() == by_reference.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_a_second_turn_goes_on_with_the_rows_of_the_first(family, tmp_path):
    """F11, F17: what is resident is not read in again, and the tokens are those of the whole text."""
    model = make_model(family)
    ids = batch()[0][:1]

    def run(store):
        cache = hf.attach_store(model, store)
        first = generate(model, store, ids, cache=cache)
        rows = cache.get_seq_length()
        assert rows == first.shape[1] - 1  # the last token's rows come with the next turn
        return generate(model, store, torch.cat([first, ids], 1), cache=cache)

    on_device, by_reference = on_both(model, run, tmp_path)
    assert on_device.tolist() == by_reference.tolist()
    whole = generate(model, hf.ReferenceRows("fp16"), on_device[:, :-12])
    assert on_device.tolist() == whole.tolist()


def test_a_prompt_in_pieces_is_the_prompt(tmp_path):
    """Pieces over rows that are on the device; also where prompts are the host's."""
    model = make_model("mistral")
    whole = generate(model, hf.ReferenceRows("fp16"), *batch())
    for on_host in (False, True):
        with nearkv.open("model") as device:
            rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16", prompts_on_host=on_host)
            pieces = generate(model, rows, *batch(), prefill_chunk_size=4)
            assert device.stats().host_lines == 0
        assert torch.equal(pieces, whole)


@pytest.mark.parametrize("kv_format", [None, "int8"])
def test_rows_are_reordered_and_cropped_as_those_of_another_cache(kv_format, tmp_path):
    """F12, F13: beams swap, one stands twice and both go their own way; rows end, and others follow."""
    generator = torch.Generator().manual_seed(SEED)

    def changes(store):
        cache = hf.NearKVCache(store, hf.RowShape(2, 2, 16, 16))
        out = []

        def step(count, rows):
            for layer in range(2):
                k, v, q = torch.randn(3, count, 2, rows, 16, generator=generator)
                cache.update(k, v, layer)
                out.append(store.attend(layer, q.transpose(1, 2), scale=0.25))

        step(2, 5)
        cache.reorder_cache(torch.tensor([1, 0]))
        step(2, 1)
        cache.reorder_cache(torch.tensor([0, 0]))
        step(2, 1)
        cache.crop(-3)
        step(2, 2)
        cache.batch_repeat_interleave(2)
        step(4, 1)
        cache.batch_select_indices(torch.tensor([False, True, True, False]))
        step(2, 1)
        cache.crop(0)
        assert cache.get_seq_length() == 8
        cache.reset()
        step(3, 4)
        return out

    with nearkv.open("model") as device:
        on_device = changes(hf.DeviceRows(device, hf.RowShape(2, 2, 16, 16), "fp16", kv_format=kv_format))
    generator.manual_seed(SEED)
    for one, other in zip(on_device, changes(hf.ReferenceRows("fp16", kv_format)), strict=True):
        assert torch.equal(one, other)


def test_generate_makes_its_caches_on_the_device():
    """One line puts a model on a device; caches that nobody has any more give their rows back."""
    model = make_model("llama")
    ids, mask = batch()
    own = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    with nearkv.open("model") as device:
        cache = hf.attach(model, device)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, own)
        assert device.stats().lines > 0
        kept = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
        )
        assert "2 sequences" in repr(cache.store.cache)  # those of the first call are gone
        generate(model, None, ids, mask, cache=cache)
        assert "4 sequences" in repr(cache.store.cache)
        del kept
        gc.collect()
        generate(model, None, found, torch.ones_like(found), cache=cache)
        assert "2 sequences" in repr(cache.store.cache)
    hf.detach(model)
    hf.detach(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), own)


def test_a_cache_of_another_kind_is_the_host_s():
    """It has the model's own attention, with a warning; the next call is on the device again."""
    model = make_model("llama")
    ids, mask = batch()
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    own = model.generate(ids, cache_implementation="static", **options)
    with nearkv.open("model") as device:
        hf.attach(model, device)
        with pytest.warns(UserWarning, match="cache_implementation='static' is the host's"):
            found = model.generate(ids, cache_implementation="static", **options)
        assert torch.equal(found, own)
        assert device.stats().lines == 0
        model.generate(ids, **options)
        assert device.stats().lines > 0


def test_another_attention_implementation_is_noticed():
    model = make_model("llama")
    ids, _ = batch()
    cache = hf.attach_store(model, hf.ReferenceRows("fp16"))
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="leave the model's attn_implementation"):
        model(ids, **{hf.cache_argument(): cache})


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_weights_are_worked_out_for_who_asks(family):
    """From rows read back, of quantised rows those that they are; also in a later step."""
    model = make_model(family)
    ids, mask = batch()
    options = {"attention_mask": mask, "output_attentions": True, "max_new_tokens": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    own = model.generate(ids, **options)
    with nearkv.open("model") as device:
        hf.attach(model, device)
        found = model.generate(ids, **options)
        layer = found[hf.cache_argument()].layers[1]
        shape = hf.row_shape(model.config)
        assert layer.keys.shape == (2, shape.kv_heads, 13, shape.head_dim)
        assert (layer.values is None) == shape.latent
    for step, expected in zip(found.attentions, own.attentions, strict=True):
        for weights, wanted in zip(step, expected, strict=True):
            assert weights.shape == (*wanted.shape[:3], weights.shape[3])
            seen = slice(weights.shape[3] - wanted.shape[3], None)  # sliding layers keep all rows
            assert torch.allclose(weights[0, ..., seen], wanted[0], atol=5e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_without_a_cache_the_model_s_own_attention_runs(family):
    model = make_model(family)
    ids, mask = batch()
    with torch.inference_mode():
        own = model(ids, attention_mask=mask, use_cache=False).logits
        hf.attach_store(model, hf.ReferenceRows("fp16"))
        found = model(ids, attention_mask=mask, use_cache=False).logits
    seen = mask.bool()
    assert torch.allclose(found[seen], own[seen], rtol=1e-4, atol=1e-4)


def test_every_call_of_a_batch_is_checked(tmp_path):
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model", channels=1) as device:
        store = hf.CheckedRows(hf.DeviceRows(device, hf.row_shape(model.config), "bf16"), tmp_path)
        generate(model, store, ids, mask)
        assert store.tally.calls == store.tally.equal == 12 * 3
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_bit_is_reported_with_the_command_that_replays_it(tmp_path):
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model") as device:
        store = hf.CheckedRows(hf.DeviceRows(device, hf.row_shape(model.config), "fp16"), tmp_path)
        honest = store.own._append
        store.own._append = lambda layer, k, v: honest(layer, k, v + (layer == 1))
        generate(model, store, ids, mask)
    assert store.tally.calls - store.tally.equal == 12
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
    cache = hf.NearKVCache(store, hf.RowShape(1, 1, 8, 8))
    states = torch.zeros(1, 1, 1, 8)
    keys, values = cache.update(states, states, 0)
    options = {"attention_mask": None, **options}
    with pytest.raises(ValueError, match=message):
        hf.nearkv_attention(torch.nn.Module(), states, keys, values, **options)


def test_a_softcap_needs_a_device_that_has_one():
    states = torch.zeros(1, 1, 1, 8)
    with nearkv.open("model", features=Feature(0)) as device:
        shape = hf.RowShape(1, 1, 8, 8)
        cache = hf.NearKVCache(hf.DeviceRows(device, shape, "fp16"), shape)
        keys, values = cache.update(states, states, 0)
        with pytest.raises(ValueError, match="this device has no softcap"):
            hf.nearkv_attention(torch.nn.Module(), states, keys, values, None, softcap=5.0)


@pytest.mark.parametrize("how", OPTIONS)
def test_a_device_with_plain_jobs_alone_chooses_the_same_tokens(how):
    """What it has not (several query rows, gaps) the host makes up for, over rows that it reads back."""
    model = make_model("mistral")
    ids, mask = batch()
    with nearkv.open("model", features=Feature(0)) as device:
        rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16")
        on_device = generate(model, rows, ids, mask, **OPTIONS[how])
        assert device.stats().host_lines > 0
    assert torch.equal(on_device, generate(model, hf.ReferenceRows("fp16"), ids, mask, **OPTIONS[how]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_nobody_sees_do_not_matter(poison):
    """C1, C3: padding holds what it holds; query rows of padding see nothing and are zero, not NaN."""
    shape = hf.RowShape(1, 2, 16, 16)
    generator = torch.Generator().manual_seed(SEED)
    k, v, q = torch.randn(3, 2, 6, 2, 16, generator=generator)
    visible = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1)
    visible[1, :, :2] = False
    with nearkv.open("model") as device:
        results = []
        for spoilt in (False, True):
            if spoilt:
                k[1, :2], v[1, :2], q[1, :2] = poison, poison, poison
            rows = hf.DeviceRows(device, shape, "fp16")
            rows.append(0, k, v)
            results.append(rows.attend(0, q, scale=0.25, visible=visible))
            assert (results[-1][1, :2] == 0).all()
    assert torch.equal(*results)


def test_rows_of_another_cache_are_refused():
    """C: a cache of another kind would be attended on the host, without a word."""
    query, rows = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="needs its own cache"):
        hf.nearkv_attention(torch.nn.Module(), query, rows, rows, None)


def test_a_placeholder_has_shapes_and_no_numbers():
    """D13: the halves of a latent row have lengths of their own, and what becomes of them keeps the layer."""
    cache = hf.NearKVCache(hf.ReferenceRows("fp16"), hf.RowShape(1, 1, 24, 16, latent=True))
    latent, rope = cache.update(torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 8), 0)
    made = torch.cat([latent @ torch.zeros(16, 5), rope.expand(-1, 1, -1, -1)], -1).transpose(1, 2)
    assert isinstance(made, Placeholder)
    assert (made.shape, made.device.type, made.layer) == ((2, 3, 1, 13), "cpu", cache.layers[0])
    for asks in (torch.Tensor.tolist, torch.Tensor.numpy, lambda x: x.sum().item(), lambda x: x.max() > 0):
        with pytest.raises(RuntimeError):
            bool(asks(latent))
    with pytest.raises(ValueError, match="one head of 16 elements"):
        cache.update(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8), 0)


def test_a_positive_crop_is_refused():
    with pytest.raises(ValueError, match="as a negative number or 0, not 3"):
        hf.NearKVCache(hf.ReferenceRows("fp16"), hf.RowShape(1, 1, 8, 8)).crop(3)


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="must be one of fp16, bf16, not 'fp32'"):
        hf.ReferenceRows("fp32")


def test_rows_that_met_poison_are_there_once():
    """A token's rows are on the device although its attention failed: they are not appended again."""
    shape = hf.RowShape(layers=1, kv_heads=2, head_dim=8, value_dim=8)
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(device, shape, "fp16")
        k, v = torch.randn(2, 1, 6, 2, 8, generator=torch.Generator().manual_seed(SEED))
        rows.append(0, k, v)
        q = torch.ones(1, 1, 2, 8)
        rows.attend(0, q, scale=1.0, visible=None)
        rows.append(0, k[:, :1], v[:, :1])
        Faults(device).poison(rows.cache, rows.sequences[0], layer=0, row=2)
        with pytest.raises(DeviceError, match="POISON"):
            rows.attend(0, q, scale=1.0, visible=None)
        assert rows.rows(0) == rows.cache.length(rows.sequences[0]) == 7
        rows.append(0, k[:, :1], v[:, :1])
        assert rows.rows(0) == 8
