"""Measures the memory behind a channel with the traffic of `nearkv_hw.memory.traffic`.

The simulator runs on its own until a measurement is over, so Python is not in the per-cycle loop.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cocotb
from cocotb.triggers import RisingEdge
from nearkv_hw.abi import DeviceConfig

from ..designs import design_of
from ..verilate import Report
from .runner import parameters, run
from .streams import cycles, start, value

_FIGURES = ("cycles", "latency_sum", "latency_min", "latency_max")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What is read and written; see `nearkv_hw.memory.traffic.Traffic`."""

    reads: int
    random: bool = False
    reads_per_write: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Measured:
    """What a pattern took, in device cycles."""

    pattern: Pattern
    cycles: int
    latency_mean: float
    latency_min: int
    latency_max: int

    @property
    def lines_per_cycle(self) -> float:
        """Lines read and written."""
        writes = self.pattern.reads // self.pattern.reads_per_write if self.pattern.reads_per_write else 0
        return (self.pattern.reads + writes) / self.cycles


def measure(
    config: DeviceConfig, patterns: Mapping[str, Pattern], report: Report = lambda line: None
) -> dict[str, Measured]:
    """Run each pattern on the memory of one channel, one after the other.

    Raises
    ------
    BuildError, ToolMissing : the memory could not be built.
    """
    from nearkv_hw.memory.traffic import Traffic

    design = design_of(Traffic, label="traffic", report=report, config=config)
    with TemporaryDirectory(prefix="nearkv-traffic-") as folder, redirect_stdout(sys.stderr):
        file = Path(folder) / "figures.json"
        wanted = {"file": str(file), "patterns": [asdict(pattern) for pattern in patterns.values()]}
        run(design, module=__name__, parameters=wanted)
        figures = json.loads(file.read_text())
    return {
        name: Measured(
            pattern,
            found["cycles"],
            found["latency_sum"] / pattern.reads,
            found["latency_min"],
            found["latency_max"],
        )
        for (name, pattern), found in zip(patterns.items(), figures, strict=True)
    }


@cocotb.test()  # type: ignore[untyped-decorator]
async def measures(dut: Any) -> None:
    """Carry out the patterns of the parameters and leave what they took in a file."""
    given = parameters()
    await start(dut)
    figures = []
    for pattern in given["patterns"]:
        dut.order.value = int(pattern["random"])
        dut.alone.value = int(pattern["alone"])
        dut.reads.value = pattern["reads"]
        dut.reads_per_write.value = pattern["reads_per_write"]
        dut.go.value = 1
        await RisingEdge(dut.done)
        await cycles(dut, 1)
        figures.append({name: value(getattr(dut, name)) for name in _FIGURES})
        dut.go.value = 0
        await cycles(dut, 4)
    Path(given["file"]).write_text(json.dumps(figures))
