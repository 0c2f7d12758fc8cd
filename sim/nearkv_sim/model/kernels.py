"""What computes the model device's attention: the native kernel where it can be built, else torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

from ..compiled import find_compiler
from ..port import Lines
from ..toolchain import Tool, ToolMissing
from ..verilate import BuildError, Report
from . import attention
from .attention import Work
from .memory import Memory

Attend = Callable[[Sequence[Work], Memory], list[Lines]]
"""Results of jobs, as `attention.attend` has them; every kernel gives the same bits."""
KERNELS = ("native", "torch")
KERNEL_VARIABLE = "NEARKV_KERNEL"
"""The environment variable that names the kernel where none is asked for."""


def checked_kernel(name: str | None) -> str | None:
    """A kernel's name, or the environment's where there is none; ValueError for what is no kernel's."""
    source = f"kernel={name!r}"
    if name is None:
        name = os.environ.get(KERNEL_VARIABLE) or None
        source = f"{KERNEL_VARIABLE}={name}"
    if name is not None and name not in KERNELS:
        raise ValueError(
            f"{source}: the model's kernels are {', '.join(KERNELS)}; without one it takes the fastest"
        )
    return name


def survey() -> Tool:
    """Whether `choose` takes the native kernel when it is given no name, for `nearkv doctor`."""
    name = checked_kernel(None)
    needed_for, install = "attention at full speed on the model device", f"unset {KERNEL_VARIABLE}"
    found = None
    if name != "torch":
        try:
            found = f"built by {find_compiler()} at first use"
        except ToolMissing as missing:
            install = str(missing).partition(": ")[2]
    return Tool("native kernel", found, f"{needed_for}; without it, torch", install, optional=True)


def choose(name: str | None, report: Report | None = None) -> tuple[str, Attend]:
    """A kernel and its name.

    Parameters
    ----------
    name : of `KERNELS`; None for that of `KERNEL_VARIABLE`, else the fastest that works.
    report : told of a build; by default the terminal.

    Raises
    ------
    ValueError : for what is no kernel's name.
    ToolMissing, BuildError : the native kernel was asked for, and there is no C++ compiler or it failed.
    """
    name = checked_kernel(name)
    if name != "torch":
        from .native import load_kernel

        try:
            return "native", load_kernel(report)
        except ToolMissing:
            if name == "native":
                raise
        except BuildError as error:
            if name == "native":
                raise
            warnings.warn(f"the model device computes in torch, which is slow: {error}", stacklevel=2)
    return "torch", attention.attend
