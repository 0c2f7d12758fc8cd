"""Rows in tiers: whatever policy moves what where, results have the bits of rows in one place."""

import random
import re

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, same_answers, same_bits, same_rows, values
from nearkv.errors import (
    ArgumentError,
    ClosedError,
    DtypeError,
    OutOfMemoryError,
    ShapeError,
    UnknownHandleError,
)
from nearkv.reference import finish
from nearkv.tiers import (
    DeviceTier,
    FileTier,
    HighestMass,
    Move,
    NewestRows,
    RowView,
    TensorTier,
    TieredCache,
    prometheus,
)
from nearkv.tiers import device as tiers_device

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "fp16"}


def tiers_of(device, tmp_path):
    return [TensorTier("hot"), TensorTier("warm"), DeviceTier(device, page_rows=4), FileTier(tmp_path)]


class LastRows:
    """The rows from number 10 on to the second tier."""

    def moves(self, view):
        far = view.tiers[0][view.tiers[0] >= 10]
        return [Move(0, 1, far)] if len(far) else []


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])


def drafts(chance, batch, kv, layer, query_rows):
    """A tree of the last rows: each sees itself and one that came before, and stands one behind that."""
    tree = torch.eye(query_rows, dtype=torch.bool).repeat(len(batch), 1, 1)
    at = torch.tensor([[kv.length(own, layer) - query_rows] * query_rows for own, _ in batch])
    for index in range(len(batch)):
        for row in range(1, query_rows):
            parent = chance.randrange(row)
            tree[index, row] |= tree[index, parent]
            at[index, row] = at[index, parent] + 1
    return {"tree": tree, "query_positions": at}


