"""Every decoder family: device and reference choose the same tokens, and logits are the eager model's.

Greedy over a left-padded batch (sliding layers run out of their windows), beams (sequences copied and
reordered), a draft model's tokens accepted and taken back (rows cropped). Every call on the device is equal.
"""

import pytest
import torch
from nearkv import hf

pytest.importorskip("transformers")

from tiny_models import FAMILIES, SEED, batch, generate, make_model, on_both
from transformers.cache_utils import DynamicCache

TOLERANCE = 2e-5


def greedy(model, store):
    return generate(model, store, *batch())


def beams(model, store):
    return generate(model, store, *batch(), num_beams=3)


def assisted(model, store):
    """The draft model is the model with some noise, so that some of its tokens are taken and some not."""
    draft = make_model(model.config.model_type)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return generate(model, store, batch()[0][:1], assistant_model=draft)


@pytest.mark.parametrize("how", [greedy, beams, assisted])
@pytest.mark.parametrize("family", FAMILIES)
def test_device_and_reference_choose_the_same_tokens(family, how, tmp_path):
    model = make_model(family)
    on_device, by_reference = on_both(model, lambda store: how(model, store), tmp_path)
    assert on_device.tolist() == by_reference.tolist()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3"])
def test_assisted_tokens_are_the_greedy_ones(family):
    model = make_model(family)
    own = generate(model, hf.ReferenceRows("fp16"), batch()[0][:1])
    assert assisted(model, hf.ReferenceRows("fp16")).tolist() == own.tolist()


class EagerRows(hf.ReferenceRows):
    """Rows rounded to the cache's format, and attention in float32 as transformers' eager code does it.

    With `given`, (q, k, v) of each call, these are taken in place of its own.
    """

    given = None

    def _attend(self, layer, q, visible, scoring):
        k, v = (None if x is None else x.codes for x in self.quantised(layer))
        if self.given is not None:
            q, k, v = self.given.pop(0)
        k, v = (None if x is None else x.view(self.torch_dtype).float() for x in (k, v))
        v = k[..., : scoring.value_dim] if v is None else v
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        scores = q.float().transpose(1, 2) @ k.transpose(2, 3) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if visible is None:
            visible = torch.ones(scores.shape[0], *scores.shape[2:], dtype=torch.bool)
            visible = visible.tril(scores.shape[3] - scores.shape[2])
        scores = scores.masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
        if scoring.sinks is not None:
            sinks = scoring.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2)


class RecordedRows(hf.ReferenceRows):
    """The reference, and what each call was given."""

    def __init__(self):
        super().__init__("fp16")
        self.seen = []

    def _attend(self, layer, q, visible, scoring):
        self.seen.append((q, *(None if x is None else x.codes for x in self.quantised(layer))))
        return super()._attend(layer, q, visible, scoring)


def logits_of(model, cache, ids):
    """The logits of a text that comes in three pieces."""
    with torch.inference_mode():
        parts = [
            model(part, use_cache=True, **{hf.cache_argument(): cache}).logits
            for part in ids.split([20, 1, 5], dim=1)
        ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_eager_model_over_the_same_rows(family, tmp_path):
    """q, K and V are rounded once, for both: a last bit that differs would have a later layer's numbers that
    lie between two of fp16 rounded to different ones, and this be a measure of rounding."""
    model = make_model(family)
    ids = torch.randint(2, 96, (2, 26), generator=torch.Generator().manual_seed(SEED))
    found, again = on_both(
        model, lambda store: logits_of(model, hf.attach_store(model, store), ids), tmp_path
    )
    assert torch.equal(found, again)
    recorded, eager_rows = RecordedRows(), EagerRows("fp16")
    logits_of(model, hf.attach_store(model, recorded), ids)
    eager_rows.given = recorded.seen
    eager = logits_of(model, hf.attach_store(model, eager_rows), ids)
    assert (found - eager).norm() < TOLERANCE * eager.norm()
    assert (found - eager).abs().max() < TOLERANCE * eager.abs().max()
    free = logits_of(model, hf.attach_store(model, EagerRows("fp16")), ids)
    each = (found - free).norm(dim=-1) / free.norm(dim=-1)
    assert each.median() < 1e-4  # an expert that is chosen otherwise changes a whole row


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_what_parts_it_from_the_model_alone(family):
    model = make_model(family)
    ids = torch.randint(2, 96, (2, 26), generator=torch.Generator().manual_seed(SEED))
    own = logits_of(model, DynamicCache(config=model.config), ids)
    found = logits_of(model, hf.attach_store(model, hf.ReferenceRows("fp16")), ids)
    each = (found - own).norm(dim=-1) / own.norm(dim=-1)
    assert 1e-5 < each.median() < 2e-3
    hf.detach(model)
    assert torch.equal(logits_of(model, DynamicCache(config=model.config), ids), own)
