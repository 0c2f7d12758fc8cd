"""All of the study, and the sentences that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nearkv_hw.abi.config import Placement

from . import near, tables
from .maps import Grid, grid
from .near import ELEMENTS, EQUAL, FORMATS, LINE, UNITS, Units
from .tables import Table, cell


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that the page shows.

    Parameters
    ----------
    maps : by the name of the units, and the format.
    tables : by their name, the maps' apart.
    """

    maps: Mapping[tuple[str, str], Grid]
    tables: Mapping[str, Table]

    def map_tables(self) -> Iterator[Table]:
        """The maps as tables."""
        for units in UNITS:
            for kv_format in FORMATS:
                yield tables.map_table(kv_format, units, self.maps[units.name, kv_format])

    def blocks(self) -> dict[str, str]:
        """Markdown of every block of the page, by name."""
        maps = "\n\n".join(table.markdown() for table in self.map_tables())
        answers = "\n".join(f"- {answer}" for answer in self.answers())
        return {"answers": answers, "maps": maps} | {
            name: table.markdown() for name, table in self.tables.items()
        }

    def answers(self) -> Iterator[str]:
        """What follows, with the figures that it follows from."""
        line, equal = self._labels(LINE), self._labels(EQUAL)
        near_line, near_equal = (sum(name != "host" for name in found) for found in (line, equal))
        yield (
            "**At the ranks**, if each may have a unit as large as a channel's: of the map's "
            f"{near_line} places where units win, `rank` wins {line.count('rank')} alone. It has twice the "
            "memory's rate, for twice the multipliers."
        )
        beside = tables.BESIDE
        fabric = 1 - beside[Placement.FABRIC].units / beside[Placement.CONTROLLER].units
        spread = 100 * max(at.spread for cells in self.maps.values() for at in cells.values())
        yield (
            "**At the channel as well**, if multipliers are what costs: with as many of them everywhere "
            f"`rank` wins {equal.count('rank')} of {near_equal} places alone and ties with the channel's in "
            f"{equal.count('rank = channel')}, for rows are read again for queries that units do not keep. "
            f"`phy`, `controller` and `fabric` never differ by more than {spread:.1g} % of a step; of memory "
            f"that the host reads as well, units get {fabric:.0%} less at `fabric` than at `controller`."
        )
        borders = [row for row in self.tables["contexts"].rows if row["model"] == f"`{near.BASE}`"]
        names, of_rank, of_controller = (
            ", ".join(cell(row[name]) for row in borders) for name in ("format", "rank", "controller")
        )
        yield (
            f"**Nowhere in short contexts**: one sequence of {near.BASE} ({names}) is decoded quicker than "
            f"with `host` from {of_rank} tokens on at `rank`, and from {of_controller} at `controller`. "
            "Below, the link brings rows while the GPUs read weights, and waiting for units only adds."
        )
        narrow = [row for row in self.tables["contexts"].rows if row["format"] == "mxfp4"]
        never = sum(row["elements"] is None for row in narrow)
        wins, wins_elements = (
            sum(at.label != "host" for at in self.maps[units.name, "mxfp4"].values())
            for units in (LINE, ELEMENTS)
        )
        yield (
            "**Nowhere for narrow elements**, if units take them no faster than wide ones: with 32 elements "
            f"per cycle, in mxfp4, `controller` is quicker than `host` at no context for {never} of "
            f"{len(narrow)} models, and units win {wins_elements} places of the map instead of {wins}."
        )
        changed = self.tables["changes"].rows
        channel = sum(row["channel"] for row in changed)
        moved = [row["rank_from"] for row in changed]
        yield (
            "**Links, units, ranks and batch** move the border to `host`, for `rank` in bf16 at g = 8 to "
            f"between {cell(min(moved))} and {cell(max(moved))} tokens; units at the channel alone are "
            f"quickest in {channel} places of the {len(changed)} maps."
        )

    def _labels(self, units: Units) -> list[str]:
        """Who wins, at every place of a kind of units."""
        return [
            at.label for (name, _), cells in self.maps.items() if name == units.name for at in cells.values()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        cells = [
            {
                "units": units,
                "kv_format": form,
                "g": g,
                "context": context,
                "winner": at.label,
                "gain": at.gain,
            }
            for (units, form), found in self.maps.items()
            for (g, context), at in found.items()
        ]
        return {"maps": cells, "tables": {name: table.to_dict() for name, table in self.tables.items()}}


_MAKERS = (
    tables.placements,
    tables.parts,
    tables.energies,
    tables.groups,
    tables.contexts,
    tables.savings,
    tables.batches,
    tables.bounds,
    tables.rates,
    tables.traffic,
)
STEPS = len(UNITS) * len(FORMATS) + len(_MAKERS) + len(tables.CHANGES)
"""How often `ask` tells what it begins."""


def ask(tell: Callable[[str], None] = lambda title: None) -> Study:
    """Ask all of it.

    Parameters
    ----------
    tell : called with a title at the beginning of each of `STEPS` steps.
    """
    maps: dict[tuple[str, str], Grid] = {}
    for units in UNITS:
        for kv_format in FORMATS:
            tell(f"map: {kv_format}, {units.name}")
            maps[units.name, kv_format] = grid(kv_format, units)
    found = {}
    for make in _MAKERS:
        tell(make.__name__)
        table = make()
        found[table.name] = table
    found["changes"] = tables.changes(maps, tell)
    return Study(maps=maps, tables=found)