class AnyMoves:
    """Rows to anywhere, at random."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def moves(self, view):
        found = []
        for source, positions in enumerate(view.tiers):
            some = [p for p in positions.tolist() if self.random.random() < 0.3]
            if some:
                target = self.random.randrange(len(view.tiers))
                found.append(Move(source, target, np.array(some, np.int64)))
        return found


@pytest.mark.parametrize(
    "dtype",
    ["fp16", "bf16", "int8", "q8_0", "mxfp4", "fp8", "nvfp4", "lut4", pytest.param("int4", id="short rows")],
)
def test_the_bits_do_not_depend_on_where_rows_live(model, tmp_path, dtype):
    """Random moves between four tiers: every result is that of a cache in one place."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": dtype}
    with (
        model.kv_cache(**shape) as plain,
        TieredCache(
            tiers_of(model, tmp_path), **shape, policy=AnyMoves(seed), moves_per_call_bytes=1 << 12
        ) as kv,
    ):
        pairs = [(kv.sequence(), plain.sequence()) for _ in range(3)]
        for step in range(40):
            layer = chance.randrange(2)
            count = chance.choice([1, 1, 3, 20])
            k, v = (values(count, 2, 32, seed=seed + 2 * step + i, dtype=kind) for i in range(2))
            tiered, own = chance.choice(pairs)
            kv.append(tiered, layer=layer, k=k, v=v)
            plain.append(own, layer=layer, k=k, v=v)
            if chance.random() < 0.1 and len(pairs) < 6:
                pairs.append((kv.fork(tiered), plain.fork(own)))
            if chance.random() < 0.1:
                kept = chance.randrange(kv.length(tiered, layer) + 1)
                kv.crop(tiered, kept)
                plain.crop(own, kept)
            batch = chance.sample(pairs, 2)
            q = values(2, chance.choice([1, 3]), 4, 32, seed=seed + step, dtype=kind)
            options = chance.choice(
                [
                    {},
                    {"window": 5, "kept_rows": 2},
                    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
                    {"alibi_slopes": SLOPES},
                    {"alibi_slopes": SLOPES, "window": 7, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
                ]
            )
            if min(kv.length(own, layer) for own, _ in batch) >= q.shape[1] and chance.random() < 0.5:
                options = {**options, **drafts(chance, batch, kv, layer, q.shape[1])}
            assert same_answers(kv, plain, batch, layer=layer, q=q, scale=0.3, **options), (step, options)
        assert same_rows(kv, plain, pairs, layers=2)
        assert sum(tier.rows for tier in kv.stats()) == sum(
            kv.length(tiered, layer) for tiered, _ in pairs for layer in range(2)
        )
        assert min(tier.bytes_in for tier in kv.stats()) > 0


@pytest.mark.parametrize("policy", [NewestRows(4, 9), AnyMoves(5)], ids=["newest", "any"])
@pytest.mark.parametrize("query_rows", [1, 3])
def test_slopes_and_trees_wherever_rows_stand(device, tmp_path, policy, query_rows):
    """A device's places are not positions: rows that moved, rows with holes between them, and drafts whose
    siblings stand in one position, all biased by where they stand."""
    chance = random.Random(7)
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "fp16"}
    tiers = [TensorTier("hot"), TensorTier("warm"), DeviceTier(device, page_rows=4)]
    with device.kv_cache(**shape) as plain, TieredCache(tiers, **shape, policy=policy) as kv:
        pairs = [(kv.sequence(), plain.sequence()) for _ in range(2)]
        for step in range(4):
            for tiered, own in pairs:
                k, v = context(5, 2, 8, 8, seed=step + own.slot)
                kv.append(tiered, layer=0, k=k, v=v)
                plain.append(own, layer=0, k=k, v=v)
        q = values(2, query_rows, 4, 8, seed=3)
        tree = drafts(chance, pairs, kv, 0, query_rows)
        for options in (
            {"alibi_slopes": SLOPES},
            {"alibi_slopes": SLOPES, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
            {**tree},
            {**tree, "alibi_slopes": SLOPES, "window": 6},
            {"tree": tree["tree"], "rows": (2, 19)},
        ):
            assert same_answers(kv, plain, pairs, layer=0, q=q, scale=0.3, **options), options
        assert tiers[2].rows


@pytest.mark.parametrize(
    ("policy", "most_runs", "on_host"),
    [(NewestRows(5), 256, 0), (AnyMoves(3), 256, 0), (LastRows(), 256, 1), (NewestRows(5), 0, 3)],
    ids=["newest", "any", "before the first place", "too many runs"],
)
def test_query_rows_that_stand_anywhere(model, monkeypatch, policy, most_runs, on_host):
    """`query_positions` with a mask: the bias is that of where they are said to stand, in any tier; also
    where rows of the device's tier would put them before its first place, which the host works out."""
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "fp16"}
    k, v = context(20, 2, 8, 8, seed=1)
    q, mask = values(1, 2, 4, 8, seed=3), torch.ones(1, 2, 20, dtype=torch.bool)
    with (
        model.kv_cache(**shape) as plain,
        TieredCache([TensorTier("hot"), DeviceTier(model)], **shape, policy=policy) as kv,
    ):
        pairs = [(kv.sequence(), plain.sequence())]
        for cache, own in zip((kv, plain), pairs[0], strict=True):
            cache.append(own, layer=0, k=k, v=v)
        results, read_back = [], []
        tier_type = tiers_device.DeviceTier
        work_out = tier_type._on_host

        def noted(tier, keys, own, asked):
            read_back.extend(positions for positions in own if len(positions))
            return work_out(tier, keys, own, asked)

        monkeypatch.setattr(tier_type, "_on_host", noted)
        monkeypatch.setattr(tiers_device, "_MOST_RUNS", most_runs)
        for at in ([18, 19], [500, 700], [2, 3]):
            options = {"visible": mask, "query_positions": torch.tensor(at), "alibi_slopes": SLOPES}
            assert same_answers(kv, plain, pairs, layer=0, q=q, scale=0.3, **options)
            results.append(plain.attend([pairs[0][1]], layer=0, q=q, scale=0.3, **options))
            wanted = expected(
                q,
                [(k, v)],
                scale=0.3,
                visible=mask,
                query_positions=torch.tensor(at),
                row_positions=torch.arange(20),
                alibi_slopes=SLOPES,
            )
            assert same_bits(results[-1], wanted)
        assert not same_bits(results[0], results[1])
        assert len(read_back) == on_host
        for wrong in ({"visible": mask[:, 0]}, {}, {"visible": mask, "window": 3}):
            for cache, own in zip((kv, plain), pairs[0], strict=True):
                with pytest.raises(ArgumentError, match="query_positions go with a tree, or with visible"):
                    cache.attend([own], layer=0, q=q, query_positions=torch.tensor([1, 2]), **wrong)


