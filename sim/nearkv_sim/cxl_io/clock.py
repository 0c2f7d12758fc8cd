"""The device's time."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since some beginning."""


class Timestamp:
    """Time as Set Timestamp sets it.

    Parameters
    ----------
    clock : the time that passes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._set: tuple[int, float] | None = None

    def set(self, value_ns: int) -> None:
        """What time it is."""
        self._set = value_ns, self._clock()

    def now_ns(self) -> int:
        """What time it is; 0 until somebody has said so."""
        if self._set is None:
            return 0
        value_ns, since = self._set
        return value_ns + round((self._clock() - since) * 1e9)
