"""Run cocotb tests of a component, from pytest, in a few lines.

A test file holds both halves. The pytest function builds the component and runs the cocotb coroutines of
the same file (their names must not start with `test`, so that pytest leaves them alone)::

    import cocotb
    import pytest
    from nearkv_hw.common.queue import Queue
    from nearkv_sim.cocotb.runner import parameters, run
    from nearkv_sim.cocotb.streams import StreamSink, StreamSource, random, start

    @pytest.mark.rtl
    @pytest.mark.parametrize("depth", [1, 4])
    def test_queue(depth):
        run(Queue(shape=8, depth=depth), module=__file__, parameters={"depth": depth})

    @cocotb.test()
    async def keeps_order(dut):
        await start(dut)                                  # clock and reset, where the design has them
        rng = random("items")                             # a generator that follows from the run's seed
        items = [rng.randrange(256) for _ in range(500)]
        source = StreamSource(dut, "i", idle=0.3)         # drives i_valid, i_payload; watches i_ready
        sink = StreamSink(dut, "o", backpressure=0.5)     # drives o_ready; checks that valid holds
        source.send(items)
        assert await sink.receive(len(items)) == items

Ports are `dut.i_payload`, `dut.partials_0_valid`: the member's path joined by underscores; only ports (and
signals named in `probes`) are visible. A failing coroutine fails the pytest test with its name, its traceback
and the seed; `NEARKV_SEED=123 pytest ...` repeats it, `NEARKV_WAVES=1 pytest ...` records waveforms. Builds
are kept by content: an unchanged component starts in about a second. For a large one keep its Verilog, too::

    run(design_of(AttentionUnit, queries=4), module=__file__)    # from nearkv_sim.designs
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cocotb_tools.config
import find_libpython
from amaranth.lib import wiring
from nearkv_hw.verilog import VerilogDesign, to_verilog

from ..cache import cache_folder
from ..designs import TOP
from ..toolchain import has_trace_headers
from ..verilate import Recipe, Report, black_boxes, build

_LOG_TAIL_LINES = 60


class SimulationFailed(AssertionError):
    """A cocotb test failed, or the simulator ended without a result."""


def run(
    component: wiring.Component | VerilogDesign,
    *,
    module: str,
    parameters: Mapping[str, Any] | None = None,
    tests: str | None = None,
    waves: bool = False,
    seed: int | None = None,
    probes: Sequence[str] = (),
    timeout_s: float = 600,
) -> None:
    """Build a component and run a module's cocotb tests on it.

    Parameters
    ----------
    component : the component, or its Verilog from `to_verilog` or `design_of`.
    module : path of the file with the cocotb tests (`__file__`), or the name of an importable module.
    parameters : anything JSON can hold; the tests get it back from `parameters()`.
    tests : regular expression; only tests whose name matches it run.
    waves : record `waves.fst` (or .vcd without lz4); its path is printed. Also with `NEARKV_WAVES=1`.
    seed : of every random choice; by default `NEARKV_SEED`, else a new one.
    probes : "module.signal" names that shall be visible below the top, as Verilog names.
    timeout_s : the simulator is stopped after this time.

    Raises
    ------
    SimulationFailed : with the names of the failed tests, the end of the log, and the seed.
    BuildError, ToolMissing : the component could not be built.
    """
    waves = waves or os.environ.get("NEARKV_WAVES", "0") not in ("", "0")
    if seed is None:
        seed = int(os.environ.get("NEARKV_SEED", "0")) or secrets.randbits(31)
    design = component if isinstance(component, VerilogDesign) else to_verilog(component, TOP)
    path = Path(module)
    name, folder = (path.stem, str(path.resolve().parent)) if path.suffix == ".py" else (module, None)
    program = build_program(design, name=name, waves=waves, probes=probes)
    work = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache_folder("runs")))
    environment = simulator_environment(design, name, folder, seed)
    environment["COCOTB_RESULTS_FILE"] = str(work / "results.xml")
    environment["NEARKV_PARAMETERS"] = json.dumps(dict(parameters or {}))
    if tests:
        environment["COCOTB_TEST_FILTER"] = tests
    log = work / "simulation.log"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [str(program), *(["--trace"] if waves else [])],
                cwd=work,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            file.write(f"\nstopped after {timeout_s:g} s\n")
    passed, failed = _results(work / "results.xml")
    if waves:
        print(f"waveforms: {', '.join(str(wave) for wave in work.glob('dump.*'))}")
    if failed or status != 0 or not passed:
        what = (
            f"failed: {', '.join(failed)}"
            if failed
            else "no test ran"
            if status == 0
            else f"the simulator ended with status {status}"
        )
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise SimulationFailed(
            f"{name}: {what} (seed {seed}; repeat with NEARKV_SEED={seed}). The end of {log}:\n{tail}"
        )
    print(f"{name}: {len(passed)} cocotb tests passed (seed {seed})")
    if not waves:
        shutil.rmtree(work)


def parameters() -> dict[str, Any]:
    """Inside a cocotb test: the parameters that `run` was given."""
    values = json.loads(os.environ.get("NEARKV_PARAMETERS", "{}"))
    assert isinstance(values, dict)
    return values


def ports() -> dict[str, dict[str, Any]]:
    """Inside a cocotb test: the design's ports by name, each with its direction ("in", "out") and width."""
    values = json.loads(os.environ["NEARKV_PORTS"])
    assert isinstance(values, dict)
    return values


