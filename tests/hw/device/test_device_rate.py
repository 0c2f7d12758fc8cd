"""How much of the memory's rate attention takes, and what passes around it cost."""

import numpy as np
import pytest
from nearkv_hw.abi.descriptor import COMPLETION
from nearkv_hw.abi.dram import PARTS, ceiling
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    RING,
    RING_LINE,
    completion_address,
    completion_phase,
    register_address,
)
from nearkv_sim.port import Read
from raw_device import Aperture, Space, ok, random_context

pytestmark = pytest.mark.rtl

MEMORY_READ_CYCLES = 48
"""A read of one line by the walker with a memory latency of 40: through the fabric and back."""
OWN_CYCLES = 28
"""From the doorbell to the first page at a unit, beside the memory reads of a table that is not on chip."""


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
    ("rows", "jobs", "share"),
    [(64, 40, 0.62), (256, 24, 0.85), (512, 12, 0.9), pytest.param(4096, 8, 0.98, marks=pytest.mark.slow)],
)
def test_share_of_the_memorys_rate(aperture, rng, rows, jobs, share):
    """Lines per cycle and channel of what refresh leaves, head_dim 128, 4 queries, doorbell and polling
    included.
    """
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
    config = aperture.config
    most = ceiling(PARTS[config.dram], config.density_gbit, config.refresh)
    reached = lines / config.channels / cycles / most
    print(f"{cycles} cycles, {lines} lines, {reached:.4f} of what refresh leaves")
    assert reached >= share


def test_a_job_of_one_row(aperture, rng):
    """What a job costs beside its lines: two reads on the way in, sums and a result on the way out."""
    context = balanced(aperture, rng, rows=1, head_dim=128)
    ok(aperture.run([context.descriptor()]))
    (record,) = aperture.run([context.descriptor()])
    print(f"{record['cycles']} cycles from fetch to record")
    assert record["cycles"] <= 2 * (aperture.config.memory_latency_cycles + 10) + 500


@pytest.mark.parametrize("on_chip", [False, True])
def test_doorbell_to_first_k_read(aperture, rng, on_chip):
    """Snapshots of registers, taken right behind the doorbell, show when a unit starts."""
    context = balanced(aperture, rng, rows=64, head_dim=128)
    if on_chip:
        ok(aperture.run([context.descriptor()]))
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
    assert busy - rung <= OWN_CYCLES + (0 if on_chip else 2 * MEMORY_READ_CYCLES)


@pytest.mark.parametrize(("group", "limit"), [(1, 150), (4, 400)])
def test_last_line_to_completion_record(aperture, rng, group, limit):
    """Snapshots of the units' lines and of the record show how long sums, results and word of them take."""
    context = balanced(aperture, rng, rows=128, head_dim=128, group=group)
    ok(aperture.run([context.descriptor()]))
    channels = range(aperture.config.channels)
    record = completion_address(aperture.config, 0, aperture.posted)
    phase = completion_phase(aperture.config, aperture.posted)
    lines = [DEVICE_COUNTERS_LINE, *(CHANNEL_COUNTERS_LINE + n for n in channels)]
    layouts = [DEVICE_COUNTERS, *(CHANNEL_COUNTERS for _ in channels), COMPLETION]
    addresses = [*(register_address(aperture.config, 0, line) for line in lines), record] * 400
    taken = snapshots(aperture, addresses, layouts, aperture.writes([context.descriptor()]))
    last = [unit["unit_lines"] for unit in taken[-1][1:-1]]
    streamed, told = (
        next(group[0]["cycles"] for group in taken if reached(group))
        for reached in (
            lambda group: [unit["unit_lines"] for unit in group[1:-1]] == last,
            lambda group: group[-1]["phase"] == phase,
        )
    )
    apart = taken[1][0]["cycles"] - taken[0][0]["cycles"]
    print(f"{told - streamed} cycles from the last line to the record, give or take {apart}")
    assert taken[0][-1]["phase"] != phase
    assert sum(last) > 0
    assert told - streamed <= limit


def snapshots(aperture, addresses, layouts, writes):
    """Carry out writes and read register lines right behind them; groups of unpacked lines."""
    (result,) = aperture.port.run([*writes, Read(np.array(addresses, np.uint64))])
    fields = [layouts[n % len(layouts)].unpack(line.tobytes()) for n, line in enumerate(result.data)]
    return [fields[n : n + len(layouts)] for n in range(0, len(fields), len(layouts))]
