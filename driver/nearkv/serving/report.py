"""Results of serving: requests (CSV, Parquet), plots (PNG), and one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearkv.estimate.report import (
    COLOURS,
    check_outputs,
    counted,
    document,
    flat,
    image,
    pairs,
    png,
    sheet,
    table,
    write_rows,
)
from nearkv.estimate.sweep import flatten

from .machine import Serving
from .result import Floats, Result

_COLOURS = {**COLOURS, "gpu+phy": "#cc79a7", "gpu+fabric": "#999999"}
_PLACES = {"gpu": "#0072b2", "device": "#009e73", "host": "#e69f00", "ssd": "#999999"}
_DASHES = ("-", (0, (5, 1.5)), (0, (3, 1.5)), (0, (1, 1.2)))
"""In turn, and ever thinner, so that lines that lie on each other are seen."""
_POINTS = 240
"""Of time, that are drawn; traffic, which comes in bursts, at a quarter of them."""
_MOST_TIME = 2.0
"""What is drawn of the time, in times of the quickest system's."""
_COLUMNS = {
    "system": "system",
    "answered": "answered",
    "refused": "refused",
    "output_tokens_per_s": "output tokens/s",
    "time_to_first_token_s.median": "TTFT median, s",
    "time_to_first_token_s.p99": "TTFT p99, s",
    "time_per_output_token_ms.median": "TPOT median, ms",
    "time_per_output_token_ms.p99": "TPOT p99, ms",
    "time_between_tokens_ms.p99": "between tokens p99, ms",
    "hit_share.all": "of prompts found, %",
    "batch.mean": "batch mean",
    "preemptions": "preemptions",
    "link_read_bytes": "link read, GB",
    "link_written_bytes": "link written, GB",
}


def write(path: Path, results: Sequence[Result], serving: Serving) -> None:
    """Write results in the form that the file's ending names.

    Parameters
    ----------
    path : .csv or .parquet (a row for every request and system), .png, or .html.
    results : of one trace and one setup.
    serving : how the engine served.

    Raises
    ------
    ArgumentError : the ending is unknown, or what it needs is not installed.
    """
    check_outputs([path])
    if path.suffix == ".png":
        path.write_bytes(overview(results))
    elif path.suffix == ".html":
        path.write_text(page(results, serving))
    else:
        write_rows(path, [row for result in results for row in result.rows()])


