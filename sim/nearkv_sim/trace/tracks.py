"""Tracks of slices, grouped, and the Trace Event Format's events that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Track:
    """A row of slices; a slice either lies within an earlier one or begins when that has ended."""

    def __init__(self, tracks: Tracks, group: int, number: int, name: str) -> None:
        self.name = name
        self._tracks = tracks
        self._place = {"pid": group, "tid": _thread(group, number)}
        self.events: list[dict[str, Any]] = []

    def slice(self, begin: int, end: int, name: str, **arguments: Any) -> None:
        """Something that goes on from cycle `begin` to before cycle `end`."""
        start = self._tracks.nanoseconds(begin)
        self.events.append(
            {
                "ph": "X",
                **self._place,
                "ts": start / 1000,
                "dur": (self._tracks.nanoseconds(end) - start) / 1000,
                "name": name,
                "args": {"cycle": begin, "cycles": end - begin, **arguments},
            }
        )

    def mark(self, cycle: int, name: str, **arguments: Any) -> None:
        """Something that happens in a cycle."""
        time = self._tracks.nanoseconds(cycle) / 1000
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                **self._place,
                "ts": time,
                "name": name,
                "args": {"cycle": cycle, **arguments},
            }
        )


class Lanes:
    """As many tracks as it takes for slices that overlap; a slice goes to the first that is free."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self._free: list[tuple[int, Track]] = []

    def at(self, begin: int, end: int) -> Track:
        """The track for what goes on from cycle `begin` to before cycle `end`; beginnings come in order."""
        for n, (free, track) in enumerate(self._free):
            if free <= begin:
                self._free[n] = (end, track)
                return track
        track = self._group.track(f"{self._name}, {len(self._free) + 1}")
        self._free.append((end, track))
        return track


@dataclass
class Group:
    """Tracks that a viewer shows together."""

    tracks: Tracks
    number: int
    name: str
    members: list[Track] = field(default_factory=list)

    def track(self, name: str) -> Track:
        """A new track."""
        track = Track(self.tracks, self.number, len(self.members) + 1, name)
        self.members.append(track)
        return track

    def lanes(self, name: str) -> Lanes:
        """New tracks for slices that overlap."""
        return Lanes(self, name)


class Tracks:
    """All groups.

    Parameters
    ----------
    origin : the cycle that is time zero.
    clock_mhz : of the device.
    """

    def __init__(self, origin: int, clock_mhz: int) -> None:
        self._origin = origin
        self._clock_mhz = clock_mhz
        self.groups: list[Group] = []

    @property
    def slices(self) -> int:
        """Slices and marks so far."""
        return sum(len(track.events) for group in self.groups for track in group.members)

    def nanoseconds(self, cycle: int) -> int:
        """When a cycle begins, in whole nanoseconds; slices that touch in cycles touch in these, too."""
        return (cycle - self._origin) * 1000 // self._clock_mhz

    def group(self, name: str) -> Group:
        """A new group, shown below the ones before."""
        self.groups.append(Group(self, len(self.groups) + 1, name))
        return self.groups[-1]

    def events(self) -> Iterator[dict[str, Any]]:
        """The format's events: names first, then each track's slices by their beginning, outer ones first."""
        for group in self.groups:
            yield _name("process", group.number, 0, "name", group.name)
            yield _name("process", group.number, 0, "sort_index", group.number)
            for n, track in enumerate(group.members, 1):
                thread = _thread(group.number, n)
                yield _name("thread", group.number, thread, "name", track.name)
                yield _name("thread", group.number, thread, "sort_index", n)
        for group in self.groups:
            for track in group.members:
                yield from sorted(
                    track.events, key=lambda e: (e["args"]["cycle"], -e["args"].get("cycles", 0))
                )


def _thread(group: int, track: int) -> int:
    """A track's number, which no other track has and no group: viewers take equal ones for main threads."""
    return 1000 * group + track


def _name(what: str, group: int, track: int, key: str, value: str | int) -> dict[str, Any]:
    """A metadata event."""
    args = {key: value}
    return {"ph": "M", "pid": group, "tid": track, "name": f"{what}_{key}", "args": args}
