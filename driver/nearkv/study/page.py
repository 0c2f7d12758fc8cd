"""docs/where-is-near.md and its figures: written from a study, and nothing else in them is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nearkv_hw.abi.config import Placement

from nearkv.estimate import Setup
from nearkv.estimate.report import COLOURS, sheet

from . import blocks, near
from .answers import Study
from .blocks import png
from .maps import bands
from .near import ELEMENTS, LINE, UNITS, Units, reference, short

COMMAND = "nearkv study where-is-near --write docs"
PAGE = "where-is-near.md"
MAP, STEP = "figures/where-is-near.png", "figures/where-is-near-steps.png"
_WINNERS = {
    "host": COLOURS["gpu+host"],
    "rank": COLOURS["gpu+rank"],
    "channel": "#cc79a7",
    "rank = channel": COLOURS["three tiers"],
}
_OTHERS = "#bbbbbb"
"""Colour of every other tie."""
_LINES: tuple[tuple[str, int, Units], ...] = (("bf16", 8, LINE), ("bf16", 16, LINE), ("mxfp4", 8, ELEMENTS))
"""Format, g and units of each panel of steps."""


def write(folder: Path, study: Study) -> list[Path]:
    """Write the page's blocks and its figures.

    Parameters
    ----------
    folder : of the documentation.
    study : what is shown.

    Returns
    -------
    The files written.
    """
    blocks.check(folder, PAGE)
    text = blocks.filled((folder / PAGE).read_text(), study.blocks(), COMMAND, where=folder / PAGE)
    files = {folder / PAGE: text.encode(), folder / MAP: map_figure(study), folder / STEP: steps_figure()}
    for path, data in files.items():
        path.write_bytes(data)
    return list(files)


def map_data(study: Study) -> list[Any]:
    """What the map shows."""
    return [
        [units, kv_format, *key, at.text]
        for (units, kv_format), cells in study.maps.items()
        for key, at in cells.items()
    ]


def map_figure(study: Study) -> bytes:
    """Winners by g and context, a row for each kind of units and a column for each format."""
    drawing = sheet(12.5, 9.5)
    plots = drawing.subplots(len(UNITS), len(near.FORMATS), sharex=True, sharey=True)
    for units, row in zip(UNITS, plots, strict=True):
        for kv_format, plot in zip(near.FORMATS, row, strict=True):
            cells = study.maps[units.name, kv_format]
            for x, context in enumerate(near.CONTEXTS):
                for low, high in bands(cells):
                    at = cells[low, context]
                    plot.add_patch(_box(x, low, high, _WINNERS.get(at.label, _OTHERS)))
                    factor = at.text.rpartition(" ")[2]
                    plot.text(x, (low + high) / 2, factor, ha="center", va="center", fontsize=8)
            plot.set_title(f"{kv_format}, {units.name}", fontsize=9)
            plot.set_xlim(-0.5, len(near.CONTEXTS) - 0.5)
            plot.set_ylim(0.5, len(near.GROUPS) + 0.5)
            plot.set_xticks(
                range(len(near.CONTEXTS)), [short(context) for context in near.CONTEXTS], fontsize=8
            )
            plot.set_yticks(near.GROUPS, [str(group) for group in near.GROUPS], fontsize=7)
    for row in plots:
        row[0].set_ylabel("query heads per KV head")
    for plot in plots[-1]:
        plot.set_xlabel("context")
    used = {at.label for cells in study.maps.values() for at in cells.values()}
    handles = [
        _box(0, 1, 1, colour, label="channel (phy, controller, fabric)" if name == "channel" else name)
        for name, colour in _WINNERS.items()
        if name in used
    ]
    handles += [_box(0, 1, 1, _OTHERS, label="other ties")] if used - set(_WINNERS) else []
    drawing.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return png(drawing, map_data(study))


def _box(x: int, low: int, high: int, colour: str, label: str = "") -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x - 0.5, low - 0.5), 1, high - low + 1, facecolor=colour, edgecolor="white", label=label
    )


def steps_data() -> list[Any]:
    """What the figure of steps shows: format, g, units and milliseconds of each placement."""
    shown = {"host": Placement.HOST, "controller": Placement.CONTROLLER, "rank": Placement.RANK}
    panels = []
    for kv_format, group, units in _LINES:
        setup = reference(kv_format, group=group)
        found = [near.times(replace(setup, context=context), units) for context in near.CONTEXTS]
        lines = {name: [round(at[where] * 1e3, 6) for at in found] for name, where in shown.items()}
        panels.append([_title(setup, group, units), lines])
    return panels


def _title(setup: Setup, group: int, units: Units) -> str:
    return f"{setup.kv_format.name}, g = {group}\n{units.name}"


def steps_figure() -> bytes:
    """Milliseconds of a step over the context."""
    data = steps_data()
    drawing = sheet(12.5, 4.2)
    plots = drawing.subplots(1, len(data), sharey=True)
    for (title, lines), plot in zip(data, plots, strict=True):
        for name, values in lines.items():
            plot.plot(
                near.CONTEXTS, values, marker="o", markersize=3, color=COLOURS[f"gpu+{name}"], label=name
            )
        plot.set_title(title, fontsize=10)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xticks(near.CONTEXTS, [short(context) for context in near.CONTEXTS], fontsize=8)
        plot.minorticks_off()
        plot.set_xlabel("context")
        plot.grid(True, alpha=0.3)
    plots[0].set_ylabel("step, ms")
    handles, labels = plots[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return png(drawing, data)
