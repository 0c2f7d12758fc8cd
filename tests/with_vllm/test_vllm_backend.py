"""One layer under vLLM's interface: it means by its arguments what vLLM's own CPU backend means."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from nearkv.vllm import Settings, backend
from nearkv.vllm.host_blocks import CheckedBlocks, ReferenceBlocks
from nearkv.vllm.residence import Residence
from vllm import _custom_ops
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn

pytestmark = pytest.mark.vllm
Q_HEADS, KV_HEADS, DIM = 6, 2, 64
BLOCKS, BLOCK_ROWS = 12, 32


@pytest.fixture
def engine(monkeypatch):
    """What layers find around them: a configuration, other layers, and where rows live."""
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    layers = {}
    monkeypatch.setattr(backend, "get_forward_context", lambda: SimpleNamespace(no_compile_layers=layers))
    residences = []

    def start(settings):
        residences.append(Residence(settings))
        monkeypatch.setattr(backend, "residence", lambda: residences[-1])
        return residences[-1]

    yield SimpleNamespace(layers=layers, start=start)
    for residence in residences:
        residence.close()


def layer_of(kind, *, name="attention", dtype=torch.float32, **options):
    """An attention layer with the part of vLLM's that backends look at."""
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    layer = torch.nn.Module()
    layer.impl = kind(Q_HEADS, DIM, DIM**-0.5, KV_HEADS, **given)
    layer.layer_name, layer.head_size, layer.head_size_v = name, DIM, DIM
    layer.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_ROWS, 2 * DIM, dtype=dtype)
    layer.isa = cpu_attn._get_attn_isa(dtype, BLOCK_ROWS, DIM, "auto")
    layer._k_scale_float = layer._v_scale_float = 1.0
    return layer


class Step:
    """A step of an engine: sequences that go on by some rows each."""

    def __init__(self, tables, before, new, seed, dtype=torch.float32):
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(new)

        def numbers(heads):
            return torch.randn(tokens, heads, DIM, generator=generator).half().to(dtype)

        self.query, self.key, self.value = numbers(Q_HEADS), numbers(KV_HEADS), numbers(KV_HEADS)
        self.slots = torch.tensor(
            [
                table[row // BLOCK_ROWS] * BLOCK_ROWS + row % BLOCK_ROWS
                for table, begin, rows in zip(tables, before, new, strict=True)
                for row in range(begin, begin + rows)
            ]
        )
        longest = max(map(len, tables))
        padded = [table + [0] * (longest - len(table)) for table in tables]
        self.tables = torch.tensor(padded, dtype=torch.int32)
        self.lengths = torch.tensor([a + b for a, b in zip(before, new, strict=True)], dtype=torch.int32)
        self.starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        self.new = new

    def on(self, layer):
        """The layer's result, [tokens, q_heads, head_dim]."""
        impl = layer.impl
        schedule = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.new),
            num_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            seq_lens=self.lengths,
            dtype=self.dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=impl.sliding_window,
            isa=layer.isa,
            enable_kv_split=False,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        about = cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=len(self.slots),
            max_query_len=max(self.new),
            query_start_loc=self.starts,
            max_seq_len=int(self.lengths.max()),
            seq_lens=self.lengths,
            block_table=self.tables,
            slot_mapping=self.slots,
            scheduler_metadata=schedule,
        )
        impl.do_kv_cache_update(layer, self.key, self.value, layer.kv_cache, self.slots)
        out = torch.full_like(self.query, torch.nan)
        return impl.forward(layer, self.query, self.key, self.value, layer.kv_cache, about, out)


