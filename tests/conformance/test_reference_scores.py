"""Softcap and ALiBi: tables and interpolation against the oracle, their own errors, and what specials do."""

import random

import oracle
import pytest
import torch
from contract_cases import seed_of_run
from nearkv.reference import decode_attention, score_factor
from nearkv.reference.alibi import alibi_bits, biased
from nearkv.reference.softcap import capped, softcap_bits
from nearkv_hw.abi.numerics import SCORE_LIMIT, TANH_TABLE

ONE = 1 << 26
"""U and tanh have 26 fraction bits."""


def arguments(rng, count):
    """Places in every segment, its ends included, and beyond them."""
    edges = [
        begin + offset for begin, width, *_ in oracle.SEGMENTS for offset in (0, 1, width // 2, width - 1)
    ]
    beyond = [16 * ONE, 16 * ONE + 1, 1 << 42, SCORE_LIMIT]
    return torch.tensor([*edges, *beyond, *(rng.randrange(16 * ONE) for _ in range(count))])


def test_table_is_the_oracles():
    assert list(TANH_TABLE) == [segment[2:] for segment in oracle.SEGMENTS]


@pytest.mark.parametrize("cap", [1e-30, 0.02, 2.0, 5.0, 30.0, 50.0, 100.0, 709.78])
def test_caps_are_the_oracles(cap):
    rng = random.Random(seed_of_run())
    u = arguments(rng, 500)
    wanted = [oracle.capped(x, oracle.cap_factor(cap)) for x in u.tolist()]
    assert capped(u, softcap_bits(cap)).tolist() == wanted
    assert capped(-u, softcap_bits(cap)).tolist() == [-s for s in wanted]


def test_caps_end_at_the_cap():
    """From u = 16 on a score is C2; at u = 0 it is 0."""
    c2 = oracle.cap_factor(50.0)
    highest = oracle.nearest(c2[1], c2[2] + 20)
    u = torch.tensor([0, 16 * ONE, 1 << 40, SCORE_LIMIT])
    assert capped(u, softcap_bits(50.0)).tolist() == [0, highest, highest, highest]


def test_tanh_is_near_and_never_falls_by_more_than_a_unit():
    u = arguments(random.Random(seed_of_run()), 1_000_000).sort().values
    t = capped(u, softcap_bits(1024 / 1.4426950408889634))  # C2 = 2^10: S is 16 units a unit of T
    error = (t.double() / (16 * ONE) - torch.tanh(u.double() / ONE)).abs().max().item()
    assert error < 9e-8
    assert t.diff().min() >= -16
    assert t.max() == 16 * ONE


@pytest.mark.slow
def test_tanh_of_every_argument():
    step, worst, largest = 1 << 22, 0.0, 0
    for begin in range(0, 16 * ONE, step):
        u = torch.arange(begin, begin + step)
        t = capped(u, softcap_bits(1024 / 1.4426950408889634))
        worst = max(worst, (t.double() / (16 * ONE) - torch.tanh(u.double() / ONE)).abs().max().item())
        largest = max(largest, int(t.max()))
    assert worst < 9e-8
    assert largest == 16 * ONE


@pytest.mark.parametrize("slope", [0.0, -0.0, 0.5, -0.75, 2.0**-8, 1e-6, 1e-40, 3e30, -3e30])
def test_biases_are_the_oracles(slope):
    rng = random.Random(seed_of_run())
    distances = [
        0,
        1,
        -1,
        (1 << 23) - 1,
        1 - (1 << 23),
        *(rng.randrange(-(1 << 23), 1 << 23) for _ in range(200)),
    ]
    scores = [0, SCORE_LIMIT, -SCORE_LIMIT, *(rng.randrange(-(1 << 43), 1 << 43) for _ in range(202))]
    bits = torch.tensor(alibi_bits(slope)).to(torch.int32)
    found = biased(torch.tensor(scores), bits, torch.tensor(distances))
    factor = oracle.slope_factor(slope)
    assert found.tolist() == [oracle.biased(s, factor, d) for s, d in zip(scores, distances, strict=True)]


# --- whole calls

bf16 = torch.bfloat16


def exact(q, k, v, scale, softcap, slopes, distances):
    """The formula in double."""
    group = q.shape[1] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bhd,brhd->bhr", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.double().view(1, -1, 1) * distances.double()
    return torch.einsum("bhr,brhd->bhd", scores.softmax(-1), v)


@pytest.mark.parametrize("softcap", [None, 5.0, 50.0, 100.0])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.0625, 2.0**-8, 1e-4])])
@pytest.mark.parametrize("spread", [0.3, 2.0, 10.0, 40.0])
def test_error_against_double(softcap, slopes, spread):
    """2e-5 is what the two may add; with the plain contract's own error."""
    generator = torch.Generator().manual_seed(seed_of_run())
    q = (torch.randn(1, 4, 64, generator=generator) * spread).to(bf16)
    k, v = (torch.randn(1, 2048, 2, 64, generator=generator).to(bf16) for _ in range(2))
    found = decode_attention(q, k, v, scale=0.125, softcap=softcap, alibi_slopes=slopes).double()
    wanted = exact(q, k, v, 0.125, softcap, slopes, torch.arange(2048) - 2047)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-5


