"""Cases that broke attention elsewhere, run through the driver on the model: names are the failure list's.

A1, A7 to A11, B6, B11, C1, C7, D1, D4 and D5 are in `test_driver_attention.py` and `test_cache_life.py`; C5,
an append to a slot that is none, has no place here: rows are appended to sequences.
"""

from functools import reduce

import nearkv
import pytest
import torch
from driver_cases import same_bits, values
from nearkv.quantise import PRESETS, RowFormat, attention_arguments, quantise
from nearkv.reference import decode_attention, finish, log_sum_exp, merge

bf16 = torch.bfloat16


@pytest.fixture(scope="module")
def device():
    with nearkv.open("model") as model:
        yield model


def cache_with(device, k, v, **options):
    """A cache of one layer that holds one sequence's rows [rows, kv_heads, dim]."""
    given = {"dtype": k.dtype, "value_dtype": v.dtype, **options}
    kv = device.kv_cache(
        layers=1, kv_heads=k.shape[1], head_dim=k.shape[2], value_dim=v.shape[2], page_rows=4, **given
    )
    handle = kv.sequence()
    kv.append(handle, layer=0, k=k, v=v)
    return kv, handle


def some(*shape, seed=1, dtype=bf16):
    return values(*shape, seed=seed, dtype=dtype)


def test_a3_window_of_one_is_the_last_row(device):
    k, v = some(6, 1, 8), some(6, 1, 5, seed=2)
    kv, handle = cache_with(device, k, v)
    with kv:
        out = kv.attend([handle], layer=0, q=some(1, 1, 8, seed=3), scale=1.0, window=1)
    assert torch.equal(out.flatten(), v[-1, 0].float())


def test_a5_a_chunk_counts_the_window_as_a_step_does(device):
    """All query rows of a prompt in one call, and each as the last one of a context of its own length."""
    q, k, v = some(1, 6, 2, 8), some(6, 1, 8, seed=2), some(6, 1, 8, seed=3)
    kv, handle = cache_with(device, k, v)
    with kv:
        before = device.stats()
        prompt = kv.attend([handle], layer=0, q=q, scale=0.3, window=3)
        assert (device.stats() - before).attention_jobs == 1
        for t in reversed(range(6)):
            step = kv.attend([handle], layer=0, q=q[:, t], scale=0.3, window=3)
            assert torch.equal(prompt[:, t], step)
            kv.crop(handle, t)


def test_a7_query_rows_see_what_serial_steps_see(device):
    """Also when there are more query rows than rows: the first ones stand before the first row."""
    q, k, v = some(1, 8, 2, 8), some(6, 1, 8, seed=2), some(6, 1, 8, seed=3)
    kv, handle = cache_with(device, k, v)
    with kv:
        out, lse = kv.attend([handle], layer=0, q=q, scale=0.3, return_lse=True)
    for t in range(8):
        rows = max(t - 1, 0)
        one = decode_attention(q[:, t], k[None, :rows], v[None, :rows], scale=0.3)
        assert same_bits(out[:, t], one)
        assert (lse[:, t] == -torch.inf).all() == (rows == 0)


def partial_of(device, k, v, q, **options):
    kv, handle = cache_with(device, k, v)
    with kv:
        return kv.attend([handle], layer=0, q=q, partial=True, **options)


def test_b1_merge_of_two_empty_states(device):
    k, v, q = some(0, 1, 8), some(0, 1, 4), some(1, 2, 8)
    empty = partial_of(device, k, v, q)
    merged = merge(empty, empty)
    assert merged.equal(empty)
    assert finish(merged).view(torch.int32).eq(0).all()
    assert log_sum_exp(merged).tolist() == [[-torch.inf, -torch.inf]]


def test_b3_a_chunk_without_rows_is_neutral(device):
    """Two requests in two chunks; the second one has no row in the first chunk."""
    q, k, v = some(2, 2, 8), some(2, 5, 1, 8, seed=2), some(2, 5, 1, 4, seed=3)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=8, value_dim=4, dtype="bf16") as kv:
        handles = [kv.sequence(), kv.sequence()]
        kv.append(handles, layer=0, k=k, v=v)
        ranges = [(0, 3), (0, 0)], [(3, 5), (0, 5)]
        parts = [kv.attend(handles, layer=0, q=q, scale=0.5, rows=own, partial=True) for own in ranges]
        whole = kv.attend(handles, layer=0, q=q, scale=0.5)
    assert log_sum_exp(parts[0])[1].tolist() == [-torch.inf, -torch.inf]
    assert torch.equal(finish(merge(*parts)), whole)