def test_heads_scales_are_found_once_and_for_all_tiers(model):
    """From the first rows of a layer, as in one place, or given; an append that fails leaves none."""
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "fp8"}
    k, v = context(9, 2, 8, 8, seed=1)
    with (
        model.kv_cache(**shape) as plain,
        TieredCache([DeviceTier(model)], **shape, policy=NewestRows()) as kv,
    ):
        assert kv.head_scales(0) == (None, None)
        s, own = kv.sequence(), plain.sequence()
        q = values(1, 4, 8, seed=3)
        assert not kv.attend([s], layer=0, q=q).any()  # no rows, and so no scales yet
        kv.append(s, layer=0, k=k, v=v)
        plain.append(own, layer=0, k=k, v=v)
        for found, wanted in zip(kv.head_scales(0), plain.head_scales(0), strict=True):
            assert torch.equal(found, wanted)
        assert kv.head_scales(1) == (None, None)
        assert same_answers(kv, plain, [(s, own)], layer=0, q=q)
        part = kv.attend([s], layer=0, q=q, partial=True)
        scale = kv.head_scales(0)[1]
        assert same_bits(finish(part, torch.float32, scale), plain.attend([own], layer=0, q=q))
    given = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([0.25, 1.0])}
    with TieredCache([TensorTier()], **shape, **given, policy=NewestRows()) as kv:
        assert torch.equal(kv.head_scales(1)[1], given["v_scale"])


def test_an_append_without_room_finds_no_scales():
    class Full(TensorTier):
        full = True

        def put(self, key, rows, positions):
            if self.full:
                raise OutOfMemoryError("full")
            super().put(key, rows, positions)

    tier = Full()
    with TieredCache([tier], **SHAPE | {"dtype": "fp8"}, policy=NewestRows()) as kv:
        s = kv.sequence()
        k, v = context(9, 2, 8, 8, seed=1)
        with pytest.raises(OutOfMemoryError):
            kv.append(s, layer=0, k=k, v=v)
        assert kv.head_scales(0) == (None, None)
        tier.full = False
        kv.append(s, layer=0, k=2 * k, v=v)
        assert kv.head_scales(0)[0] is not None


def test_the_newest_rows_are_near(device):
    """Four, eight, and the rest: a long prompt goes down at once, and a crop brings rows back up."""
    k, v = context(40, 2, 8, 8, seed=1)
    q = values(1, 4, 8, seed=3)
    tiers = [TensorTier("hot"), TensorTier("warm"), DeviceTier(device, page_rows=4)]
    with TieredCache(tiers, **SHAPE, policy=NewestRows(4, 8)) as kv:
        s = kv.sequence()
        kv.append(s, layer=0, k=k, v=v)
        assert [np.sort(tier.positions((1, 0))).tolist() for tier in tiers] == [
            [36, 37, 38, 39],
            list(range(28, 36)),
            list(range(28)),
        ]
        for more in range(20):
            row = values(1, 2, 8, seed=more)
            kv.append(s, layer=0, k=row, v=row)
            k, v = torch.cat([k, row]), torch.cat([v, row])
            assert [len(tier.positions((1, 0))) for tier in tiers] == [4, 8, 29 + more]
        assert same_bits(kv.attend([s], layer=0, q=q, scale=0.3), expected(q, [(k, v)], scale=0.3))
        kv.crop(s, 30)
        kv.migrate()
        assert [tier.rows for tier in kv.stats()] == [4, 8, 18]
        out = kv.attend([s], layer=0, q=q, scale=0.3)
        assert same_bits(out, expected(q, [(k[:30], v[:30])], scale=0.3))
        kv.free(s)
        assert [tier.rows for tier in kv.stats()] == [0, 0, 0]
        assert tiers[2].caches[0].memory().pages == 0


