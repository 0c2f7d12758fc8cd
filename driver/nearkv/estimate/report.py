"""Results of a sweep: a table (CSV, Parquet), plots (PNG), and one HTML page that needs no network."""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearkv.errors import ArgumentError

from .setup import Setup
from .sweep import Axes
from .systems import NO_LIMIT

Rows = Sequence[dict[str, Any]]
KINDS = (".csv", ".parquet", ".png", ".html")
_NEEDS = {".parquet": "pyarrow", ".png": "matplotlib", ".html": "matplotlib"}
_PANELS = 4
"""Values of the second axis that get a panel each: the first, the last, and some between."""
_SHOWN = ("gpu", "gpu+memory", "gpu+rank", "gpu+controller", "gpu+host", "three tiers")
"""Systems that are drawn; phy and fabric lie where controller does."""
COLOURS = dict(zip(_SHOWN, ("#000000", "#d55e00", "#56b4e9", "#0072b2", "#e69f00", "#009e73"), strict=True))
"""Okabe and Ito's colours, which most people can tell apart."""


def check_outputs(paths: Sequence[Path]) -> None:
    """ArgumentError for a file that could not be written in the end."""
    for path in paths:
        if path.suffix not in KINDS:
            raise ArgumentError(f"{path}: its ending must be one of {', '.join(KINDS)}")
        if not path.parent.is_dir():
            raise ArgumentError(f"{path}: there is no folder {path.parent}")
        needed = _NEEDS.get(path.suffix)
        if needed:
            try:
                __import__(needed)
            except ImportError as error:
                raise ArgumentError(
                    f"{path}: needs {needed}, which is not installed; pip install 'nearkv[sweep]', "
                    "or write .csv"
                ) from error


def write(path: Path, setup: Setup, axes: Axes, rows: Rows) -> None:
    """Write a sweep's result in the form that the file's ending names.

    Raises
    ------
    ArgumentError : the ending is unknown, or what it needs is not installed.
    """
    check_outputs([path])
    if path.suffix == ".png":
        path.write_bytes(figure(setup, axes, rows))
    elif path.suffix == ".html":
        path.write_text(page(setup, axes, rows))
    else:
        write_rows(path, rows)


