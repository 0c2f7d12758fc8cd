"""What `attend` can be asked for, each by itself: results, what the device does, and what comes back."""

import nearkv
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.errors import ArgumentError, DeviceError, ShapeError
from nearkv.quantise import PRESETS, quantise
from nearkv.reference import decode_attention, finish, merge, page_summaries, select_pages
from nearkv_hw.abi import Feature

SCALE = 0.4


@pytest.fixture
def setting(model):
    """Two sequences of 40 and 23 rows, their rows, and a cache that keeps summaries."""
    contexts = [context(n, 2, 24, 40, seed=n) for n in (40, 23)]
    kv = model.kv_cache(
        layers=1, kv_heads=2, head_dim=24, value_dim=40, dtype="fp16", page_rows=4, summaries=True
    )
    return kv, filled(kv, contexts), contexts


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(setting, softcap):
    kv, handles, contexts = setting
    q = values(2, 6, 24, seed=3)
    out = kv.attend(handles, layer=0, q=q, scale=SCALE, softcap=softcap)
    assert same_bits(out, expected(q, contexts, scale=SCALE, softcap=softcap))


@pytest.mark.parametrize("query_rows", [None, 3])
def test_alibi(setting, query_rows):
    kv, handles, contexts = setting
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(6)])
    q = values(2, *([query_rows] if query_rows else []), 6, 24, seed=3)
    out = kv.attend(handles, layer=0, q=q, scale=SCALE, alibi_slopes=slopes)
    wanted = expected(q, contexts, scale=SCALE, alibi_slopes=slopes, causal=bool(query_rows))
    assert same_bits(out, wanted)


@pytest.mark.parametrize("query_rows", [1, 2, 5, 300])
def test_query_rows_are_one_job_of_a_head(setting, query_rows):
    """Query rows are aligned with the last rows; more than 255 are several jobs."""
    kv, handles, contexts = setting
    q = values(2, query_rows, 4, 24, seed=3)
    before = kv._totals.jobs
    out = kv.attend(handles, layer=0, q=q, scale=SCALE)
    assert kv._totals.jobs - before == 2 * 2 * -(-query_rows // 255)
    assert same_bits(out, expected(q, contexts, scale=SCALE, causal=True))


@pytest.mark.parametrize("query_rows", [None, 2, 260])
def test_more_queries_than_a_job_takes(model, query_rows):
    """150 query heads for a KV head are two jobs, so are 260 query rows; their areas may exceed an extent."""
    k, v = context(20, 2, 16, 16, seed=1)
    q = values(1, *([query_rows] if query_rows else []), 300, 16, seed=2)
    slopes, sinks = torch.linspace(0.01, 1, 300), torch.linspace(-1, 1, 300)
    options = {"scale": SCALE, "alibi_slopes": slopes, "sinks": sinks, "softcap": 5.0}
    with model.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="fp16", page_rows=4) as kv:
        (handle,) = filled(kv, [(k, v)])
        before = kv._totals.jobs
        out = kv.attend([handle], layer=0, q=q, **options)
        assert kv._totals.jobs - before == 2 * 2 * -(-(query_rows or 1) // 255)
    assert same_bits(out, expected(q, [(k, v)], causal=query_rows is not None, **options))


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("query_rows", [None, 4])
def test_windows_with_kept_rows(setting, query_rows, kept):
    kv, handles, contexts = setting
    q = values(2, *([query_rows] if query_rows else []), 4, 24, seed=3)
    out = kv.attend(handles, layer=0, q=q, scale=SCALE, window=7, kept_rows=kept)
    assert same_bits(out, expected(q, contexts, scale=SCALE, window=7, kept_rows=kept))


def test_a_window_streams_its_rows_alone(setting, model):
    kv, handles, _ = setting
    q = values(1, 2, 24, seed=3)
    lines = []
    for options in (
        {},
        {"window": 8},
        {"window": 8, "kept_rows": 4},
        {"visible": torch.arange(40)[None] % 8 < 4},
    ):
        before = model.stats()
        kv.attend(handles[:1], layer=0, q=q, **options)
        lines.append((model.stats() - before).attention_lines)
    row = 1 + 2
    assert lines == [2 * 40 * row, 2 * 8 * row, 2 * 12 * row, 2 * 20 * row]


@pytest.mark.parametrize("several", [False, True])
def test_trees(setting, several):
    """A draft of six tokens in three branches, at their depths, for both sequences or one for each."""
    kv, handles, contexts = setting
    parents = [-1, 0, 0, 1, 2, 2]
    tree = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node] |= tree[parent]
    depth = tree.sum(1) - 1
    q = values(2, 6, 4, 24, seed=3)
    slopes = torch.linspace(0.01, 0.5, 4)
    given = torch.stack([tree, tree.flip(0).flip(1)]) if several else tree
    positions = torch.stack([len(k) - 6 + depth for k, _ in contexts])
    out = kv.attend(
        handles,
        layer=0,
        q=q,
        scale=SCALE,
        tree=given,
        query_positions=positions,
        alibi_slopes=slopes,
        window=30,
    )
    for i, (k, v) in enumerate(contexts):
        wanted = decode_attention(
            q[i : i + 1], k[None], v[None], scale=SCALE, tree=given[i] if several else given,
            query_positions=positions[i], alibi_slopes=slopes, window=30,
        )  # fmt: skip
        assert same_bits(out[i : i + 1], wanted)