def test_rows_of_which_attention_makes_most_stay():
    """Rows 3 and 11 are like the query; they stay in the first tier when others leave it."""
    q = torch.ones(1, 1, 8).half()
    k = torch.full((1, 1, 8), -0.5).half().repeat(20, 1, 1)
    k[[3, 11]] = 4.0
    tiers = [TensorTier("hot"), TensorTier("warm")]
    with TieredCache(tiers, layers=1, kv_heads=1, head_dim=8, dtype="fp16", policy=HighestMass(20, 2)) as kv:
        s = kv.sequence()
        kv.append(s, layer=0, k=k, v=k)
        kv.attend([s], layer=0, q=q)
        kv.policy = HighestMass(4, 2)
        kv.append(s, layer=0, k=k[:1], v=k[:1])
        assert np.sort(tiers[0].positions((1, 0))).tolist() == [3, 11, 19, 20]


def test_moves_wait_for_a_budget_and_never_above_a_mark():
    """Back-pressure: what is below the mark moves a little at a time, what is above it at once."""
    row_bytes = 2 * 2 * 8 * 2
    rows = context(64, 2, 8, 8, seed=1)
    for capacity in (None, 32 * row_bytes):
        tiers = [TensorTier("hot", capacity_bytes=capacity), TensorTier("warm")]
        policy = NewestRows(4)
        with TieredCache(tiers, **SHAPE, policy=policy, moves_per_call_bytes=0) as kv:
            s = kv.sequence()
            for at in range(0, 64, 8):
                kv.append(s, layer=0, k=rows[0][at : at + 8], v=rows[1][at : at + 8])
            if capacity is None:
                assert kv.waiting_rows == 60
                assert kv.migrate(1) == 60 * row_bytes
                assert kv.waiting_rows == 0
            else:
                assert kv.stats()[0].watermark <= 0.9


def test_an_eighth_goes_when_a_tier_is_full():
    view = RowView(32, [np.arange(16), np.arange(16, 16)], lambda tier: np.zeros(16), [True, False])
    (move,) = NewestRows(100).moves(view)
    assert (move.source, move.target, move.positions.tolist()) == (0, 1, [0, 1])
    (move,) = HighestMass(100, 1).moves(view)
    assert (move.source, move.target, len(move.positions)) == (0, 1, 2)


def test_partials_merge_over_everything(model):
    """Two tiered caches with half of the rows each, and their merged partials."""
    k, v = context(20, 2, 8, 8, seed=1)
    q, sinks = values(1, 4, 8, seed=3), torch.tensor([0.5, -1.0, 2.0, 0.0])
    parts = []
    for half in (slice(0, 10), slice(10, 20)):
        with TieredCache([TensorTier("hot"), DeviceTier(model)], **SHAPE, policy=NewestRows(3)) as kv:
            s = kv.sequence()
            kv.append(s, layer=0, k=k[half], v=v[half])
            own = sinks if half.start else None
            parts.append(kv.attend([s], layer=0, q=q, scale=0.3, partial=True, sinks=own))
    assert same_bits(finish(nearkv.merge(*parts)), expected(q, [(k, v)], scale=0.3, sinks=sinks))


def test_sequences_without_rows_have_their_sinks(model):
    q, options = values(2, 3, 4, 8, seed=3), {"layer": 0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    with (
        model.kv_cache(**SHAPE) as plain,
        TieredCache([DeviceTier(model)], **SHAPE, policy=NewestRows()) as kv,
    ):
        results = [
            cache.attend([cache.sequence() for _ in range(2)], q=q, return_lse=True, **options)
            for cache in (kv, plain)
        ]
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


def test_latent_rows_and_other_types(model):
    k = values(30, 1, 24, seed=1)
    q = values(1, 4, 24, seed=3)
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 24, "value_dim": 16, "latent": True, "dtype": "fp16"}
    with (
        model.kv_cache(**shape) as plain,
        TieredCache([TensorTier("hot"), DeviceTier(model)], **shape, policy=NewestRows(5)) as kv,
    ):
        s, own = kv.sequence(), plain.sequence()
        kv.append(s, layer=0, k=k)
        plain.append(own, layer=0, k=k)
        for options in ({}, {"softcap": 5.0}, {"out_dtype": torch.bfloat16}, {"rows": (3, 28)}):
            out = kv.attend([s], layer=0, q=q, **options)
            assert same_bits(out, plain.attend([own], layer=0, q=q, **options))