def test_b5_base_of_log_sum_exp_has_no_part_in_a_merge(device):
    q = torch.zeros(1, 1, 4, dtype=bf16)
    for rows, expected in ((3, 0.25), (1023, 2.0**-10)):
        k, v = torch.ones(rows + 1, 1, 4, dtype=bf16), torch.zeros(rows + 1, 1, 1, dtype=bf16)
        v[rows] = 1
        kv, handle = cache_with(device, k, v)
        with kv:
            spans = (0, rows), (rows, rows + 1)
            parts = [kv.attend([handle], layer=0, q=q, scale=1.0, rows=own, partial=True) for own in spans]
        assert finish(merge(*parts)).item() == expected


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8", "mxfp4"])
def test_b6_b7_sink_counts_once_over_splits(device, softcap, preset):
    """One of four parts has the sink, and no row; whatever the format, and under a softcap."""
    ones = torch.ones(3, 1, 32, dtype=bf16)
    q, sinks = torch.zeros(1, 1, 32, dtype=bf16), torch.zeros(1)
    kv, handle = cache_with(device, ones, ones, dtype=preset, value_dtype=preset)
    with kv:
        given = {"layer": 0, "q": q, "scale": 1.0, "softcap": softcap}
        parts = [kv.attend([handle], rows=(1, 1), sinks=sinks, partial=True, **given)]
        parts += [kv.attend([handle], rows=(i, i + 1), partial=True, **given) for i in range(3)]
        whole = kv.attend([handle], sinks=sinks, **given)
        v_scale = kv.head_scales(0)[1]
    assert torch.equal(finish(reduce(merge, parts), v_scale=v_scale), whole)
    assert torch.allclose(whole, torch.tensor(0.75), rtol=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_b7_sink_counts_with_narrow_formats(device, preset):
    rows = torch.ones(3, 1, 4, dtype=torch.float16 if preset == "fp16" else bf16)
    q = torch.zeros(1, 1, 4, dtype=rows.dtype)
    kv, handle = cache_with(device, rows, rows, dtype=preset, value_dtype=preset)
    with kv:
        with_sink, without = (
            kv.attend([handle], layer=0, q=q, scale=1.0, sinks=sinks) for sinks in (torch.zeros(1), None)
        )
    assert torch.allclose(with_sink, without * 0.75, rtol=1e-6)
    assert torch.allclose(without, torch.ones(4), rtol=0.15)


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_b9_any_number_of_splits(device, splits):
    """Pages of 4 rows dealt to splits: a list of row ranges each, merged to the bits of the whole."""
    q, k, v = some(1, 2, 8), some(70, 1, 8, seed=2), some(70, 1, 4, seed=3)
    owner = torch.arange(70) // 4 % splits
    kv, handle = cache_with(device, k, v)
    with kv:
        for rows in (70, 41, 16, 5, 1):
            kv.crop(handle, rows)
            before = device.stats()
            parts = [
                kv.attend([handle], layer=0, q=q, visible=(owner[:rows] == one)[None], partial=True)
                for one in range(splits)
            ]
            assert (device.stats() - before).host_lines == 0
            assert torch.equal(finish(reduce(merge, parts)), kv.attend([handle], layer=0, q=q))


@pytest.mark.parametrize("rows", [1024, 4096])
def test_b13_many_equal_weights_are_not_lost(device, rows):
    ones = torch.ones(rows, 1, 2, dtype=torch.float16)
    kv, handle = cache_with(device, ones, ones)
    with kv:
        out = kv.attend([handle], layer=0, q=ones[None, 0], scale=1.0)
    assert out.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", ["visible", "rows", "window"])
def test_c3_a_hidden_row_is_left_out_not_added_to(device, how):
    """K rows of NaN that are not seen, in one way or another, between rows that are."""
    q, k, v = some(1, 2, 8), some(4, 1, 8, seed=2), some(4, 1, 8, seed=3)
    seen = {"visible": [0, 3], "rows": [0, 1], "window": [2, 3]}[how]
    spoilt = torch.full_like(k, torch.nan)
    spoilt[seen] = k[seen]
    option = {"visible": torch.tensor([[True, False, False, True]]), "rows": (0, 2), "window": 2}[how]
    kv, handle = cache_with(device, spoilt, v)
    with kv:
        out = kv.attend([handle], layer=0, q=q, scale=1.0, **{how: option})
    assert torch.equal(out, decode_attention(q, k[None, seen], v[None, seen], scale=1.0))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(12, 12), (9, 3), (32, 8), (28, 4), (4, 1), (5, 1)])
