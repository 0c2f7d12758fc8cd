"""The map of winners: a cell for every number of query heads per KV head and every context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nearkv_hw.abi.config import Placement

from nearkv.estimate import Setup

from . import near
from .near import Units, reference

_ALIKE = 0.05
"""Factors of the map that differ by less are shown as one, the first."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A place of the map.

    Parameters
    ----------
    label : who wins: `rank`, `channel` (phy, controller and fabric), `host`, or those that tie.
    gain : how many times longer the host takes than the best placement with units.
    spread : by which share phy, controller and fabric differ.
    """

    label: str
    gain: float
    spread: float

    @property
    def text(self) -> str:
        """Label, and how many times quicker it is than the host, or the host than the best unit."""
        factor = max(self.gain, 1 / self.gain)
        return f"{self.label} {factor:.{1 if factor >= 1.95 else 2}f}"


def label(won: Sequence[Placement]) -> str:
    """A name for those that win.

    Examples
    --------
    >>> label(list(Placement)[1:4]), label(list(Placement)), label([Placement.RANK])
    ('channel', 'any', 'rank')
    """
    if len(won) == len(Placement):
        return "any"
    channel = [p for p in won if p in near.ON_CHANNEL]
    names = ["rank"] if Placement.RANK in won else []
    names += ["channel"] if len(channel) == len(near.ON_CHANNEL) else [p.name.lower() for p in channel]
    return " = ".join([*names, *(["host"] if Placement.HOST in won else [])])


Grid = dict[tuple[int, int], Cell]
"""Cells by g and context."""


def grid(kv_format: str, units: Units, change: Callable[[Setup], Setup] = lambda setup: setup) -> Grid:
    """The map of a format and of a kind of units."""
    found = {}
    for group in near.GROUPS:
        setup = change(reference(kv_format, group=group))
        for context in near.CONTEXTS:
            seconds = near.times(replace(setup, context=context), units)
            channel = [seconds[placement] for placement in near.ON_CHANNEL]
            found[group, context] = Cell(
                label=label(near.winners(seconds)),
                gain=near.gain(seconds),
                spread=max(channel) / min(channel) - 1,
            )
    return found


def bands(cells: Grid) -> list[tuple[int, int]]:
    """First and last of neighbouring g whose winners are the same and whose factors are nearly so."""
    found: list[tuple[int, int]] = []
    for group in near.GROUPS:
        if found and all(_alike(cells[found[-1][0], at], cells[group, at]) for at in near.CONTEXTS):
            found[-1] = (found[-1][0], group)
        else:
            found.append((group, group))
    return found


def _alike(one: Cell, other: Cell) -> bool:
    return one.label == other.label and abs(other.gain / one.gain - 1) < _ALIKE
