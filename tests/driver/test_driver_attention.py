"""Attention through the driver against the reference, bit by bit, on both devices."""

import math

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.reference import decode_attention
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.memory import ResultLayout
from nearkv_sim.port import Write

SCALE = 0.3


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        (1, 1),
        (16, 8),
        (32, 33),
        (40, 7),
        (59, 59),
        (64, 64),
        (80, 128),
        (111, 112),
        (128, 1),
        (160, 96),
        (192, 256),
        (256, 192),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dimensions(device, head_dim, value_dim, dtype):
    """Any head_dim and value_dim; padding of the last line never matters (D3)."""
    contexts = [context(n, 2, head_dim, value_dim, seed=n, dtype=dtype) for n in (1, 21)]
    q = values(2, 4, head_dim, seed=5, dtype=dtype)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=head_dim, value_dim=value_dim, dtype=dtype) as kv:
        out = kv.attend(filled(kv, contexts), layer=0, q=q, scale=SCALE)
    assert same_bits(out, expected(q, contexts, scale=SCALE))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(12, 12), (9, 3), (32, 8), (28, 4), (4, 1), (5, 1), (16, 1), (4, 2)]
)
def test_heads(device, q_heads, kv_heads):
    """Query head h uses KV head h // (q_heads / kv_heads), at any ratio and with several passes (D1, D2)."""
    contexts = [context(9, kv_heads, 16, 16, seed=1)]
    q = values(1, q_heads, 16, seed=3)
    with device.kv_cache(layers=1, kv_heads=kv_heads, head_dim=16, dtype="fp16") as kv:
        out = kv.attend(filled(kv, contexts), layer=0, q=q, scale=SCALE)
        passes = device.stats().attention_passes
    assert same_bits(out, expected(q, contexts, scale=SCALE))
    assert passes >= kv_heads * -(-(q_heads // kv_heads) // device.config.queries)


def test_a_tiled_group_would_show(device):
    """D1: v of KV head 0 is 1, of KV head 1 is 2; four query heads see 1, 1, 2, 2."""
    k = torch.zeros(1, 2, 8, dtype=torch.float16)
    v = torch.tensor([1.0, 2.0]).reshape(1, 2, 1).to(torch.float16)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=8, value_dim=1, dtype="fp16") as kv:
        out = kv.attend(filled(kv, [(k, v)]), layer=0, q=torch.zeros(1, 4, 8, dtype=torch.float16))
    assert out.flatten().tolist() == [1, 1, 2, 2]


def test_a_very_large_group(model):
    """A group beyond what one descriptor takes becomes several jobs."""
    contexts = [context(5, 2, 8, 8, seed=1), context(3, 2, 8, 8, seed=3)]
    q, sinks = values(2, 2 * 150, 8, seed=3), values(300, seed=4, dtype=torch.float32)
    with model.kv_cache(layers=1, kv_heads=2, head_dim=8, dtype="fp16") as kv:
        out = kv.attend(filled(kv, contexts), layer=0, q=q, scale=SCALE, sinks=sinks)
    assert same_bits(out, expected(q, contexts, scale=SCALE, sinks=sinks))


@pytest.mark.parametrize("page_rows", [4, 16])
def test_lengths_around_a_page(device, page_rows):
    """The last page is full, has one row, or lacks one (E1)."""
    lengths = (page_rows - 1, page_rows, page_rows + 1, 2 * page_rows)
    contexts = [context(n, 1, 16, 16, seed=n) for n in lengths]
    q = values(4, 2, 16, seed=9)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=16, dtype="fp16", page_rows=page_rows) as kv:
        out = kv.attend(filled(kv, contexts), layer=0, q=q, scale=SCALE)
    assert same_bits(out, expected(q, contexts, scale=SCALE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_types_and_log_sum_exp(device, dtype):
    contexts = [context(20, 2, 32, 24, seed=1), context(7, 2, 32, 24, seed=7)]
    q = values(2, 6, 32, seed=9)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=32, value_dim=24, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        out, lse = kv.attend(handles, layer=0, q=q, scale=SCALE, out_dtype=dtype, return_lse=True)
        partial = kv.attend(handles, layer=0, q=q, scale=SCALE, partial=True)
    for i, (k, v) in enumerate(contexts):
        own, own_lse = decode_attention(
            q[i : i + 1], k[None], v[None], scale=SCALE, out_dtype=dtype, return_lse=True
        )
        assert same_bits(out[i : i + 1], own)
        assert same_bits(lse[i : i + 1], own_lse)
    assert same_bits(nearkv.finish(partial, dtype), out)
    assert same_bits(nearkv.log_sum_exp(partial), lse)


def test_window_counts_the_current_row(device):
    """A1: of six equal rows a window of four sees the last four."""
    k = torch.zeros(6, 1, 4, dtype=torch.float16)
    v = torch.eye(6, dtype=torch.float16)[:, None]
    q = torch.zeros(1, 1, 4, dtype=torch.float16)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=4, value_dim=6, dtype="fp16") as kv:
        handles = filled(kv, [(k, v)])
        assert kv.attend(handles, layer=0, q=q, window=4).flatten().tolist() == [0, 0, 0.25, 0.25, 0.25, 0.25]
        assert kv.attend(handles, layer=0, q=q, window=1).flatten().tolist() == [0, 0, 0, 0, 0, 1]
        assert torch.equal(kv.attend(handles, layer=0, q=q, window=99), kv.attend(handles, layer=0, q=q))


def test_a_sink_counts_once(device):
    """B6: three rows and a sink of equal weight leave 3/4, also when the context is split."""
    k, v = torch.zeros(3, 1, 4, dtype=torch.float16), torch.ones(3, 1, 1, dtype=torch.float16)
    q, sinks = torch.zeros(1, 1, 4, dtype=torch.float16), torch.zeros(1)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=4, value_dim=1, dtype="fp16") as kv:
        handles = filled(kv, [(k, v)])
        assert kv.attend(handles, layer=0, q=q, sinks=sinks).item() == 0.75
        parts = [
            kv.attend(handles, layer=0, q=q, rows=rows, sinks=sinks if i == 0 else None, partial=True)
            for i, rows in enumerate([(0, 0), (0, 2), (2, 3)])
        ]
        merged = nearkv.merge(nearkv.merge(parts[0], parts[1]), parts[2])
        assert nearkv.finish(merged).item() == 0.75


