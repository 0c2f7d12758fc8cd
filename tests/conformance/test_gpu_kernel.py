"""The Triton kernel against the reference, bit for bit: on a GPU, or interpreted where there is none."""

import os
import random
import re
import subprocess
import sys

import pytest
import torch
from contract_cases import OUTPUTS, Sizes, random_case, seed_of_run, vectors
from nearkv import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
gpu = pytest.importorskip("nearkv.gpu", reason="Triton is not installed: pip install 'nearkv[gpu]'")

SMALL = Sizes(batch=2, query_rows=2, kv_heads=2, group=2, rows=24, dim=24)


def same_bits(first, second):
    kind = torch.int32 if first.dtype == torch.float32 else torch.int16
    return first.dtype == second.dtype and torch.equal(first.view(kind), second.view(kind))


def partial(case):
    """The kernel's partial, brought to the CPU."""
    own = case.to(DEVICE)
    return gpu.decode_attention(own.q, own.k, own.v, partial=True, **own.options).to("cpu")


def check_random(seed, count, sizes=SMALL):
    rng = random.Random(seed)
    for index in range(count):
        case = random_case(rng, sizes)
        assert partial(case).equal(case.partial()), f"case {index}: {case.describe()}"


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.case.name)
def test_vectors(vector):
    assert partial(vector.case).equal(vector.case.partial())


@pytest.mark.parametrize("output", OUTPUTS)
def test_results(output):
    own = vectors()[0].case.to(DEVICE)
    scale = torch.tensor([0.37] * own.k.shape[2])
    options = {**own.options, "out_dtype": OUTPUTS[output]}
    found = gpu.decode_attention(own.q, own.k, own.v, v_scale=scale.to(DEVICE), **options)
    expected = reference.finish(own.to("cpu").partial(), OUTPUTS[output], scale)
    assert same_bits(found.cpu(), expected)


def test_random_cases():
    """Every format, scales, codebooks, latents, masks, windows, trees, pages, softcap, ALiBi and sinks."""
    check_random(seed_of_run(), 8)


@pytest.mark.slow
def test_many_random_cases():
    check_random(seed_of_run(), 100)


def test_slabs_and_blocks_are_no_part_of_the_result(monkeypatch):
    from nearkv.gpu import launch

    rng = random.Random(seed_of_run())
    q = torch.randn(1, 4, 48).half()
    k, v = torch.randn(1, 203, 2, 48).half(), torch.randn(1, 203, 2, 24).half()
    options = {"scale": rng.uniform(0.05, 2), "sinks": torch.randn(4), "window": 180, "causal": True}
    expected = reference.decode_attention(q, k, v, partial=True, **options)
    lse = reference.decode_attention(q, k, v, return_lse=True, **options)
    moved = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    for elements, programs in ((1 << 10, 1), (1 << 12, 64)):
        monkeypatch.setattr(launch, "_BLOCK_ELEMENTS", elements)
        monkeypatch.setattr(launch, "_PROGRAMS", programs)
        assert gpu.decode_attention(q, k, v, partial=True, **moved).to("cpu").equal(expected)
    found = gpu.decode_attention(q, k, v, return_lse=True, **moved)
    assert all(same_bits(one.cpu(), other) for one, other in zip(found, lse, strict=True))


def test_partials_merge_with_the_references():
    torch.manual_seed(seed_of_run())
    q, k, v = (torch.randn(*shape).bfloat16() for shape in ((1, 2, 32), (1, 90, 1, 32), (1, 90, 1, 32)))
    whole = reference.decode_attention(q, k, v, scale=0.2, partial=True)
    hot = gpu.decode_attention(*(x.to(DEVICE) for x in (q, k[:, 50:], v[:, 50:])), scale=0.2, partial=True)
    cold = reference.decode_attention(q, k[:, :50], v[:, :50], scale=0.2, partial=True)
    assert reference.merge(cold, hot.to("cpu")).equal(whole)