def rows_of_ones(scores):
    """A query, and K rows of head_dim 1 whose dot products are `scores`; V rows are one-hot."""
    q, rows = torch.ones(1, 1, 1, dtype=bf16), len(scores)
    return (
        q,
        torch.tensor(scores).view(1, rows, 1, 1).to(bf16),
        torch.eye(rows).view(1, rows, 1, rows).to(bf16),
    )


def test_an_infinite_score_is_the_cap():
    q, k, v = rows_of_ones([torch.inf, 1e30, -torch.inf, -1e30])
    result = decode_attention(q, k, v, scale=1.0, softcap=2.0).flatten()
    assert torch.equal(result[[0, 2]], result[[1, 3]])
    assert abs(float(result[2] / result[0]) - torch.tensor(-4.0).exp().item()) < 1e-5
    v[0, 2, 0, 3] = torch.inf  # the row of -Inf is looked at
    assert decode_attention(q, k, v, scale=1.0, softcap=2.0).flatten()[3] == torch.inf
    turned = decode_attention(q, k, v[:, :, :, :1], scale=-1.0, softcap=2.0)
    assert abs(float(turned) - float(result[2])) < 1e-6


@pytest.mark.parametrize("scores", [[torch.nan, 1.0], [0.0, torch.nan]])
def test_a_cap_keeps_nan(scores):
    assert decode_attention(*rows_of_ones(scores), scale=1.0, softcap=2.0).isnan().all()


def test_an_infinity_meets_no_factor_under_a_cap():
    assert decode_attention(*rows_of_ones([torch.inf, 1.0]), scale=0.0, softcap=2.0).isnan().all()


def test_a_sink_is_neither_capped_nor_biased():
    q, k, v = rows_of_ones([0.0])
    _, lse = decode_attention(
        q,
        k,
        v,
        scale=1.0,
        softcap=0.5,
        alibi_slopes=torch.ones(1),
        sinks=torch.tensor([3.0]),
        return_lse=True,
    )
    assert abs(lse.item() - torch.tensor([0.0, 3.0]).logsumexp(0).item()) < 1e-5


def test_a_bias_keeps_a_dropped_row_dropped():
    q, k, v = rows_of_ones([-torch.inf, 0.0])
    slopes = torch.tensor([-3e30])  # the first row would get the largest score there is
    assert decode_attention(q, k, v, scale=1.0, alibi_slopes=slopes).flatten().tolist() == [0.0, 1.0]


def test_cap_and_bias_of_a_distance_alone():
    """Two far rows of one dot product differ by slope * distance, whatever the positions' origin."""
    q, k, v = rows_of_ones([7.0, 7.0])
    slopes, query = torch.tensor([2.0**-20]), torch.tensor([(1 << 23) - 1])
    rows = torch.tensor([0, (1 << 23) - 1])
    result = decode_attention(
        q, k, v, scale=1.0, softcap=3.0, alibi_slopes=slopes, query_positions=query, row_positions=rows
    ).flatten()
    assert abs(float(result[0] / result[1]) - torch.tensor(-8.0).exp().item()) < 1e-7


def test_positions_without_any_given():
    """The last query row stands at the last row."""
    generator = torch.Generator().manual_seed(seed_of_run())
    q = torch.randn(2, 3, 4, 8, generator=generator).to(bf16)
    k, v = (torch.randn(2, 7, 2, 8, generator=generator).to(bf16) for _ in range(2))
    slopes = torch.tensor([0.5, 0.25, 0.125, -0.1])
    found = decode_attention(q, k, v, scale=0.3, alibi_slopes=slopes)
    for t in range(3):
        alone = exact(q[:, t], k, v, 0.3, None, slopes, torch.arange(7) - (7 - 3 + t))
        assert torch.allclose(found[:, t].double(), alone, rtol=0, atol=1e-5)
    given = decode_attention(q, k, v, scale=0.3, alibi_slopes=slopes, query_positions=torch.arange(4, 7))
    assert torch.equal(found, given)


def test_factor_of_a_capped_score():
    assert score_factor(0.5, 0.25, softcap=3.0) == oracle.float32_code(0.5 / 3.0 * 64 * 0.25)
    assert oracle.decode("fp32", score_factor(1.0, softcap=64.0)) == (0, 1 << 23, -23)
