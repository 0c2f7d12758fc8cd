"""Sliding layers give back what windows have left: the same tokens and bits, bounded pages, safe crops."""

import nearkv
import pytest
import torch
from nearkv import hf
from nearkv.errors import ArgumentError

pytest.importorskip("transformers")

from test_hf_batching import batcher_of
from tiny_models import SEED, batch, generate, make_model

WINDOW = 8
PAGE_ROWS = 4
TOKENS = 60
FAMILIES = ["qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3", "cohere2"]


class Watched(hf.CheckedRows):
    """Checked rows of pages of four, which note the most pages that a call left in each layer."""

    def __init__(self, device_rows, folder):
        super().__init__(device_rows, folder)
        self.most = {}

    def _attend(self, layer, q, visible, scoring):
        out = super()._attend(layer, q, visible, scoring)
        cache = self.device_rows.cache
        tables = [cache._sequences.table(sequence, layer) for sequence in self.device_rows.sequences]
        pages = max(len(table.held_pages) for table in tables)
        self.most[layer] = max(self.most.get(layer, 0), pages)
        return out


def run_on_device(model, run, tmp_path, crop_rows=0):
    """What `run(store)` returns, the most pages that layers had, and the pages at the end."""
    with nearkv.open("model") as device:
        rows = hf.DeviceRows(
            device, hf.row_shape(model.config), "fp16", page_rows=PAGE_ROWS, crop_rows=crop_rows
        )
        store = Watched(rows, tmp_path)
        result = run(store)
        assert store.tally.calls == store.tally.equal > 0
        return result, store.most


