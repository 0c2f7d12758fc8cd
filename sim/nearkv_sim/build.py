"""From a configuration to a device that runs: Amaranth to Verilog to a shared library or a cocotb program.

Each step is kept by what it depends on. The Verilog is found again by the hardware's sources, the
configuration and the tools' versions, without running Amaranth.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearkv_hw.abi import DeviceConfig

from .designs import design_of
from .messages import cpp_header
from .toolchain import need_trace_headers
from .verilate import NATIVE, Recipe, Report, black_boxes, build

if TYPE_CHECKING:
    from nearkv_hw.verilog import VerilogDesign


def device_design(config: DeviceConfig, report: Report = lambda line: None) -> VerilogDesign:
    """The device's Verilog."""
    from nearkv_hw.device import Device

    return design_of(Device, label=config.name, report=report, config=config)


def device_library(
    design: VerilogDesign, *, name: str, trace: bool = False, report: Report = lambda line: None
) -> Path:
    """The shared library of a device whose ports are the message streams of its endpoint's ports.

    Parameters
    ----------
    design : the top module.
    name : for people.
    trace : whether it can record waveforms, which costs some speed even while it does not.
    report : told of each step.

    Raises
    ------
    BuildError, ToolMissing : what failed or is missing, and what to do.
    """
    if trace:
        need_trace_headers()
    recipe = Recipe(
        name=f"{name}-rtl{'-trace' if trace else ''}",
        top=_HOST_TOP,
        sources={
            "messages.h": cpp_header(
                _endpoint_ports(design),
                registers=any(port.name == "decoder_write_valid" for port in design.ports),
            ),
            "control.vlt": f'`verilator_config\nlint_off -file "*.v"\nno_inline -module "{_SHARED}"\n',
            "design.v": design.text,
            "host_top.v": _host_top(design),
        },
        native=list(
            dict.fromkeys([*black_boxes(design), *(NATIVE / file for file in ("events.cpp", "host.cpp"))])
        ),
        library=True,
        verilator=[*_SPEED, *(["--trace-fst"] if trace else [])],
        # Local symbols only: a process may hold libraries of several configurations.
        compile=["-fvisibility=hidden", "-I.."],
        link=["-Wl,-Bsymbolic"],
    )
    return build(recipe, report)


@contextmanager
def progress() -> Iterator[Report]:
    """A reporter that shows steps on the terminal with a spinner, and as plain lines where there is none."""
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    if console.is_terminal:
        with console.status("") as status:
            yield lambda line: status.update(f"{line} [dim]({time.monotonic() - started:.0f} s so far)[/]")
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)


_HOST_TOP = "host_top"
_SHARED = "*.unit0"
"""The module of all attention units: as it is not inlined, most of its code is there once for all of them."""
_SPEED = ("--x-assign", "fast", "--x-initial", "fast", "--no-assert")


def _endpoint_ports(design: VerilogDesign) -> int:
    """How many ports the device's endpoint has."""
    return sum(re.fullmatch(r"m2s_req_\d+_valid", port.name) is not None for port in design.ports)


def _host_top(design: VerilogDesign) -> str:
    """A top around the design with its reset registered.

    What depends on an input is evaluated twice in every cycle, and nearly every register depends on reset.
    """
    ports = ", ".join(port.name for port in design.ports)
    declared = "".join(f"  {port.direction}put [{port.width - 1}:0] {port.name};\n" for port in design.ports)
    inner = ", ".join(
        f".{port.name}({'reset' if port.name == 'rst' else port.name})" for port in design.ports
    )
    return (
        f"module {_HOST_TOP}({ports});\n{declared}  reg reset = 1;\n"
        f"  always @(posedge clk) reset <= rst;\n  {design.name} device({inner});\nendmodule\n"
    )
