"""`nearkv bench`: measure, and print one object of named results."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import JsonOption, print_results

app = typer.Typer(name="bench", help="Measure something and print named results.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure something and print named results."""


@app.command()
def sim(
    device: Annotated[str, typer.Option(help="Which device: rtl, model, with a preset: rtl:card.")] = "rtl",
    seconds: Annotated[float, typer.Option(help="How long attention streams.", min=0.1)] = 5.0,
    build: Annotated[
        bool, typer.Option(help="Build the device from nothing, too, in a folder of its own (minutes).")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a device is built (sim.build_s), started (sim.open_s) and simulated.

    sim.cycles_per_s and sim.lines_per_s are device cycles and K and V lines per second of wall time while
    all attention units stream: jobs of 4,096 rows, head_dim 128, 4 query heads.
    """
    from nearkv.bench.sim import measure

    print_results(f"simulation of {device}", measure(device, seconds=seconds, build=build), as_json)
