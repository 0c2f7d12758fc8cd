"""Partial results (docs/numerics.md section 5): what tiers, channels and devices exchange, and merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from torch import Tensor

from nearkv.reference.binned import State, merge_states

LANE_FLAGS = LANE_NAN | LANE_POSITIVE_INFINITY | LANE_NEGATIVE_INFINITY

Planes = tuple[Any, Any, Any]
"""T, H and L of states: tensors or arrays of any signed integer type."""


@dataclass(frozen=True)
class Partial:
    """The result of queries [batch, q_heads] or [batch, query_rows, q_heads] over a part of their rows.

    Parameters
    ----------
    denominator : state Λ per query.
    numerators : state A per query and lane, [..., q_heads, value_dim].
    query_nan : bool per query; where it is set, everything else of the query has no meaning.
    lane_flags : uint8 per query and lane, bits `LANE_NAN`, `LANE_POSITIVE_INFINITY` and
        `LANE_NEGATIVE_INFINITY` of `nearkv_hw.abi.memory`.

    Raises
    ------
    ValueError : when shapes or devices do not fit together, or a flag is none of the three.
    """

    denominator: State
    numerators: State
    query_nan: Tensor
    lane_flags: Tensor

    def __post_init__(self) -> None:
        queries, lanes = tuple(self.query_nan.shape), tuple(self.lane_flags.shape)
        if lanes[:-1] != queries:
            raise ValueError(f"a partial of queries {queries} cannot have lane flags of shape {lanes}")
        for name, state, wanted in (
            ("denominator", self.denominator, queries),
            ("numerators", self.numerators, lanes),
        ):
            if tuple(state.top.shape) != wanted:
                raise ValueError(
                    f"the {name} of a partial has shape {tuple(state.top.shape)}, must have {wanted}"
                )
        devices = {plane.device for plane in self.planes()}
        if len(devices) > 1:
            raise ValueError(f"the planes of a partial lie on several devices: {sorted(map(str, devices))}")

    @classmethod
    def empty(cls, queries: tuple[int, ...], value_dim: int, device: torch.device | str = "cpu") -> Partial:
        """The partial of no rows, which changes nothing that it is merged with."""
        lanes = (*queries, value_dim)
        return cls(
            State.empty(queries, device),
            State.empty(lanes, device),
            torch.zeros(queries, dtype=torch.bool, device=device),
            torch.zeros(lanes, dtype=torch.uint8, device=device),
        )

    @classmethod
    def from_planes(
        cls, denominator: Planes, numerators: Planes, query_nan: Any = None, lane_flags: Any = None
    ) -> Partial:
        """A partial from planes as they travel and lie in memory.

        Parameters
        ----------
        denominator : T (int32, `TOP_NONE` for an empty state), H and L (int64), arrays or tensors
            [..., q_heads].
        numerators : the same, [..., q_heads, value_dim].
        query_nan : truth values [..., q_heads]; all clear when not given.
        lane_flags : uint8 [..., q_heads, value_dim]; all clear when not given.

        Raises
        ------
        ValueError : when shapes or devices do not fit together, or a flag has an unknown bit.
        """
        low, high = State.from_planes(*denominator), State.from_planes(*numerators)
        if query_nan is None:
            query_nan = torch.zeros_like(low.top)
        if lane_flags is None:
            lane_flags = torch.zeros_like(high.top)
        flags = torch.as_tensor(lane_flags).to(torch.uint8)
        if bool((flags & ~LANE_FLAGS).any()):
            raise ValueError(f"lane flags have the bits {LANE_FLAGS:#b}, got {int(flags.max()):#b}")
        return cls(low, high, torch.as_tensor(query_nan).to(torch.bool), flags)

    def equal(self, other: Partial) -> bool:
        """Whether both hold the same bits in all that has a meaning."""
        return not bool(self.differing(other).any())

    def differing(self, other: Partial) -> Tensor:
        """The queries in which the two differ, bool [..., q_heads]; ValueError when their shapes do."""
        _check_alike(self, other)
        unequal = torch.zeros_like(self.query_nan)
        for mine, theirs in zip(self.planes(), other.planes(), strict=True):
            difference = mine != theirs
            unequal |= difference if difference.dim() == unequal.dim() else difference.any(-1)
        # Where both queries are NaN, sums and lane flags are not compared.
        return unequal & ~(self.query_nan & other.query_nan)

    def to(self, device: torch.device | str) -> Partial:
        """The same partial on another device."""
        moved = [plane.to(device) for plane in self.planes()]
        return Partial(State(*moved[:3]), State(*moved[3:6]), moved[6], moved[7])

    def reshaped(self, queries: tuple[int, ...]) -> Partial:
        """The same with its queries [..., q_heads] in another shape: `queries`, and then q_heads."""

        def shaped(plane: Tensor, last: int) -> Tensor:
            return plane.reshape(*queries, *plane.shape[plane.dim() - last :])

        denominator, numerators = (
            State(*(shaped(plane, last) for plane in (state.top, state.high, state.low)))
            for state, last in ((self.denominator, 1), (self.numerators, 2))
        )
        return Partial(denominator, numerators, shaped(self.query_nan, 1), shaped(self.lane_flags, 2))

    def at(self, places: Sequence[int]) -> Partial:
        """Some of a batch's queries, in this order."""
        taken = [plane[list(places)] for plane in self.planes()]
        return Partial(State(*taken[:3]), State(*taken[3:6]), taken[6], taken[7])

    def spread(self, places: Sequence[int], batch: int) -> Partial:
        """The same as the queries at these places of a batch, whose others have seen no rows."""
        queries = (batch, *self.query_nan.shape[1:])
        found = Partial.empty(queries, self.lane_flags.shape[-1], self.query_nan.device)
        for plane, own in zip(found.planes(), self.planes(), strict=True):
            plane[list(places)] = own
        return found

    def planes(self) -> tuple[Tensor, ...]:
        """T, H and L of the denominator and of the numerators, `query_nan` and `lane_flags`."""
        low, high = self.denominator, self.numerators
        return low.top, low.high, low.low, high.top, high.high, high.low, self.query_nan, self.lane_flags


def merge(first: Partial, second: Partial) -> Partial:
    """The partial of both sets of rows; any order and any grouping of merges gives the same bits.

    Raises
    ------
    ValueError : when the two have different shapes or lie on different devices.
    """
    _check_alike(first, second)
    return Partial(
        merge_states(first.denominator, second.denominator),
        merge_states(first.numerators, second.numerators),
        first.query_nan | second.query_nan,
        first.lane_flags | second.lane_flags,
    )


def _check_alike(first: Partial, second: Partial) -> None:
    if first.lane_flags.shape != second.lane_flags.shape:
        raise ValueError(
            f"partials of shapes {tuple(first.lane_flags.shape)} and {tuple(second.lane_flags.shape)} "
            "are not of the same queries and lanes"
        )
    if first.query_nan.device != second.query_nan.device:
        devices = f"{first.query_nan.device} and {second.query_nan.device}"
        raise ValueError(f"partials lie on {devices}; move one with .to(device)")
