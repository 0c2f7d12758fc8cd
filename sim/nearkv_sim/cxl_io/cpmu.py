"""The performance monitoring unit: the device's own counters, started, frozen and written as CXL has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nearkv_hw.abi.cpmu import COUNTER_BITS, COUNTERS, CPMU

from .registers import RegisterFile

_MASK = (1 << COUNTER_BITS) - 1


class Cpmu:
    """Counters of fixed functions.

    A counter counts while it is enabled and not frozen; while it does not, it can be written.

    Parameters
    ----------
    events : how often each of `abi.cpmu.COUNTERS` has happened since reset.

    Members
    -------
    registers : the unit's.
    """

    def __init__(self, events: Callable[[], tuple[int, ...]]) -> None:
        self._events = events
        self.registers = RegisterFile(CPMU)
        self._held = [0] * len(COUNTERS)
        self._since: list[int | None] = [None] * len(COUNTERS)
        self.registers.on_write("freeze", lambda *_: self._follow())
        for n in range(len(COUNTERS)):
            self.registers.on_write(f"configuration_{n}", lambda *_: self._follow())
            self.registers.on_write(f"counter_{n}", partial(self._written, n))
            self.registers.on_read(f"counter_{n}", partial(self._count, n))

    def reset(self) -> None:
        """Nothing is enabled, and all counters are zero."""
        self.registers.reset()
        self._held = [0] * len(COUNTERS)
        self._since = [None] * len(COUNTERS)

    def across(self, restart: Callable[[], None]) -> None:
        """Keep the counts over something after which events may be counted from zero."""
        self._follow(stop=True)
        restart()
        self._follow()

    def _follow(self, *, stop: bool = False) -> None:
        """Start and stop counters as their registers say, or stop all."""
        frozen, now = self.registers["freeze"], self._events()
        for n, since in enumerate(self._since):
            enabled = bool(self.registers.field(f"configuration_{n}", "enable"))
            runs = enabled and not frozen >> n & 1 and not stop
            if since is not None and not runs:
                self._held[n] = self._held[n] + now[n] - since & _MASK
                self._since[n] = None
            elif since is None and runs:
                self._since[n] = now[n]

    def _count(self, n: int) -> int:
        since = self._since[n]
        return self._held[n] if since is None else self._held[n] + self._events()[n] - since & _MASK

    def _written(self, n: int, _: int, value: int) -> None:
        if self._since[n] is None:
            self._held[n] = value
