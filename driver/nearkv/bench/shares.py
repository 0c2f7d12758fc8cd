"""How host and attention divide the memory when both want more than there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from nearkv_hw.abi.dram import PARTS, ceiling
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    register_address,
)
from nearkv_sim.port import Operation, Read, ReadResult

from nearkv.device import Device
from nearkv.errors import NearkvError
from nearkv.workload import Filled, Workload

from .beside import beside
from .figure import Figure

_AREAS = 256
_AREA_LINES = 256
"""Lines of an area of the host's; all of them are more than any controller's rows hold."""
_WARM_UP = 4_000
"""Reads before the measured ones: the batch's jobs stream by then."""


def shares(device: Device, *, rows: int, reads: int) -> Iterator[Figure]:
    """What the host's reads anywhere in memory get, and attention beside them, against what each may rely on.

    A share is of the memory's time. So the host may rely on that part of what its reads get alone, which open
    a row each, and attention on its part of what refresh leaves.

    Parameters
    ----------
    device : with units at a channel whose controllers have a `fabric_share`.
    rows : of each of 8 jobs.
    reads : of the host.

    Raises
    ------
    NearkvError : the reads lasted longer than the jobs.
    """
    config = device.config
    work = Workload(rows=rows, kv_heads=8, batch=1, group=4)
    operations = _host(device, reads)
    with work.fill(device) as filled:
        filled.step()
        results = device._port.run(operations)
        cycles_alone, _ = _between(results[1], results[3])
        cycles, lines = _beside_attention(device, filled, operations)
    if lines + _WARM_UP > work.lines:
        raise NearkvError(f"{reads} reads last longer than 8 jobs of {rows} rows; take fewer or longer jobs")
    best = ceiling(PARTS[config.dram], config.density_gbit, config.refresh)
    share = config.fabric_share / 16
    slices = config.slices
    alone_rate = reads / (cycles_alone * slices)
    guaranteed = {"host": share * alone_rate, "attention": (1 - share) * best}
    about = {**work.to_dict(), "reads": reads, "cycles": cycles, "ceiling": best, "host_alone": alone_rate}
    for name, count in (("host", reads), ("attention", lines)):
        rate = count / (cycles * slices)
        of_it = {**about, "guaranteed": guaranteed[name]}
        yield Figure(f"memory.shares.{name}", rate, "of a line per cycle and slice", of_it)
        yield Figure(
            f"memory.shares.{name}_of_guaranteed", rate / guaranteed[name], "of what is its own", of_it
        )


def _host(device: Device, reads: int) -> list[Operation]:
    """Reads of lines of the host's in all slices; counters are read before and after them."""
    tenant = device._tenant(0)
    areas = tenant.hosts(tenant.scattered("bench", _AREAS, _AREA_LINES * LINE_BYTES))
    places = (areas[:, None] + np.arange(_AREA_LINES, dtype=np.uint64) * np.uint64(LINE_BYTES)).reshape(-1)
    rng = np.random.default_rng(reads)
    window = [DEVICE_COUNTERS_LINE, *(CHANNEL_COUNTERS_LINE + s for s in range(device.config.slices))]
    counters = Read(np.array([register_address(device.config, 0, line) for line in window], np.uint64))
    # without fences, so that the counters are read among the reads: their requests leave in order
    return [
        Read(rng.choice(places, _WARM_UP)),
        counters,
        Read(rng.choice(places, reads)),
        counters,
    ]


def _beside_attention(device: Device, filled: Filled, operations: list[Operation]) -> tuple[int, int]:
    """Cycles and lines of attention between the counters that the operations read."""
    with beside(device._port, operations) as results:
        filled.step()
    return _between(results[1], results[3])


def _between(first: ReadResult, last: ReadResult) -> tuple[int, int]:
    """Cycles, and lines that units took, between two reads of the counters."""
    cycles, lines = [], []
    for result in (first, last):
        cycles.append(DEVICE_COUNTERS.unpack(result.data[0].tobytes())["cycles"])
        lines.append(sum(CHANNEL_COUNTERS.unpack(line.tobytes())["unit_lines"] for line in result.data[1:]))
    return cycles[1] - cycles[0], lines[1] - lines[0]