def test_an_empty_sequence_and_one_tier(model):
    with TieredCache([TensorTier("hot"), DeviceTier(model)], **SHAPE, policy=NewestRows(1)) as kv:
        one, two = kv.sequence(), kv.sequence()
        k, v = context(5, 2, 8, 8, seed=1)
        kv.append(two, layer=1, k=k, v=v)
        q = values(2, 4, 8, seed=3)
        out, lse = kv.attend([one, two], layer=1, q=q, scale=0.3, return_lse=True)
        assert same_bits(out[1:], expected(q[1:], [(k, v)], scale=0.3))
        assert not out[0].any()
        assert (lse[0] == -torch.inf).all()


def test_telemetry(model, tmp_path):
    """Hit shares add up to one, bytes are those that moved, and Prometheus can read it."""
    tiers = tiers_of(model, tmp_path)
    with TieredCache(tiers, **SHAPE, policy=NewestRows(2, 4, 8)) as kv:
        s = kv.sequence()
        kv.append(s, layer=0, k=(rows := context(40, 2, 8, 8, seed=1))[0], v=rows[1])
        kv.attend([s], layer=0, q=values(1, 4, 8, seed=3))
        stats = kv.stats()
        assert sum(tier.hit_share for tier in stats) == pytest.approx(1.0)
        assert [tier.calls for tier in stats] == [1, 1, 1, 1]
        assert [tier.rows for tier in stats] == [2, 4, 8, 26]
        row = kv.geometry.row_bytes
        assert (stats[0].bytes_in, stats[0].bytes_out) == (40 * row, 38 * row)
        assert stats[3].to_dict()["used_bytes"] == 26 * row
        text = kv.prometheus()
        assert prometheus(stats) == text
        assert 'nearkv_tier_rows{tier="file"} 26\n' in text
        for line in text.splitlines():
            assert re.fullmatch(
                r'# (HELP|TYPE) nearkv_tier_\w+ .+|nearkv_tier_\w+\{tier="\w+"\} [-+.e\d]+', line
            )
        assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ShapeError,
            r"k has shape \[3, 2, 9\], must have \[rows, 2, 8\]",
            lambda kv, s, x: kv.append(s, layer=0, k=torch.zeros(3, 2, 9).half(), v=x),
        ),
        (ShapeError, "k has 3 rows and v has 2", lambda kv, s, x: kv.append(s, layer=0, k=x, v=x[:2])),
        (
            DtypeError,
            "this cache holds torch.float16",
            lambda kv, s, x: kv.append(s, layer=0, k=x.float(), v=x),
        ),
        (ArgumentError, "v is missing", lambda kv, s, x: kv.append(s, layer=0, k=x)),
        (UnknownHandleError, "layers 0 to 1", lambda kv, s, x: kv.append(s, layer=2, k=x, v=x)),
        (
            ArgumentError,
            "names a sequence twice",
            lambda kv, s, x: kv.append([s, s], layer=0, k=x[None], v=x[None]),
        ),
        (
            ArgumentError,
            "rows or visible",
            lambda kv, s, x: kv.attend([s], layer=0, q=x[:1], rows=(0, 0), visible=x),
        ),
        (ArgumentError, "rows=4", lambda kv, s, x: kv.crop(s, 4)),
    ],
)
def test_calls_that_do_not_fit(error, message, call):
    with TieredCache([TensorTier()], **SHAPE, policy=NewestRows()) as kv:
        s = kv.sequence()
        x = values(3, 2, 8, seed=1)
        with pytest.raises(error, match=message):
            call(kv, s, x)
        assert kv.length(s) == 0
        kv.free(s)
        with pytest.raises(ClosedError, match="was freed"):
            kv.length(s)


def test_caches_that_are_none(model):
    with pytest.raises(ArgumentError, match="must be one or more, of different names"):
        TieredCache([TensorTier(), TensorTier()], **SHAPE, policy=NewestRows(1))
    with pytest.raises(ArgumentError, match="k_scale belongs to a scale per head"):
        TieredCache([TensorTier()], **SHAPE, k_scale=torch.ones(2), policy=NewestRows())
    with TieredCache([TensorTier()], **SHAPE, policy=NewestRows(1)) as kv:
        with pytest.raises(ArgumentError, match="1 numbers of rows for 1 tiers"):
            kv.append(kv.sequence(), layer=0, k=(x := values(1, 2, 8, seed=1)), v=x)
    with pytest.raises(ClosedError, match="the tiered cache is closed"):
        kv.sequence()
