"""Verilog to a compiled model: the cached, locked, reported build step of every device and bench."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import cache_folder, digest, filled_whole, locked
from .toolchain import find_compiler, find_verilator

if TYPE_CHECKING:
    from nearkv_hw.verilog import VerilogDesign

Report = Callable[[str], None]
"""Takes a line that says what the build does now."""
NATIVE = Path(__file__).parent / "native"
"""Hand-written C++ and SystemVerilog."""
BLACK_BOXES = {
    "nearkv_store": ("nearkv_store.sv", "store.cpp"),
    "nearkv_event": ("nearkv_event.sv", "events.cpp"),
    "nearkv_dram": ("nearkv_dram.sv", "dram.cpp", "store.cpp", "events.cpp"),
}
"""What of `NATIVE` stands behind each module that the hardware leaves open."""
_SPLIT = ("--output-split", "5000", "--output-split-cfuncs", "1000")
_LOG_TAIL_LINES = 30


class BuildError(RuntimeError):
    """A build step failed; the message has the step, the end of its log and the log's path."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to build.

    Parameters
    ----------
    name : for people; part of the folder's name.
    top : the top module.
    sources : generated files, name to text: Verilog in the order in which it is read, and C++ headers.
    native : hand-written files, .sv and .cpp; headers beside them are found.
    library : a shared library, which may run for hours, if true, else a program.
    verilator : more options of Verilator.
    optimise : the compiler's optimisation option.
    compile : more options of the compiler.
    link : more options of the linker.
    march_native : compile for this very processor.
    """

    name: str
    top: str
    sources: Mapping[str, str]
    native: Sequence[Path] = ()
    library: bool = False
    verilator: Sequence[str] = ()
    optimise: str = "-O2"
    compile: Sequence[str] = ()
    link: Sequence[str] = ()
    march_native: bool = False

    def key(self) -> str:
        """What the product depends on, in sixteen digits: sources, options, tools and processor."""
        headers = sorted({header for path in self.native for header in path.parent.glob("*.h")})
        return digest(
            [
                self.top,
                *(part for item in self.sources.items() for part in item),
                *(part for path in (*self.native, *headers) for part in (path.name, path.read_bytes())),
                str((self.library, self.optimise, *self.verilator, "", *self.compile, "", *self.link)),
                find_verilator().version,
                find_compiler(fast=self.library).version,
                processor() if self.march_native else platform.machine(),
            ]
        )


@cache
def processor() -> str:
    """The instruction sets of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


def black_boxes(design: VerilogDesign) -> list[Path]:
    """The hand-written files behind the black boxes that a design instantiates."""
    files = dict.fromkeys(
        file for module, names in BLACK_BOXES.items() if design.instantiates(module) for file in names
    )
    return [NATIVE / file for file in files]


def build(recipe: Recipe, report: Report = lambda line: None) -> Path:
    """The product of a recipe, built unless the cache has it; safe with many processes at once.

    Returns
    -------
    The program or shared library, in a folder of the cache of its own.

    Raises
    ------
    BuildError : Verilator or the compiler failed.
    ToolMissing : one of them is not there.
    """
    root = cache_folder("verilated")
    folder = root / f"{recipe.name}-{recipe.key()}"
    product = folder / (f"{recipe.top}.so" if recipe.library else recipe.top)
    if not product.exists():
        with locked(root / f"{folder.name}.lock"):
            if not product.exists():
                _build_into(folder, product.name, recipe, report)
    return product


def _build_into(folder: Path, product: str, recipe: Recipe, report: Report) -> None:
    with filled_whole(folder) as work:
        for name, text in recipe.sources.items():
            (work / name).write_text(text)
        verilator = find_verilator()
        compiler = find_compiler(fast=recipe.library)
        compile_options = [*recipe.compile, *compiler.options, *(["-fPIC"] if recipe.library else [])]
        if recipe.march_native:
            compile_options.append("-march=native")
        link_options = [*(["-shared"] if recipe.library else []), *recipe.link, *compiler.link]
        include = {f"-I{path.parent}" for path in recipe.native if path.suffix == ".cpp"}
        command = [
            *(str(verilator.executable), "-cc", "--exe", "--prefix", "Vtop", "--top-module", recipe.top),
            *("-Mdir", "obj", "-o", f"../{product}", "-O3", *_SPLIT, "-Wno-fatal", "-I."),
            *recipe.verilator,
            *(part for option in (*compile_options, *sorted(include)) for part in ("-CFLAGS", option)),
            *(part for option in link_options for part in ("-LDFLAGS", option)),
            *(name for name in recipe.sources if not name.endswith(".h")),
            *map(str, recipe.native),
        ]
        environment = verilator.environment()
        started = time.monotonic()
        report(f"{recipe.name}: Verilog to C++")
        _step("verilator", command, work, environment, report)
        report(f"{recipe.name}: compiling (Verilator took {time.monotonic() - started:.0f} s)")
        flags = {
            "CXX": compiler.executable,
            "LINK": compiler.executable,
            # The wheel's verilated.mk leaves some of these empty.
            "CFG_CXXFLAGS_PCH_I": "-include",
            "CFG_CXXFLAGS_STD": "-std=gnu++20",
            "CFG_CXXFLAGS_COROUTINES": "",  # no option is needed in this standard
            "CFG_LDLIBS_THREADS": "-pthread",
            "OPT_FAST": recipe.optimise,
            "OPT_GLOBAL": "-O2",  # the run-time library, the same for all: ccache has it
            "OPT_SLOW": "-O0",  # what runs once
        }
        if compiler.cached and shutil.which("ccache"):
            flags["OBJCACHE"] = "ccache"
            environment["CCACHE_SLOPPINESS"] = "pch_defines,time_macros"
        jobs = len(os.sched_getaffinity(0))
        command = ["make", "-j", str(jobs), "-C", "obj", "-f", "Vtop.mk"]
        environment.pop("MAKEFLAGS", None)
        _step("make", [*command, *(f"{k}={v}" for k, v in flags.items())], work, environment, report)
        shutil.rmtree(work / "obj")


def _step(name: str, command: list[str], folder: Path, environment: dict[str, str], report: Report) -> None:
    log = folder / f"{name}.log"
    with log.open("w") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        status = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status != 0:
        kept = cache_folder("failed") / f"{folder.name}.{name}.log"
        shutil.copy(log, kept)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise BuildError(f"{name} failed with status {status}; the end of {kept}:\n{tail}")
