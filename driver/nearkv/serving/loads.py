"""Rows on their way from where prefixes are kept, beside the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .machine import Machine

_DONE = 1.0
"""Bytes that are none: what is left when sums of floats round."""


class Load:
    """Rows on their way to where a request needs them.

    Members
    -------
    bytes_left : that have yet to come.
    """

    __slots__ = ("bytes_left",)

    def __init__(self) -> None:
        self.bytes_left = 0.0


class Loads:
    """All loads of a system; those from one place come one after the other, at its rate.

    Parameters
    ----------
    machine : the system.

    Members
    -------
    loaded : bytes that have come from each place.
    """

    def __init__(self, machine: Machine) -> None:
        self.loaded = [0.0] * len(machine.places)
        self._rates = [place.rate for place in machine.places]
        self._device = machine.device
        self._queues: list[deque[Load]] = [deque() for _ in machine.places]

    def start(self, at: int) -> Load:
        """A load from a place, behind those that are waited for; who starts it says its bytes."""
        load = Load()
        self._queues[at].append(load)
        return load

    def waits(self, at: int) -> bool:
        """Whether anything has yet to come from a place."""
        return bool(self._queues[at])

    def due(self) -> Iterator[float]:
        """Seconds until the next load of each place has come, if nothing else takes its rate."""
        for queue, rate in zip(self._queues, self._rates, strict=True):
            if queue:
                yield queue[0].bytes_left / rate

    def come(self, seconds: float, used: float) -> bool:
        """Time goes by, in which a step took `used` bytes from the devices.

        Returns
        -------
        Whether a load has arrived.
        """
        arrived = False
        for at, queue in enumerate(self._queues):
            left = self._rates[at] * seconds - (used if at == self._device else 0.0)
            while queue and left > 0:
                came = min(left, queue[0].bytes_left)
                queue[0].bytes_left -= came
                left -= came
                self.loaded[at] += came
                if queue[0].bytes_left <= _DONE:
                    self.loaded[at] += queue[0].bytes_left
                    queue.popleft().bytes_left = 0.0
                    arrived = True
        return arrived
