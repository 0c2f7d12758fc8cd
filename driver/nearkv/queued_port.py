"""A port that keeps writes for the next program: many small ones travel together, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nearkv_hw.abi import DeviceConfig
from nearkv_sim.port import Fence, LinkDown, Operation, Port, Program, ReadResult, Write
from nearkv_sim.served import ApertureTakenError, NoServiceError, ServedPort

from .errors import ArgumentError, LinkError, TenantTakenError

_MOST_LINES = 4096
"""Lines that wait at most; more of them travel at once."""


class Programs(Protocol):
    """What carries out programs: a port, or this one."""

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out a program; see `Port.run`."""


class QueuedPort:
    """What a tenant uses of a port.

    Parameters
    ----------
    port : the device.

    Members
    -------
    config, kind : of the device.
    flushes : how often what waited was sent.
    """

    def __init__(self, port: Port) -> None:
        self.config: DeviceConfig = port.config
        self.kind = port.kind
        self.flushes = 0
        self._down = ""
        self._port = port
        self._waiting: list[Operation] = []
        self._lines = 0

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out what waits, and then a program; see `Port.run`."""
        if self._down:
            raise LinkError(f"{self._down}: call recover() of the device once it is back")
        if self._waiting:
            program = [*self._waiting, *program]
            self._waiting, self._lines = [], 0
            self.flushes += 1
        try:
            return self._port.run(program)
        except ApertureTakenError as error:
            raise TenantTakenError(str(error)) from error
        except LinkDown as error:
            self._down = f"the link was lost ({error})"
            raise LinkError(f"{self._down}: what was under way may have arrived in part") from error

    def ask(self, request: dict[str, Any], arrays: Sequence[Any] = ()) -> tuple[dict[str, Any], list[Any]]:
        """What the server of a device answers beside it; see `ServedPort.ask`.

        Raises
        ------
        ArgumentError : for a device that is not served, or whose server offers nothing.
        LinkError : when the server is gone.
        """
        if not isinstance(self._port, ServedPort):
            raise ArgumentError(
                "shared=True needs a device that several hosts use: open unix:PATH, served by nearkv serve "
                "--library TENANT"
            )
        if self._down:
            raise LinkError(f"{self._down}: call recover() of the device once it is back")
        try:
            return self._port.ask(request, arrays)
        except NoServiceError as error:
            raise ArgumentError(str(error)) from error
        except LinkDown as error:
            self._down = f"the link was lost ({error})"
            raise LinkError(self._down) from error

    def wrap(self, wrap: Callable[[Port], Port]) -> None:
        """Have everything pass through another port."""
        self._port = wrap(self._port)

    def enqueue(self, writes: Sequence[Operation]) -> None:
        """Have writes and fences wait for the next program; all of it comes after what waits already."""
        self._waiting += [*writes, Fence()]
        self._lines += sum(len(one.addresses) for one in writes if isinstance(one, Write))
        if self._lines > _MOST_LINES:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._waiting:
            self.run([])
