"""`nearkv study`: one question over many setups, and the page of docs that answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import JsonOption, print_json, say
from .progress import steps_bar

app = typer.Typer(name="study", help="Ask one question over many setups.", no_args_is_help=True)


@app.callback()
def study() -> None:
    """Ask one question over many setups."""


@app.command()
def where_is_near(
    write: Annotated[
        Path | None, typer.Option(help="Write tables and figures of where-is-near.md in this folder: docs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Where should attention units stand: rank, phy, controller, fabric, or nowhere (host)?

    Who wins by query heads per KV head, context and format, where the winner changes, what limits each, and
    what becomes of it when link, units, ranks or batch are others: the blocks of docs/where-is-near.md.
    """
    from nearkv.study import answers, blocks, page

    if write:
        blocks.check(write, page.PAGE)
    with steps_bar(answers.STEPS) as steps:
        found = answers.ask(steps.begin)
    if write:
        written = page.write(write, found)
    if as_json:
        print_json(found.to_dict())
        return
    for name, block in found.blocks().items():
        print(f"## {name}\n\n{block}\n")
    for path in written if write else ():
        say(f"wrote {path}")