TABLES = [[3, 1, 9], [3, 7], [5]]
STEPS = [((0, 32, 0), (40, 7, 9)), ((40, 39, 9), (30, 1, 1)), ((70, 40, 10), (1, 1, 1))]
"""Rows before, and new rows: pieces of prompts beside single tokens; a block that two sequences share."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 16},
        {"logits_soft_cap": 5.0},
        {"sinks": torch.tensor([0.5, 1, -1, 2, 0, 3])},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.1, 0.3, 0.7]},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_arguments_mean_what_they_mean_to_vllms_own_backend(engine, options):
    """Over the same rows, to the accuracy of vLLM's kernel in float32; bits are held by the check."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    residence = engine.start(Settings("model", check=True))
    ours = engine.layers["attention"] = layer_of(backend.NearKVImpl, **options)
    theirs = layer_of(cpu_attn.CPUAttentionBackendImpl, **options)
    for number, (before, new) in enumerate(STEPS):
        step = Step(TABLES, before, new, seed + number)
        torch.testing.assert_close(step.on(ours), step.on(theirs), rtol=0, atol=2e-5)
    assert residence.tally.calls == residence.tally.equal == 3 + 2 + 1  # a call for each number of rows
    assert not ours.kv_cache.any()


def test_bf16_rows_of_a_bf16_model(engine):
    residence = engine.start(Settings("model", check=True))
    layer = engine.layers["attention"] = layer_of(backend.NearKVImpl, dtype=torch.bfloat16)
    out = Step(TABLES, *STEPS[0], seed=1, dtype=torch.bfloat16).on(layer)
    assert out.dtype == torch.bfloat16
    assert not out.isnan().any()
    (store,) = residence.stores
    assert store.device_blocks.cache.dtype == torch.bfloat16


def test_layers_share_a_store_and_one_without_rows_reads_anothers(engine):
    residence = engine.start(Settings("model"))
    for name in "ab":
        engine.layers[name] = layer_of(backend.NearKVImpl, name=name)
    engine.layers["c"] = layer_of(backend.NearKVImpl, name="c", kv_sharing_target_layer_name="b")
    step = Step(TABLES, *STEPS[0], seed=2)
    outs = {name: step.on(engine.layers[name]) for name in "ab"}
    assert torch.equal(outs["a"], outs["b"])
    engine.layers["c"].impl.do_kv_cache_update = lambda *arguments: None  # as vLLM leaves it out
    assert torch.equal(step.on(engine.layers["c"]), outs["b"])
    assert len(residence.stores) == 1
    assert residence.stores[0].held_blocks == 2 * 4


def test_another_engine_in_the_process_has_rows_of_its_own(engine):
    residence = engine.start(Settings("reference"))
    step = Step(TABLES, *STEPS[0], seed=3)
    engine.layers["a"] = layer_of(backend.NearKVImpl)
    first = step.on(engine.layers["a"])
    store = residence.stores[0]
    assert isinstance(store, ReferenceBlocks)
    engine.layers["a"] = layer_of(backend.NearKVImpl)
    assert torch.equal(step.on(engine.layers["a"]), first)
    assert len(residence.stores) == 1
    assert residence.stores[0] is not store


def test_check_is_the_device_and_the_reference(engine):
    residence = engine.start(Settings("model", check=True))
    engine.layers["a"] = layer_of(backend.NearKVImpl)
    Step(TABLES, *STEPS[0], seed=4).on(engine.layers["a"])
    assert isinstance(residence.stores[0], CheckedBlocks)
    assert residence.tally.seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "bf16 or fp16; leave it"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "run this model without NEARKV_VLLM"),
    ],
)
def test_what_the_device_does_not_do_is_refused(engine, options, message):
    with pytest.raises(ValueError, match=message):
        layer_of(backend.NearKVImpl, **options)


def test_encoders_stay_with_vllms_backend(engine, monkeypatch):
    asked = []
    monkeypatch.setattr(
        cpu_attn.CPUAttentionBackendImpl, "forward", lambda self, layer, *others: asked.append(layer)
    )
    residence = engine.start(Settings("model"))
    layer = engine.layers["a"] = layer_of(backend.NearKVImpl, attn_type=AttentionType.ENCODER_ONLY)
    Step(TABLES, *STEPS[0], seed=5).on(layer)
    assert asked == [layer]
    assert not residence.stores


def test_the_environment_puts_the_backend_in_the_place_of_vllms(monkeypatch):
    from nearkv.vllm import register
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = AttentionBackendEnum.CPU_ATTN.get_path()
    monkeypatch.delenv("NEARKV_VLLM", raising=False)
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == own
    monkeypatch.setenv("NEARKV_VLLM", "model")
    try:
        register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is backend.NearKVBackend
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
