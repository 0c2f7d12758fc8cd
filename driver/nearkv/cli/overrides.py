"""Configuration fields on the command line: `--set channels=1 --set dram=ddr5_6400`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A field of the configuration; may be given again."),
]
"""The option of every command that opens a device of its own."""


def overrides_of(given: list[str] | None) -> dict[str, Any]:
    """Fields and values; numbers as such, everything else as names. What they may be, `configure` says."""
    fields: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r}: write FIELD=VALUE, such as channels=1 or dram=ddr5_6400")
        try:
            fields[name] = int(value, 0)
        except ValueError:
            fields[name] = value
    return fields