def build_program(
    design: VerilogDesign,
    *,
    name: str,
    waves: bool = False,
    probes: Sequence[str] = (),
    report: Report = lambda line: None,
) -> Path:
    """The simulator program of a design for cocotb, from the cache if it is there."""
    trace = ["--trace-fst" if has_trace_headers() else "--trace-vcd"] if waves else []
    libraries = str(cocotb_tools.config.libs_dir)
    simulator = Path(cocotb_tools.config.share_dir) / "lib" / "verilator" / "verilator.cpp"
    recipe = Recipe(
        name=f"{name}-cocotb",
        top=design.name,
        sources={"control.vlt": _control(design, probes), "design.v": design.text},
        native=[*black_boxes(design), simulator],
        verilator=["--vpi", "--timescale", "1ns/1ps", *trace],
        optimise="-O1",
        link=[
            *(f"-Wl,-rpath,{libraries}", f"-L{libraries}", "-lcocotbvpi_verilator"),
            "-Wl,--export-dynamic-symbol=nearkv_dram_flip",  # tests call it
        ],
    )
    return build(recipe, report)


def simulator_environment(
    design: VerilogDesign, module: str, folder: str | None, seed: int
) -> dict[str, str]:
    """The environment in which a cocotb program runs the tests of `module`, found in `folder` if given."""
    libpython = find_libpython.find_libpython()
    if libpython is None:
        raise RuntimeError(
            f"{sys.executable} has no shared libpython, which cocotb needs; use another Python"
        )
    return {
        **os.environ,
        "COCOTB_TEST_MODULES": module,
        "COCOTB_TOPLEVEL": design.name,
        "COCOTB_RANDOM_SEED": str(seed),
        "COCOTB_TRUST_INERTIAL_WRITES": "1",  # Verilator's harness applies writes as inertial ones
        "COCOTB_ANSI_OUTPUT": "0",
        "NEARKV_PORTS": json.dumps(
            {port.name: {"direction": port.direction, "width": port.width} for port in design.ports}
        ),
        "GPI_USERS": f"{libpython};{cocotb_tools.config.pygpi_entry_point()}",
        "PYGPI_PYTHON_BIN": sys.executable,
        "PYTHONPATH": os.pathsep.join([*([folder] if folder else []), *filter(None, sys.path)]),
        "TOPLEVEL_LANG": "verilog",
    }


def _control(design: VerilogDesign, probes: Sequence[str]) -> str:
    """Verilator's control file: which signals VPI sees (not every wire), no lint of generated text."""
    seen = [(design.name, port.name) for port in design.ports]
    for probe in probes:
        module, _, signal = probe.rpartition(".")
        if not module:
            raise ValueError(f'a probe is named "module.signal", not {probe!r}')
        seen.append((module, signal))
    lines = [f'public_flat_rw -module "{module}" -var "{signal}"' for module, signal in seen]
    return "\n".join(["`verilator_config", 'lint_off -file "design.v"', *lines, ""])


def _results(path: Path) -> tuple[list[str], list[str]]:
    """Names of the passed and the failed tests."""
    passed: list[str] = []
    failed: list[str] = []
    if path.exists():
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            bad = case.find("failure") is not None or case.find("error") is not None
            (failed if bad else passed).append(case.get("name", "?"))
    return passed, failed
