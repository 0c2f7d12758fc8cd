"""Continuous batching: requests that come, wait, share a prefix and go; tokens are those of each alone."""

import nearkv
import pytest
import torch
from nearkv import hf

pytest.importorskip("transformers")

from tiny_models import SEED, generate, make_model, on_both

PROMPTS = [7, 3, 19, 1, 12]


def prompts():
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(2, 96, (length,), generator=generator) for length in PROMPTS]


def batcher_of(model, store, **options):
    model.generation_config.eos_token_id = None
    return hf.Batcher(model, hf.attach_store(model, store), **options)


def alone(model, ids, new_tokens):
    tokens = generate(model, hf.ReferenceRows("fp16"), ids[None], max_new_tokens=new_tokens)
    return tokens[0, len(ids) :].tolist()


def come_and_go(model, store):
    """Two requests, then three more while those decode, for fewer places than requests."""
    batcher = batcher_of(model, store, prompt_rows=5, max_batch=3)
    ids = prompts()
    numbers = [batcher.add(ids[i], max_new_tokens=4 + 3 * i) for i in (0, 1)]
    for _ in range(4):
        batcher.step()
    numbers += [batcher.add(ids[i], max_new_tokens=4 + 3 * i) for i in (2, 3, 4)]
    done = batcher.run()
    return [done[number] for number in numbers]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_tokens_are_those_of_each_request_alone(family, tmp_path):
    model = make_model(family)
    on_device, by_reference = on_both(model, lambda store: come_and_go(model, store), tmp_path)
    assert on_device == by_reference
    assert on_device == [alone(model, ids, 4 + 3 * i) for i, ids in enumerate(prompts())]


def test_a_shared_prefix_is_read_once(tmp_path):
    """E11, F17: requests go on from forks; none sees what another appends, nor does the prefix change."""
    model = make_model("llama")
    prefix, questions = prompts()[2], [prompts()[i] for i in (0, 1, 4)]

    def run(store):
        batcher = batcher_of(model, store)
        common = hf.attach_store(model, store).fresh()
        with torch.inference_mode():
            model(prefix[None], **{hf.cache_argument(): common})
        for question in questions:
            batcher.add(question, max_new_tokens=6, after=common)
        done = batcher.run()
        assert common.get_seq_length() == len(prefix)
        return list(done.values())

    on_device, by_reference = on_both(model, run, tmp_path)
    assert on_device == by_reference
    assert on_device == [alone(model, torch.cat([prefix, question]), 6) for question in questions]


def test_a_stop_token_ends_a_request_and_frees_its_rows():
    model = make_model("llama")
    ids = prompts()[0]
    expected = alone(model, ids, 8)
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(device, hf.row_shape(model.config), "fp16")
        batcher = batcher_of(model, rows)
        batcher._stop = {expected[3]}
        batcher.add(ids, max_new_tokens=8)
        cancelled = batcher.add(ids)
        batcher.step()
        batcher.cancel(cancelled)
        done = batcher.run()
        assert done == {0: expected[: expected.index(expected[3]) + 1], 1: []}
        assert "0 sequences" in repr(rows.cache)


def test_what_does_not_fit_is_refused():
    model = make_model("llama")
    with pytest.raises(ValueError, match="max_batch must be at least 1, not 0"):
        batcher_of(model, hf.ReferenceRows("fp16"), max_batch=0)
    batcher = batcher_of(model, hf.ReferenceRows("fp16"))
    with pytest.raises(ValueError, match=r"one prompt of at least one token, not \[2, 3\]"):
        batcher.add(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        batcher.add(prompts()[0], max_new_tokens=0)
    with pytest.raises(KeyError, match="request 5 is not open"):
        batcher.cancel(5)