def test_d2_kv_head_of_a_query_head(device, q_heads, kv_heads):
    v = torch.arange(kv_heads).reshape(1, kv_heads, 1).to(bf16)
    kv, handle = cache_with(device, torch.ones_like(v), v)
    with kv:
        out = kv.attend([handle], layer=0, q=torch.ones(1, q_heads, 1, dtype=bf16), scale=1.0)
        rows = kv.attend([handle], layer=0, q=torch.ones(1, 2, q_heads, 1, dtype=bf16), scale=1.0)
    wanted = [h // (q_heads // kv_heads) for h in range(q_heads)]
    assert out.flatten().tolist() == wanted
    assert rows[0, 1].flatten().tolist() == wanted


DIMS = [1, 16, 32, 40, 48, 59, 64, 80, 96, 111, 112, 128, 160, 192, 256, 576, 1023]


@pytest.mark.parametrize("preset", ["bf16", "fp8", "q8_0", "nvfp4"])
@pytest.mark.parametrize("dim", DIMS)
def test_d3_any_head_dimension(device, dim, preset):
    k = torch.zeros(2, 1, dim, dtype=bf16)
    k[1, 0, -1] = 60  # the last element decides
    v = torch.zeros(2, 1, dim, dtype=bf16)
    v[1] = 1
    kv, handle = cache_with(device, k, v, dtype=preset, value_dtype=preset)
    with kv:
        out = kv.attend([handle], layer=0, q=torch.ones(1, 1, dim, dtype=bf16), scale=1.0)
    assert torch.allclose(out, torch.tensor(1.0), rtol=1e-2)


def test_d7_softcap_comes_after_the_scale_and_before_the_mask(device):
    q, k = torch.full((1, 1, 1), 20.0, dtype=bf16), torch.ones(2, 1, 1, dtype=bf16)
    kv, handle = cache_with(device, k, k)
    with kv:
        options = {"layer": 0, "q": q, "scale": 0.5, "softcap": 2.0, "return_lse": True}
        out, lse = kv.attend([handle], rows=(0, 1), **options)
        none = kv.attend([handle], rows=(0, 0), **options)
    assert out.item() == 1.0
    assert abs(lse.item() - 1.99982) < 1e-5
    assert none[0].view(torch.int32).item() == 0
    assert none[1].item() == -torch.inf


@pytest.mark.parametrize("out_dtype", [torch.float32, bf16])
def test_d9_scales_per_head_are_used_once_each(device, out_dtype):
    """Two heads, whose scales are neither dropped nor swapped nor those of the other head."""
    k = torch.tensor([[0x48, 0], [0, 0x50]], dtype=torch.uint8).reshape(2, 1, 2).expand(2, 2, 2)  # 4 and 8
    v = torch.tensor([0x38, 0x44], dtype=torch.uint8).reshape(2, 1, 1).expand(2, 2, 1)  # 1 and 3
    scales = {"k_scale": torch.tensor([0.25, 1.0]), "v_scale": torch.tensor([0.5, 2.0])}
    kv, handle = cache_with(device, k, v, dtype="fp8", value_dtype="fp8", **scales)
    with kv:
        out = kv.attend([handle], layer=0, q=torch.ones(1, 2, 2, dtype=bf16), scale=1.0, out_dtype=out_dtype)
    wanted = torch.stack([torch.tensor([4.0, 8.0]) * s for s in (0.25, 1.0)]).softmax(-1)
    wanted = wanted @ torch.tensor([1.0, 3.0]) * torch.tensor([0.5, 2.0])
    assert abs(wanted[0].item() - 1.23106) < 1e-5
    assert torch.allclose(out.float().flatten(), wanted, rtol=1e-5 if out_dtype == torch.float32 else 1e-2)


def test_d11_casts_of_e4m3_saturate(device):
    """Rows beyond 448 become 448, infinities too; NaN stays NaN."""
    numbers = torch.tensor([449.0, 464.0, 480.0, torch.inf, torch.nan]).view(1, 1, 5)
    before = device.stats().saturated
    kv, handle = cache_with(
        device, torch.ones(1, 1, 1, dtype=bf16), numbers, value_dtype=RowFormat("fp8_e4m3")
    )
    with kv:
        out = kv.attend([handle], layer=0, q=torch.ones(1, 1, 1, dtype=bf16), scale=1.0).flatten()
    assert out[:4].tolist() == [448.0] * 4
    assert out[4].isnan()
    assert device.stats().saturated - before == 2  # 449 and 464 round to 448


def test_d13_value_dimension_of_its_own(device):
    """One head, rows of 24 whose first 16 are V; and K and V of other lengths and formats."""
    k, q = some(9, 1, 24), some(1, 4, 24, seed=2)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=24, value_dim=16, latent=True, page_rows=4) as kv:
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k)
        out = kv.attend([handle], layer=0, q=q, scale=0.3)
    assert same_bits(out, decode_attention(q, k[None], None, value_dim=16, scale=0.3))
    v = some(9, 1, 8, seed=3)
    kv, handle = cache_with(device, k, v, value_dtype="mxfp8")
    with kv:
        out = kv.attend([handle], layer=0, q=q, scale=0.3)
    rows = attention_arguments(quantise(k[None], RowFormat("bf16")), quantise(v[None], PRESETS["mxfp8"].k))
    assert same_bits(out, decode_attention(q, rows.pop("k"), rows.pop("v"), scale=0.3, **rows))
