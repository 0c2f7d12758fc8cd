"""Several devices as one tier: pages spread over them, partials merged."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce

import numpy as np

from nearkv.arguments import whole_number
from nearkv.errors import ArgumentError, OutOfMemoryError
from nearkv.reference import Partial, merge
from nearkv.rows import Context

from .tier import Asked, Geometry, Key, Positions, Tier


class PoolTier(Tier):
    """Tiers that hold a sequence's rows together, page by page in turn, and attend at once.

    Page p of sequence s is for member (s + p) modulo their number: a long sequence and many short ones both
    load all members alike. Where that one has no room, a page goes to the member with the most.

    Parameters
    ----------
    members : two tiers or more of different names, such as a `DeviceTier` per device; a device may be of any
        kind and size, or another process's (`unix:PATH`).
    name : for telemetry.
    page_rows : rows of a page.

    Raises
    ------
    ArgumentError : for fewer members, two of one name, or a number of rows that is none.
    OutOfMemoryError : from `put`, when no member has room for a page; then none of its rows came in.

    Examples
    --------
    >>> import nearkv, torch
    >>> from nearkv.tiers import DeviceTier, NewestRows, PoolTier, TieredCache
    >>> devices = [nearkv.open("model"), nearkv.open("model", channels=1)]
    >>> pool = PoolTier([DeviceTier(device, f"device {n}") for n, device in enumerate(devices)])
    >>> kv = TieredCache([pool], layers=1, kv_heads=1, head_dim=4, dtype="fp16", policy=NewestRows())
    >>> s = kv.sequence()
    >>> kv.append(s, layer=0, k=torch.zeros(40, 1, 4).half(), v=torch.ones(40, 1, 4).half())
    >>> kv.attend([s], layer=0, q=torch.zeros(1, 1, 4).half()).tolist()
    [[[1.0, 1.0, 1.0, 1.0]]]
    >>> [member.rows for member in pool.members]
    [16, 24]
    >>> for device in devices:
    ...     device.close()
    """

    def __init__(self, members: Many[Tier], name: str = "pool", *, page_rows: int = 16) -> None:
        names = [member.name for member in members]
        if len(members) < 2 or len({*names}) != len(names):
            raise ArgumentError(f"members {names}: must be two or more, of different names")
        bounds = [member.capacity_bytes for member in members]
        super().__init__(name, None if None in bounds else sum(bound or 0 for bound in bounds))
        self.members = tuple(members)
        self._page_rows = whole_number("page_rows", page_rows, 1, 1 << 20)

    def open(self, geometry: Geometry) -> None:
        """See `Tier.open`."""
        super().open(geometry)
        self._threads = ThreadPoolExecutor(len(self.members), thread_name_prefix=self.name)
        for member in self.members:
            member.open(geometry)

    def positions(self, key: Key) -> Positions:
        """See `Tier.positions`."""
        return np.concatenate([member.positions(key) for member in self.members])

    def put(self, key: Key, rows: Context, positions: Positions) -> None:
        """See `Tier.put`."""
        pages = positions // self._page_rows
        placed: dict[int, list[int]] = {}
        for page in np.unique(pages):
            places = np.flatnonzero(pages == page)
            placed.setdefault(self._member(key, int(page), len(places), placed), []).extend(places.tolist())
        for index, places_of in placed.items():
            own = np.array(sorted(places_of), np.int64)
            self.members[index].put(key, rows.at(own), positions[own])
        self.bytes_in += len(positions) * self.geometry.row_bytes

    def get(self, key: Key, positions: Positions) -> Context:
        """See `Tier.get`."""
        found: Context | None = None
        for member, places in self._held(key, positions):
            rows = member.get(key, positions[places])
            found = rows.zeros(len(positions)) if found is None else found
            found.put(places, rows)
        if found is None:
            raise ArgumentError(f"{self.name} has no rows of sequence {key[0]} in layer {key[1]}")
        return found

    def remove(self, key: Key, positions: Positions) -> None:
        """See `Tier.remove`."""
        for member, places in self._held(key, positions):
            member.remove(key, positions[places])
        self.bytes_out += len(positions) * self.geometry.row_bytes

    def copy(self, key: Key, sequence: int) -> None:
        """See `Tier.copy`."""
        for member in self.members:
            member.copy(key, sequence)

    def drop(self, key: Key) -> None:
        """See `Tier.drop`."""
        for member in self.members:
            member.drop(key)

    def partial(self, layer: int, sequences: Many[int], asked: Asked) -> Partial:
        """See `Tier.partial`: those of the members that have rows, at the same time, merged."""
        keys = [(sequence, layer) for sequence in sequences]
        having = [m for m in self.members if any(len(m.positions(key)) for key in keys)] or [self.members[0]]

        def part(index: int) -> Callable[[], Partial]:
            sinks = asked.sinks if index == 0 else None  # they count once
            own = replace(asked, sinks=sinks)
            return lambda: having[index].partial(layer, sequences, own)

        parts = [self._threads.submit(part(index)) for index in range(len(having))]
        return reduce(merge, [part.result() for part in parts])

    @property
    def rows(self) -> int:
        """See `Tier.rows`."""
        return sum(member.rows for member in self.members)

    def close(self) -> None:
        """See `Tier.close`."""
        self._threads.shutdown()
        for member in self.members:
            member.close()

    def _member(self, key: Key, page: int, rows: int, placed: dict[int, list[int]]) -> int:
        """Where so many rows of a page go, beside what is placed already."""
        room = [
            np.inf
            if member.capacity_bytes is None
            else member.capacity_bytes - member.used_bytes - len(placed.get(n, ())) * self.geometry.row_bytes
            for n, member in enumerate(self.members)
        ]
        first = (key[0] + page) % len(self.members)
        need = rows * self.geometry.row_bytes
        chosen = first if room[first] >= need else int(np.argmax(room))
        if room[chosen] < need:
            raise OutOfMemoryError(
                f"{self.name} has no room for {rows} rows of {self.geometry.row_bytes} bytes: its members "
                f"have {', '.join(f'{m.name} {int(r)}' for m, r in zip(self.members, room, strict=True))} "
                "bytes left; free sequences, or add a member"
            )
        return chosen

    def _held(self, key: Key, positions: Positions) -> list[tuple[Tier, Positions]]:
        """The members that have some of these rows, and which."""
        held = [(m, np.flatnonzero(np.isin(positions, m.positions(key)))) for m in self.members]
        return [(member, places) for member, places in held if len(places)]
