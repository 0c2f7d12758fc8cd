"""Numbers that the device and the driver report."""

from dataclasses import replace

import nearkv
import pytest
import torch
from driver_cases import context, filled, values
from nearkv.estimate import AttentionLayers, Model, Setup, estimate, of
from nearkv.estimate import device as estimated
from nearkv.estimate.setup import placed
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS
from nearkv_hw.abi.memory import ENTRIES_PER_LINE


def test_lines_jobs_and_passes_are_counted(device):
    """Jobs of 40 and 8 rows, K of one line and V of two, a group of nine query heads in passes of four."""
    contexts = [context(n, 2, 32, 64, seed=n) for n in (40, 8)]
    q = values(2, 18, 32, seed=1)
    device.wait_for_scrub()
    with device.kv_cache(layers=1, kv_heads=2, head_dim=32, value_dim=64, dtype="fp16") as kv:
        handles = filled(kv, contexts)
        kv.attend(handles, layer=0, q=q)  # takes the extents that results need
        before = device.stats()
        kv.attend(handles, layer=0, q=q)
        done = device.stats() - before
    assert done.attention_jobs == done.jobs == 4
    assert done.attention_passes == 4 * 3
    assert done.attention_lines == done.lines == 3 * 2 * 48 * (1 + 2)
    assert sum(channel.unit_lines for channel in done.channels) == done.lines
    assert len(done.channels) == 2
    assert done.errors == done.violations == done.outside_reads == done.outside_writes == 0
    assert 0 < done.attention_cycles <= done.cycles
    assert done.utilisation == done.lines / (2 * done.attention_cycles)
    assert 0 < done.utilisation <= 1
    fabric = sum(channel.fabric_reads + channel.fabric_writes for channel in done.channels)
    assert done.dram_bytes == 64 * (done.lines + fabric)
    assert done.to_dict()["utilisation"] == done.utilisation


def test_link_bytes_of_an_attention_call(model):
    """Queries, descriptors, doorbell, poll, two looks at the clock, records, results; nothing else."""
    with model.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype="fp16") as kv:
        handles = filled(kv, [context(40, 2, 32, 32, seed=1)])
        q = values(1, 4, 32, seed=1)
        kv.attend(handles, layer=0, q=q)
        before = model.stats()
        kv.attend(handles, layer=0, q=q)
        done = model.stats() - before
    stats_lines = 2 + 3 * 2  # two of the device, and three of each slice
    assert done.link_bytes == 64 * (4 + 2 + 1 + 1 + 2 + 2 + 4 * 2 + stats_lines)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_lines_of_units_behind_the_crossbar_are_counted_once(kernel):
    """The fabric reads them for the units, so that they are lines of both, and read from the memory once."""
    spent = {}
    for placement in ("controller", "fabric"):
        with nearkv.open("model", placement=placement, kernel=kernel) as device:
            with device.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype="fp16") as kv:
                kv.attend(filled(kv, [context(40, 2, 32, 32, seed=1)]), layer=0, q=values(1, 4, 32, seed=1))
            spent[placement] = device.stats()
    own, behind = spent["controller"], spent["fabric"]
    assert own.lines == behind.lines == 2 * 40 * 2
    assert own.dram_bytes == behind.dram_bytes
    reads = [sum(channel.fabric_reads for channel in one.channels) for one in (own, behind)]
    assert reads[1] - reads[0] == own.lines


@pytest.mark.rtl
def test_a_channel_streams_most_cycles(rtl_device):
    """At least 80 % of a line per cycle and channel over 4,096-row jobs of head_dim 128 and 4 queries."""
    k, v = context(4096, 2, 128, 128, seed=1)
    with rtl_device.kv_cache(layers=1, kv_heads=2, head_dim=128, dtype="fp16") as kv:
        handles = filled(kv, [(k, v)])
        before = rtl_device.stats()
        kv.attend(handles, layer=0, q=values(1, 8, 128, seed=2))
        done = rtl_device.stats() - before
    assert done.utilisation >= 0.8


def test_a_device_that_never_attended():
    with nearkv.open("model") as device:
        assert device.stats().utilisation == 0


