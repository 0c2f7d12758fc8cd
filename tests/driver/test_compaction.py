"""Compaction: what few pages in many extents leave idle is bounded, and nothing else changes."""

import contextlib
import random

import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from killing import HostDied, KillingPort
from leaks import no_leak
from nearkv.device import Device
from nearkv.errors import ArgumentError, UnknownHandleError
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.model import ModelPort

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 32, "dtype": "fp16", "page_rows": 1024}
PAGE_BYTES = 1024 * 2 * 64
"""Eight to an extent."""
Q = values(1, 4, 32, seed=3)


def numbered(count, seed):
    """Rows of a sequence: few kinds of numbers, quickly made."""
    return context(count, 2, 32, 32, seed=seed)


def scattered(device, chance, sequences=40, **shape):
    """A cache most of whose sequences went again; those that stayed, with their rows."""
    kv = device.kv_cache(**SHAPE | shape)
    rows = [numbered(chance.choice([40, 1024, 2500]), seed) for seed in range(sequences)]
    handles = filled(kv, rows)
    staying = dict(zip(handles, rows, strict=True))
    for handle in chance.sample(handles, sequences * 3 // 4):
        kv.free(handle)
        del staying[handle]
    return kv, staying


def whole(kv, staying):
    for handle, (k, v) in staying.items():
        own = kv.read(handle, layer=0)
        out = kv.attend([handle], layer=0, q=Q, scale=0.3)
        if not (same_bits(own[0], k) and same_bits(own[1], v)):
            return False
        if not same_bits(out, expected(Q, [(k, v)], scale=0.3)):
            return False
    return True


def test_what_lies_idle_is_less_than_an_extent_of_each_channel(model):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kv, staying = scattered(model, random.Random(seed))
    before = model.memory()
    moved = model.compact()
    after = model.memory()
    assert moved > 0
    assert moved % PAGE_BYTES == 0
    assert (after.pages, after.page_bytes) == (before.pages, before.page_bytes)
    assert after.free_page_bytes < model.config.slices * EXTENT_BYTES < before.free_page_bytes
    assert after.fragmentation < before.fragmentation
    assert after.free_bytes == 0
    assert after.owned_bytes < before.owned_bytes
    no_leak(kv)
    assert whole(kv, staying)
    assert model.compact() == 0
    for handle in staying:
        kv.free(handle)
    assert model.memory().pages == 0
    kv.close()


def test_pages_stay_in_their_channels_and_shared_ones_shared(model):
    """Forks, prefixes, released pages, summaries, and another cache with pages of the same size."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kv, staying = scattered(model, chance, summaries=True)
    other, others = scattered(model, chance, summaries=True)
    handle, (k, v) = max(staying.items(), key=lambda pair: len(pair[1][0]))
    forks = [kv.fork(handle), kv.fork(handle, 30)]
    prefix = kv.publish(handle, range(len(k)))
    long = kv.sequence()
    rows = numbered(5000, 99)
    kv.append(long, layer=0, k=rows[0], v=rows[1])
    kv.slide(long, 1500)
    shared = model.memory().shared_pages

    def channels():
        table = kv._sequences.table(handle, 0)
        return [model.config.slice_of(page) for page in table.addresses().tolist()]

    at, named = channels(), kv._sequences.table(handle, 0).addresses().tolist()
    assert model.compact() > 0
    assert kv._sequences.table(handle, 0).addresses().tolist() != named or channels() == at
    assert channels() == at
    assert model.memory().shared_pages == shared
    no_leak_of_both(kv, other)
    assert whole(kv, {**staying, forks[0]: (k, v), forks[1]: (k[:30], v[:30])})
    assert whole(other, others)
    again = kv.fork_prefix(prefix)
    assert same_bits(kv.read(again, layer=0)[0], k)
    assert same_bits(
        kv.attend([long], layer=0, q=Q, window=1500, scale=0.3),
        expected(Q, [(rows[0][-1500:], rows[1][-1500:])], scale=0.3),
    )
    # whoever writes gets a page of its own, as before
    kv.append(forks[1], layer=0, k=k[:5], v=v[:5])
    assert whole(kv, {handle: (k, v), forks[1]: (torch.cat([k[:30], k[:5]]), torch.cat([v[:30], v[:5]]))})


def no_leak_of_both(*caches):
    """`no_leak` for caches that have pages of one size together."""
    named: dict[int, int] = {}
    for kv in caches:
        for table in kv.page_tables:
            for page in table.addresses().tolist():
                named[page] = named.get(page, 0) + 1
    pages = caches[0]._pages
    assert pages.used == len(named)
    assert pages._others == {page: count - 1 for page, count in named.items() if count > 1}


def test_decoding_goes_on(model):
    """Prepared steps follow pages that moved."""
    chance = random.Random(5)
    kv, staying = scattered(model, chance)
    handle, (k, v) = next(iter(staying.items()))
    for step in range(12):
        row = values(1, 1, 2, 32, seed=step)
        q = values(1, 4, 32, seed=50 + step)
        out = kv.append_attend([handle], layer=0, k=row, v=-row, q=q, scale=0.3)
        k, v = torch.cat([k, row[0]]), torch.cat([v, -row[0]])
        assert same_bits(out, expected(q, [(k, v)], scale=0.3))
        if step in (5, 8):
            more = filled(kv, [numbered(3000, s) for s in range(20)])
            kv.append_async(handle, layer=0, k=row[0], v=row[0])
            k, v = torch.cat([k, row[0]]), torch.cat([v, row[0]])
            for one in chance.sample(more, 15):
                kv.free(one)
            pending = kv.attend_async([handle], layer=0, q=q, scale=0.3)
            assert model.compact() > 0
            assert same_bits(pending.result(), expected(q, [(k, v)], scale=0.3))


def test_a_budget_and_pages_that_are_in_the_way(model):
    """An extent moves as a whole or not at all; lost content and pages of no table stay where they are."""
    chance = random.Random(1)
    kv, staying = scattered(model, chance)
    assert model.compact(most_bytes=0) == 0
    some = model.compact(most_bytes=4 * PAGE_BYTES)
    assert some <= 4 * PAGE_BYTES
    for tables in (kv._sequences.table(handle, 0) for handle in staying):
        for page in tables.addresses().tolist():
            model._port.inject(page, [0, 1])
    assert model.compact() == 0
    assert model.memory().free_page_bytes > model.config.slices * EXTENT_BYTES
    no_leak(kv)
    with pytest.raises(ArgumentError, match="most_bytes"):
        model.compact(most_bytes=-1)
    with pytest.raises(UnknownHandleError):
        model.compact(9)


def test_a_host_that_dies_while_it_compacts():
    """At any line of content or of entries: every row is there for the next session, and no page leaks."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for kill in range(25):
        port = KillingPort(ModelPort(configure("small")), seed + kill)
        device = Device(port)
        _kv, staying = scattered(device, random.Random(kill), 24)
        slots = {handle.slot: rows for handle, rows in staying.items()}
        port.left = chance.choice(
            [chance.randrange(26_000), chance.randrange(9) * 2048 + chance.randrange(4)]
        )
        with contextlib.suppress(HostDied):
            device.compact()
        port.left = None
        again = Device(port)
        (found,) = again.attach()
        no_leak(found)
        assert whole(found, {sequence: slots[sequence.slot] for sequence in found.sequences})
        assert len(found.sequences) == len(staying)
        again.compact()
        assert whole(found, {sequence: slots[sequence.slot] for sequence in found.sequences})
