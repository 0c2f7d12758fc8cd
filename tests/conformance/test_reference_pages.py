"""Page summaries and selection against the oracle, and against attention over all rows."""

import random

import oracle
import pytest
import torch
from contract_cases import Sizes, random_cases, seed_of_run
from nearkv.reference import decode_attention, finish, merge, page_summaries, select_pages
from nearkv_hw.abi.numerics import SCORE_LIMIT
from test_reference_oracle import FORMAT_OF, codes, decoded_rows

bf16 = torch.bfloat16
K_OPTIONS = ("k_format", "k_scales", "k_lut", "scale_block", "scale_format")


def cases(count, largest):
    """Random cases with the options that concern K, and a page size."""
    rng = random.Random(seed_of_run())
    for case in random_cases(rng.getrandbits(32), count, largest):
        case.options.setdefault("scale_block", None)
        case.options.setdefault("scale_format", None)
        yield case, {name: case.options.get(name) for name in K_OPTIONS}, rng.choice((1, 2, 4, 7)), rng


def test_summaries_and_selection_are_the_oracles():
    for case, options, page_rows, rng in cases(150, Sizes(rows=12)):
        summaries = page_summaries(case.k, page_rows=page_rows, **options)
        batch, rows, kv_heads, _ = case.k.shape
        name = summaries.format.name
        assert name == (options["k_format"] if options["k_format"] in ("bf16", "fp16") else "bf16")
        pages = -(-rows // page_rows)
        q = codes(case.q) if case.q.dim() == 4 else codes(case.q).unsqueeze(1)
        group = q.shape[2] // kv_heads
        call = {"scale": case.options["scale"], "k_scale": case.options.get("k_scale")}
        call["softcap"] = case.options.get("softcap")
        count = rng.randint(1, pages + 2)
        candidates = (
            torch.rand(batch, pages, generator=torch.Generator().manual_seed(rng.getrandbits(32))) < 0.7
        )
        found = select_pages(case.q, summaries, count=count, candidates=candidates, **call)
        assert found.page_rows == page_rows
        for b in range(batch):
            own = candidates[b].nonzero().flatten().tolist()
            for h in range(kv_heads):
                decoded = decoded_rows(case, "k", b, h)
                k_scale = 1.0 if call["k_scale"] is None else call["k_scale"][h].item()
                c = (
                    oracle.factor(call["scale"], k_scale)
                    if call["softcap"] is None
                    else oracle.capped_factor(call["scale"], call["softcap"], k_scale)
                )
                bounds = []
                for page in range(pages):
                    wanted = oracle.summary(name, decoded[page * page_rows : (page + 1) * page_rows])
                    stored = [codes(x[b, page, h]).tolist() for x in (summaries.least, summaries.largest)]
                    assert stored == list(wanted), case.describe()
                    least, largest = (oracle.decode_row(name, side) for side in wanted)
                    queries = [
                        oracle.decode_row(FORMAT_OF[case.q.dtype], q[b, t, h * group + g].tolist())
                        for t in range(q.shape[1])
                        for g in range(group)
                    ]
                    bounds.append(max(oracle.bound(query, least, largest, c) for query in queries))
                assert found.bounds[b, h].tolist() == bounds, case.describe()
                assert found.numbers()[b][h] == oracle.select(bounds, count, own)


def test_all_pages_are_dense():
    """With every page selected, the bits are those of attention without any selection."""
    for case, options, page_rows, _ in cases(60, Sizes(rows=20)):
        for name in ("pages", "page_rows"):
            case.options.pop(name, None)
        summaries = page_summaries(case.k, page_rows=page_rows, **options)
        every = select_pages(case.q, summaries, scale=1.0, count=1 << 20)
        assert bool(every.pages.all())
        dense = case.partial()
        case.options |= {"pages": every.pages, "page_rows": page_rows}
        assert case.partial().equal(dense), case.describe()


def random_rows(rows, kv_heads=2, group=2, dim=16, batch=2):
    torch.manual_seed(seed_of_run())
    q = torch.randn(batch, kv_heads * group, dim).to(bf16)
    return q, *(torch.randn(batch, rows, kv_heads, dim).to(bf16) for _ in range(2))


@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_a_bound_is_one(scale):
    """No row of a page scores higher, but for what a binned sum cuts off."""
    q, k, _ = random_rows(40)
    found = select_pages(q, page_summaries(k, page_rows=8), scale=scale, count=2)
    for b in range(2):
        for h in range(2):
            for page in range(5):
                best = -SCORE_LIMIT
                for r in range(page * 8, page * 8 + 8):
                    row = oracle.decode_row("bf16", codes(k)[b, r, h].tolist())
                    for head in (2 * h, 2 * h + 1):
                        query = oracle.decode_row("bf16", codes(q)[b, head].tolist())
                        best = max(best, oracle.score(query, row, oracle.factor(scale)))
                assert best <= int(found.bounds[b, h, page]) + 1


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_page_of_the_best_row_is_found(scale):
    q, k, v = random_rows(64, batch=1)
    for h, row in ((0, 17), (1, 50)):
        k[0, row, h] = q[0, 2 * h] * (4 * scale)  # the row that the head's first query head looks for
    found = select_pages(q, page_summaries(k, page_rows=8), scale=scale, count=2)
    assert found.numbers() == [[[2, 7], [6, 7]]]
    out = decode_attention(q, k, v, scale=scale, pages=found.pages, page_rows=8)
    dense = decode_attention(q, k, v, scale=scale)
    assert torch.allclose(out[0, ::2], dense[0, ::2], atol=1e-3)


def test_ties_go_to_the_lower_page_and_the_newest_is_always_there():
    q, k = torch.zeros(1, 1, 4).to(bf16), torch.randn(1, 50, 1, 4).to(bf16)
    summaries = page_summaries(k, page_rows=8)
    for count, wanted in ((1, [6]), (2, [0, 6]), (4, [0, 1, 2, 6]), (7, [*range(7)]), (99, [*range(7)])):
        assert select_pages(q, summaries, scale=1.0, count=count).numbers() == [[wanted]]
    seen = torch.tensor([[False, True, True, False, True, False, False]])
    found = select_pages(q, summaries, scale=1.0, count=2, candidates=seen)
    assert found.numbers() == [[[1, 4]]]
    none = select_pages(q, summaries, scale=1.0, count=2, candidates=torch.zeros_like(seen))
    assert none.numbers() == [[[]]]


@pytest.mark.parametrize("stray", [torch.nan, torch.inf, -torch.inf])
def test_a_page_that_makes_the_result_nan_is_not_left_out(stray):
    q, k, v = random_rows(32, kv_heads=1, group=1, batch=1)
    k[0, 9, 0, 3] = stray
    q[0, 0, 3] = 1.0 if stray > 0 else -1.0
    found = select_pages(q, page_summaries(k, page_rows=8), scale=1.0, count=2)
    assert found.numbers() == [[[1, 3]]]
    assert decode_attention(q, k, v, scale=1.0, pages=found.pages, page_rows=8).isnan().all()


def test_a_page_that_holds_no_weight_is_last():
    q, k, _ = random_rows(32, kv_heads=1, group=1, batch=1)
    q[0, 0, 3] = 1.0
    k[0, :8, 0, 3] = -torch.inf
    found = select_pages(q, page_summaries(k, page_rows=8), scale=1.0, count=3)
    assert found.numbers() == [[[1, 2, 3]]]
    assert int(found.bounds[0, 0, 0]) == -SCORE_LIMIT


def test_query_rows_and_heads_of_a_group_select_together():
    q, k, _ = random_rows(64, kv_heads=1, group=4, batch=1)
    summaries = page_summaries(k, page_rows=4)
    several = q.view(1, 2, 2, 16)  # two query rows of two heads
    apart = [select_pages(q[:, h : h + 1], summaries, scale=1.0, count=1).bounds for h in range(4)]
    both = select_pages(several, summaries, scale=1.0, count=3)
    assert torch.equal(both.bounds, torch.stack(apart).amax(0))
    assert torch.equal(both.pages, select_pages(q, summaries, scale=1.0, count=3).pages)


def test_parts_of_a_selection_merge():
    """Channels with pages of their own return partials of the selected ones."""
    q, k, v = random_rows(40)
    found = select_pages(q, page_summaries(k, page_rows=4), scale=0.5, count=4)
    whole = decode_attention(q, k, v, scale=0.5, pages=found.pages, page_rows=4)
    channel = torch.arange(10) % 2
    parts = [
        decode_attention(q, k, v, scale=0.5, pages=found.pages & (channel == c), page_rows=4, partial=True)
        for c in range(2)
    ]
    assert torch.equal(finish(merge(*parts)), whole)


def test_summaries_grow_with_a_page():
    """The summary of a page is that of its rows so far: a running least and largest."""
    _, k, _ = random_rows(8)
    for rows in range(1, 9):
        summaries = page_summaries(k[:, :rows], page_rows=8)
        assert torch.equal(summaries.least.view(bf16)[:, 0], k[:, :rows].amin(1))
        assert torch.equal(summaries.largest.view(bf16)[:, 0], k[:, :rows].amax(1))
    assert page_summaries(k[:, :0], page_rows=8).least.shape == (2, 0, 2, 16)


def test_what_bf16_does_not_hold_is_rounded_outward():
    scales = torch.tensor([[[[1 + 2.0**-10]]]], dtype=torch.float16)
    k = torch.tensor([[[[1, 0xFF]]]], dtype=torch.uint8)  # 1 and -1
    summaries = page_summaries(k, page_rows=4, k_format="int8", k_scales=scales)
    assert summaries.least.view(bf16).flatten().tolist() == [1.0, -1.0078125]
    assert summaries.largest.view(bf16).flatten().tolist() == [1.0078125, -1.0]
    huge = page_summaries(
        torch.tensor([[[[0x7B, 0xFB]]]], dtype=torch.uint8), page_rows=4, k_format="fp8_e5m2",
        k_scales=torch.tensor([[[[0x7F00]]]], dtype=torch.int16), scale_format="bf16",
    )  # fmt: skip
    assert huge.largest.view(bf16).flatten().tolist() == [torch.inf, -torch.finfo(bf16).max]
    assert huge.least.view(bf16).flatten().tolist() == [torch.finfo(bf16).max, -torch.inf]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1, .*, got 0"),
        ({"q": torch.ones(1, 2, 4)}, TypeError, "q must be bfloat16 or float16, not torch.float32"),
        (
            {"q": torch.ones(1, 3, 4).to(bf16)},
            ValueError,
            r"q of shape \(1, 3, 4\) does not fit .* 2 KV heads",
        ),
        ({"q": torch.ones(2, 2, 4).to(bf16)}, ValueError, "does not fit summaries of batch 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be above 0"),
        ({"scale": torch.inf}, ValueError, "must be finite in float32"),
        (
            {"candidates": torch.ones(1, 4)},
            ValueError,
            r"candidates must be bool \(1, 3\), got torch.float32 \(1, 4\)",
        ),
    ],
)
def test_refused(changes, error, message):
    summaries = page_summaries(torch.ones(1, 5, 2, 4).to(bf16), page_rows=2)
    arguments = {"q": torch.ones(1, 2, 4).to(bf16), "scale": 1.0, "count": 1}
    with pytest.raises(error, match=message):
        select_pages(summaries=summaries, **arguments | changes)


def test_refused_summaries():
    with pytest.raises(ValueError, match="page_rows must be at least 1, got 0"):
        page_summaries(torch.ones(1, 5, 2, 4).to(bf16), page_rows=0)
    with pytest.raises(ValueError, match="k_format must be one of"):
        page_summaries(torch.ones(1, 5, 2, 4).to(bf16), page_rows=4, k_format="fp9")
