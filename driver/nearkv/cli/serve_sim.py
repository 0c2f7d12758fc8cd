"""`nearkv serve-sim`: a trace of requests, served by GPUs alone and by GPUs and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from nearkv.arguments import one_of

from .output import JsonOption, bytes_of, print_json, print_table, say
from .overrides import SetOption
from .setups import (
    CapacityOption,
    ConfigFileOption,
    DeviceOption,
    DevicesOption,
    GpuOption,
    GpusOption,
    HostShareOption,
    HostsOption,
    KVFormatOption,
    LaunchOption,
    LinkFactorOption,
    MicroBatchesOption,
    ModelOption,
    SwitchOption,
    UnitRateOption,
    setup_of,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from nearkv.estimate import Setup
    from nearkv.serving import Result, Serving, Trace

_SYSTEMS = ("gpu", "gpu+memory", "gpu+controller", "three tiers")
"""Compared where none is named."""
_TIMES = (
    "system",
    "tokens/s",
    "TTFT s",
    "TPOT ms",
    "between tokens p99",
    "refused",
)
_MEMORY = (
    "system",
    "batch",
    "preempted",
    "of prompts found on GPU / device / below",
    "link read",
    "link written",
)


def serve_sim(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Requests: .jsonl (Mooncake) or .csv (Azure); made up if not given."),
    ] = None,
    model: ModelOption = None,
    config: ConfigFileOption = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="A system, as nearkv estimate names it, or all; may be given again. "
            f"If not given: {', '.join(_SYSTEMS)}."
        ),
    ] = None,
    kv_format: KVFormatOption = "bf16",
    gpu: GpuOption = "h100",
    gpus: GpusOption = 1,
    device: DeviceOption = "card",
    overrides: SetOption = None,
    devices: DevicesOption = 1,
    capacity: CapacityOption = "0",
    micro_batches: MicroBatchesOption = 1,
    launch_us: LaunchOption = None,
    switch: SwitchOption = False,
    hosts: HostsOption = 1,
    host_share: HostShareOption = 0.0,
    unit_rate: UnitRateOption = 1.0,
    link_factor: LinkFactorOption = 1.0,
    max_batch: Annotated[str, typer.Option(help="Sequences that run together at most.")] = "256",
    max_context: Annotated[
        str | None,
        typer.Option(help="Longest request, prompt and answer, that is accepted; the model's if not given."),
    ] = None,
    step_tokens: Annotated[
        str, typer.Option(help="Tokens of one step, decoding sequences and prompts together.")
    ] = "8k",
    prefix_cache: Annotated[bool, typer.Option(help="Keep rows of prompts for later requests.")] = True,
    spill: Annotated[
        bool,
        typer.Option(
            "--spill",
            help="gpu+memory: run requests with rows in CXL memory, too, fetched for every token, instead of "
            "having them wait for GPU memory.",
        ),
    ] = False,
    host_cache: Annotated[str, typer.Option(help="Host memory that keeps prefixes: 512g.")] = "0",
    ssd_cache: Annotated[str, typer.Option(help="Drives that keep prefixes: 4t.")] = "0",
    ssd_gbs: Annotated[float | None, typer.Option(help="GB/s of the drives.")] = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="Of the trace: mooncake or azure; as its ending says if not given."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block whose hash a trace has.")] = 512,
    sort: Annotated[bool, typer.Option("--sort", help="Sort a trace by arrival first.")] = False,
    speedup: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Take the first so many requests alone.")] = None,
    requests: Annotated[int | None, typer.Option(help="Made-up trace: how many; 500 if not given.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Made-up trace: requests per second; 1 if not given.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Made-up trace: mean tokens of a prompt's own part; 4k if not given.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Made-up trace: mean tokens of an answer; 256 if not given.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Made-up trace: of lengths, 0 (equal) to 1 (exponential); 1 if not given."),
    ] = None,
    prefixes: Annotated[
        int | None, typer.Option(help="Made-up trace: different beginnings; 8 if not given.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Made-up trace: tokens of each beginning; 2k if not given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Made-up trace: of its random numbers; 0 if not given.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where results go: .csv or .parquet (a row per request), .png or .html; may be given again."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate serving: replay requests against GPUs and devices; time to first token, time per token, hits.

    Batches form continuously, prompts are worked on in chunks beside them, prefixes are kept in tiers. Steps
    take what nearkv estimate says. What is simulated and what is not is in docs/serving-simulation.md.
    """
    from nearkv.estimate.quantities import quantity
    from nearkv.estimate.report import check_outputs
    from nearkv.serving import Serving, Synthetic, read, systems
    from nearkv.serving.machine import SSD_BANDWIDTH, machine
    from nearkv.serving.report import write

    check_outputs(out or [])
    given: dict[str, Any] = {
        "requests": requests,
        "rate": rate,
        "prompt": None if prompt is None else quantity(prompt, "prompt"),
        "output": None if output is None else quantity(output, "output"),
        "spread": spread,
        "prefixes": prefixes,
        "prefix": None if prefix is None else quantity(prefix, "prefix"),
        "seed": seed,
    }
    made_up = {name: value for name, value in given.items() if value is not None}
    if trace is None:
        if kind is not None or sort:
            raise typer.BadParameter("--format and --sort are for a trace from a file; give its path")
        asked = Synthetic(block_tokens=block_tokens, **made_up).trace()
    elif made_up:
        raise typer.BadParameter(
            f"--{', --'.join(made_up)}: for made-up traces; leave them out, or leave {trace} out"
        )
    else:
        asked = read(trace, kind=kind, block_tokens=block_tokens, sort=sort)
    asked = asked.scaled(speedup=speedup, limit=limit)
    setup = setup_of(
        model=model,
        config=config,
        context=1,
        batch=quantity(max_batch, "max_batch"),
        kv_format=kv_format,
        gpu=gpu,
        gpus=gpus,
        device=device,
        overrides=overrides,
        devices=devices,
        capacity=capacity,
        micro_batches=micro_batches,
        launch_us=launch_us,
        switch=switch,
        hosts=hosts,
        host_share=host_share,
        unit_rate=unit_rate,
        link_factor=link_factor,
    )
    setup = _with_context(setup, max_context)
    serving = Serving(
        step_tokens=quantity(step_tokens, "step_tokens"),
        prefix_cache=prefix_cache,
        spill=spill,
        host_bytes=quantity(host_cache, "host_cache"),
        ssd_bytes=quantity(ssd_cache, "ssd_cache"),
        ssd_bandwidth=SSD_BANDWIDTH.value if ssd_gbs is None else ssd_gbs * 1e9,
    )
    names = _names(system, systems(setup))
    for name in names:
        machine(setup, name, serving)  # refuses before anything is started
    results = _simulate(setup, asked, names, serving)
    for path in out or ():
        write(path, results, serving)
    if as_json:
        print_json(
            {
                "trace": {"name": asked.name, "requests": len(asked.requests), "unused": asked.unused},
                "serving": vars(serving),
                "setup": setup.to_dict(),
                "results": [result.summary() for result in results],
            }
        )
        return
    _show(asked, results)
    for path in out or ():
        say(f"wrote {escape(str(path))}")