def test_energy_by_hand():
    """Of two slices of LPDDR5X, four sub-channels each, in a millisecond."""
    with nearkv.open("model", dram="lpddr5x_8533") as device:
        one = device.stats()
    stats = replace(
        one,
        cycles=1000 * one.config.clock_mhz,
        link_bytes=6400,
        dram_bytes=64 * 2 * (1000 + 100 + 50),
        attention_products=1_000_000,
        attention_value_products=400_000,
        channels=tuple(replace(c, unit_lines=1000, fabric_reads=100, fabric_writes=50) for c in one.channels),
        memories=tuple(replace(m, row_hits=1135, row_misses=10, row_conflicts=5) for m in one.memories),
    )
    parts = stats.energy.parts
    refreshes = 8 * 1e-3 / 3906e-9
    moved = 2200 * 2300 + 100 * 2360 + refreshes * 28_000
    assert parts["dram"].mid == pytest.approx((moved + 2 * 15 * 900) * 1e-12)
    assert parts["link"].mid == pytest.approx(6400 * 8 * 8e-12)
    assert parts["arithmetic"].mid == pytest.approx((1e6 * 2 + 2 * 4e5 * 160 * 0.02) * 1e-12)
    assert parts["on_chip"].mid == pytest.approx(300 * 64 * 8 * 0.15e-12)
    assert parts["static"].mid == pytest.approx(1e-3 * (8 * 0.02 + 20 + 2 * 0.1))
    assert stats.energy.total.low < stats.energy.total.mid < stats.energy.total.high
    assert stats.to_dict()["energy_j"] == stats.energy.to_dict()
    # a device without row counters: a row of each of four sub-channels is 32 lines, two of them a pair
    none = replace(stats, memories=one.memories)
    assert PARTS[one.config.dram].row_lines == 32
    assert none.energy.parts["dram"].mid == pytest.approx((moved + 2300 / 32 * 900) * 1e-12)


def test_energy_of_what_happened_in_between(model):
    """Everything is counted, so that parts of the time add up to the whole."""
    with model.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype="fp16") as kv:
        handles, q = filled(kv, [context(40, 2, 32, 32, seed=1)]), values(1, 4, 32, seed=1)
        first = model.stats()
        assert first.energy.parts["arithmetic"].high == 0
        kv.attend(handles, layer=0, q=q)
        second = model.stats()
        kv.attend(handles, layer=0, q=q)
        third = model.stats()
    assert (third - first).attention_products == 2 * 40 * 4 * (32 + 32)
    assert (third - first).attention_value_products == 2 * 40 * 4 * 32
    for name, whole in third.energy.parts.items():
        steps = [(third - second).energy, (second - first).energy, first.energy]
        assert whole.mid == pytest.approx(sum(step.parts[name].mid for step in steps)), name


def test_energy_of_a_memory_without_figures():
    with nearkv.open("model", dram="fixed") as device:
        assert device.stats().energy is None
        assert device.stats().to_dict()["energy_j"] is None


def test_energy_without_units(model):
    """The host multiplies; the rows cross the link instead."""
    spent = []
    for overrides in ({}, {"placement": "host"}):
        with nearkv.open("model", **overrides) as device:
            with device.kv_cache(layers=1, kv_heads=2, head_dim=128, dtype="fp16") as kv:
                handles = filled(kv, [context(400, 2, 128, 128, seed=1)])
                before = device.stats()
                kv.attend(handles, layer=0, q=values(1, 8, 128, seed=1))
                spent.append((device.stats() - before).energy.parts)
    units, host = spent
    assert host["arithmetic"].high == 0 < units["arithmetic"].low
    assert host["link"].mid > 10 * units["link"].mid


