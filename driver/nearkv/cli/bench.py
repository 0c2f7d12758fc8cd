"""`nearkv bench`: measure, and print one object of named results."""

from __future__ import annotations

from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from .output import JsonOption, print_results
from .overrides import SetOption, overrides_of
from .progress import steps_bar

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


@app.command()
def model(
    all_lengths: Annotated[
        bool, typer.Option("--all-lengths", help="Contexts of 2,048, 32,768 and 131,072 rows, too (2 GiB).")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Pairs of calls that a figure is the median of.", min=1)] = 30,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast the model device attends, beside torch's own attention (model.ratio_to_sdpa).

    32 query heads over 8 KV heads, head_dim 128, 8,192 rows, bf16, on all cores, from doorbell to result.
    model.rows_per_s counts a row for each KV head.
    """
    from nearkv.bench import model as bench

    lengths = bench.LENGTHS if all_lengths else (bench.ROWS,)
    with steps_bar(len(lengths)) as steps:
        results = list(bench.measure(lengths, repeats=repeats, progress=steps))
    print_results("model", results, as_json)


@app.command()
def driver(
    device: Annotated[str, typer.Option(help="Which device: rtl, model, with a preset.")] = "model:card",
    repeats: Annotated[int, typer.Option(help="Calls that a figure is the median of.", min=1)] = 100,
    hosts: Annotated[
        list[int] | None,
        typer.Option(
            help="Processes that use one served device at once; may be given again. 1, 2, 8.", min=1
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what the driver costs on the host (driver.*), apart from what the device takes.

    driver.attend_overhead_us is the driver's own time of a call for a batch of 8; driver.appends_per_s counts
    rows of all 8 KV heads, the device's time included; driver.pages_per_s are pages taken and given back.
    driver.host_bytes_per_row is of one KV head. driver.hosts_attend_us is a call of one of several hosts.
    """
    from nearkv.bench import driver as bench
    from nearkv.bench import hosts as several

    figures = [
        *bench.measure(device, repeats=repeats),
        *several.measure(device, hosts=hosts or (1, 2, 8), calls=repeats),
    ]
    results = [asdict(figure) for figure in figures]
    print_results(f"driver on {device}", results, as_json)


@app.command()
def hf(
    model: Annotated[
        Path | None, typer.Option(help="A folder as transformers saves a model. SmolLM2-135M if not given.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of the context.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Steps that a figure is the median of.", min=1)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Measure what a token costs beside the device (hf.integration, hf.beside).

    A decode step with transformers' own attention and cache, and with both on the model device, in processor
    time on one core; both figures are parts of the former.
    """
    from nearkv.bench import hf as bench
    from nearkv.hf import load

    loaded = load(model)
    with steps_bar(2) as bar:
        results = list(bench.measure(loaded, rows=rows, steps=steps, progress=bar))
    print_results(f"Hugging Face, {loaded.name}", results, as_json)


@app.command()
def formats(
    device: Annotated[str, typer.Option(help="Which device: rtl, model, with a preset.")] = "rtl:card",
    kv_format: Annotated[
        list[str] | None, typer.Option(help="A KV format; may be given again. All presets if not given.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how many lines a unit takes in a cycle, by KV format.

    formats.lines_per_cycle is the rate while a pass goes on, formats.job_lines_per_cycle that of a whole job
    of 2,048 rows. Rows of 128 elements and of 32, with as many query heads as a unit keeps. A card with the
    fixed memory and one channel shows as much as a whole one, and is built in a fraction of the time:
    --set channels=1 --set dram=fixed.
    """
    from nearkv.bench import formats as bench

    wanted = kv_format or bench.ALL
    with steps_bar(bench.steps(wanted)) as steps:
        results = list(bench.measure(device, formats=wanted, progress=steps, **overrides_of(overrides)))
    print_results(f"formats on {device}", results, as_json)


@app.command()
def memory(
    part: Annotated[
        list[str] | None,
        typer.Option(help="A DRAM part, such as ddr5_6400; may be given again. All if not given."),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(help="Where the units stand; may be given again. controller if not given."),
    ] = None,
    channels: Annotated[int, typer.Option(help="Channels of the devices that run batches.")] = 2,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="batch, heads, job, latency, attacc, shares, placements or traffic; may be given again. "
            "All if not given."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="An eighth of the rows: figures to look at, not to quote.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Replace the tables of this page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how much of its DRAM's rate the device takes (memory.*), with the RTL of every part.

    Counted is every needed line once, from the doorbell to the last completion. A device that was never
    built takes a minute or two, a batch of long jobs some more: all of it takes hours on two cores. Measure
    pieces with --json, and make one page of them with `nearkv bench tables`.
    """
    from nearkv_hw.abi.config import Placement
    from nearkv_hw.abi.dram import PARTS, Dram

    from nearkv.bench import controller
    from nearkv.bench import memory as bench
    from nearkv.bench.report import write_into

    known = {*bench.CASES, "traffic"}
    for name in case or ():
        if name not in known:
            raise typer.BadParameter(f"no case {name!r}; there are {', '.join(sorted(known))}")
    parts = _members("--part", part, Dram) or tuple(PARTS)
    options = bench.Options(
        parts=parts,
        placements=_members("--placement", placement, Placement) or (Placement.CONTROLLER,),
        channels=channels,
        quick=quick,
        cases=case or (),
    )
    with_dram = [dram for dram in parts if dram in PARTS and options.wants("traffic")]
    with steps_bar(len(bench.plan(options)) + len(with_dram)) as steps:
        results = [
            *bench.measure(options, steps),
            *controller.measure(with_dram, quick=quick, progress=steps),
        ]
    if write:
        write_into(write, results)
    print_results("memory", results, as_json)


@app.command()
def link(
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure latencies with off, flits_68 or flits_256; may be given again. All if not given."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what flits carry (link.read.lines_per_flit, link.write.lines_per_flit), and latencies.

    Lines per flit are those of a pair of link layers whose wire is all that is short, with flits of 68 bytes,
    with and without multi-data headers, and of 256. link.read_latency_ns and link.write_latency_ns go from a
    request to its answer at the host's messages, on an idle device.
    """
    from nearkv_hw.abi.config import LinkLayer

    from nearkv.bench import link as bench

    layers = _members("--layer", layer, LinkLayer) or tuple(LinkLayer)
    with steps_bar(bench.steps(layers)) as steps:
        results = list(bench.measure(layers, steps))
    print_results("link", results, as_json)


@app.command()
def tables(
    results: Annotated[
        list[Path], typer.Argument(help="What runs of `nearkv bench memory --json` printed.", exists=True)
    ],
    write: Annotated[Path | None, typer.Option(help="Replace the tables of this page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make tables of memory.* results that earlier runs printed, such as one for each part."""
    from nearkv.bench.report import read_results, write_into

    found = [result for path in results for result in read_results(path)]
    if write:
        write_into(write, found)
    print_results("memory", found, as_json)


@app.command()
def timing(
    part: Annotated[
        list[str] | None,
        typer.Option(help="A DRAM part, such as ddr5_6400; may be given again. All if not given."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Every eighth workload alone.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Write all workloads with the new cycles, as rtl_cycles.json has them."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the workloads of the timing model on the RTL (timing.cycles) and its errors (timing.error).

    All parts take some minutes once their devices are built.
    """
    from nearkv_hw.abi.dram import PARTS, Dram

    from nearkv.bench import timing as bench

    parts = _members("--part", part, Dram) or tuple(PARTS)
    with steps_bar(bench.devices(parts)) as steps:
        again = list(bench.measure(parts, quick=quick, progress=steps))
    if write:
        bench.write(write, again)
    print_results("timing", bench.results(again), as_json)


Member = TypeVar("Member", bound=IntEnum)


def _members(option: str, names: list[str] | None, kind: type[Member]) -> tuple[Member, ...]:
    """Members of an enumeration by their names in lower case."""
    choices = {member.name.lower(): member for member in kind}
    for name in names or ():
        if name not in choices:
            raise typer.BadParameter(f"{option} {name!r}: there are {', '.join(choices)}")
    return tuple(choices[name] for name in names or ())
