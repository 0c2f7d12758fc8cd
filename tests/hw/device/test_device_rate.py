"""How much of the memory's rate attention takes, and what passes around it cost."""

import numpy as np
import pytest
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    RING,
    RING_LINE,
    register_address,
)
from nearkv_sim.port import Read
from raw_device import Aperture, Space, ok, random_context

pytestmark = pytest.mark.rtl

MEMORY_READ_CYCLES = 48
"""A read of one line by the walker with a memory latency of 40: through the fabric and back."""
OWN_CYCLES = 60
"""From the doorbell to the first page at a unit, beside the two memory reads on the way."""


@pytest.fixture
def aperture(open_port, request):
    """The first aperture of `small` in RTL, owner of everything."""
    if open_port.kind != "rtl":
        pytest.skip("the model's cycles are an estimate")
    aperture = Aperture(open_port())
    ok([aperture.claim()])
    return aperture


def channel_counters(aperture):
    return [
        aperture.counters(CHANNEL_COUNTERS, CHANNEL_COUNTERS_LINE + n)
        for n in range(aperture.config.channels)
    ]


def balanced(aperture, rng, **options):
    """A context whose pages alternate over the channels, as the driver lays them out."""
    context = random_context(rng, **options)
    size, count = context.layout.page_bytes, -(-context.rows // context.page_rows)
    spaces = [Space(rng, [n]) for n in range(aperture.config.channels)]
    context.place(aperture, Space(rng, [8]), [spaces[n % len(spaces)].take(size) for n in range(count)])
    return context


@pytest.mark.parametrize(
    ("rows", "jobs", "share"), [(512, 6, 0.9), pytest.param(4096, 8, 0.98, marks=pytest.mark.slow)]
)
def test_share_of_the_memorys_rate(aperture, rng, rows, jobs, share):
    """Lines per cycle and channel, head_dim 128, 4 queries, doorbell and polling included."""
    context = balanced(aperture, rng, rows=rows, head_dim=128)
    before = channel_counters(aperture)
    began = aperture.counters()["cycles"]
    records = aperture.run([context.descriptor()] * jobs)
    cycles = aperture.counters()["cycles"] - began
    ok(records)
    context.check(aperture)
    after = channel_counters(aperture)
    lines = sum(record["lines"] for record in records)
    assert lines == jobs * rows * context.layout.row_bytes // 64
    print({name: [b[name] - a[name] for a, b in zip(before, after, strict=True)] for name in before[0]})
    print(f"{cycles} cycles, {lines} lines, {lines / aperture.config.channels / cycles:.4f} of the rate")
    assert lines / aperture.config.channels / cycles >= share


def test_a_job_of_one_row(aperture, rng):
    """What a job costs beside its lines: two reads on the way in, sums and a result on the way out."""
    context = balanced(aperture, rng, rows=1, head_dim=128)
    ok(aperture.run([context.descriptor()]))
    (record,) = aperture.run([context.descriptor()])
    print(f"{record['cycles']} cycles from fetch to record")
    assert record["cycles"] <= 2 * (aperture.config.memory_latency_cycles + 10) + 500


def test_doorbell_to_first_k_read(aperture, rng):
    """Snapshots of registers, taken right behind the doorbell, show when a unit starts."""
    context = balanced(aperture, rng, rows=64, head_dim=128)
    lines = [DEVICE_COUNTERS_LINE, RING_LINE, CHANNEL_COUNTERS_LINE]
    layouts = [DEVICE_COUNTERS, RING, CHANNEL_COUNTERS]
    addresses = [register_address(aperture.config, 0, line) for line in lines] * 80
    (before, _, idle) = snapshots(aperture, addresses, layouts, [])[0]
    tail = aperture.posted + 1
    taken = snapshots(aperture, addresses, layouts, aperture.writes([context.descriptor()]))
    ok(aperture.collect(1))
    rung = next(device["cycles"] for device, ring, _ in taken if ring["tail"] == tail)
    busy = next(device["cycles"] for device, _, unit in taken if unit["unit_busy"] > idle["unit_busy"])
    assert before["cycles"] < rung < busy
    print(f"{busy - rung} cycles from the doorbell to a busy unit, give or take {3 * 2}")
    assert busy - rung <= OWN_CYCLES + 2 * MEMORY_READ_CYCLES


def snapshots(aperture, addresses, layouts, writes):
    """Carry out writes and read register lines right behind them; groups of unpacked lines."""
    (result,) = aperture.port.run([*writes, Read(np.array(addresses, np.uint64))])
    fields = [layouts[n % len(layouts)].unpack(line.tobytes()) for n, line in enumerate(result.data)]
    return [fields[n : n + len(layouts)] for n in range(0, len(fields), len(layouts))]
