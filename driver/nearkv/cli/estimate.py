"""`nearkv estimate`: what a device would do for a model, or for many questions at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

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
    from nearkv.estimate import Answer, Band, Setup

_COLUMNS = (
    "system",
    "ms a token",
    "tokens/s",
    "bound by",
    "KV on GPU / device / host",
    "link a token",
    "J a token",
    "W a device",
    "sequences with room",
)


def estimate(
    axes: Annotated[
        list[str] | None, typer.Argument(help="More axes of the sweep.", metavar="[AXIS]...")
    ] = None,
    model: ModelOption = None,
    config: ConfigFileOption = None,
    context: Annotated[str, typer.Option(help="Tokens of every sequence: 128k.")] = "32k",
    batch: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1",
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
    form: Annotated[str, typer.Option(help="The card's form: e3s, e3s-2t, e3l-2t, cem or cem-8pin.")] = "cem",
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="An axis: context=4k..1m (doubling) or gpu=h100,h200. More may follow it."),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Where a sweep's result goes: .csv, .parquet, .png or .html; may be given again."),
    ] = None,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that runs the sweep.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the models and GPUs of the table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate a model's decode step: time, throughput, capacity, link traffic, energy, and what limits.

    Compared are the GPU alone, GPU and CXL memory without compute, GPU and devices with their units at every
    place, and three tiers (GPU, devices, host memory). Figures and their sources are in docs/estimate.md.
    """
    from nearkv.estimate import estimate as answers_of
    from nearkv.estimate.quantities import quantity

    if listing:
        _list(as_json)
        return
    setup = setup_of(
        model=model,
        config=config,
        context=quantity(context, "context"),
        batch=quantity(batch, "batch"),
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
        form=form,
    )
    if sweep or axes:
        _sweep(setup, [*(sweep or ()), *(axes or ())], out or [], dask, as_json)
        return
    if out or dask:
        raise typer.BadParameter(
            "--out and --dask are for sweeps; add --sweep, such as --sweep context=4k..1m"
        )
    answers = answers_of(setup)
    if as_json:
        print_json(
            {
                "setup": setup.to_dict(),
                "model": setup.model.to_dict(),
                "answers": [a.to_dict() for a in answers],
            }
        )
    else:
        _show(setup, answers)


def _show(setup: Setup, answers: Sequence[Answer]) -> None:
    model = setup.model
    say(
        f"[bold]{model.name}[/] ({model.source}): {model.parameters / 1e9:.1f} billion parameters, "
        f"{model.weight_bytes / 2**30:.1f} GiB; KV {model.kv_bytes_per_token(setup.kv_format) / 1024:g} KiB "
        f"a token, {model.kv_bytes(setup.context, setup.kv_format) / 2**30:.2f} GiB a sequence"
    )
    config = setup.config
    say(
        f"{setup.gpus} x {setup.gpu.name}; {setup.devices} x {config.name}: {config.channels} channels of "
        f"{config.dram.name.lower()}, {config.queries} kept queries, {setup.device_bytes / 2**30:g} GiB, "
        f"link {config.link.name.lower()}"
    )
    title = f"{setup.batch} x {setup.context:,} tokens, {setup.kv_format.name}"
    print_table(title, _COLUMNS, (_row(answer) for answer in answers))
    missing = [f"{answer.system}: {answer.why_not}" for answer in answers if not answer.fits]
    if missing:
        say("* no room, times are those with room: " + "; ".join(missing))
    hot = [a.system for a in answers if a.throttled.mid > 1]
    if hot:
        say(f"! more than the card's form ({setup.form}) may dissipate: " + ", ".join(hot))


def _row(answer: Answer) -> tuple[str, ...]:
    from nearkv.estimate.report import room_of

    split = answer.split
    shares = " / ".join(f"{100 * share:.0f}" for share in (split.gpu, split.device, split.host))
    power = answer.device_power_w
    return (
        f"{'' if answer.fits else '* '}{answer.system}",
        f"{answer.step_s * 1e3:,.2f}",
        f"{answer.tokens_per_s:,.1f}",
        answer.bound,
        f"{shares} %",
        bytes_of(answer.link_bytes / answer.batch),
        _band(answer.energy_per_token),
        f"{'! ' if answer.throttled.mid > 1 else ''}{_band(power)}" if power.high else "",
        room_of(answer.max_batch),
    )


def _band(band: Band) -> str:
    return f"{band.low:.3g} to {band.high:.3g}"


def _list(as_json: bool) -> None:
    from nearkv.estimate import CONFIGS, FORMATS, GPUS, model

    models = [model(name) for name in CONFIGS]
    if as_json:
        print_json(
            {
                "models": [one.to_dict() for one in models],
                "gpus": [gpu.to_dict() for gpu in GPUS.values()],
                "kv_formats": list(FORMATS),
            }
        )
        return
    print_table(
        "models",
        ("name", "layers", "billion parameters", "KV KiB a token (bf16)", "source"),
        (
            (
                m.name,
                m.layers,
                f"{m.parameters / 1e9:.1f}",
                f"{m.kv_bytes_per_token(FORMATS['bf16']) / 1024:g}",
                m.source,
            )
            for m in models
        ),
    )
    print_table(
        "GPUs",
        ("name", "memory GiB", "GB/s", "bf16 TFLOPS", "source"),
        (
            (
                g.name,
                f"{g.memory_bytes.value / 2**30:.1f}",
                f"{g.bandwidth.value / 1e9:,.0f}",
                f"{g.flops.value / 1e12:g}",
                g.bandwidth.source,
            )
            for g in GPUS.values()
        ),
    )


def _sweep(setup: Setup, axes: list[str], out: list[Path], dask: str | None, as_json: bool) -> None:
    from rich.progress import Progress

    from nearkv.estimate.report import check_outputs, write
    from nearkv.estimate.sweep import parse, run

    check_outputs(out)
    parsed = parse(axes)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("questions", total=None)
        rows = run(
            setup,
            parsed,
            dask=dask,
            report=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for path in out:
        write(path, setup, parsed, rows)
    if as_json:
        print_json({"setup": setup.to_dict(), "axes": parsed, "rows": rows})
        return
    for path in out:
        say(f"wrote {path}")
    if not out:
        names = list(parsed)
        print_table(
            f"{setup.model.name}: {len(rows)} answers",
            (*names, "system", "ms a token", "tokens/s", "bound by"),
            ([*(r[n] for n in names), *_brief(r)] for r in rows),
        )


def _brief(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{'' if row['fits'] else '* '}{row['system']}",
        f"{row['time_per_output_token_ms']:,.2f}",
        f"{row['tokens_per_s']:,.1f}",
        row["bound"],
    )