def write_rows(path: Path, rows: Rows) -> None:
    """Write a table as CSV or Parquet, as the file's ending says."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def figure(setup: Setup, axes: Axes, rows: Rows, value: str = "time_per_output_token_ms") -> bytes:
    """A PNG: `value` over the first axis, a line for every system, a panel for values of the second axis.

    Dotted where weights or rows have no room.
    """
    x, *others = axes
    panels = _panels(axes[others[0]]) if others else [None]
    fixed = {name: axes[name][0] for name in others[1:]}
    drawing = sheet(1.5 + 4.2 * len(panels), 4.6)
    plots = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for plot, panel in zip(plots, panels, strict=True):
        wanted = fixed if panel is None else {**fixed, others[0]: panel}
        for system in _SHOWN:
            line = [r for r in rows if r["system"] == system and all(r[k] == v for k, v in wanted.items())]
            if line:
                _draw(plot, x, line, value, system)
        plot.set_title("" if panel is None else f"{others[0]} {panel}", fontsize=10)
        plot.set_xlabel(x)
        if all(isinstance(at, int) for at in axes[x]):
            plot.set_xscale("log", base=2)
            plot.set_xticks(axes[x], [_short(at) for at in axes[x]], rotation=45, fontsize=8)
            plot.minorticks_off()
        plot.set_yscale("log")
        plot.grid(True, which="major", alpha=0.3)
    plots[0].set_ylabel(_TITLES.get(value, value))
    handles, labels = plots[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    drawing.suptitle(", ".join([*_same(setup, axes), *(f"{name} {at}" for name, at in fixed.items())]))
    return png(drawing)


def _same(setup: Setup, axes: Axes) -> list[str]:
    """Model, GPUs and devices, as far as they are the same for all answers."""
    titles = {
        ("model",): setup.model.name,
        ("gpus", "gpu"): f"{setup.gpus} x {setup.gpu.name}",
        ("devices",): counted(setup.devices, "device"),
    }
    return [title for fields, title in titles.items() if not set(fields) & set(axes)]


def counted(count: int, what: str) -> str:
    """So many of something.

    Examples
    --------
    >>> counted(1, "device"), counted(2, "device")
    ('1 device', '2 devices')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def sheet(width: float, height: float) -> Any:
    """A figure to draw on, in inches; no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing


def png(drawing: Any) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


_TITLES = {
    "time_per_output_token_ms": "time per output token, ms",
    "tokens_per_s": "tokens per second",
    "link_bytes_per_token": "bytes over the link per token",
    "energy_per_token_j.mid": "energy per token, J (middle of the band)",
}


def _draw(plot: Any, x: str, line: Rows, value: str, system: str) -> None:
    at, values = [row[x] for row in line], [row[value] for row in line]
    if not any(values):
        return
    style = {"color": COLOURS[system], "linewidth": 1.6}
    plot.plot(at, values, linestyle=":", **style)
    room = [v if row["fits"] else float("nan") for row, v in zip(line, values, strict=True)]
    plot.plot(at, room, marker="o", markersize=3, label=system, **style)


def _panels(values: list[Any]) -> list[Any]:
    """At most `_PANELS` of the values, evenly."""
    count = min(_PANELS, len(values))
    return [values[round(n * (len(values) - 1) / max(1, count - 1))] for n in range(count)]


def _short(value: int) -> str:
    for unit, size in (("m", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}
img{max-width:100%}table{border-collapse:collapse;font-size:13px}
th,td{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:right}th{text-align:left;background:#f4f4f4}
td:first-child{text-align:left}.scroll{max-height:32rem;overflow:auto}.no{color:#999}
"""
_COLUMNS = {
    "system": "system",
    "time_per_output_token_ms": "ms a token",
    "tokens_per_s": "tokens/s",
    "bound": "bound by",
    "max_batch": "sequences with room",
    "link_bytes_per_token": "link bytes a token",
    "energy_per_token_j.low": "J a token, low",
    "energy_per_token_j.high": "J a token, high",
}


def page(setup: Setup, axes: Axes, rows: Rows) -> str:
    """One HTML page with everything in it: the question, plots, the table. It loads nothing."""
    images = "".join(image(title, figure(setup, axes, rows, value)) for value, title in _TITLES.items())
    asked = {name: value for name, value in flat(setup).items() if name not in axes}
    names = {**{name: name for name in axes}, **_COLUMNS}
    shown = [{**row, "max_batch": room_of(row["max_batch"])} for row in rows]
    answers = table(names, shown, [not row["fits"] for row in rows])
    return document(
        f"{'' if 'model' in axes else f'{setup.model.name}: '}estimates over {', '.join(axes)}",
        "<p>Lines are dotted, and rows grey, where weights or KV rows have no room: what it would take with "
        f"room.</p>{images}<h2>What was asked</h2>{pairs(asked)}<h2>All answers</h2>{answers}",
    )


def room_of(sequences: int) -> str:
    """How many sequences have room, for people."""
    return "no limit" if sequences >= NO_LIMIT else f"{sequences:,}"


def flat(setup: Setup) -> dict[str, Any]:
    """What is asked, with the fields of the devices' configuration."""
    asked = setup.to_dict() | setup.config.to_dict()
    del asked["config"]
    return asked


def document(title: str, body: str) -> str:
    """An HTML page that loads nothing."""
    title = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{body}</html>"
    )


def image(title: str, data: bytes) -> str:
    """A PNG within a page, under its title."""
    title = html.escape(title)
    source = base64.b64encode(data).decode()
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{source}">'


def pairs(values: dict[str, Any]) -> str:
    """A table of names and values."""
    rows = (
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def table(names: dict[str, str], rows: Rows, grey: Sequence[bool] = ()) -> str:
    """A table with the columns `names`, titles by name.

    Parameters
    ----------
    names : titles by name.
    rows : what to show.
    grey : which rows to show in grey; none if not given.
    """
    head = "".join(f"<th>{html.escape(title)}</th>" for title in names.values())
    body = "".join(
        f"<tr{' class=no' if number < len(grey) and grey[number] else ''}>"
        + "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in names)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
