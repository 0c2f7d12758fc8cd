"""Which rows should be where: small objects that look at one sequence's rows of a layer and name moves."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nearkv.arguments import whole_number
from nearkv.errors import ArgumentError

from .tier import Positions


@dataclass(frozen=True)
class RowView:
    """One sequence's rows of a layer, as a policy sees them.

    Members
    -------
    rows : how many the sequence has.
    tiers : of each tier, the rows that are there, rising.
    mass : of a tier, how much calls so far made of each of these rows, roughly; zeros where nobody knows.
    full : of each tier, whether it is above the mark at which rows have to go.
    """

    rows: int
    tiers: Many[Positions]
    mass: Callable[[int], npt.NDArray[np.float64]]
    full: Many[bool]


@dataclass(frozen=True)
class Move:
    """Rows that should go from one tier to another, both by their place in the list of tiers."""

    source: int
    target: int
    positions: Positions


class Policy(Protocol):
    """What decides. It never has a part in any result."""

    def moves(self, view: RowView) -> list[Move]:
        """Moves of rows that are where `view` says; each row once."""


class NewestRows:
    """The newest rows in the first tier, the next ones in the second, and so on; all others in the last.

    Parameters
    ----------
    rows : that every tier but the last keeps of each sequence and layer.

    Raises
    ------
    ArgumentError : for numbers below 0.
    """

    def __init__(self, *rows: int) -> None:
        self.rows = [whole_number("rows", count, 0, 1 << 62) for count in rows]

    def moves(self, view: RowView) -> list[Move]:
        """See `Policy.moves`; of a tier that is full an eighth of its rows goes down besides."""
        last = len(view.tiers) - 1
        if len(self.rows) != last:
            raise ArgumentError(
                f"{len(self.rows)} numbers of rows for {last + 1} tiers: give one for each but the last"
            )
        edges = view.rows - np.cumsum(self.rows)
        found = []
        for source, positions in enumerate(view.tiers):
            targets = (positions[:, None] < edges).sum(axis=1)
            if view.full[source] and source < last:
                oldest = positions[: max(len(positions) // 8, 1)]
                targets[: len(oldest)] = np.maximum(targets[: len(oldest)], source + 1)
            for target in np.unique(targets[targets != source]).tolist():
                found.append(Move(source, target, positions[targets == target]))
        return found


class HighestMass:
    """The rows in the first tier of which attention made most, and the newest ones; others go down one.

    Parameters
    ----------
    rows : that the first tier keeps of each sequence and layer.
    newest : of these, the newest ones, which nobody has looked at yet.
    """

    def __init__(self, rows: int, newest: int) -> None:
        self.rows = whole_number("rows", rows, 0, 1 << 62)
        self.newest = whole_number("newest", newest, 0, self.rows)

    def moves(self, view: RowView) -> list[Move]:
        """See `Policy.moves`."""
        found = []
        for index, positions in enumerate(view.tiers[:-1]):
            kept = self.rows if not index else len(positions)
            if view.full[index]:
                kept = min(kept, len(positions) - max(len(positions) // 8, 1))
            if len(positions) <= kept:
                continue
            mass = view.mass(index)
            mass[positions >= view.rows - self.newest] = np.inf
            order = np.argsort(mass, kind="stable")
            found.append(Move(index, index + 1, np.sort(positions[order[: len(positions) - kept]])))
        return found