def test_a_mask_for_each_query_row(setting, model):
    """Each query row becomes a job of its own, over the runs of rows that it sees."""
    kv, handles, contexts = setting
    q = values(2, 3, 4, 24, seed=3)
    visible = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[1, :, 23:] = False
    before = model.stats()
    out = kv.attend(handles, layer=0, q=q, scale=SCALE, visible=visible)
    spent = model.stats() - before
    assert (spent.attention_jobs, spent.host_lines) == (2 * 3 * 2, 0)
    for i, (k, v) in enumerate(contexts):
        own = visible[i : i + 1, :, : len(k)]
        wanted = decode_attention(q[i : i + 1], k[None], v[None], scale=SCALE, visible=own, causal=True)
        assert same_bits(out[i : i + 1], wanted)


VARIANTS = {
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "window": {"window": 20, "kept_rows": 3},
    "tree": {"tree": torch.tensor([[True, False], [False, True]])},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("query_rows", [1, 2])
def test_partials_of_any_variant_merge_to_the_whole(setting, name, query_rows):
    """Two parts of each context, the sinks in one of them."""
    kv, handles, _ = setting
    options = dict(VARIANTS[name])
    if name == "tree":
        options["tree"] = options["tree"][:query_rows, :query_rows]
    q, sinks = values(2, query_rows, 4, 24, seed=3), torch.tensor([0.5, -1.0, 2.0, 0.0])
    given = {"layer": 0, "q": q, "scale": SCALE, **options}
    whole = kv.attend(handles, sinks=sinks, **given)
    parts = [
        kv.attend(handles, rows=(0, 9), sinks=sinks, partial=True, **given),
        kv.attend(handles, rows=[(9, 40), (9, 23)], partial=True, **given),
    ]
    assert same_bits(finish(merge(*parts)), whole)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("query_rows", [None, 3])
def test_selected_pages(setting, model, count, query_rows):
    """The pages are those of the reference, and only their rows are streamed."""
    kv, handles, contexts = setting
    q = values(2, *([query_rows] if query_rows else []), 4, 24, seed=3)
    before = model.stats()
    out, lse, pages = kv.attend(handles, layer=0, q=q, scale=SCALE, select_pages=count, return_lse=True)
    lines = (model.stats() - before).attention_lines
    for i, (k, v) in enumerate(contexts):
        picked = select_pages(q[i : i + 1], page_summaries(k[None], page_rows=4), scale=SCALE, count=count)
        assert torch.equal(pages[i : i + 1, :, : picked.pages.shape[2]], picked.pages)
        assert not pages[i, :, picked.pages.shape[2] :].any()
        wanted = decode_attention(
            q[i : i + 1], k[None], v[None], scale=SCALE, pages=picked.pages, page_rows=4,
            causal=query_rows is not None, return_lse=True,
        )  # fmt: skip
        assert same_bits(out[i : i + 1], wanted[0])
        assert same_bits(lse[i : i + 1], wanted[1])
    assert int(pages.sum()) == 2 * 2 * count
    passes = -(-2 * (query_rows or 1) // 4)
    summaries = 2 * (10 + 6) * 2
    assert lines <= passes * summaries + passes * int(pages.sum()) * 4 * 3


def test_so_many_pages_as_a_device_selects_from(setting, monkeypatch):
    kv, handles, _ = setting
    q = values(2, 4, 24, seed=3)
    monkeypatch.setattr(nearkv.attention, "MAX_CANDIDATES", 10)
    kv.attend(handles, layer=0, q=q, select_pages=2)
    monkeypatch.setattr(nearkv.attention, "MAX_CANDIDATES", 9)
    with pytest.raises(ArgumentError, match=r"there are 10 pages of 4 rows to select from, .* at most 9"):
        kv.attend(handles, layer=0, q=q, select_pages=2)


def test_a_tree_with_a_selection_is_left_to_the_host():
    """By a device that has both, but not together."""
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    q = values(1, 3, 4, 16, seed=3)
    found = []
    for features in (Feature.all(), Feature.all() & ~Feature.TREE_SELECTION):
        with nearkv.open("model", features=features) as device:
            kv = device.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="fp16", page_rows=4, summaries=True)
            (handle,) = filled(kv, [context(22, 2, 16, 16, seed=1)])
            before = device.stats()
            out, pages = kv.attend(
                [handle],
                layer=0,
                q=q,
                scale=SCALE,
                tree=tree,
                query_positions=torch.tensor([19, 20, 20]),
                select_pages=2,
            )
            found.append((out, pages, (device.stats() - before).host_lines))
    (out, pages, lines), (host_out, host_pages, host_lines) = found
    assert same_bits(out, host_out)
    assert torch.equal(pages, host_pages)
    assert lines == 0 < host_lines


def test_selecting_all_pages_is_dense(setting):
    kv, handles, _ = setting
    q = values(2, 4, 24, seed=3)
    out, pages = kv.attend(handles, layer=0, q=q, scale=SCALE, select_pages=10)
    assert same_bits(out, kv.attend(handles, layer=0, q=q, scale=SCALE))
    assert pages.sum(-1).tolist() == [[10, 10], [6, 6]]


@pytest.mark.parametrize("name", ["bf16", "fp8", "q4_0", "mxfp4"])
def test_summaries_are_kept_up_through_a_cache_s_life(model, name):
    """Appends row by row, a crop within a page, new rows, a fork: always those of the rows that are there."""
    form, dtype = PRESETS[name].k, torch.bfloat16 if name == "bf16" else torch.float32
    k, v = (values(30, 1, 16, seed=n, dtype=dtype) for n in (1, 2))
    q = values(1, 2, 16, seed=3, dtype=torch.bfloat16)
    kv = model.kv_cache(layers=1, kv_heads=1, head_dim=16, dtype=name, page_rows=4, summaries=True)
    handle = kv.sequence()
    head = None

    def check(chosen, sequence):
        rows = quantise(k[chosen], form, head_scale=head)
        given = {"k_format": form.element}
        if rows.scales is not None:
            given |= {"k_scales": rows.scales[None], "scale_block": form.block, "scale_format": form.scale}
        summaries = page_summaries(rows.codes[None], page_rows=4, **given)
        picked = select_pages(q, summaries, scale=SCALE, count=3, k_scale=head)
        _, pages = kv.attend([sequence], layer=0, q=q, scale=SCALE, select_pages=3)
        assert torch.equal(pages, picked.pages)

    for row in range(18):
        kv.append(handle, layer=0, k=k[row : row + 1], v=v[row : row + 1])
        head = kv.head_scales(0)[0]
    check([*range(18)], handle)
    copy = kv.fork(handle)
    kv.crop(handle, 10)
    check([*range(10)], handle)
    kv.append(handle, layer=0, k=k[18:], v=v[18:])
    check([*range(10), *range(18, 30)], handle)
    check([*range(18)], copy)
    kv.crop(handle, 8)
    kv.append(handle, layer=0, k=k[:1], v=v[:1])
    check([*range(8), 0], handle)


def test_append_attend_takes_every_variant(setting):
    kv, handles, _ = setting
    new = [context(3, 2, 24, 40, seed=n) for n in (91, 92)]
    k, v = (torch.stack([rows[i] for rows in new]) for i in (0, 1))
    q = values(2, 3, 4, 24, seed=3)
    out, pages = kv.append_attend(
        handles, layer=0, k=k, v=v, q=q, scale=SCALE, softcap=9.0, window=25, select_pages=4
    )
    again = kv.attend(handles, layer=0, q=q, scale=SCALE, softcap=9.0, window=25, select_pages=4)
    assert same_bits(out, again[0])
    assert torch.equal(pages, again[1])


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ArgumentError, "softcap must be above 0", {"softcap": 0.0}),
        (ArgumentError, "at most 709.78", {"softcap": 710.0}),
        (ArgumentError, "slope", {"alibi_slopes": torch.tensor([1.0, 2.0, torch.nan, 0.0])}),
        (ArgumentError, "select_pages=0: must be an integer from 1", {"select_pages": 0}),
        (ArgumentError, "window=0", {"window": 0}),
        (ShapeError, r"query_positions have shape \[2, 2\], must have \[1\] or \[2, 1\]",
         {"tree": torch.ones(1, 1).bool(), "query_positions": torch.zeros(2, 2, dtype=torch.int64)}),
        (ArgumentError, "query_positions must be 0 to 8388607",
         {"tree": torch.ones(1, 1).bool(), "query_positions": torch.tensor([-1])}),
    ],
)  # fmt: skip
def test_what_is_refused(setting, error, message, options):
    kv, handles, _ = setting
    with pytest.raises(error, match=message):
        kv.attend(handles, layer=0, q=values(2, 4, 24, seed=3), **options)


