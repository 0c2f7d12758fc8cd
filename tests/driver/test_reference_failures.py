"""Cases that broke attention elsewhere, as the reference answers them. Names are those of the failure list.

Device-level tests of the same cases live with the device.
"""

import os

import pytest
import torch
from nearkv.quantise import PRESETS, RowFormat, attention_arguments, quantise
from nearkv.reference import Partial, decode_attention, finish, log_sum_exp, merge

bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed():
    """Inputs are random; the seed is printed and can be given."""
    seed = int(os.environ.get("NEARKV_TEST_SEED") or torch.seed() % 2**32)
    print(f"NEARKV_TEST_SEED={seed}")
    torch.manual_seed(seed)


def one_hot_rows(rows):
    """q that scores every row alike, and V rows e_j: each result lane is the weight of a row."""
    q, k = torch.zeros(1, 1, 4, dtype=bf16), torch.randn(1, rows, 1, 4).to(bf16)
    return q, k, torch.eye(rows).reshape(1, rows, 1, rows).to(bf16)


def last(rows, window):
    """A window of rows, the current one included."""
    return (torch.arange(rows) >= rows - window).unsqueeze(0)


def test_a1_window_counts_the_current_row():
    result = decode_attention(*one_hot_rows(6), scale=1.0, visible=last(6, 4))
    assert result.flatten().tolist() == [0, 0, 0.25, 0.25, 0.25, 0.25]


def test_a3_window_of_one_is_the_last_row():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 1, 8), (1, 6, 1, 8), (1, 6, 1, 5)))
    result = decode_attention(q, k, v, scale=1.0, visible=last(6, 1))
    assert torch.equal(result.flatten(), v[0, -1, 0].float())


def test_a5_a_chunk_counts_the_window_as_a_step_does():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 6, 2, 8), (1, 6, 1, 8), (1, 6, 1, 8)))
    prompt = decode_attention(q, k, v, scale=0.3, window=3)
    for t in range(6):
        step = decode_attention(q[:, t], k[:, : t + 1], v[:, : t + 1], scale=0.3, window=3)
        assert torch.equal(prompt[:, t], step)


def test_a7_query_rows_see_what_serial_steps_see():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 2, 2, 8), (1, 6, 1, 8), (1, 6, 1, 8)))
    visible = torch.arange(6) <= torch.tensor([4, 5]).reshape(1, 2, 1)
    both = decode_attention(q, k, v, scale=0.3, visible=visible)
    assert torch.equal(both[:, 0], decode_attention(q[:, 0], k[:, :5], v[:, :5], scale=0.3))
    assert torch.equal(both[:, 1], decode_attention(q[:, 1], k, v, scale=0.3))


def plus_zero(tensor):
    return bool((tensor.view(torch.int32) == 0).all())


def test_a8_no_visible_row_is_plus_zero():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 2, 8), (1, 5, 1, 8), (1, 5, 1, 3)))
    out, lse = decode_attention(q, k, v, scale=1.0, visible=torch.zeros(1, 5).bool(), return_lse=True)
    assert plus_zero(out)
    assert lse.tolist() == [[-torch.inf, -torch.inf]]


def test_a9_empty_sequence_in_a_batch():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((3, 2, 8), (3, 3, 1, 8), (3, 3, 1, 4)))
    lengths = torch.tensor([3, 0, 2])
    visible = torch.arange(3) < lengths.unsqueeze(1)
    out, lse = decode_attention(q, k, v, scale=0.5, visible=visible, return_lse=True)
    assert plus_zero(out[1])
    assert lse[1].tolist() == [-torch.inf, -torch.inf]
    for b in (0, 2):
        n = int(lengths[b])
        alone = decode_attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], scale=0.5, return_lse=True)
        assert torch.equal(out[b : b + 1], alone[0])
        assert torch.equal(lse[b : b + 1], alone[1])
    no_rows = decode_attention(q, k[:, :0], v[:, :0], scale=0.5)
    assert plus_zero(no_rows)


def test_b1_merge_of_two_empty_states():
    empty = Partial.empty((1, 2), 4)
    merged = merge(empty, empty)
    assert merged.equal(empty)
    assert plus_zero(finish(merged))
    assert log_sum_exp(merged).tolist() == [[-torch.inf, -torch.inf]]


