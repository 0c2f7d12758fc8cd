"""`nearkv replay`: run an attention call from a file again and compare it bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import JsonOption, print_json, print_table, say

if TYPE_CHECKING:
    from nearkv.replay import Outcome


def replay(
    file: Annotated[Path, typer.Argument(help="A replay file, as a check writes it when bits differ.")],
    device: Annotated[
        str | None,
        typer.Option(
            help="Run it on another kind of device than where it was seen: model, rtl or cocotb, with a "
            "preset if wanted (rtl:card)."
        ),
    ] = None,
    wave: Annotated[
        Path | None, typer.Option(help="Record an FST of the run into this file (rtl and cocotb).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an attention call again, hold it against the reference, and say where bits part.

    Exit status 1 when a bit is unequal. What differs is shown stage by stage: the partial result over all
    rows, then the first row whose own partial differs, with its weight and score.
    """
    from nearkv import replay as replays

    case, recorded = replays.load(file)
    with replays.open_for(case, device, trace=wave is not None) as opened:
        if wave is not None:
            opened.start_wave(wave)
        outcome = replays.replay(case, recorded, opened)
        kind = opened.kind
    if as_json:
        print_json({"file": str(file), "device": kind, **outcome.to_dict()})
    else:
        _show(outcome, kind)
    if not outcome.equal:
        raise typer.Exit(1)


def _show(outcome: Outcome, kind: str) -> None:
    then = "has the reference's bits" if outcome.recorded_equal else "differs from the reference"
    say(f"The result in the file {then}.")
    if outcome.equal:
        say(f"[green]equal[/]: all {outcome.lanes} lanes from {kind} have the reference's bits")
        return
    say(f"[red]unequal[/]: {outcome.unequal} of {outcome.lanes} lanes from {kind} differ from the reference")
    rows = ((s.sequence, s.q_head, s.stage, s.device, s.reference) for s in outcome.stages)
    print_table("stages", ("sequence", "query head", "stage", kind, "reference"), rows)
