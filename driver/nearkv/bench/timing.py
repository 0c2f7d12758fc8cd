"""The timing model against the RTL: the workloads of `nearkv.estimate.measured`, measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nearkv_hw.abi.dram import PARTS, Dram

from nearkv.bench import Progress, Quiet
from nearkv.device import Device, open
from nearkv.estimate.measured import Measurement, measurements
from nearkv.workload import Filled, Workload

from .memory import rest, step_cycles

_STEPS = 8
"""Steps of a workload at least: one in ten or so meets a refresh that the idle memory makes up for."""
_LONG_CYCLES = 100_000
"""A workload of so many cycles is known to half a percent from one step."""


@dataclass(frozen=True)
class Again:
    """A workload whose cycles were measured once more: the mean of `steps` steps."""

    before: Measurement
    cycles: int
    steps: int


def measure(
    parts: Sequence[Dram], *, quick: bool = False, progress: Progress | None = None
) -> Iterator[Again]:
    """Measure the workloads of some parts, each on a device that has nothing else in its memory.

    Parameters
    ----------
    parts : DRAM parts.
    quick : every eighth workload alone.
    progress : told of every device.
    """
    progress = progress or Quiet()
    names = [part.name.lower() for part in parts]
    wanted = [m for m in measurements() if m.config["dram"] in names][:: 8 if quick else 1]

    def device_of(measurement: Measurement) -> str:
        return json.dumps(measurement.config, sort_keys=True)

    for _, group in groupby(sorted(wanted, key=device_of), key=device_of):
        of_device = list(group)
        config = of_device[0].config
        progress.begin(f"{config['dram']}, {config['queries']} kept queries: {len(of_device)} workloads")
        for measurement in of_device:
            work = Workload(**measurement.workload)
            # what was on a device before decides in which banks the next queries and rows meet
            with open("rtl", report=progress.tell, **config) as device:
                progress.tell(f"{config['dram']}: {work.batch * work.kv_heads} jobs of {work.rows} rows")
                with work.fill(device) as filled:
                    filled.step()
                    steps = max(measurement.steps, _STEPS if measurement.cycles < _LONG_CYCLES else 1)
                    cycles = mean_cycles(device, filled, work, steps=steps)
            yield Again(measurement, round(cycles), steps)


def mean_cycles(device: Device, filled: Filled, work: Workload, *, steps: int) -> float:
    """The mean of steps of a rested device, begun at moments spread over the interval between refreshes.

    Steps begun at any moment would not do: what a host does between them takes the same time again and
    again, so that all of them may meet a refresh, or none.
    """
    config = device.config
    part = PARTS[config.dram]
    interval = part.frames(config.density_gbit, config.refresh).refresh_interval * part.subchannels
    total = 0
    for step in range(steps):
        rest(device)
        begun = device.stats().cycles
        left = (step * interval // steps - begun) % interval
        while device.stats().cycles - begun < left:
            pass
        total += step_cycles(device, filled, work)
    return total / steps


def devices(parts: Sequence[Dram]) -> int:
    """Devices that `measure` builds at most."""
    names = [part.name.lower() for part in parts]
    return len({json.dumps(m.config, sort_keys=True) for m in measurements() if m.config["dram"] in names})


def results(again: Sequence[Again]) -> list[dict[str, Any]]:
    """Named results: the cycles of each workload, and the model's relative error."""
    found = []
    for one in again:
        before = one.before
        config = {
            **before.config,
            **before.workload,
            "kind": before.kind,
            "calibration": before.calibration,
            "steps": one.steps,
            "model_cycles": before.model_cycles,
        }
        error = before.model_cycles / one.cycles - 1
        found.append({"name": "timing.cycles", "value": one.cycles, "unit": "cycles", "config": config})
        found.append({"name": "timing.error", "value": error, "unit": "of the cycles", "config": config})
    return found


def write(path: Path, again: Sequence[Again]) -> None:
    """Write all workloads with what was measured in place of what was known."""
    new = {id(one.before): (one.cycles, one.steps) for one in again}
    figures = [(m, *new.get(id(m), (m.cycles, m.steps))) for m in measurements()]
    lines = [
        json.dumps(
            {
                "set": "calibration" if m.calibration else "check",
                "workload": m.workload,
                "config": m.config,
                "cycles": cycles,
                "steps": steps,
            }
        )
        for m, cycles, steps in figures
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
