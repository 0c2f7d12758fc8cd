"""The tables of docs/where-is-near.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS, ceiling
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES

from nearkv.estimate import FORMATS as KV_FORMATS
from nearkv.estimate import Setup, model
from nearkv.estimate.energy import PART_TITLES
from nearkv.estimate.layers import fetch_rate
from nearkv.estimate.setup import LAUNCH_S
from nearkv.estimate.systems import at_placement, gpu_room, with_spill

from . import near
from .maps import Grid, bands, grid
from .near import ELEMENTS, FORMATS, LINE, REFERENCE_CONTEXT, UNITS, Units, reference, short

RANK, CONTROLLER, HOST = Placement.RANK, Placement.CONTROLLER, Placement.HOST
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table.

    Parameters
    ----------
    name : of its block on the page.
    title : what it says.
    columns : titles by the rows' names.
    rows : values; None where there is none.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Row]

    def markdown(self) -> str:
        """As a page has it, the first column left and the others right."""
        rule = f"|---|{'---:|' * (len(self.columns) - 1)}"
        lines = [" | ".join(cell(row.get(name)) for name in self.columns) for row in self.rows]
        head = f"| {' | '.join(self.columns.values())} |"
        return "\n".join([f"{self.title}:", "", head, rule, *(f"| {line} |" for line in lines)])

    def to_dict(self) -> dict[str, Any]:
        """Title and rows as plain values."""
        return {"title": self.title, "rows": list(self.rows)}


def cell(value: Any) -> str:
    """A value for people: three digits of a fraction, all of a whole number, "never" for None.

    Examples
    --------
    >>> cell(12345), cell(0.91666), cell(123.4), cell(None), cell("rank")
    ('12,345', '0.917', '123', 'never', 'rank')
    """
    if value is None:
        return "never"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if 0 < abs(value) < 0.001:
            return "< 0.001"
        if value == 0:
            return "0"
        digits = next((n for n, least in enumerate((100, 10, 1)) if abs(value) >= least), 3)
        return f"{value:,.{digits}f}"
    return str(value)


def map_table(kv_format: str, units: Units, cells: Grid) -> Table:
    """A map as a table, a row for each band of g, with the figures of its first."""
    rows: list[Row] = [
        {"g": str(low) if low == high else f"{low} to {high}"}
        | {short(at): cells[low, at].text for at in near.CONTEXTS}
        for low, high in bands(cells)
    ]
    columns = {"g": "g"} | {short(at): short(at) for at in near.CONTEXTS}
    return Table(name="map", title=f"{kv_format}, {units.name}", columns=columns, rows=rows)


# what stands where, and what a step goes to


def placements() -> Table:
    """What a card has at each placement, and what the rows come at."""
    rows = []
    for placement in Placement:
        placed = reference().at(placement)
        config, part = placed.config, PARTS[placed.config.dram]
        memory = config.slices * config.clock_mhz * 1e6 * LINE_BYTES
        refreshed = memory * ceiling(part, config.density_gbit, config.refresh)
        rows.append(
            {
                "placement": f"`{placement.name.lower()}`",
                "units": config.units,
                "multipliers": config.units * config.lanes * config.queries,
                "rate": (refreshed if config.units else fetch_rate(placed) / placed.devices) / 1e9,
            }
        )
    return Table(
        name="placements",
        title="A card at each placement",
        columns={
            "placement": "placement",
            "units": "units",
            "multipliers": "multipliers",
            "rate": "rows come at, GB/s",
        },
        rows=rows,
    )


def parts() -> Table:
    """What a step goes to at the reference point."""
    rows = []
    for placement, answer in near.answers(reference()).items():
        device = sum(s for name, s in answer.parts.items() if name.startswith("device"))
        trips, link = answer.parts.get("round trips", 0.0), answer.parts["link"]
        on_gpu = sum(answer.parts.values()) - device - trips - link
        rows.append(
            {
                "placement": f"`{placement.name.lower()}`",
                "step": answer.step_s * 1e3,
                "gpu": on_gpu * 1e3,
                "device": device * 1e3,
                "link": link * 1e3,
                "trips": trips * 1e3,
                "bound": answer.bound,
                "bytes": answer.link_bytes / 1e6,
            }
        )
    return Table(
        name="parts",
        title="Milliseconds of a step at the reference point",
        columns={
            "placement": "placement",
            "step": "step",
            "gpu": "GPUs",
            "device": "units",
            "link": "link",
            "trips": "round trips",
            "bound": "largest part",
            "bytes": "MB over the link",
        },
        rows=rows,
    )


def energies() -> Table:
    """Where the energy of a token goes at the reference point."""
    rows = []
    setup = reference()
    for placement, answer in near.answers(setup).items():
        total = near.energy(setup.at(placement), answer)
        split = {name: band.mid / setup.batch for name, band in answer.energy.items()}
        split["static"] += total.mid - answer.energy_per_token.mid
        rows.append(
            {
                "placement": f"`{placement.name.lower()}`",
                **split,
                "total": total.mid,
                "band": f"{total.low:.0f} to {total.high:.0f}",
            }
        )
    return Table(
        name="energies",
        title="Joules of a token at the reference point, middles of their bands",
        columns={
            "placement": "placement",
            **PART_TITLES,
            "gpus": "GPUs",
            "total": "all",
            "band": "band",
        },
        rows=rows,
    )


# where it changes


def contexts() -> Table:
    """From which contexts units near memory are quicker, for models of the table."""
    rows = []
    for name in near.MODELS:
        for kv_format in FORMATS:
            setup = near.setup_of(model(name), context=1, kv_format=kv_format)
            rows.append(
                {
                    "model": f"`{name}`",
                    "g": setup.model.attention[0].group,
                    "gpus": setup.gpus,
                    "format": kv_format,
                    "rank": near.context_from(setup, near.beats(RANK, near.host)),
                    "controller": near.context_from(setup, near.beats(CONTROLLER, near.host)),
                    "elements": near.context_from(setup, near.beats(CONTROLLER, near.host, ELEMENTS)),
                    "room": near.context_from(setup, _full),
                    "spill": near.context_from(setup, near.beats(CONTROLLER, with_spill)),
                }
            )
    return Table(
        name="contexts",
        title="Tokens of context from which one sequence is decoded quicker",
        columns={
            "model": "model",
            "g": "g",
            "gpus": "GPUs",
            "format": "format",
            "rank": "`rank` than `host`",
            "controller": "`controller` than `host`",
            "elements": "the same, 32 elements per cycle",
            "room": "GPU memory is full",
            "spill": "`controller` than `gpu+memory`",
        },
        rows=rows,
    )


def groups() -> Table:
    """The same for every g, from one model's shape."""
    rows = []
    for group in near.GROUPS:
        row: Row = {"g": group}
        for kv_format in FORMATS:
            setup = reference(kv_format, group=group)
            for placement in (RANK, CONTROLLER):
                name = f"{kv_format}, `{placement.name.lower()}`"
                row[name] = near.context_from(setup, near.beats(placement, near.host))
        rows.append(row)
    return Table(
        name="groups",
        title="Tokens of context from which one sequence is decoded quicker than with `host`",
        columns={name: name for name in rows[0]},
        rows=rows,
    )


