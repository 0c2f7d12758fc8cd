"""What commands print: one JSON object, or tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
"""The option that every command has."""


def print_json(data: Any) -> None:
    """Print an object for programs."""
    print(json.dumps(data))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table for people; what is in its first column is not broken."""
    first, *others = columns
    table = Table(Column(first, no_wrap=True), *others, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def say(text: str) -> None:
    """Print a line for people; rich markup works."""
    Console().print(text)


def bytes_of(count: float) -> str:
    """A number of bytes for people."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def fail(error: BaseException) -> None:
    """Print an error to the error stream."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}")


def print_results(title: str, results: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print what a bench measured: name, value, unit and config of each result."""
    if as_json:
        print_json({"results": results})
    else:
        rows = ((r["name"], f"{r['value']:,.6g}", r["unit"]) for r in results)
        print_table(title, ("name", "value", "unit"), rows)
