"""Events of a device as Python has them: arrays, with the names of their sources."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

EVENT = np.dtype([("cycle", "<u8"), ("source", "<u4"), ("kind", "<u4"), ("a", "<u8"), ("b", "<u8")])
"""`nearkv::Event` of native/events.h."""
CAPACITY = 4 << 20
"""Events that a recording keeps unless told otherwise: 128 MiB."""

Array = npt.NDArray[Any]


class EventKind(IntEnum):
    """`nearkv::EventKind`: what an event tells, and what its `a` and `b` are."""

    STAGE = 0
    """A stage of a job; `nearkv_hw.timeline.EVENTS` has them by name."""
    ACTIVATE = 1
    """Of a bank, a row."""
    READ = 2
    """Of a bank, a column."""
    WRITE = 3
    """Of a bank, a column."""
    PRECHARGE = 4
    """Of a bank."""
    PRECHARGE_ALL = 5
    REFRESH = 6
    REFRESH_SET = 7
    """Of a set of banks."""
    LINK = 8
    """A message: host address, tag."""


ALL = frozenset(EventKind)
"""Every kind of event."""


@dataclass(frozen=True)
class Recording:
    """What a device did while it was recorded.

    Members
    -------
    events : `EVENT` [n], in the order of their cycles.
    names : of the sources, by number.
    lost : events that came when the recording was full.
    began, ended : device cycles between which it lies.
    """

    events: Array
    names: tuple[str, ...]
    lost: int
    began: int
    ended: int

    def of(self, name: str) -> Array:
        """The events of the source `name`; none where the device has no such source."""
        if name not in self.names:
            return self.events[:0]
        chosen: Array = self.events[self.events["source"] == self.names.index(name)]
        return chosen

    def indices(self, name: str) -> list[str]:
        """What follows `name` and a dot in names of sources, in their order."""
        prefix = f"{name}."
        return sorted(
            (known.removeprefix(prefix) for known in self.names if known.startswith(prefix)),
            key=lambda index: [int(part) for part in index.split(".")],
        )