def _full(setup: Setup) -> bool:
    """Whether the GPUs have no room for the rows."""
    return setup.batch * setup.model.kv_bytes(setup.context, setup.kv_format) > gpu_room(setup)


def savings() -> Table:
    """From which contexts units take less energy than the host."""
    rows = []
    for kv_format in FORMATS:
        setup = reference(kv_format)
        row: Row = {"format": kv_format}
        for placement in (RANK, CONTROLLER):

            def less(at: Setup, placement: Placement = placement) -> bool:
                with_units, without = (
                    near.energy(placed, at_placement(placed)).mid
                    for placed in (at.at(placement), at.at(HOST))
                )
                return with_units < without

            row[placement.name.lower()] = near.context_from(setup, less)
        rows.append(row)
    return Table(
        name="savings",
        title="Tokens of context from which a token takes less energy than at `host`",
        columns={"format": "format", "rank": "`rank`", "controller": "`controller`"},
        rows=rows,
    )


def batches() -> Table:
    """From which batches the host's link, and then units, decide."""
    rows = []
    for kv_format in FORMATS:
        for context in (1024, 4096, 16384):
            setup = reference(kv_format, context=context)

            def saturated(at: Setup) -> bool:
                answer = near.host(at)
                return answer.parts["link"] >= answer.step_s

            rows.append(
                {
                    "format": kv_format,
                    "context": short(context),
                    "link": near.batch_from(setup, saturated),
                    "rank": near.batch_from(setup, near.beats(RANK, near.host)),
                    "controller": near.batch_from(setup, near.beats(CONTROLLER, near.host)),
                }
            )
    return Table(
        name="batches",
        title="Sequences from which the link is the slower part of `host`, and units are quicker",
        columns={
            "format": "format",
            "context": "context",
            "link": "link saturated",
            "rank": "`rank` quicker",
            "controller": "`controller` quicker",
        },
        rows=rows,
    )