def test_b3_a_chunk_without_rows_is_neutral():
    """Two requests in two chunks; the second one has no row in the first chunk."""
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((2, 2, 8), (2, 5, 1, 8), (2, 5, 1, 4)))
    first, second = torch.tensor([[True] * 3, [False] * 3]), torch.ones(2, 2).bool()
    empty = decode_attention(q, k[:, :3], v[:, :3], scale=0.5, visible=first, partial=True)
    assert log_sum_exp(empty)[1].tolist() == [-torch.inf, -torch.inf]
    chunks = merge(empty, decode_attention(q, k[:, 3:], v[:, 3:], scale=0.5, visible=second, partial=True))
    whole = decode_attention(q, k, v, scale=0.5, visible=torch.cat([first, second], dim=1))
    assert torch.equal(finish(chunks), whole)


def test_b5_base_of_log_sum_exp_has_no_part_in_a_merge():
    q = torch.zeros(1, 1, 4, dtype=bf16)
    for rows, expected in ((3, 0.25), (1023, 2.0**-10)):
        k = torch.ones(1, rows, 1, 4, dtype=bf16)
        prefix = decode_attention(q, k, torch.zeros(1, rows, 1, 1, dtype=bf16), scale=1.0, partial=True)
        suffix = decode_attention(q, k[:, :1], torch.ones(1, 1, 1, 1, dtype=bf16), scale=1.0, partial=True)
        assert finish(merge(prefix, suffix)).item() == expected


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("empty_first_split", [False, True])
def test_b6_sink_counts_once_over_splits(empty_first_split, softcap):
    def attend(rows, **options):
        rows = slice(rows, rows + 1) if isinstance(rows, int) else rows
        return decode_attention(q, k[:, rows], v[:, rows], scale=1.0, softcap=softcap, **options)

    q, k = torch.zeros(1, 1, 4, dtype=bf16), torch.ones(1, 3, 1, 4, dtype=bf16)
    v, sinks = torch.ones(1, 3, 1, 2, dtype=bf16), torch.zeros(1)
    parts = [attend(i, sinks=sinks if i == 0 else None, partial=True) for i in range(3)]
    if empty_first_split:  # the split that has the sink has no row, as a window leaves it
        hidden = torch.zeros(1, 1).bool()
        parts.insert(0, attend(0, sinks=sinks, visible=hidden, partial=True))
        parts[1] = attend(0, partial=True)
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    assert finish(whole).flatten().tolist() == [0.75, 0.75]
    assert torch.equal(finish(whole), attend(slice(None), sinks=sinks))


@pytest.mark.parametrize("preset", PRESETS)
def test_b7_sink_counts_with_narrow_formats(preset):
    rows, form = torch.ones(1, 3, 1, 4), PRESETS[preset]
    arguments = attention_arguments(quantise(rows, form.k), quantise(rows, form.v))
    q = torch.zeros(1, 1, 4, dtype=bf16)
    with_sink, without = (
        decode_attention(q, scale=1.0, sinks=sinks, **arguments) for sinks in (torch.zeros(1), None)
    )
    assert torch.allclose(with_sink, without * 0.75, rtol=1e-6)
    assert torch.allclose(without, torch.ones(4), rtol=0.15)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7])
def test_b9_any_number_of_splits(splits):
    """Pages of 16 rows, every context from 1 to 70: rows dealt to splits by page."""
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 2, 8), (1, 70, 1, 8), (1, 70, 1, 4)))
    owner = torch.arange(70) // 16 % splits
    for rows in range(1, 71):
        seen = torch.arange(70) < rows
        whole = decode_attention(q, k[:, :rows], v[:, :rows], scale=0.5)
        parts = [
            decode_attention(q, k, v, scale=0.5, visible=(seen & (owner == one)).unsqueeze(0), partial=True)
            for one in range(splits)
        ]
        merged = parts[0]
        for part in parts[1:]:
            merged = merge(merged, part)
        assert torch.equal(finish(merged), whole)


def test_b11_sequences_of_a_batch_merge_apart():
    q, k = torch.zeros(2, 1, 4, dtype=bf16), torch.ones(2, 4, 1, 4, dtype=bf16)
    v = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 4, 1, 1).to(bf16)
    parts = [
        decode_attention(q, k[:, rows], v[:, rows], scale=1.0, partial=True)
        for rows in (slice(3), slice(3, 4))
    ]
    assert finish(merge(*parts)).flatten().tolist() == [1.0, 3.0]


