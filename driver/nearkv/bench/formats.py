"""How many lines the attention units take in a cycle, by KV format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nearkv.device import Device, open
from nearkv.quantise.formats import PRESETS
from nearkv.workload import Workload

from . import Progress, Quiet

ROWS = (2048, 8192)
"""Rows of the two jobs that are compared."""
DIMS = (128, 32)
"""Rows of whole lines, and rows of which narrow ones share a line."""


def measure(
    spec: str, *, formats: list[str], progress: Progress | None = None, **overrides: Any
) -> Iterator[dict[str, Any]]:
    """Of every format and dimension, two rates of one attention unit.

    `formats.lines_per_cycle` is what the unit takes while a pass goes on: the lines that a long job has more
    than a short one, over the cycles that it has more. `formats.job_lines_per_cycle` is the short job's own,
    which has its begin and its end over few lines. A cycle counts in both if the unit had something to stream
    and the memory had answered. As many query heads as the unit keeps attend at once.

    Parameters
    ----------
    spec : which device.
    formats : names of presets.
    progress : told of every step.
    overrides : fields of the configuration.
    """
    progress = progress or Quiet()
    progress.begin(f"{spec}: build or open")
    with open(spec, report=progress.tell, **overrides) as device:
        for name in formats:
            for dim in DIMS:
                progress.begin(f"{name}, {dim} elements")
                short, long = (
                    Workload(
                        rows=rows, kv_heads=1, batch=1, group=device.config.queries, head_dim=dim, dtype=name
                    )
                    for rows in ROWS
                )
                lines, cycles = _taken(device, short)
                more_lines, more_cycles = _taken(device, long)
                config = {"device": spec, **device.config.to_dict(), **short.to_dict()}
                for what, value, rows in (
                    ("lines", (more_lines - lines) / (more_cycles - cycles), list(ROWS)),
                    ("job_lines", lines / cycles, short.rows),
                ):
                    yield {
                        "name": f"formats.{what}_per_cycle",
                        "value": value,
                        "unit": "lines per cycle and unit",
                        "config": {**config, "rows": rows},
                    }


def _taken(device: Device, work: Workload) -> tuple[int, int]:
    """Lines that the units take in a job, and their cycles in which they had one to take."""
    with work.fill(device) as filled:
        filled.step()
        before = device.stats()
        filled.step()
        done = device.stats() - before
    lines = sum(channel.unit_lines for channel in done.channels)
    return lines, lines + sum(channel.unit_wait for channel in done.channels)


def steps(formats: list[str]) -> int:
    """Steps that `measure` tells of."""
    return 1 + len(formats) * len(DIMS)


ALL = list(PRESETS)
