"""The timing model against the RTL: the workloads of `nearkv.estimate.measured`, measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nearkv_hw.abi.dram import Dram

from nearkv.bench import Progress, Quiet
from nearkv.device import open
from nearkv.estimate.measured import Measurement, measurements
from nearkv.workload import Workload

from .memory import rest, step_cycles



@dataclass(frozen=True)
class Again:
    """A workload whose cycles were measured once more."""

    before: Measurement
    cycles: int


def measure(
    parts: Sequence[Dram], *, quick: bool = False, progress: Progress | None = None
) -> Iterator[Again]:
    """Measure the workloads of some parts.

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
        with open("rtl", report=progress.tell, **config) as device:
            for measurement in of_device:
                work = Workload(**measurement.workload)
                progress.tell(f"{config['dram']}: {work.batch * work.kv_heads} jobs of {work.rows} rows")
                with work.fill(device) as filled:
                    filled.step()
                    steps = []
                    for _ in range(measurement.steps):
                        rest(device)
                        steps.append(step_cycles(device, filled, work))
                yield Again(measurement, round(sum(steps) / len(steps)))


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
            "model_cycles": before.model_cycles,
        }
        error = before.model_cycles / one.cycles - 1
        found.append({"name": "timing.cycles", "value": one.cycles, "unit": "cycles", "config": config})
        found.append({"name": "timing.error", "value": error, "unit": "of the cycles", "config": config})
    return found


def write(path: Path, again: Sequence[Again]) -> None:
    """Write all workloads with what was measured in place of what was known."""
    new = {id(one.before): one.cycles for one in again}
    lines = [
        json.dumps(
            {
                "set": "calibration" if m.calibration else "check",
                "workload": m.workload,
                "config": m.config,
                "cycles": new.get(id(m), m.cycles),
                "steps": m.steps,
            }
        )
        for m in measurements()
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
