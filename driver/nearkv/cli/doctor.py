"""`nearkv doctor`: what of the toolchain is there, what is missing, and how to get it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .output import JsonOption, print_json, print_table, say

_ON_OWN_FEET = ("model",)
"""Kinds of device that need no toolchain."""


def doctor(
    device: Annotated[
        str, typer.Option(help="The kind of device that must work: model, rtl or cocotb.")
    ] = "rtl",
    as_json: JsonOption = False,
) -> None:
    """Say what of the toolchain is there, what is missing, and the command that installs it.

    The model device needs none of it: without a C++ compiler torch computes its attention, with the same bits
    and far slower.

    Exit status 1 when something is missing that the asked device cannot do without.
    """
    from nearkv_sim import KINDS, toolchain
    from nearkv_sim.model import kernels

    if device not in KINDS:
        raise typer.BadParameter(f"unknown device {device!r}; there are {', '.join(KINDS)}")
    tools = [*toolchain.survey(), kernels.survey()]
    missing = [tool for tool in tools if tool.found is None]
    required = [] if device in _ON_OWN_FEET else [tool for tool in missing if not tool.optional]
    if as_json:
        print_json({"device": device, "ready": not required, "tools": [asdict(tool) for tool in tools]})
    else:
        rows = (
            (
                tool.name,
                tool.found or ("[yellow]missing, optional[/]" if tool.optional else "[red]missing[/]"),
                tool.needed_for,
            )
            for tool in tools
        )
        print_table("toolchain", ("tool", "found", "needed for"), rows)
        for tool in missing:
            say(f"{tool.name} is missing ({tool.needed_for}); install it with: [bold]{tool.install}[/]")
        say(f"[red]{device} does not work yet[/]" if required else f"[green]{device} is ready[/]")
    if required:
        raise typer.Exit(1)