def test_rows_ranges_windows_and_sinks_together(device):
    contexts = [context(n, 2, 24, 40, seed=n) for n in (30, 17, 5)]
    q, sinks = values(3, 4, 24, seed=2), torch.tensor([0.5, -1.0, -math.inf, 3.0])
    ranges = [(3, 30), (0, 17), (5, 5)]
    with device.kv_cache(layers=1, kv_heads=2, head_dim=24, value_dim=40, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        out = kv.attend(handles, layer=0, q=q, scale=SCALE, rows=ranges, window=9, sinks=sinks)
        lengths = torch.tensor([[30], [17], [5]])
        index = torch.arange(30)
        bounds = torch.tensor(ranges)
        visible = (index >= bounds[:, :1]) & (index < bounds[:, 1:])
        masked = kv.attend(handles, layer=0, q=q, scale=SCALE, visible=visible, window=9, sinks=sinks)
    visible &= index >= lengths - 9
    own = [(k, v) for k, v in contexts]
    wanted = torch.cat(
        [
            decode_attention(
                q[i : i + 1], k[None], v[None], scale=SCALE, visible=visible[i : i + 1, : len(k)], sinks=sinks
            )
            for i, (k, v) in enumerate(own)
        ]
    )
    assert same_bits(out, wanted)
    assert same_bits(masked, wanted)


def test_empty_sequences_are_written(device):
    """A8, A9: an empty sequence in a batch gives +0 and -Inf, whatever the result area held before."""
    contexts = [context(n, 1, 8, 8, seed=n) for n in (3, 0, 2)]
    q = values(3, 2, 8, seed=1)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        kv.attend(handles, layer=0, q=q)
        tenant = kv._tenant
        area = ResultLayout(8, OutputForm.FP32).lines * 2
        areas = tenant.scattered("results", len(contexts), area * 64)
        lines = (areas[:, None] + np.arange(area, dtype=np.uint64) * np.uint64(64)).reshape(-1)
        device._port.run([Write(tenant.hosts(lines), np.full((lines.size, 64), 0xFF, np.uint8))])
        out, lse = kv.attend(handles, layer=0, q=q, return_lse=True)
        invisible = kv.attend(handles, layer=0, q=q, rows=[(2, 2), (0, 0), (1, 1)])
    assert same_bits(out[1], torch.zeros(2, 8))
    assert lse[1].tolist() == [-math.inf, -math.inf]
    assert same_bits(invisible, torch.zeros(3, 2, 8))
    assert same_bits(out[[0, 2]], expected(q, contexts, scale=1 / math.sqrt(8))[[0, 2]])


@pytest.mark.parametrize("query_rows", [(), (1,), (2,)])
def test_visible_of_empty_sequences(model, query_rows):
    """A mask without columns is a mask like any other."""
    with model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        out = kv.attend(
            [kv.sequence()],
            layer=0,
            q=values(1, *query_rows, 2, 8, seed=1),
            visible=torch.zeros(1, *query_rows, 0, dtype=torch.bool),
        )
    assert same_bits(out, torch.zeros(1, *query_rows, 2, 8))


def test_rows_of_a_batch_stay_apart(device):
    """B11: sequences that differ in v alone give different results."""
    k = values(4, 1, 8, seed=1)
    contexts = [(k, torch.full((4, 1, 8), float(i), dtype=torch.float16)) for i in (1, 2, 3)]
    q = values(1, 2, 8, seed=3).expand(3, 2, 8)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        out = kv.attend(filled(kv, contexts), layer=0, q=q)
    assert out[:, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_unused_slots_never_matter(device, garbage):
    """C1: rows of a page behind the committed length hold NaN or infinities."""
    k, v = context(1, 1, 8, 8, seed=1)
    bad = torch.full((3, 1, 8), garbage, dtype=torch.float16)
    q = values(1, 2, 8, seed=3)
    with device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", page_rows=4) as kv:
        (handle,) = filled(kv, [(torch.cat([k, bad]), torch.cat([v, bad]))])
        kv.crop(handle, 1)
        out, lse = kv.attend([handle], layer=0, q=q, return_lse=True)
        (clean,) = filled(kv, [(k, v)])
        clean_out, clean_lse = kv.attend([clean], layer=0, q=q, return_lse=True)
    assert same_bits(out, clean_out)
    assert same_bits(lse, clean_lse)
    assert out.isfinite().all()


def test_specials_in_rows_are_the_contract_s(device):
    """C7: NaN and infinities in visible rows, and a NaN in q."""
    k, v = context(12, 1, 16, 16, seed=1, dtype=torch.bfloat16)
    v[1, 0, 3], v[2, 0, 4], v[3, 0, 4], v[4, 0, 5] = math.nan, math.inf, -math.inf, math.inf
    q = values(1, 4, 16, seed=2, dtype=torch.bfloat16)
    q[0, 1, 0] = math.nan
    k_inf = k.clone()
    k_inf[5, 0, :] = math.inf
    contexts = [(k, v), (k_inf, v)]
    q = q.expand(2, 4, 16).contiguous()
    with device.kv_cache(layers=1, kv_heads=1, head_dim=16) as kv:
        handles = filled(kv, contexts)
        out, lse = kv.attend(handles, layer=0, q=q, scale=SCALE, return_lse=True)
        partial = kv.attend(handles, layer=0, q=q, scale=SCALE, partial=True)
    assert same_bits(out, expected(q, contexts, scale=SCALE))
    assert lse.isnan()[0].tolist() == [False, True, False, False]
    for i, (k_i, v_i) in enumerate(contexts):
        own = decode_attention(q[i : i + 1], k_i[None], v_i[None], scale=SCALE, partial=True)
        assert same_bits(nearkv.finish(own), nearkv.finish(partial)[i : i + 1])


def test_large_numbers(device):
    """D4 and D5: products and sums beyond fp16's range."""
    q = torch.full((1, 1, 64), 128.0, dtype=torch.float16)
    k = torch.stack([torch.full((1, 64), 128.0), torch.full((1, 64), 64.0)]).to(torch.float16)
    v = torch.tensor([1.0, 2.0]).reshape(2, 1, 1).to(torch.float16)
    many = (torch.zeros(8, 1, 64, dtype=torch.float16), torch.full((8, 1, 1), 60000.0, dtype=torch.float16))
    with device.kv_cache(layers=1, kv_heads=1, head_dim=64, value_dim=1, dtype="fp16") as kv:
        handles = filled(kv, [(k, v), many])
        assert kv.attend(handles[:1], layer=0, q=q, scale=1.0).item() == 1.0
        assert kv.attend(handles[1:], layer=0, q=q, scale=1.0).item() == 60000.0


def test_strides_of_queries_and_rows(device):
    """E7: q, k and v as slices of fused tensors."""
    fused = values(2, 3, 4, 48, seed=1)
    q = fused[:, 0, :, 16:32]
    rows = values(10, 2, 3, 16, seed=2)
    k, v = rows[:, :, 0], rows[:, :, 2]
    with device.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="fp16") as kv:
        handles = filled(kv, [(k, v), (k.flip(0), v.flip(0))])
        out = kv.attend(handles, layer=0, q=q, scale=SCALE)
    contexts = [(k, v), (k.flip(0), v.flip(0))]
    assert same_bits(out, expected(q.contiguous(), contexts, scale=SCALE))


def test_batchmates_never_matter(device):
    """G1: a sequence alone, among others, twice in a batch, and in another order."""
    contexts = [context(n, 2, 32, 32, seed=n) for n in (33, 1, 64, 17)]
    q = values(4, 4, 32, seed=8)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        alone = torch.cat([kv.attend([h], layer=0, q=q[i : i + 1]) for i, h in enumerate(handles)])
        order = [2, 0, 3, 0, 1]
        together = kv.attend([handles[i] for i in order], layer=0, q=q[order])
    assert same_bits(together, alone[order])


def test_more_jobs_than_the_ring_has_slots():
    contexts = [context(n + 1, 3, 8, 8, seed=n) for n in range(7)]
    q = values(7, 3, 8, seed=8)
    with nearkv.open("model", ring_slots=4) as device:
        with device.kv_cache(layers=1, kv_heads=3, head_dim=8, dtype="fp16") as kv:
            handles = filled(kv, contexts)
            for _ in range(3):
                out = kv.attend(handles, layer=0, q=q, scale=SCALE)
        assert same_bits(out, expected(q, contexts, scale=SCALE))


def test_page_numbers_beyond_16_bits(plain_model):
    """E3: 70,001 pages of one context, and pages of memory with numbers as large."""
    rows = 4 * 70_000 + 1
    k, v = values(rows, 1, 1, seed=1), values(rows, 1, 1, seed=2)
    q = values(1, 1, 1, seed=3)
    with plain_model.kv_cache(layers=1, kv_heads=1, head_dim=1, dtype="fp16", page_rows=4) as kv:
        (handle,) = filled(kv, [(k, v)])
        for begin in (4 * 65_535, 4 * 65_536, 4 * 70_000):
            seen = slice(begin, begin + 1)
            assert kv.attend([handle], layer=0, q=q, rows=(begin, begin + 1)).item() == v[seen].item()
        out = kv.attend([handle], layer=0, q=q, scale=SCALE)
        assert int(handle._tables[0].page_addresses(0, 70_001).max()) // (4 * 128) > 1 << 16
    assert same_bits(out, expected(q, [(k, v)], scale=SCALE))


def test_addresses_above_four_gigabytes():
    """E5: everything of a tenant lies above 4 GiB."""
    contexts = [context(40, 2, 16, 16, seed=1)]
    q = values(1, 4, 16, seed=2)
    with nearkv.open("model:card") as device:
        device._tenant(0).extents._next = 5000
        with device.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="fp16") as kv:
            handles = filled(kv, contexts)
            assert int(handles[0]._tables[0].page_addresses(0, 1).min()) >= 5000 << 20
            out = kv.attend(handles, layer=0, q=q, scale=SCALE)
    assert same_bits(out, expected(q, contexts, scale=SCALE))


