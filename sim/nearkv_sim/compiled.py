"""Hand-written C++ to a shared library with the system's compiler alone: cached by content, optional."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from .cache import cache_folder, digest, filled_whole, locked
from .toolchain import ToolMissing
from .verilate import BuildError, Report, processor

_LOG_TAIL_LINES = 30


def compiled_library(
    *,
    name: str,
    sources: Sequence[Path],
    generated: Mapping[str, str],
    options: Sequence[str] = (),
    report: Report | None = None,
) -> Path:
    """A shared library, compiled for this very processor unless the cache has it; safe with many processes.

    Parameters
    ----------
    name : for people; part of the folder's name.
    sources : .cpp files; headers beside them are found.
    generated : headers made for it, name to text.
    options : of the compiler.
    report : told of the step; by default the terminal.

    Raises
    ------
    ToolMissing : there is no C++ compiler.
    BuildError : it failed.
    """
    compiler = find_compiler()
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    key = digest(
        [
            *(part for path in (*sources, *headers) for part in (path.name, path.read_bytes())),
            *(part for item in generated.items() for part in item),
            *options,
            _version(compiler),
            processor(),
        ]
    )
    root = cache_folder("compiled")
    library = root / f"{name}-{key}" / f"{name}.so"
    if not library.exists():
        with locked(root / f"{name}-{key}.lock"):
            if not library.exists():
                from .build import progress

                with nullcontext(report) if report else progress() as tell:
                    tell(f"{name}: compiling, once")
                    _compile(compiler, library, sources, generated, options)
    return library


def find_compiler() -> str:
    """The path of the system's C++ compiler; ToolMissing where there is none."""
    for program in ("c++", "g++", "clang++"):
        path = shutil.which(program)
        if path is not None:
            return path
    raise ToolMissing("a C++ compiler is missing; install it with: sudo apt-get install -y g++")


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _compile(
    compiler: str,
    library: Path,
    sources: Sequence[Path],
    generated: Mapping[str, str],
    options: Sequence[str],
) -> None:
    folder = library.parent
    with filled_whole(folder) as work:
        for header, text in generated.items():
            (work / header).write_text(text)
        include = dict.fromkeys(f"-I{source.parent}" for source in sources)
        command = [compiler, "-std=gnu++20", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += [*options, f"-I{work}", *include, *map(str, sources), "-o", str(work / library.name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LOG_TAIL_LINES:])
            raise BuildError(f"{compiler} failed with status {done.returncode} on {library.stem}:\n{tail}")