def test_b13_many_equal_weights_are_not_lost():
    for rows in (1024, 4096):
        ones = torch.ones(1, rows, 1, 2, dtype=torch.float16)
        q = torch.ones(1, 1, 2, dtype=torch.float16)
        assert decode_attention(q, ones, ones, scale=1.0).flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c1_stale_rows_of_a_page_never_matter(stale, dtype):
    q, k, v = (torch.randn(shape).to(dtype) for shape in ((1, 2, 8), (1, 4, 1, 8), (1, 4, 1, 8)))
    clean = decode_attention(q, k[:, :1], v[:, :1], scale=1.0)
    k[:, 1:], v[:, 1:] = stale, stale
    assert torch.equal(
        decode_attention(q, k, v, scale=1.0, visible=torch.tensor([[1, 0, 0, 0]]).bool()), clean
    )


def test_c3_a_hidden_row_is_left_out_not_added_to():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 2, 8), (1, 4, 1, 8), (1, 4, 1, 8)))
    k[:, 2:] = torch.nan  # of the K rows alone
    hidden = torch.tensor([[True, True, False, False]])
    clean = decode_attention(q, k[:, :2], v[:, :2], scale=1.0)
    assert torch.equal(decode_attention(q, k, v, scale=1.0, visible=hidden), clean)
    assert torch.equal(decode_attention(q, k, v, scale=1.0, ranges=[(0, 2)]), clean)


def test_c7_specials_in_visible_rows_are_defined():
    q = torch.ones(1, 1, 2, dtype=bf16)
    k, v = torch.ones(1, 3, 1, 2, dtype=bf16), torch.ones(1, 3, 1, 2, dtype=bf16)
    k[0, 2, 0, 0] = torch.inf
    assert decode_attention(q, k, v, scale=1.0).isnan().all()
    k[0, 2, 0, 0] = -torch.inf  # drops the row, whatever its V row holds
    v[0, 2] = torch.nan
    assert decode_attention(q, k, v, scale=1.0).flatten().tolist() == [1.0, 1.0]
    v[0, 1, 0, 0] = torch.nan
    result = decode_attention(q, k, v, scale=1.0).flatten()
    assert result[0].isnan()
    assert result[1] == 1.0
    v[0, :2, 0, 0] = -0.0
    assert plus_zero(decode_attention(q, k, v, scale=1.0)[..., 0])


def test_d1_heads_of_a_group_are_neighbours():
    v = torch.tensor([1.0, 2.0]).reshape(1, 1, 2, 1).to(bf16)
    result = decode_attention(torch.ones(1, 4, 1, dtype=bf16), torch.ones_like(v), v, scale=1.0)
    assert result.flatten().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(12, 12), (9, 3), (32, 8), (28, 4), (4, 1), (5, 1)])
