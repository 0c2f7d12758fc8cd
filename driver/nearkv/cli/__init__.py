"""The command line `nearkv`. Each command is a module here with a function of its own."""

from __future__ import annotations

import sys

import typer

from nearkv.errors import NearkvError

from . import bench, doctor, estimate, info, inspect, replay, run, serve, serve_sim, study, trace
from .output import fail

app = typer.Typer(
    name="nearkv",
    help="A CXL memory device that computes decode attention where the KV cache lives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(doctor.doctor)
app.command()(info.info)
app.command()(inspect.inspect)
app.command()(run.run)
app.command()(replay.replay)
app.command()(trace.trace)
app.command()(estimate.estimate)
app.command()(serve.serve)
app.command()(serve_sim.serve_sim)
app.add_typer(bench.app)
app.add_typer(study.app)


def main() -> None:
    """Run the command line; what a user can put right ends as one message and status 1."""
    try:
        app()
    except (NearkvError, RuntimeError, ValueError, OSError) as error:  # a failed build is a RuntimeError
        fail(error)
        sys.exit(1)
