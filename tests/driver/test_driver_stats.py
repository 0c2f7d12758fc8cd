"""Numbers that the device and the driver report."""

import nearkv
import pytest
from driver_cases import context, filled, values


def test_lines_jobs_and_passes_are_counted(device):
    """Jobs of 40 and 8 rows, K of one line and V of two, a group of nine query heads in passes of four."""
    contexts = [context(n, 2, 32, 64, seed=n) for n in (40, 8)]
    q = values(2, 18, 32, seed=1)
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
    stats_lines = 1 + 3 * 2  # the device's, and three of each slice
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