@pytest.mark.parametrize("window", [None, 3])
def test_several_query_rows(device, window):
    """A7: query rows are aligned with the context's last rows, and equal serial steps."""
    k, v = context(6, 2, 8, 8, seed=1)
    q = values(1, 3, 4, 8, seed=2)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=8, dtype="fp16") as kv:
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k[:3], v=v[:3])
        serial = []
        for i in range(3):
            kv.append(handle, layer=0, k=k[3 + i : 4 + i], v=v[3 + i : 4 + i])
            serial.append(kv.attend([handle], layer=0, q=q[:, i], window=window))
        out, lse = kv.attend([handle], layer=0, q=q, window=window, return_lse=True)
        partial = kv.attend([handle], layer=0, q=q, window=window, partial=True)
        last = kv.attend([handle], layer=0, q=q[:, 2:], window=window)
    assert same_bits(out, torch.stack(serial, 1))
    assert same_bits(nearkv.finish(partial), out)
    assert same_bits(nearkv.log_sum_exp(partial), lse)
    assert same_bits(last, out[:, 2:])


def test_masks_with_gaps(plain_model):
    """Visible rows with gaps, sequences of different lengths, on a device without lists of ranges: the host
    works it out; a mask of one range is the device's work."""
    model = plain_model
    contexts = [context(n, 1, 8, 8, seed=n) for n in (9, 4)]
    q = values(2, 2, 8, seed=3)
    visible = torch.zeros(2, 9, dtype=torch.bool)
    visible[0, [0, 2, 3, 8]] = True
    visible[1, [1, 2]] = True
    with model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        kv.attend(handles, layer=0, q=q)  # takes the extents that results need
        before = model.stats()
        out = kv.attend(handles, layer=0, q=q, scale=SCALE, visible=visible)
        spent = model.stats() - before
        assert (spent.jobs, spent.attention_jobs) == (0, 2)
        # K and V of the rows that are seen, and of no other
        assert spent.host_lines == spent.attention_lines == 2 * int(visible.sum())
        kv.attend(handles[1:], layer=0, q=q[1:], scale=SCALE, visible=visible[1:, :4])
        spent = model.stats() - before
        assert (spent.jobs, spent.attention_jobs, spent.host_lines) == (1, 3, 2 * int(visible.sum()))
    wanted = [
        decode_attention(q[i : i + 1], k[None], v[None], scale=SCALE, visible=visible[i : i + 1, : len(k)])
        for i, (k, v) in enumerate(contexts)
    ]
    assert same_bits(out, torch.cat(wanted))


