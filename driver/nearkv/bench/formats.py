"""How many lines the attention units take in a cycle, by KV format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nearkv.device import open
from nearkv.quantise.formats import PRESETS
from nearkv.workload import Workload

from . import Progress, Quiet

ROWS = 2048
DIMS = (128, 32)
"""Rows of whole lines, and rows of which narrow ones share a line."""


def measure(
    spec: str, *, formats: list[str], progress: Progress | None = None, **overrides: Any
) -> Iterator[dict[str, Any]]:
    """`formats.lines_per_cycle` of every format and dimension, from the counters of the units.

    A unit's cycles with something to stream, but for those in which the memory had not answered yet, are
    what its lines took. As many query heads as the units keep attend at once.

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
        config = device.config
        for name in formats:
            for dim in DIMS:
                progress.begin(f"{name}, {dim} elements")
                work = Workload(
                    rows=ROWS, kv_heads=2, batch=1, group=config.queries, head_dim=dim, dtype=name
                )
                with work.fill(device) as filled:
                    filled.step()
                    before = device.stats()
                    filled.step()
                    done = device.stats() - before
                lines = sum(channel.unit_lines for channel in done.channels)
                waited = sum(channel.unit_wait for channel in done.channels)
                yield {
                    "name": "formats.lines_per_cycle",
                    "value": lines / (lines + waited),
                    "unit": "lines per cycle and unit",
                    "config": {"device": spec, **config.to_dict(), **work.to_dict(), "lines": lines},
                }


def steps(formats: list[str]) -> int:
    """Steps that `measure` tells of."""
    return 1 + len(formats) * len(DIMS)


ALL = list(PRESETS)