def overview(results: Sequence[Result]) -> bytes:
    """A PNG: distributions of both times, and what went on over time."""
    drawing = sheet(12, 10.5)
    plots = drawing.subplots(3, 2)
    _distribution(plots[0][0], results, "first_token_s", 1.0, "time to first token, s")
    _distribution(plots[0][1], results, "token_s", 1e3, "time per output token, ms")
    _over_time(plots[1][0], results, "batch", "sequences that decode")
    _over_time(plots[1][1], results, "waiting", "requests that wait for room or their turn")
    _over_time(plots[2][0], results, "used", "rows of running requests, millions")
    _over_time(plots[2][1], results, "link", "over the devices' links, GB/s")
    handles, labels = plots[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    late = [result.system for result in results if _end(result) > shown_s(results)]
    cut = f"\n{', '.join(late)} went on for longer than is drawn" if late else ""
    drawing.suptitle(_title(results) + cut)
    return png(drawing)


def occupancy(results: Sequence[Result]) -> bytes:
    """A PNG: rows in every place over time, a panel for each system."""
    columns = min(2, len(results))
    lines = -(-len(results) // columns)
    drawing = sheet(6 * columns, 0.8 + 3.1 * lines)
    plots = drawing.subplots(lines, columns, squeeze=False)
    shown: dict[str, Any] = {}
    for plot, result in zip(plots.flat, results, strict=False):
        at = _points(result, results)
        bands = {}
        for number, place in enumerate(result.machine.places):
            gib = place.size / max(1, place.rows) / 2**30
            for what in ("used", "kept") if number < len(result.machine.homes) else ("kept",):
                bands[place.name, what] = _at(result, f"{what}{number}", at) * gib
        colours = [_PLACES[name] for name, _ in bands]
        stacked = plot.stackplot(at, list(bands.values()), colors=colours, linewidth=0)
        for (name, what), area in zip(bands, stacked, strict=True):
            area.set_alpha(0.95 if what == "used" else 0.4)
            shown[f"{name}, {'running' if what == 'used' else 'kept'}"] = area
        plot.set_title(result.system, fontsize=10)
        plot.set_ylabel("GiB")
        plot.set_xlim(0, shown_s(results))
        plot.set_ylim(bottom=0)
        plot.grid(True, alpha=0.3)
    for plot in list(plots.flat)[len(results) :]:
        plot.set_visible(False)
    for plot in plots[-1]:
        plot.set_xlabel("seconds")
    wanted = [f"{name}, {what}" for name in _PLACES for what in ("running", "kept")]
    names = [name for name in wanted if name in shown]
    drawing.legend(
        [shown[name] for name in names], names, loc="outside lower center", ncols=len(names), frameon=False
    )
    return png(drawing)


def page(results: Sequence[Result], serving: Serving) -> str:
    """One HTML page with everything in it: sums, plots, what was asked. It loads nothing."""
    sums = [_shown(result) for result in results]
    hits = {f"hit_share.{name}": f"in {name}, %" for name in _PLACES}
    hits = {name: title for name, title in hits.items() if any(one.get(name, "") != "" for one in sums)}
    refused = [row for result in results for row in result.rows() if row["refused"]]
    trace = results[0].trace
    asked = {"trace": trace.name, "requests": len(trace.requests), "block_tokens": trace.block_tokens}
    setup = flat(results[0].machine.setup)
    del setup["placement"]
    body = table({**_COLUMNS, **hits}, sums)
    body += image("Times, batch and traffic", overview(results))
    body += image("Where rows lie", occupancy(results))
    if refused:
        names = ("system", "request", "prompt_tokens", "output_tokens", "refused")
        body += "<h2>Refused</h2>" + table({name: name.replace("_", " ") for name in names}, refused)
    body += f"<h2>What was asked</h2>{pairs(asked | vars(serving) | setup)}"
    return document(_title(results), body)


def shown_s(results: Sequence[Result]) -> float:
    """How much of the time is drawn: one system that takes forever must not hide the others, nor one that
    refuses everything."""
    ends = [_end(result) for result in results if result.answered] or [max(map(_end, results))]
    return min(max(ends), _MOST_TIME * min(ends))


def _shown(result: Result) -> dict[str, Any]:
    """Sums in the units that a page shows."""
    units = {"hit_share": 100.0, "link": 1e-9}
    sums = flatten(result.summary())
    for name in sums:
        for start, factor in units.items():
            if name.startswith(start):
                sums[name] *= factor
    return {**{f"hit_share.{name}": "" for name in _PLACES}, **sums}


def _title(results: Sequence[Result]) -> str:
    setup, trace = results[0].machine.setup, results[0].trace
    name = trace.name.partition(" (")[0]
    return (
        f"{setup.model.name}, {setup.gpus} x {setup.gpu.name}, {counted(setup.devices, 'device')}; "
        f"{len(trace.requests):,} requests, {name}"
    )


def _distribution(plot: Any, results: Sequence[Result], what: str, factor: float, title: str) -> None:
    """Shares of the requests that took no longer."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, result in enumerate(results):
        values = np.sort(getattr(result, what)) * factor
        if len(values):
            share = np.arange(1, len(values) + 1) / len(values)
            plot.step(values, share, where="post", label=result.system, **_style(number, result))
    plot.set_xscale("log")
    low, high = plot.get_xlim()
    plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    plot.xaxis.set_major_formatter("{x:g}")
    plot.xaxis.set_minor_formatter(NullFormatter())
    plot.set_ylim(0, 1)
    plot.set_xlabel(title)
    plot.set_ylabel("share of requests")
    plot.grid(True, which="major", alpha=0.3)


def _over_time(plot: Any, results: Sequence[Result], what: str, title: str) -> None:
    for number, result in enumerate(results):
        at = _points(result, results, _POINTS // 4 if what == "link" else _POINTS)
        if what == "used":
            homes = range(len(result.machine.homes))
            values = sum((_at(result, f"used{home}", at) for home in homes), np.zeros(len(at))) / 1e6
        elif what == "link":
            values = _rate(result, at) / 1e9
        else:
            values = _at(result, what, at)
        plot.plot(at, values, **_style(number, result))
    plot.set_xlim(0, shown_s(results))
    plot.set_xlabel("seconds")
    plot.set_title(title, fontsize=10)
    plot.set_ylim(bottom=0)
    plot.grid(True, alpha=0.3)


def _style(number: int, result: Result) -> dict[str, Any]:
    return {
        "color": _COLOURS[result.system],
        "linewidth": max(1.2, 2.8 - 0.4 * number),
        "linestyle": _DASHES[number % len(_DASHES)],
    }


def _end(result: Result) -> float:
    """When the last request was answered."""
    return float(result.log["ended"][-1]) if len(result.log["ended"]) else 1.0


def _points(result: Result, results: Sequence[Result], count: int = _POINTS) -> Floats:
    """The ends of equal parts of a result's time, as far as it is drawn."""
    return np.linspace(0, min(_end(result), shown_s(results)), count + 1)[1:]


def _at(result: Result, what: str, at: Floats) -> Floats:
    """Means of a column of the log over the time up to each point from the one before."""
    log = result.log
    return _per_second(result, log[what] * (log["ended"] - log["began"]), at)


def _rate(result: Result, at: Floats) -> Floats:
    """Bytes/s over the devices' links in the time up to each point."""
    return _per_second(result, result.log["read"] + result.log["sent"], at)


def _per_second(result: Result, amounts: Floats, at: Floats) -> Floats:
    """What the lines of the log amount to in the time up to each point, by its seconds."""
    ended = result.log["ended"]
    if not len(ended):
        return np.zeros(len(at))
    sums = np.concatenate(([0.0], amounts.cumsum()))
    whole = np.interp(at, np.concatenate(([0.0], ended)), sums)
    return np.diff(whole, prepend=0.0) / np.diff(at, prepend=0.0)