def test_a_hot_tier_attends_with_it(monkeypatch):
    from nearkv import host_attention
    from nearkv.tiers import NewestRows, TensorTier, TieredCache

    torch.manual_seed(seed_of_run())
    tiers = [TensorTier("hot", device=DEVICE), TensorTier("warm")]
    kv = TieredCache(tiers, layers=1, kv_heads=1, head_dim=32, dtype="bf16", policy=NewestRows(8))
    sequence = kv.sequence()
    k, v = (torch.randn(20, 1, 32).bfloat16() for _ in range(2))
    kv.append(sequence, layer=0, k=k, v=v)
    q = torch.randn(1, 2, 32).bfloat16()
    calls = []

    def kernel(*args, **options):
        calls.append(options)
        return gpu.decode_attention(*args, **options)

    monkeypatch.setattr(host_attention, "attention_on", lambda device: kernel)
    out = kv.attend([sequence], layer=0, q=q)
    assert calls
    assert same_bits(out, reference.decode_attention(q, k[None], v[None], scale=32**-0.5))


def test_no_rows_and_no_visible_row():
    q = torch.randn(2, 2, 16, device=DEVICE).half()
    for rows, visible in ((0, None), (5, torch.zeros(2, 5, dtype=torch.bool, device=DEVICE))):
        k = torch.randn(2, rows, 1, 16, device=DEVICE).half()
        out = gpu.decode_attention(q, k, k, scale=1.0, visible=visible)
        assert same_bits(out.cpu(), torch.zeros(2, 2, 16))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"windw": 3}, TypeError, "no option 'windw'; there are"),
        ({"partial": True, "return_lse": True}, ValueError, "belong to a finished result"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype must be one of"),
        ({"softcap": -1.0}, ValueError, "softcap must be above 0"),
        ({"k_format": "fp7"}, ValueError, "k_format must be one of"),
    ],
)
def test_bad_arguments(options, error, message):
    q, k = torch.zeros(1, 1, 16).half(), torch.zeros(1, 3, 1, 16).half()
    with pytest.raises(error, match=message):
        gpu.decode_attention(q, k, k, scale=1.0, **options)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nearkv.gpu.kernel import partials
from nearkv.gpu.launch import planes, INTERPRETED
assert not INTERPRETED
constants = {name: 0 for name in partials.arg_names if name.isupper()}
constants |= dict(DIM=80, K_DIM=128, V_DIM=64, V_PITCH=64, VALUE_DIM=64, BLOCK_ROWS=16, Q_WIDTH=8)
constants |= dict(SOFTCAP=True, ALIBI=True, K_CODE_BITS=16, K_WIDTH=11, K_LUT=16, K_SCALE_BITS=8)
constants |= dict(K_SCALE_WIDTH=4, K_BLOCK=32, K_BLOCKS=3, V_CODE_BITS=8, V_WIDTH=4, V_BLOCK=1, V_BLOCKS=1)
words = {"q": "*i16", "k_lut": "*i16", "v_lut": "*i16", "factors": "*i32", "slopes": "*i32"}
words |= {name: "*u8" for name in ("k", "v", "k_scales", "v_scales", "visible")}
counts = ("rows", "slab", "kv_heads", "queries", "group")
signature = {
    name: "constexpr" if name in constants
    else "i32" if name in counts or name.startswith("visible_") or name.endswith("_batch")
    else words.get(name, "*i64")
    for name in partials.arg_names
}
places = {(partials.arg_names.index(name),): value for name, value in constants.items()}
kernel = triton.compile(ASTSource(partials, signature, places), target=GPUTarget("cuda", 80, 32))
print(kernel.asm["ptx"])
try:
    import nearkv.gpu, torch
    nearkv.gpu.decode_attention(torch.zeros(1, 1, 4).half(), *[torch.zeros(1, 1, 1, 4).half()] * 2, scale=1.0)
except RuntimeError as error:
    print("refused:", error)
"""


def test_it_compiles_to_integers_alone():
    """For a GPU that need not be there; and what a CPU without the interpreter is told."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    ptx, _, refused = done.stdout.partition("refused:")
    assert ".visible .entry partials" in ptx
    assert not re.findall(r"\b[a-z]\w*(?:\.\w+)*\.b?f(?:16|32|64)\w*\b", ptx)
    assert "q is on the CPU; move all tensors to a GPU" in refused
