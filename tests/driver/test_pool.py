"""Several devices as one pool: pages spread, partials merged, the bits of rows in one place."""

import random

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import same_answers, same_bits, same_rows, values
from nearkv.errors import ArgumentError, OutOfMemoryError
from nearkv.tiers import DeviceTier, NewestRows, PoolTier, TensorTier, TieredCache

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "fp16"}
ROW_BYTES = 2 * 2 * 8 * 2
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])


@pytest.fixture
def devices():
    with nearkv.open("model") as one, nearkv.open("model", channels=1) as two, nearkv.open("model") as three:
        yield one, two, three


def pool_of(devices, **arguments):
    return PoolTier([DeviceTier(device, f"device {n}") for n, device in enumerate(devices)], **arguments)


@pytest.mark.parametrize("before", [(), (5,)], ids=["pool alone", "behind another tier"])
@pytest.mark.parametrize("dtype", ["fp16", "q8_0", "mxfp4", "fp8"])
def test_the_bits_are_those_of_one_device(model, devices, dtype, before):
    """Forks, crops and calls at random, beside a cache of one device."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": dtype}
    pool = pool_of(devices, page_rows=4)
    tiers = [*(TensorTier("hot") for _ in before), pool]
    with (
        model.kv_cache(**shape) as plain,
        TieredCache(tiers, **shape, policy=NewestRows(*before)) as kv,
    ):
        pairs = [(kv.sequence(), plain.sequence()) for _ in range(3)]
        for step in range(30):
            layer = chance.randrange(2)
            count = chance.choice([1, 3, 20])
            k, v = (values(count, 2, 32, seed=seed + 2 * step + i) for i in range(2))
            tiered, own = chance.choice(pairs)
            kv.append(tiered, layer=layer, k=k, v=v)
            plain.append(own, layer=layer, k=k, v=v)
            if chance.random() < 0.2 and len(pairs) < 6:
                pairs.append((kv.fork(tiered), plain.fork(own)))
            if chance.random() < 0.2:
                kept = chance.randrange(kv.length(tiered, layer) + 1)
                kv.crop(tiered, kept)
                plain.crop(own, kept)
            batch = chance.sample(pairs, 2)
            q = values(2, chance.choice([1, 3]), 4, 32, seed=seed + step)
            options = chance.choice(
                [
                    {},
                    {"window": 5, "kept_rows": 2},
                    {"sinks": SINKS},
                    {"alibi_slopes": SLOPES, "sinks": SINKS},
                ]
            )
            assert same_answers(kv, plain, batch, layer=layer, q=q, scale=0.3, **options), (step, options)
        assert same_rows(kv, plain, pairs, layers=2)
        for tiered, _ in pairs:
            kv.free(tiered)
        assert [member.rows for member in pool.members] == [0, 0, 0]
        assert sum(cache.memory().pages for member in pool.members for cache in member.caches) == 0


def test_pages_are_spread_evenly(devices):
    """A long sequence, many short ones: members differ by a page of each."""
    pool = pool_of(devices, page_rows=4)
    with TieredCache([pool], **SHAPE, policy=NewestRows()) as kv:
        long = kv.sequence()
        rows = values(120, 2, 8, seed=1)
        kv.append(long, layer=0, k=rows, v=rows)
        assert [member.rows for member in pool.members] == [40, 40, 40]
        for _ in range(9):
            kv.append(kv.sequence(), layer=1, k=rows[:2], v=rows[:2])
        assert [member.rows for member in pool.members] == [46, 46, 46]


def test_a_member_without_room_is_passed_over(devices):
    members = [
        DeviceTier(device, f"device {n}", capacity_bytes=rows * ROW_BYTES)
        for n, (device, rows) in enumerate(zip(devices, (8, 40, 16), strict=True))
    ]
    pool = PoolTier(members, page_rows=4)
    assert pool.capacity_bytes == 64 * ROW_BYTES
    with TieredCache([pool], **SHAPE, policy=NewestRows()) as kv:
        s = kv.sequence()
        rows = values(64, 2, 8, seed=1)
        kv.append(s, layer=0, k=rows[:60], v=rows[:60])
        assert [member.rows for member in members] == [8, 36, 16]
        kv.append(s, layer=0, k=rows[60:], v=rows[60:])
        assert [member.rows for member in members] == [8, 40, 16]
        with pytest.raises(OutOfMemoryError, match=r"no room for 1 rows of 64 bytes.*device 0 0, device 1 0"):
            kv.append(s, layer=0, k=rows[:1], v=rows[:1])
        assert kv.length(s) == 64
        q = values(1, 4, 8, seed=3)
        assert kv.attend([s], layer=0, q=q).shape == (1, 4, 8)
        assert torch.equal(kv.read(s, layer=0).k.view(torch.float16), rows)
        assert np.sort(pool.positions((1, 0))).tolist() == list(range(64))


@pytest.mark.rtl
def test_a_pool_of_different_kinds(model):
    """An emulated device and a modelled one hold a sequence together."""
    rows = values(70, 2, 8, seed=1)
    q = values(1, 4, 8, seed=3)
    with nearkv.open("rtl") as rtl:
        pool = pool_of([rtl, model])
        with TieredCache([pool], **SHAPE, policy=NewestRows()) as kv, model.kv_cache(**SHAPE) as plain:
            s, own = kv.sequence(), plain.sequence()
            kv.append(s, layer=0, k=rows, v=rows)
            plain.append(own, layer=0, k=rows, v=rows)
            assert all(member.rows >= 32 for member in pool.members)
            out = kv.attend([s], layer=0, q=q, sinks=SINKS)
            assert same_bits(out, plain.attend([own], layer=0, q=q, sinks=SINKS))


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["a"], {}, r"members \['a'\]: must be two or more, of different names"),
        (["a", "a"], {}, r"members \['a', 'a'\]: must be two or more, of different names"),
        (["a", "b"], {"page_rows": 0}, "page_rows"),
    ],
)
def test_arguments_are_checked(names, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        PoolTier([TensorTier(name) for name in names], **arguments)
