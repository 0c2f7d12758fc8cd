"""`nearkv run`: decode with a real model on the device, and check every bit."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nearkv_sim import kind_and_preset
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel

from nearkv.codec import element_dtype
from nearkv.errors import NearkvError
from nearkv.quantise import cache_format

from .counters import print_counters
from .output import JsonOption, print_json, print_table, say
from .overrides import SetOption, overrides_of

if TYPE_CHECKING:
    from nearkv.hf.run import Report

PROMPT = (
    "Why is the sky blue, and why does it turn red when the sun goes down? Answer in two short sentences."
)


def run(
    device: Annotated[
        str,
        typer.Option(
            help="rtl, cocotb or model, with a preset if wanted (rtl:card); or reference: no device, "
            "attention by nearkv.reference."
        ),
    ] = "rtl",
    overrides: SetOption = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A causal language model as transformers saves one; SmolLM2-135M-Instruct if not given.",
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="What to answer.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode at most.")] = 16,
    dtype: Annotated[
        str, typer.Option(help="Format of rows and queries on the device: fp16 or bf16.")
    ] = "fp16",
    kv_format: Annotated[
        str | None,
        typer.Option(help="Format of the rows, a preset of nearkv.quantise: fp8, int8, q8_0, nvfp4, ..."),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Where rows live: torch=16,host=64,device keeps each sequence's newest 16 rows in a "
            "tensor (on a GPU if there is one), the next 64 in host memory, others on the device; or file."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Hold every attention call against the reference, bit by bit.")
    ] = True,
    wave: Annotated[Path | None, typer.Option(help="Record an FST of the run into this file.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write what an rtl device did as a timeline for ui.perfetto.dev into this file."),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Print what every slice of the device's memory counted, too.")
    ] = False,
    replays: Annotated[Path, typer.Option(help="Folder for the inputs and results of unequal calls.")] = Path(
        "replays"
    ),
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt greedily, every layer's decode attention on the device, and report what it took.

    Exit status 1 when a checked call differs from the reference in any bit.
    """
    try:
        import nearkv.hf
        from nearkv.hf.run import REFERENCE
        from nearkv.hf.run import run as decode
    except ImportError as error:
        raise NearkvError(f"{error.name} is missing; get it with: pip install 'nearkv[hf]'") from error
    import nearkv

    if wave and device == REFERENCE:
        raise typer.BadParameter(
            f"--wave records a device's signals; {REFERENCE} has none: use rtl or cocotb"
        )
    element_dtype(dtype)  # what cannot work is said before the model is loaded
    if kv_format is not None:
        cache_format(kv_format)
    if device != REFERENCE:
        kind_and_preset(device)
    if trace and device == REFERENCE:
        raise typer.BadParameter(f"--trace shows a device; {REFERENCE} is none: use rtl")
    if counters and device == REFERENCE:
        raise typer.BadParameter(f"--counters are a device's; {REFERENCE} is none: use rtl, cocotb or model")
    if overrides and device == REFERENCE:
        raise typer.BadParameter(f"--set configures a device; {REFERENCE} is none: use rtl, cocotb or model")
    fields = overrides_of(overrides)
    console = Console(stderr=True)
    with ExitStack() as stack:
        with console.status("loading the model"):
            start = time.perf_counter()
            loaded = nearkv.hf.load(model)
            load_s = time.perf_counter() - start
        start = time.perf_counter()
        opened = None
        if device != REFERENCE:
            opened = stack.enter_context(nearkv.open(device, **fields, **({"trace": True} if wave else {})))
            if wave:
                opened.start_wave(wave)
            if trace:
                stack.enter_context(opened.trace(trace))
        open_s = time.perf_counter() - start
        live = stack.enter_context(
            Live(_panel("reading the prompt", "", 0), console=console, refresh_per_second=8)
        )

        def show(text: str, count: int) -> None:
            live.update(_panel(f"token {count} of at most {max_new_tokens}", text, count))

        report = decode(
            loaded,
            prompt,
            device=opened,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            kv_format=kv_format,
            tiers=tiers,
            check=check,
            replay_folder=replays,
            on_token=show,
        )
    if as_json:
        print_json({**report.to_dict(), "load_s": load_s, "open_s": open_s})
    else:
        _show(report, open_s)
        if counters:
            print_counters(report.channels, report.memories)
        if trace:
            say(f"Timeline: {escape(str(trace))}; open it at https://ui.perfetto.dev.")
    if not report.equal:
        raise typer.Exit(1)


def _panel(title: str, text: str, count: int) -> Panel:
    return Panel(escape(text) if count else "…", title=title, title_align="left")


def _show(report: Report, open_s: float) -> None:
    print_table(f"{report.model} on {report.device}", ("", ""), _rows(report, open_s))
    if not report.calls_checked:
        say("No call was checked.")
    elif report.equal:
        say(f"[green]{report.calls_equal} of {report.calls_checked} calls equal[/], in every bit")
    else:
        say(f"[red]{report.calls_equal} of {report.calls_checked} calls equal[/]; see an unequal one with:")
        for command in report.replay_commands[:5]:
            say(f"  {escape(command)}")


def _rows(report: Report, open_s: float) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("prompt", f"{escape(report.prompt)} ({report.prompt_tokens} tokens)"),
        ("text", escape(report.text)),
        ("format of K and V", report.kv_format),
        ("tokens", f"{len(report.tokens)}, {report.tokens_per_s:.2f} a second"),
        ("with checking", f"{report.tokens_per_s_checked:.2f} a second"),
    ]
    rows += _tier_rows(report)
    if report.kv_bytes:
        saved = report.kv_bytes / report.link_bytes if report.link_bytes else 0.0
        rows += [
            ("attention calls", f"{report.calls:,} on the device"),
            ("device cycles", f"{report.device_cycles:,}"),
            ("K and V lines streamed", f"{report.lines:,}"),
            ("utilisation", f"{report.utilisation:.1%} of one line per cycle and channel, during attention"),
            ("bytes over the link", f"{report.link_bytes:,}"),
            ("shipping the KV instead", f"{report.kv_bytes:,} ({saved:.1f} times as much)"),
            *_energy_rows(report),
            ("opening the device", f"{open_s:.1f} s"),
        ]
    return rows


def _tier_rows(report: Report) -> list[tuple[str, str]]:
    """What every tier has, and how much of the attention fell there."""
    return [
        (
            f"tier {tier['name']}",
            f"{tier['rows']:,} rows, {tier['hit_share']:.1%} of attention, "
            f"{tier['bytes_in']:,} bytes in, {tier['bytes_out']:,} out",
        )
        for tier in report.tiers
    ]


def _energy_rows(report: Report) -> list[tuple[str, str]]:
    """What the device took, in total and by part, as bands."""
    if not report.energy_j:
        return []
    from nearkv.estimate.energy import PART_TITLES

    total = report.energy_j["total"]
    parts = ", ".join(f"{title} {_mj(report.energy_j[name])}" for name, title in PART_TITLES.items())
    return [("energy, device and link", f"{total['mid'] * 1e3:.3g} mJ ({_mj(total)}): {parts}")]


def _mj(band: dict[str, float]) -> str:
    """A band of joules in millijoules."""
    return f"{band['low'] * 1e3:.3g} to {band['high'] * 1e3:.3g}"
