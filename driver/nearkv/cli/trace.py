"""`nearkv trace`: a timeline of a device at work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .counters import print_counters
from .output import JsonOption, print_json, print_table, say
from .overrides import SetOption, overrides_of

if TYPE_CHECKING:
    from nearkv.device import TraceSummary
    from nearkv.stats import Stats

_MEANINGS = {
    "cycles": "device cycles",
    "clock_mhz": "of the device",
    "events": "recorded",
    "events_lost": "came when the recording was full (--events)",
    "jobs": "of attention, shown with all their stages",
    "descriptors_incomplete": "fetched, but not completed while recording went on",
    "slices": "in the file",
    "commands_left_out": "of the DRAM, later than the file shows",
}


def trace(
    file: Annotated[Path, typer.Argument(help="Where the timeline goes; compressed if it ends in .gz.")],
    device: Annotated[str, typer.Option(help="Which device: rtl, or with a preset: rtl:card.")] = "rtl",
    rows: Annotated[int, typer.Option(min=1, help="Rows of every sequence.")] = 512,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads; a job is one of a sequence.")] = 2,
    group: Annotated[int, typer.Option(min=1, help="Query heads of a KV head.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a row.")] = 128,
    append: Annotated[bool, typer.Option(help="Record the writing of the rows, too.")] = False,
    events: Annotated[int, typer.Option(min=1, help="Events to keep at most.")] = 4 << 20,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Attend a batch of sequences and write what the device did in every cycle as a timeline.

    Open the file at https://ui.perfetto.dev or chrome://tracing: tracks per channel, unit and link, a slice
    for every stage of every job and for every command of the DRAM.
    """
    import nearkv
    from nearkv.workload import Workload

    work = Workload(rows=rows, kv_heads=kv_heads, group=group, batch=batch, head_dim=head_dim)
    status = Console(stderr=True).status("writing the rows")
    with nearkv.open(device, **overrides_of(overrides)) as opened, status:
        before = opened.stats()
        if append:
            with opened.trace(file, events=events) as summary, work.fill(opened) as filled:
                status.update("attending")
                filled.step()
        else:
            with work.fill(opened) as filled:
                status.update("attending")
                filled.step()  # brings tables on chip and claims what the driver needs
                before = opened.stats()
                with opened.trace(file, events=events) as summary:
                    filled.step()
        done = opened.stats() - before
        config = opened.config.to_dict()
    if as_json:
        result = {"file": str(file), "config": config, "workload": work.to_dict(), **summary}
        print_json({**result, "bytes": file.stat().st_size, "stats": done.to_dict()})
    else:
        _show(file, summary, done)


def _show(file: Path, summary: TraceSummary, done: Stats) -> None:
    """Say what a timeline holds, what the device counted meanwhile, and how to open it."""
    rows: list[tuple[str, Any, str]] = [
        (name, f"{value:,}", _MEANINGS.get(name, "")) for name, value in summary.items()
    ]
    rows.append(("bytes", f"{file.stat().st_size:,}", "of the file"))
    print_table(f"{file}", ("", "", ""), rows)
    counters = done.to_dict()
    print_counters(counters["channels"], counters["memories"])
    say("Open it at https://ui.perfetto.dev (Open trace file) or chrome://tracing.")
