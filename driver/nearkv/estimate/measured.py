"""Cycles that the RTL took for batches of jobs, beside those of the timing model.

`rtl_cycles.json` has means over `steps` steps whose tables and descriptors were on chip, from the first
doorbell to the last completion record, each workload on a device that had nothing else in its memory. To
those of the set "calibration" the model's constants were fitted; to those of the set "check" they were not.
`nearkv bench timing` measures them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearkv_hw.abi import configure
from nearkv_hw.abi.lines import lines_of
from nearkv_sim.model import timing

_FIGURES = Path(__file__).with_name("rtl_cycles.json")
_SHORT_ROWS = 128
"""Jobs of fewer rows are told apart: what belongs to a job weighs as much as its rows."""


@dataclass(frozen=True)
class Measurement:
    """One workload on the RTL.

    Parameters
    ----------
    calibration : whether the model's constants were fitted to it.
    config, workload : fields of the device and of `nearkv.workload.Workload`.
    cycles : that the RTL took, the mean of `steps` steps.
    model_cycles : that the timing model says.
    """

    calibration: bool
    config: dict[str, Any]
    workload: dict[str, Any]
    cycles: int
    steps: int
    model_cycles: float

    @property
    def error(self) -> float:
        """The model's relative error."""
        return self.model_cycles / self.cycles - 1

    @property
    def kind(self) -> str:
        """Batches or single jobs, of long or of short contexts."""
        single = self.workload["batch"] * self.workload["kv_heads"] == 1
        if single:
            return "single job"
        return "batch, short jobs" if self.workload["rows"] < _SHORT_ROWS else "batch"


@cache
def measurements() -> tuple[Measurement, ...]:
    """Every measurement of the file, with the model's answer."""
    return tuple(
        Measurement(
            entry["set"] == "calibration",
            entry["config"],
            entry["workload"],
            entry["cycles"],
            entry["steps"],
            _modelled(entry["config"], entry["workload"]),
        )
        for entry in json.loads(_FIGURES.read_text())
    )


@dataclass(frozen=True)
class Errors:
    """Errors of one kind of workload on one part, with the units in one place.

    Parameters
    ----------
    count : workloads.
    mean, largest : sizes of their relative errors.
    """

    count: int
    mean: float
    largest: float


def errors(of: Iterable[Measurement]) -> dict[tuple[str, str, str], Errors]:
    """By part, placement and kind: how large the errors are."""
    kinds: dict[tuple[str, str, str], list[float]] = {}
    for measurement in of:
        key = (measurement.config["dram"], measurement.config["placement"], measurement.kind)
        kinds.setdefault(key, []).append(abs(measurement.error))
    return {
        key: Errors(len(sizes), sum(sizes) / len(sizes), max(sizes)) for key, sizes in sorted(kinds.items())
    }


def _modelled(overrides: dict[str, Any], workload: dict[str, Any]) -> float:
    config = configure(**overrides)
    row_lines = lines_of(2 * workload["head_dim"])
    work = timing.uniform(
        config,
        jobs=workload["batch"] * workload["kv_heads"],
        rows=workload["rows"],
        group=workload["group"],
        value_dim=workload["head_dim"],
        row_lines=2 * row_lines,
        query_lines=row_lines,
        page_rows=workload["page_rows"],
    )
    return timing.call(config, work)