def bounds() -> Table:
    """From which g on units, not memory, bound each placement, for each kind of unit and format."""
    rows = []
    for units in UNITS:
        for kv_format in FORMATS:
            row: Row = {"units": units.name, "format": kv_format}
            for placement in (*near.ON_CHANNEL, RANK):

                def bound(
                    group: int, kv_format: str = kv_format, units: Units = units, at: Placement = placement
                ) -> bool:
                    return near.slowed(units.place(reference(kv_format, group=group), at)) > near.SLOWED

                row[placement.name.lower()] = near.first(bound, 1, 128)
            rows.append(row)
    names = [p.name.lower() for p in (*near.ON_CHANNEL, RANK)]
    return Table(
        name="bounds",
        title="Query heads per KV head from which units bound and no longer memory",
        columns={"units": "units", "format": "format", **{name: f"`{name}`" for name in names}},
        rows=rows,
    )


def rates() -> Table:
    """How quick units, and how quick a link, have to be."""
    rows = []
    for kv_format in FORMATS:
        setup = reference(kv_format)
        bits = KV_FORMATS[kv_format].element.bits

        def kept_up(rate: float, setup: Setup = setup) -> bool:
            return near.attention(replace(setup.at(CONTROLLER), unit_rate=rate)).bound == "memory"

        rate = near.edge(kept_up, 1e-3, 1e3)
        row: Row = {
            "format": kv_format,
            "lines": rate,
            "elements": rate and rate * LINE_BITS / bits,
        }
        for placement in (CONTROLLER, RANK):
            seconds = at_placement(setup.at(placement)).step_s

            def caught_up(factor: float, setup: Setup = setup, seconds: float = seconds) -> bool:
                return near.host(replace(setup, link_factor=factor)).step_s <= seconds

            factor = near.edge(caught_up, 1e-3, 1e3)
            row[placement.name.lower()] = factor
        rows.append(row)
    return Table(
        name="rates",
        title="What a unit has to take, and how many times quicker a link would let `host` keep up",
        columns={
            "format": "format",
            "lines": "lines per cycle and unit",
            "elements": "elements per cycle and unit",
            "controller": "link, against `controller`",
            "rank": "link, against `rank`",
        },
        rows=rows,
    )