def test_d2_kv_head_of_a_query_head(q_heads, kv_heads):
    v = torch.arange(kv_heads).reshape(1, 1, kv_heads, 1).to(bf16)
    result = decode_attention(torch.ones(1, q_heads, 1, dtype=bf16), torch.ones_like(v), v, scale=1.0)
    assert result.flatten().tolist() == [h // (q_heads // kv_heads) for h in range(q_heads)]


@pytest.mark.parametrize("dim", [1, 16, 32, 40, 48, 59, 64, 80, 96, 111, 112, 128, 160, 192, 256])
def test_d3_any_head_dimension(dim):
    q, k = torch.ones(1, 1, dim, dtype=bf16), torch.zeros(1, 2, 1, dim, dtype=bf16)
    k[0, 1, 0, -1] = 30  # the last element decides
    v = torch.zeros(1, 2, 1, dim, dtype=bf16)
    v[0, 1] = 1
    assert (decode_attention(q, k, v, scale=1.0) == 1).all()


def test_d4_dot_product_beyond_fp16():
    q = torch.full((1, 1, 64), 128.0, dtype=torch.float16)
    k = torch.stack([q, q / 2], dim=1)
    v = torch.tensor([3.0, 5.0], dtype=torch.float16).reshape(1, 2, 1, 1)
    assert decode_attention(q, k, v, scale=1.0).item() == 3.0
    out, lse = decode_attention(q, k, v, scale=2.0**-20, return_lse=True)
    exact = torch.tensor([1.0, 0.5]).double().softmax(0) @ torch.tensor([3.0, 5.0]).double()
    assert abs(out.item() - exact.item()) < 1e-5
    assert abs(lse.item() - torch.tensor([1.0, 0.5]).logsumexp(0).item()) < 1e-5


def test_d5_values_at_the_edge_of_fp16():
    v = torch.full((1, 8, 1, 2), 60000.0, dtype=torch.float16)
    q = torch.zeros(1, 1, 2, dtype=torch.float16)
    result = decode_attention(q, torch.ones_like(v), v, scale=1.0, out_dtype=torch.float16)
    assert result.flatten().tolist() == [60000.0, 60000.0]


def test_d7_softcap_comes_after_the_scale_and_before_the_mask():
    q, k = torch.full((1, 1, 1), 20.0, dtype=bf16), torch.ones(1, 2, 1, 1, dtype=bf16)
    options = {"scale": 0.5, "softcap": 2.0, "visible": torch.tensor([[True, False]]), "return_lse": True}
    out, lse = decode_attention(q, k, k, **options)
    assert out.item() == 1.0
    assert abs(lse.item() - 1.99982) < 1e-5
    none = decode_attention(q, k, k, **options | {"visible": torch.zeros(1, 2).bool()})
    assert plus_zero(none[0])
    assert none[1].item() == -torch.inf


def test_d9_scales_per_head_are_used_once_each():
    k = torch.tensor([[0x48, 0], [0, 0x50]], dtype=torch.uint8).reshape(1, 2, 1, 2)  # 4 and 8
    v = torch.tensor([0x38, 0x44], dtype=torch.uint8).reshape(1, 2, 1, 1)  # 1 and 3
    result = decode_attention(
        torch.ones(1, 1, 2, dtype=bf16),
        k,
        v,
        scale=1.0,
        k_format="fp8_e4m3",
        k_scale=torch.tensor([0.25]),
        v_scale=torch.tensor([0.5]),
    )
    assert abs(result.item() - 1.23106) < 1e-5


def test_d11_casts_of_e4m3_saturate():
    """Rows beyond 448 become 448, infinities too; NaN stays NaN. No framework's cast has a say in it."""
    numbers = torch.tensor([449.0, 464.0, 480.0, torch.inf, torch.nan]).view(1, 1, 1, 5)
    rows = quantise(numbers, RowFormat("fp8_e4m3"))
    v = decode_attention(
        torch.ones(1, 1, 1, dtype=bf16), torch.ones(1, 1, 1, 1, dtype=bf16), rows.codes, scale=1.0,
        v_format="fp8_e4m3",
    ).flatten()  # fmt: skip
    assert v[:4].tolist() == [448.0] * 4
    assert v[4].isnan()


def test_d13_value_dimension_of_its_own():
    result = decode_attention(
        torch.ones(1, 2, 16, dtype=bf16),
        torch.ones(1, 3, 1, 16, dtype=bf16),
        torch.ones(1, 3, 1, 8, dtype=bf16),
        scale=1.0,
    )
    assert result.shape == (1, 2, 8)
    assert (result == 1).all()


def test_g1_company_in_a_batch_changes_nothing():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((4, 4, 16), (4, 300, 2, 16), (4, 300, 2, 16)))
    lengths = torch.tensor([300, 1, 17, 130])
    together = decode_attention(q, k, v, scale=0.25, visible=torch.arange(300) < lengths.unsqueeze(1))
    for b, n in enumerate(lengths.tolist()):
        alone = decode_attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], scale=0.25)
        assert torch.equal(together[b : b + 1], alone)


def test_g7_length_of_the_cache_changes_nothing():
    q, k, v = (torch.randn(shape).to(bf16) for shape in ((1, 4, 16), (1, 300, 2, 16), (1, 300, 2, 16)))
    short = decode_attention(q, k[:, :200], v[:, :200], scale=0.25)
    assert torch.equal(
        decode_attention(q, k, v, scale=0.25, visible=torch.arange(300).unsqueeze(0) < 200), short
    )