def windowed(model):
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * 3
    return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_bounded_by_the_window(family, how, tmp_path):
    """Long generation of a left-padded batch: a window of 8 rows never has more than 3 pages of 4, once a
    prompt is in; layers that see all rows keep them."""
    model = make_model(family)
    ids, mask = batch()

    def run(store):
        return generate(model, store, ids, mask, max_new_tokens=TOKENS, **how)

    found, most = run_on_device(model, run, tmp_path)
    assert found.tolist() == run(hf.ReferenceRows("fp16")).tolist()
    for layer in range(3):
        if layer in windowed(model):
            assert most[layer] <= -(-WINDOW // PAGE_ROWS) + 1
        else:
            assert most[layer] == -(-(ids.shape[1] + TOKENS - 1) // PAGE_ROWS)


def test_rows_for_crops_are_kept(tmp_path):
    """`crop_rows` rows more stay, and a crop of so many, and no more, goes back to the bits that were."""
    model = make_model("mistral")
    ids = torch.randint(2, 96, (1, 50), generator=torch.Generator().manual_seed(SEED))

    def run(store, back):
        cache = hf.attach_store(model, store)
        with torch.inference_mode():
            for piece in (ids[:, :30], *ids[:, 30:].split(1, dim=1)):
                model(piece, **{hf.cache_argument(): cache})
            cache.crop(-back)
            return model(ids[:, 50 - back :], **{hf.cache_argument(): cache}).logits

    for back in (3, 10):
        found, most = run_on_device(model, lambda store, back=back: run(store, back), tmp_path, 10)
        assert torch.equal(found, run(hf.ReferenceRows("fp16"), back))
        assert set(most.values()) == {-(-(WINDOW + 10) // PAGE_ROWS) + 1}
    with pytest.raises(
        ArgumentError, match=r"crop to 35 rows: layer 0 has a window of 8.*sees row 28, and rows"
    ):
        run_on_device(model, lambda store: run(store, 15), tmp_path, 10)


def test_a_crop_that_is_refused_changes_nothing(tmp_path):
    model = make_model("gemma2")
    ids = batch()[0][:1]
    with nearkv.open("model") as device:
        store = hf.DeviceRows(device, hf.row_shape(model.config), "fp16", page_rows=PAGE_ROWS, crop_rows=0)
        cache = hf.attach_store(model, store)
        generate(model, store, ids, cache=cache, max_new_tokens=30)
        lengths = [store.rows(layer) for layer in range(3)]
        with pytest.raises(ArgumentError, match="after activate_past_recording"):
            cache.crop(-20)
        assert [store.rows(layer) for layer in range(3)] == lengths
        cache.crop(-lengths[0])
        assert [store.rows(layer) for layer in range(3)] == [0, 0, 0]
        again = generate(model, store, ids, cache=cache, max_new_tokens=30)
        assert again.tolist() == generate(model, hf.ReferenceRows("fp16"), ids, max_new_tokens=30).tolist()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_drafts_are_taken_back_with_no_rows_to_spare(family, tmp_path):
    """transformers records the past for assisted decoding: rows stay until it has said how many go."""
    model = make_model(family)
    draft = make_model(family)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = batch()[0][:1]

    def run(store, **options):
        return generate(model, store, ids, max_new_tokens=40, **options)

    wanted = run(hf.ReferenceRows("fp16"), assistant_model=draft).tolist()
    found, most = run_on_device(model, lambda store: run(store, assistant_model=draft), tmp_path)
    assert found.tolist() == wanted
    for layer in windowed(model):
        assert most[layer] <= -(-(WINDOW + 6) // PAGE_ROWS) + 1
    lookup, _ = run_on_device(model, lambda store: run(store, prompt_lookup_num_tokens=5), tmp_path)
    assert lookup.tolist() == run(hf.ReferenceRows("fp16"), prompt_lookup_num_tokens=5).tolist()


def test_a_draft_model_on_the_device_takes_its_own_rows_back(tmp_path):
    """The draft model's rows live on a device, too; its windows are as small."""
    model, draft = make_model("mistral"), make_model("mistral", num_hidden_layers=1)
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = batch()[0][:1]
    with nearkv.open("model") as device:
        hf.attach(draft, device, page_rows=PAGE_ROWS, crop_rows=0)
        cache = hf.attach(model, device, page_rows=PAGE_ROWS, crop_rows=0)
        found = generate(model, None, ids, cache=cache, max_new_tokens=40, assistant_model=draft)
    model = make_model("mistral")
    assert found.tolist() == generate(model, hf.ReferenceRows("fp16"), ids, max_new_tokens=40).tolist()


def test_requests_of_a_batcher_slide_each_on_its_own(tmp_path):
    """Ragged sequences in one call: each has the pages of its own window, and its own tokens."""
    model = make_model("mistral")
    generator = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(2, 96, (length,), generator=generator) for length in (3, 25, 12)]

    def run(store):
        batcher = batcher_of(model, store, prompt_rows=5)
        numbers = [batcher.add(ids, max_new_tokens=30) for ids in prompts]
        pages = []
        while batcher.open:
            batcher.step()
            if isinstance(store, hf.DeviceRows):
                pages.append(store.cache.memory().pages)
        done = batcher.run()
        return [done[number] for number in numbers], pages

    with nearkv.open("model") as device:
        store = hf.DeviceRows(device, hf.row_shape(model.config), "fp16", page_rows=PAGE_ROWS, crop_rows=0)
        found, pages = run(store)
    assert found == run(hf.ReferenceRows("fp16"))[0]
    heads = 2 * 3
    assert max(pages) <= 3 * heads * 4  # requests, and windows of 8 rows with up to 5 new ones in pages of 4


def test_rows_read_back_have_zeros_where_none_are(tmp_path):
    model = make_model("gemma2")
    ids, mask = batch()
    with nearkv.open("model") as device:
        store = hf.DeviceRows(device, hf.row_shape(model.config), "fp16", page_rows=PAGE_ROWS, crop_rows=0)
        generate(model, store, ids, mask, max_new_tokens=30)
        reference = hf.ReferenceRows("fp16")
        generate(model, reference, ids, mask, max_new_tokens=30)
        for layer in range(3):
            end = store.cache.released(store.sequences[0], layer)[1]
            assert (end > 0) == (layer in windowed(model))
            for found, wanted in zip(store.read(layer), reference.read(layer), strict=True):
                assert not found[:, :end].any()
                assert torch.equal(found[:, end:].double(), wanted[:, end:].double())
