"""A device without attention units: the host reads the rows and works out the same bits; what is counted."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.errors import AccessError
from nearkv.rows import dealt
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES, Link
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.link import lines_per_cycle

SCALE = 0.3


@pytest.fixture(params=["model", pytest.param("rtl", marks=[pytest.mark.rtl, pytest.mark.slow])])
def host(request):
    with nearkv.open(request.param, placement="host") as device:
        yield device


def calls(kv, handles, q, **more):
    """Every kind of call on a batch of sequences, one layer."""
    sinks = values(q.shape[-2], seed=77, dtype=torch.float32)
    visible = torch.zeros(len(handles), max(kv.length(h) for h in handles), dtype=torch.bool)
    visible[:, 1:4] = True
    plain = kv.attend(handles, layer=0, q=q, **more)
    out, lse = kv.attend(handles, layer=0, q=q, window=5, return_lse=True, **more)
    partial = kv.attend(handles, layer=0, q=q, sinks=sinks, partial=True, **more)
    return [
        plain,
        out,
        lse,
        nearkv.finish(partial),
        nearkv.log_sum_exp(partial),
        kv.attend(handles, layer=0, q=q, rows=(2, 4), sinks=sinks, **more),
        kv.attend(handles, layer=0, q=q, rows=(0, 0), **more),
        kv.attend(handles, layer=0, q=q, visible=visible, **more),
        kv.attend(handles, layer=0, q=q, out_dtype=torch.bfloat16, **more),
        kv.attend(handles, layer=0, q=q[:, None].expand(-1, 2, -1, -1).contiguous(), **more),
    ]


def test_every_option_has_the_devices_bits(host, model):
    contexts = [context(n, 2, 40, 72, seed=n) for n in (33, 4, 70)]
    q = values(3, 6, 40, seed=3)
    answers = []
    for device in (model, host):
        with device.kv_cache(layers=1, kv_heads=2, head_dim=40, value_dim=72, dtype="fp16") as kv:
            answers.append(calls(kv, filled(kv, contexts), q, scale=SCALE))
    assert all(same_bits(*pair) for pair in zip(*answers, strict=True))
    assert same_bits(answers[0][0], expected(q, contexts, scale=SCALE))


def test_append_attend(host):
    contexts = [context(16, 2, 16, 24, seed=n) for n in (1, 2)]
    new = [context(2, 2, 16, 24, seed=n) for n in (11, 12)]
    q = values(2, 4, 16, seed=3)
    with host.kv_cache(layers=1, kv_heads=2, head_dim=16, value_dim=24, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        k, v = (torch.stack([rows[i] for rows in new]) for i in (0, 1))
        out = kv.append_attend(handles, layer=0, k=k, v=v, q=q, scale=SCALE)
        assert [kv.length(handle) for handle in handles] == [18, 18]
    whole = [(torch.cat([c[0], n[0]]), torch.cat([c[1], n[1]])) for c, n in zip(contexts, new, strict=True)]
    assert same_bits(out, expected(q, whole, scale=SCALE))


def test_what_crosses_the_link_is_counted(host):
    rows, kv_heads, group = 40, 2, 3
    contexts = [context(rows, kv_heads, 64, 64, seed=n) for n in (1, 2)]
    q = values(2, kv_heads * group, 64, seed=3)
    with host.kv_cache(layers=1, kv_heads=kv_heads, head_dim=64, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        before = host.stats()
        kv.attend(handles, layer=0, q=q)
        spent = host.stats() - before
    lines = 2 * rows * kv_heads * 2 * 2  # sequences, rows, heads, K and V, lines of a row
    assert spent.attention_lines == spent.host_lines == lines
    assert (spent.attention_jobs, spent.attention_passes) == (2 * kv_heads, 2 * kv_heads)
    assert spent.jobs == spent.lines == 0
    # The rows, a clock line before and after them, and the registers that `stats` reads.
    registers = spent.link_reads - lines - 2
    assert 0 < registers < 100
    assert spent.link_bytes == spent.link_reads * LINE_BYTES
    assert 0 < spent.attention_cycles < 3 * lines


def test_one_program_reads_a_batch(host):
    """However many sequences: the link is never left idle between two of them."""
    contexts = [context(8, 1, 16, 16, seed=n) for n in range(5)]
    programs = []
    port = host._port
    with host.kv_cache(layers=1, kv_heads=1, head_dim=16, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        run = port.run
        port.run = lambda program: programs.append(program) or run(program)
        try:
            kv.attend(handles, layer=0, q=values(5, 2, 16, seed=1))
        finally:
            del port.run
    assert len(programs) == 1


@pytest.mark.rtl
@pytest.mark.slow
@pytest.mark.parametrize("dram", ["fixed", "ddr5_6400"])
def test_rows_come_at_the_links_rate(dram):
    """Also while the DRAM refreshes itself: answers that wait for the link last as long."""
    with nearkv.open("rtl", placement="host", dram=dram) as device:
        config = device.config
        with device.kv_cache(layers=1, kv_heads=2, head_dim=128, dtype="bf16") as kv:
            contexts = [context(512, 2, 128, 128, seed=n, dtype=torch.bfloat16) for n in range(2)]
            handles = filled(kv, contexts)
            before = device.stats()
            kv.attend(handles, layer=0, q=values(2, 4, 128, seed=1, dtype=torch.bfloat16))
            spent = device.stats() - before
    rate = min(float(lines_per_cycle(config.link, config.clock_mhz)), config.slices)
    assert spent.attention_lines / spent.attention_cycles >= 0.97 * rate
    assert spent.attention_lines / spent.attention_cycles <= rate


@pytest.mark.parametrize("kind", ["model", pytest.param("rtl", marks=[pytest.mark.rtl, pytest.mark.slow])])
def test_poison_is_told(kind):
    q = values(1, 2, 16, seed=2)
    with nearkv.open(kind, placement="host", dram="ddr5_6400") as device:
        with device.kv_cache(layers=1, kv_heads=1, head_dim=16, dtype="fp16") as kv:
            (handle,) = filled(kv, [context(20, 1, 16, 16, seed=1)])
            page = int(handle._tables[0].page_addresses(1, 2)[0, 0])
            good = kv.attend([handle], layer=0, q=q)
            device._port.inject(page, [3, 500])  # a bit in each of two words is corrected
            assert same_bits(kv.attend([handle], layer=0, q=q), good)
            device._port.inject(page, [9])
            with pytest.raises(AccessError, match=f"line {page:#x} of tenant 0 is poisoned") as caught:
                kv.attend([handle], layer=0, q=q)
            assert (caught.value.address, caught.value.poison) == (page, True)
            kv.attend([handle], layer=0, q=q, rows=(0, 16))
            device._port.inject(page, [9])
            assert same_bits(kv.attend([handle], layer=0, q=q), good)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_slices_take_turns(channels):
    config = configure(channels=channels, link=Link.X16_64)
    rng = np.random.default_rng(5)
    extents = rng.permutation(16)[:6]
    addresses = np.concatenate(
        [e * EXTENT_BYTES + LINE_BYTES * np.arange(rng.integers(1, 40)) for e in extents]
    ).astype(np.uint64)
    rng.shuffle(addresses)
    order = dealt(addresses, config)
    assert sorted(order) == list(range(len(addresses)))
    slices = np.array([config.slice_of(int(a)) for a in addresses[order]])
    for s in range(config.slices):
        own = addresses[order][slices == s]
        assert (np.diff(own.astype(np.int64)) > 0).all()
    least = min(np.bincount(slices, minlength=config.slices))
    for turn in range(least):
        assert sorted(slices[turn * config.slices : (turn + 1) * config.slices]) == list(range(config.slices))
    assert dealt(addresses[:0], config).shape == (0,)
