"""Tiny random models with rows in several tiers choose the tokens of one."""

import nearkv
import pytest
import torch
from nearkv import hf
from nearkv.errors import ArgumentError
from nearkv.hf.tiered import TieredRows, tiers_of

pytest.importorskip("transformers")

from tiny_models import batch, generate, make_model

OPTIONS = {"greedy": {}, "beams": {"num_beams": 3}}
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


@pytest.mark.parametrize("kv_format", ["q8_0", "fp8", "nvfp4"])
def test_narrow_rows_in_tiers(kv_format):
    """Also those whose heads have a scale, found from the prompt: the tiers' is the reference's."""
    model = make_model("llama")
    ids, mask = batch()
    with nearkv.open("model") as device:
        rows = TieredRows("host=5,device", device, hf.row_shape(model.config), "fp16", kv_format)
        in_tiers = generate(model, rows, ids, mask)
        assert all(tier.rows for tier in rows.cache.stats())
        rows.cache.close()
    by_reference = generate(model, hf.ReferenceRows("fp16", kv_format), ids, mask)
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


def test_latents_and_rows_read_back():
    model = make_model("llama")
    with nearkv.open("model") as device:
        rows = TieredRows("host=3,device", device, hf.row_shape(model.config), "fp16")
        reference = hf.ReferenceRows("fp16")
        for store in (rows, reference):
            generate(model, store, *batch())
        for found, expected in zip(rows.read(1), reference.read(1), strict=True):
            assert torch.equal(found.double(), expected)
        rows.cache.close()
    with pytest.raises(ArgumentError, match="not latents"):
        TieredRows("host", None, hf.RowShape(1, 1, 24, 16, latent=True), "fp16")