@pytest.mark.parametrize("placement", Placement)
def test_events_are_those_of_the_estimate_for_the_same_work(placement):
    """A layer of grouped heads over four sequences, on a card with the units at each place.

    Every line is counted once by both. The device also reads the jobs' page tables, and over the link go a
    doorbell, a poll, two looks at the clock and the counters' lines, or polls of rows alone.
    """
    rows, batch, kv_heads = 512, 4, 4
    kind = AttentionLayers(count=1, q_heads=16, kv_heads=kv_heads, head_dim=128, value_dim=128)
    layer = Model(name="layer", source="", hidden=64, attention=(kind,), embedding=0, tied=True, dense=1000)
    config = placed(estimated("card", capacity_bytes=1 << 30), placement)
    answers = estimate(Setup(model=layer, context=rows, batch=batch, config=config))
    said = of(answers, f"gpu+{placement.name.lower()}")
    fields = {name: value for name, value in config.to_dict().items() if name != "name"}
    with nearkv.open("model:card", **fields) as device:
        with device.kv_cache(layers=1, kv_heads=kv_heads, head_dim=128, dtype="bf16") as kv:
            handles = filled(kv, [context(rows, kv_heads, 128, 128, seed=1, dtype=torch.bfloat16)] * batch)
            q = values(batch, 16, 128, seed=1, dtype=torch.bfloat16)
            kv.attend(handles, layer=0, q=q, out_dtype=torch.bfloat16)
            before = device.stats()
            kv.attend(handles, layer=0, q=q, out_dtype=torch.bfloat16)
            spent = device.stats() - before
    lines = 2 * batch * rows * kv_heads * 4
    has_units = placement is not Placement.HOST
    tables = batch * kv_heads * (1 + rows // 16 // ENTRIES_PER_LINE) if has_units else 0
    queries, answered, results = (batch * 16 * n if has_units else 0 for n in (4, 4, 5))
    found, theirs = spent.events, said.events
    assert theirs.line_reads == pytest.approx(lines + queries + answered)
    assert theirs.line_writes == found.line_writes == queries + results
    assert found.line_reads == pytest.approx(theirs.line_reads + tables)
    crossing = 2 * queries + answered + results
    crossing += lines if placement in (Placement.FABRIC, Placement.HOST) else 0
    assert theirs.crossbar_bytes == pytest.approx(64 * crossing)
    assert found.crossbar_bytes == 64 * (crossing + tables)
    stats_lines = 2 + 3 * config.slices
    assert found.link_bytes == said.link_bytes + 64 * (stats_lines + (4 if has_units else 2))
    assert found.multiplies == theirs.multiplies
    assert found.sum_bits == theirs.sum_bits


def test_energy_is_that_of_the_estimate_for_the_same_work():
    """A layer of grouped heads over 4,096 rows of eight sequences, on a card with DDR5-6400.

    Parts are as their events. The estimate has time that a GPU works, so what is always on is compared as
    power.
    """
    config = estimated("card", capacity_bytes=1 << 30)
    kind = AttentionLayers(count=1, q_heads=16, kv_heads=4, head_dim=128, value_dim=128)
    layer = Model(name="layer", source="", hidden=64, attention=(kind,), embedding=0, tied=True, dense=1000)
    answer = of(estimate(Setup(model=layer, context=4096, batch=8, config=config)), "gpu+controller")
    fields = {name: value for name, value in config.to_dict().items() if name != "name"}
    with nearkv.open("model:card", **fields) as device:
        with device.kv_cache(layers=1, kv_heads=4, head_dim=128, dtype="bf16") as kv:
            rows = context(4096, 4, 128, 128, seed=1, dtype=torch.bfloat16)
            handles = filled(kv, [rows] * 8)
            q = values(8, 16, 128, seed=1, dtype=torch.bfloat16)
            kv.attend(handles, layer=0, q=q, out_dtype=torch.bfloat16)
            before = device.stats()
            kv.attend(handles, layer=0, q=q, out_dtype=torch.bfloat16)
            spent = device.stats() - before
    found, said = spent.energy.parts, answer.energy
    assert found["arithmetic"] == said["arithmetic"]
    for level in ("low", "mid", "high"):
        ours, theirs = ({n: getattr(band, level) for n, band in parts.items()} for parts in (found, said))
        assert ours["link"] / theirs["link"] == pytest.approx(spent.link_bytes / answer.link_bytes)
        assert 1 <= ours["dram"] / theirs["dram"] < 1.005
        seconds = spent.cycles / (config.clock_mhz * 1e6)
        assert ours["static"] / seconds == pytest.approx(theirs["static"] / answer.step_s)
        crossing = spent.events.crossbar_bytes / answer.events.crossbar_bytes
        assert ours["on_chip"] / theirs["on_chip"] == pytest.approx(crossing)


@pytest.mark.rtl
def test_energy_of_rtl_and_model(rtl_device, model):
    """The same work; the RTL is polled more often, keeps tables on chip, and has cycles of its own."""
    spent = []
    for device in (rtl_device, model):
        device.wait_for_scrub()
        with device.kv_cache(layers=1, kv_heads=2, head_dim=128, dtype="fp16") as kv:
            handles, q = filled(kv, [context(1000, 2, 128, 128, seed=1)]), values(1, 8, 128, seed=2)
            kv.attend(handles, layer=0, q=q)
            before = device.stats()
            kv.attend(handles, layer=0, q=q)
            spent.append(device.stats() - before)
    rtl, software = (one.energy.parts for one in spent)
    assert any(memory.row_misses for memory in spent[0].memories)
    assert rtl["arithmetic"] == software["arithmetic"]
    assert rtl["link"].mid > software["link"].mid
    for name, within in (("dram", 0.02), ("on_chip", 0.1), ("static", 0.1)):
        assert rtl[name].mid == pytest.approx(software[name].mid, rel=within), name
