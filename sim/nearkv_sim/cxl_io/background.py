"""Background operations: one at a time, whose progress the host can see."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi.mailbox import Opcode, ReturnCode

from .clock import Clock
from .command import Failed


class Background:
    """The operation that runs, or ran last.

    Parameters
    ----------
    clock : the time that passes.
    finished : called when one has ended.

    Members
    -------
    opcode : of the command that began it; 0 for none since reset.
    """

    def __init__(self, clock: Clock, finished: Callable[[], None]) -> None:
        self._clock = clock
        self._finished = finished
        self.opcode = 0
        self._began = 0.0
        self._duration_s = 0.0
        self.running = False

    def start(self, opcode: Opcode, duration_s: float) -> None:
        """Begin one; `Failed` while another runs."""
        if self.running:
            raise Failed(ReturnCode.BUSY)
        self.opcode, self._began, self._duration_s, self.running = opcode, self._clock(), duration_s, True

    def poll(self) -> None:
        """See whether it has ended."""
        if self.running and self._clock() - self._began >= self._duration_s:
            self.running = False
            self._finished()

    @property
    def percentage(self) -> int:
        """How far it is."""
        if not self.running:
            return 100 if self.opcode else 0
        return min(99, int(100 * (self._clock() - self._began) / self._duration_s))