def test_append_attend_is_both(device):
    contexts = [context(16, 2, 16, 24, seed=n) for n in (1, 2)]
    q = values(2, 4, 16, seed=3)
    with device.kv_cache(layers=2, kv_heads=2, head_dim=16, value_dim=24, dtype="fp16") as kv:
        handles = filled(kv, contexts, layer=1)
        new = [context(2, 2, 16, 24, seed=n) for n in (11, 12)]
        k, v = (torch.stack([rows[i] for rows in new]) for i in (0, 1))
        out = kv.append_attend(handles, layer=1, k=k, v=v, q=q, scale=SCALE, window=17)
        assert [kv.length(h, 1) for h in handles] == [18, 18]
        assert same_bits(out, kv.attend(handles, layer=1, q=q, scale=SCALE, window=17))
    whole = [
        (torch.cat([c[0], n[0]])[1:], torch.cat([c[1], n[1]])[1:]) for c, n in zip(contexts, new, strict=True)
    ]
    assert same_bits(out, expected(q, whole, scale=SCALE))


def test_tenants_share_a_device(device):
    contexts = [context(8, 1, 8, 8, seed=1)]
    q = values(1, 1, 8, seed=3)
    violations = device.stats().violations
    results = []
    for tenant in (0, 1):
        with device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", tenant=tenant) as kv:
            results.append(kv.attend(filled(kv, contexts), layer=0, q=q, scale=SCALE))
    assert same_bits(results[0], results[1])
    assert device.stats().violations == violations