# beside the host


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What host and units get of the memory when both want more than there is; lines per cycle and slice.

    Parameters
    ----------
    host_alone : of the host's reads, lines anywhere, without units.
    host, units : of both at once.
    """

    host_alone: float
    host: float
    units: float


BESIDE: dict[Placement, Beside] = {
    Placement.RANK: Beside(host_alone=0.264, host=0.265, units=0.537),
    Placement.PHY: Beside(host_alone=0.475, host=0.271, units=0.472),
    Placement.CONTROLLER: Beside(host_alone=0.475, host=0.273, units=0.471),
    Placement.FABRIC: Beside(host_alone=0.475, host=0.320, units=0.392),
}
"""Measured on the RTL: two channels of DDR5-6400 (two ranks each at `rank`), half the time for each, as
`nearkv bench memory --case shares --part ddr5_6400 --placement rank` (and so on) prints it."""


def traffic() -> Table:
    """What is left of units and host beside each other."""
    config = reference().config
    best = ceiling(PARTS[config.dram], config.density_gbit, config.refresh)
    rows = [
        {
            "placement": f"`{placement.name.lower()}`",
            "units": f"{found.units / best:.0%}",
            "host": f"{found.host / found.host_alone:.0%}",
        }
        for placement, found in BESIDE.items()
    ]
    return Table(
        name="traffic",
        title="Beside as many random reads of the host as the link carries, measured on the RTL",
        columns={
            "placement": "placement",
            "units": "units, of what refresh leaves",
            "host": "host, of what it gets alone",
        },
        rows=rows,
    )


# what if


def _config(**fields: Any) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, config=replace(setup.config, **fields))


def _setup(**fields: Any) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, **fields)


CHANGES: dict[str, Callable[[Setup], Setup]] = {
    "nothing": _setup(),
    "link x 0.5": _setup(link_factor=0.5),
    "link x 2": _setup(link_factor=2.0),
    "unit rate x 0.5": _setup(unit_rate=0.5),
    "unit rate x 2": _setup(unit_rate=2.0),
    "4 ranks": _config(placement=RANK, ranks=4),
    "16 kept queries": _config(queries=16),
    f"handing over in {LAUNCH_S.band.low * 1e6:g} us": _setup(launch_s=LAUNCH_S.band.low),
    f"handing over in {LAUNCH_S.band.high * 1e6:g} us": _setup(launch_s=LAUNCH_S.band.high),
    "8 sequences": _setup(batch=8),
    "8 sequences, 2 micro-batches": _setup(batch=8, micro_batches=2),
}
"""What is changed, one thing at a time."""


def changes(maps: Mapping[tuple[str, str], Grid], tell: Callable[[str], None]) -> Table:
    """What becomes of the winners of the map of line units when something is changed."""
    rows = []
    for name, change in CHANGES.items():
        tell(name)
        grids = {kv_format: grid(kv_format, LINE, change) for kv_format in FORMATS}
        cells = [(f, place) for f in FORMATS for place in grids[f]]
        other = sum(grids[f][place].label != maps[LINE.name, f][place].label for f, place in cells)
        setup = change(reference())
        rows.append(
            {
                "change": name,
                "other": other,
                **{
                    who: sum(grids[f][place].label == who for f, place in cells)
                    for who in ("host", "channel", "rank")
                },
                "rank_from": near.context_from(setup, near.beats(RANK, near.host)),
                "controller_from": near.context_from(setup, near.beats(CONTROLLER, near.host)),
                **{f"gain_{g}": grids["bf16"][g, REFERENCE_CONTEXT].gain for g in (8, 16)},
            }
        )
    return Table(
        name="changes",
        title=f"Of the {len(FORMATS) * len(maps[LINE.name, FORMATS[0]])} places of the map's first row",
        columns={
            "change": "changed",
            "other": "other winner",
            "host": "`host` wins",
            "channel": "channel wins",
            "rank": "`rank` wins",
            "rank_from": "`rank` than `host` from",
            "controller_from": "`controller` than `host` from",
            "gain_8": "times quicker, g = 8",
            "gain_16": "g = 16",
        },
        rows=rows,
    )