def test_a_tree_needs_its_rows(setting):
    kv, _, _ = setting
    handle = kv.sequence()
    with pytest.raises(ArgumentError, match="a tree's query rows are the last rows"):
        kv.attend([handle], layer=0, q=values(1, 2, 4, 24, seed=3), tree=torch.ones(2, 2).bool())


def test_the_host_has_the_same_bits():
    """Devices that lack lists of ranges and query rows leave both to the host: bits do not tell which."""
    q = values(1, 3, 4, 16, seed=3)
    visible = torch.rand(1, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    found, lines = [], []
    for features in (Feature.all(), Feature.all() & ~Feature.RANGES, Feature.all() & ~Feature.QUERY_ROWS):
        with nearkv.open("model", features=features) as device:
            kv = device.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="nvfp4", page_rows=4)
            (handle,) = filled(kv, [context(20, 2, 16, 16, seed=1)])
            before = device.stats()
            found.append(
                kv.attend(
                    [handle], layer=0, q=q, scale=SCALE, visible=visible, softcap=4.0, kept_rows=2, window=9
                )
            )
            lines.append((device.stats() - before).host_lines)
    assert lines[0] == 0
    assert all(lines[1:])
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_only_selected_pages_are_read(setting, model):
    """A lost row of a page that is not selected is not met; a lost summary is, and names its page."""
    kv, handles, _ = setting
    q = values(1, 2, 24, seed=3)
    out, pages = kv.attend(handles[:1], layer=0, q=q, select_pages=3)
    other = int((~pages[0, 0]).nonzero()[0])
    page = int(handles[0]._tables[0].page_addresses(other, other + 1)[0, 0])
    model._port.inject(kv._tenant.host(page), [0, 1])
    again, _ = kv.attend(handles[:1], layer=0, q=q, select_pages=3)
    assert same_bits(out, again)
    with pytest.raises(DeviceError, match=f"POISON, in the table, the queries or page {other}"):
        kv.attend(handles[:1], layer=0, q=q)
    model._port.inject(kv._tenant.host(page + kv._layout.summary_offset), [0, 1])
    with pytest.raises(DeviceError, match=f"POISON, in the table, the queries or page {other}"):
        kv.attend(handles[:1], layer=0, q=q, select_pages=3)
