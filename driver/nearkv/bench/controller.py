"""Bandwidth and latency of a channel's memory alone, beside the closed forms of its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nearkv_hw.abi import configure
from nearkv_hw.abi.dram import (
    PARTS,
    Dram,
    DramPart,
    ceiling,
    random_fraction,
    turnaround_share,
    unloaded_read_ns,
)
from nearkv_hw.memory.dram.controller import WRITE_ENTRIES
from nearkv_sim.cocotb.traffic import Measured, Pattern
from nearkv_sim.cocotb.traffic import measure as run

from nearkv.bench import Progress, Quiet

_WARM_UP = "warm-up"
READS = 60_000
"""Of each pattern: some twenty refresh intervals."""


def measure(
    parts: Sequence[Dram], *, quick: bool, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Results `memory.controller.*`: what each pattern brought, the part's limit, and the share of that.

    Parameters
    ----------
    parts : DRAM parts.
    quick : fewer reads.
    progress : told of every step.
    """
    progress = progress or Quiet()
    reads = READS // 10 if quick else READS
    patterns = {
        _WARM_UP: Pattern(reads=READS),  # until as many refreshes are owed as may be
        "streaming": Pattern(reads=reads),
        "random": Pattern(reads=reads, random=True),
        "mixed": Pattern(reads=reads, reads_per_write=2),
        "unloaded": Pattern(reads=reads // 100, random=True, alone=True),
    }
    for dram in parts:
        config = configure("small", dram=dram)
        progress.begin(f"{dram.name.lower()}: traffic of a controller alone")
        measured = run(config, patterns, progress.tell)
        part = PARTS[dram]
        best = ceiling(part, config.density_gbit, config.refresh)
        about = {"part": dram.name.lower(), "density_gbit": config.density_gbit, "ceiling": best}
        limits = {
            "streaming": best,
            "random": best * random_fraction(part),
            "mixed": best * (1 - _turnaround(part)),
        }
        for name, limit in limits.items():
            rate = measured[name].lines_per_cycle
            config_of = {**about, "reads": reads, "limit": limit}
            yield _result(f"{name}.fraction_of_peak", rate, "of a line per cycle", config_of)
            yield _result(f"{name}.fraction_of_limit", rate / limit, "of the part's limit", config_of)
        yield from _latencies(measured["unloaded"], part, about)


def _latencies(unloaded: Measured, part: DramPart, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The quickest read of a closed bank, at the memory's port, and what of it is the part's own."""
    cycle_ns = float(part.cycle_ns)
    about = {**about, "part_ns": unloaded_read_ns(part)}
    taken = unloaded.latency_min * cycle_ns
    yield _result("unloaded.latency_ns", taken, "ns", about)
    yield _result(
        "unloaded.overhead_cycles", unloaded.latency_min - about["part_ns"] / cycle_ns, "cycles", about
    )


def _turnaround(part: DramPart) -> float:
    """What turning the bus takes, with as many writes at a time as a controller's queue holds."""
    return turnaround_share(part, 2 * WRITE_ENTRIES, WRITE_ENTRIES)


def _result(name: str, value: float, unit: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"memory.controller.{name}", "value": value, "unit": unit, "config": config}
