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


@app.command()
def accuracy(
    write: Annotated[
        Path | None, typer.Option(help="Write the table of numerics.md in this folder: docs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How far is the contract from float64, for every variant and format?"""
    from nearkv.study import accuracy as study
    from nearkv.study import blocks

    if write:
        blocks.check(write, study.PAGE, figures=False)
    with steps_bar(len(study.VARIANTS)) as steps:
        errors = study.measure(steps.begin)
    written = study.write(write, errors) if write else []
    if as_json:
        print_json({"spreads": study.SPREADS, "errors": errors, "added": study.added(errors)})
        return
    print(study.block(errors))
    for path in written:
        say(f"wrote {path}")


@app.command()
def quantisation(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model, as transformers saves one; SmolLM2 if not given.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write table and figure of formats.md in this folder: docs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What does quantising K and V to each preset do to the attention of a real model?

    Cosine and relative error of attention outputs over the model's own queries, K and V of a text, against
    float64 on the rows as they were.
    """
    from nearkv import hf
    from nearkv.hf.record import record
    from nearkv.quantise import PRESETS
    from nearkv.study import blocks
    from nearkv.study import quantisation as study

    if write:
        blocks.check(write, study.PAGE)
    with steps_bar(len(PRESETS) + 2) as steps:
        steps.begin("loading the model")
        loaded = hf.load(model)
        steps.begin("reading the text")
        layers = record(loaded, study.TEXT)
        found = study.measure(layers, steps.begin)
    written = study.write(write, found, layers) if write else []
    if as_json:
        print_json(study.to_dict(found))
        return
    print(study.table(found, layers).markdown())
    for path in written:
        say(f"wrote {path}")