def _with_context(setup: Setup, longest: str | None) -> Setup:
    """With the longest request that is accepted: the model's own unless another is asked for."""
    from nearkv.estimate.quantities import quantity
    from nearkv.estimate.setup import MAX_CONTEXT

    own = setup.model.max_context or MAX_CONTEXT
    return replace(setup, context=own if longest is None else quantity(longest, "max_context"))


def _names(given: list[str] | None, known: list[str]) -> list[str]:
    """Systems to compare, each once."""
    if not given:
        return [name for name in _SYSTEMS if name in known]
    for name in given:
        one_of("system", name, dict.fromkeys(["all", *known]))
    return known if "all" in given else list(dict.fromkeys(given))


def _simulate(setup: Setup, trace: Trace, names: Sequence[str], serving: Serving) -> list[Result]:
    from rich.progress import Progress

    from nearkv.serving import simulate

    results = []
    with Progress(console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(name, total=len(trace.requests))
            report = partial(_progress, progress, task)
            results.append(simulate(setup, trace, name, serving, report))
    return results


def _progress(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def _show(trace: Trace, results: Sequence[Result]) -> None:
    setup = results[0].machine.setup
    lasts = trace.requests[-1].arrival_s
    say(
        f"[bold]{setup.model.name}[/] on {setup.gpus} x {setup.gpu.name}, {setup.devices} x "
        f"{setup.config.name} ({setup.device_bytes / 2**30:g} GiB each)"
    )
    say(f"{escape(trace.name)}: {len(trace.requests):,} requests in {lasts:,.0f} s")
    if trace.unused:
        say(f"fields of the trace that mean nothing here: {escape(', '.join(trace.unused))}")
    sums = [result.summary() for result in results]
    print_table("times, median / 99th percentile of requests", _TIMES, map(_times, sums))
    print_table("means and sums", _MEMORY, map(_memory, sums))
    refusals: dict[str, list[str]] = {}
    for result in results:
        refused = [one for one in result.outcomes if one.refused]
        if refused:
            told = f"{len(refused):,}, the first of them request {refused[0].number}: {refused[0].refused}"
            refusals.setdefault(told, []).append(result.system)
    for told, systems in refusals.items():
        say(f"refused by {', '.join(systems)}: {told}")
    if refusals:
        say("--out FILE.csv says of every request what came of it")


def _times(found: dict[str, Any]) -> tuple[str, ...]:
    first, token = found["time_to_first_token_s"], found["time_per_output_token_ms"]
    return (
        found["system"],
        f"{found['output_tokens_per_s']:,.0f}",
        f"{_number(first['median'])} / {_number(first['p99'])}",
        f"{_number(token['median'])} / {_number(token['p99'])}",
        _number(found["time_between_tokens_ms"]["p99"]),
        f"{found['refused']:,}",
    )


def _memory(found: dict[str, Any]) -> tuple[str, ...]:
    hits = found["hit_share"]
    below = hits.get("host", 0.0) + hits.get("ssd", 0.0)
    found_in = (hits.get("gpu", 0.0), hits.get("device", 0.0), below)
    return (
        found["system"],
        _number(found["batch"]["mean"]),
        f"{found['preemptions']:,}",
        " / ".join(f"{100 * share:.0f}" for share in found_in) + " %",
        bytes_of(found["link_read_bytes"]),
        bytes_of(found["link_written_bytes"]),
    )


def _number(value: float) -> str:
    """Three digits, and no exponent for large ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
