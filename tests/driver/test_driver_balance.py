"""A job's pages are spread evenly over the channels, however many heads there are, however rows come."""

import random

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context
from nearkv_hw.abi.config import EXTENT_BYTES

PAGE_ROWS = 4
HEAD_DIM = 16


def channels_of(cache, sequence, channels, layer=0):
    """The channel of every page, [pages, kv_heads]."""
    table = cache._open_sequences().table(sequence, layer)
    addresses = table.page_addresses(0, table.pages).T
    return (addresses // np.uint64(EXTENT_BYTES) % np.uint64(channels)).astype(int)


def check_balance(of_pages, channels):
    """Any run of a head's pages, so any range of rows, loads the channels evenly but for one page."""
    for of_head in of_pages.T:
        steps = np.diff(of_head) % channels
        assert (steps == 1 % channels).all(), of_head
        counts = np.bincount(of_head, minlength=channels)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 3, 7, 130])
def test_a_jobs_pages_differ_by_one_between_channels(kv_heads, channels):
    """Sequences that grow in turns, a few rows at a time, are cropped, freed and forked."""
    rng = random.Random(17 * kv_heads + channels)
    with (
        nearkv.open("model", channels=channels) as device,
        device.kv_cache(layers=1, kv_heads=kv_heads, head_dim=HEAD_DIM, page_rows=PAGE_ROWS) as cache,
    ):
        sequences = [cache.sequence() for _ in range(3)]
        for step in range(40):
            sequence = rng.choice(sequences)
            rows = rng.choice([1, 1, 2, PAGE_ROWS, 3 * PAGE_ROWS + 1])
            k, v = context(rows, kv_heads, HEAD_DIM, HEAD_DIM, seed=step, dtype=torch.bfloat16)
            cache.append(sequence, layer=0, k=k, v=v)
            if rng.random() < 0.1:
                cache.crop(sequence, cache.length(sequence) // 2)
            if rng.random() < 0.1:
                sequences.append(cache.fork(sequence))
            if len(sequences) > 2 and rng.random() < 0.1:
                cache.free(sequences.pop(rng.randrange(len(sequences))))
        for sequence in sequences:
            check_balance(channels_of(cache, sequence, channels), channels)


def test_heads_begin_where_the_load_is_least():
    """A page for each of three heads in four channels, twice: no channel has two before all have one."""
    with (
        nearkv.open("model", channels=4) as device,
        device.kv_cache(layers=1, kv_heads=3, head_dim=HEAD_DIM, page_rows=PAGE_ROWS) as cache,
    ):
        first, second = cache.sequence(), cache.sequence()
        for sequence in (first, second):
            k, v = context(PAGE_ROWS, 3, HEAD_DIM, HEAD_DIM, seed=1, dtype=torch.bfloat16)
            cache.append(sequence, layer=0, k=k, v=v)
        begun = np.concatenate([channels_of(cache, s, 4)[0] for s in (first, second)])
        assert sorted(np.bincount(begun, minlength=4)) == [1, 1, 2, 2]
