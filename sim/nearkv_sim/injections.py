"""What can be done to simulated hardware below its tenants: bits of its DRAM are inverted, it is reset."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.config import LinkLayer
from nearkv_hw.abi.dram import Dram
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.mailbox import PoisonSource
from nearkv_hw.abi.window import (
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    LINK_STATE,
    LINK_STATE_LINE,
    MEMORY_COUNTERS,
    MEMORY_COUNTERS_LINE,
    register_address,
)

from .decoders import RunningDecoders, decoders_of
from .maintenance import Ability
from .port import Access, Addresses, Operation, Read, ReadResult, SimulatedPort, Write

_TWO_BITS = (0, 1)
_EVERY_BYTE = np.uint64((1 << LINE_BYTES) - 1)


class Injections:
    """`Maintenance` of a device at its RTL.

    It knows of lines that were poisoned here or by a host's write, and of those that a host's read found; a
    host's clean write of a whole line takes it off the list.

    Parameters
    ----------
    port : the device, which has this one.
    restart : starts a port anew, with an empty memory, where that is possible.

    Counters come from the first aperture's window; while no decoder leads there they stay as they were.
    """

    def __init__(self, port: SimulatedPort, restart: Callable[[Any], None] | None = None) -> None:
        self._port: SimulatedPort = weakref.proxy(port)
        self.decoders: RunningDecoders | None = decoders_of(port.config, RunningDecoders, self._port)
        self._told: dict[int, bytes] = {}
        self._restart = restart
        self._lines: dict[int, PoisonSource] = {}
        self._own_reads = 0
        self.abilities = Ability(0)
        if port.config.dram is not Dram.FIXED:
            self.abilities |= Ability.POISON
        if restart is not None:
            self.abilities |= Ability.ERASE

    def observe(self, program: Sequence[Operation], results: Sequence[ReadResult]) -> None:
        """Learn from what a program did."""
        left = iter(results)
        for operation in program:
            if isinstance(operation, Read):
                access = next(left).access
                if access.any() or self._lines:
                    self._observe_read(operation, access)
            elif isinstance(operation, Write) and (self._lines or operation.poison):
                self._observe_write(operation)

    def _observe_read(self, read: Read, access: npt.NDArray[np.uint8]) -> None:
        for address in self._device_addresses(read.addresses[access == Access.POISON]):
            self._lines.setdefault(address, PoisonSource.INTERNAL)
        for address in self._device_addresses(read.addresses[access == Access.DATA]):
            self._lines.pop(address, None)

    def _observe_write(self, write: Write) -> None:
        if write.poison:
            self._lines.update(dict.fromkeys(self._device_addresses(write.addresses), PoisonSource.EXTERNAL))
            return
        written = write.addresses if write.enables is None else write.addresses[write.enables == _EVERY_BYTE]
        for address in self._device_addresses(written):
            self._lines.pop(address, None)

    def _device_addresses(self, hosts: Addresses) -> list[int]:
        """Of those that are memory's, not a window's."""
        config = self._port.config
        if self.decoders is not None:
            hosts = self.decoders.translate_all(hosts)
        inside = hosts % np.uint64(config.aperture_bytes)
        found: list[int] = inside[inside < config.capacity_bytes].tolist()
        return found

    def poison(self, address: int) -> None:
        """See `Maintenance.poison`."""
        if address not in self._lines:
            self._port.inject(address, _TWO_BITS)
        self._lines[address] = PoisonSource.INJECTED

    def poisoned(self) -> dict[int, PoisonSource]:
        """See `Maintenance.poisoned`."""
        return dict(sorted(self._lines.items()))

    def corrected(self) -> int:
        """See `Maintenance.corrected`."""
        lines = (MEMORY_COUNTERS_LINE + slice_ for slice_ in range(self._port.config.slices))
        return sum(told["corrected"] for told in self._read_registers(lines, MEMORY_COUNTERS))

    def traffic(self) -> tuple[int, int, int]:
        """See `Maintenance.traffic`; what was read here does not count."""
        (told,) = self._read_registers([DEVICE_COUNTERS_LINE], DEVICE_COUNTERS)
        return told["cycles"], told["link_reads"] - self._own_reads, told["link_writes"]

    def link_state(self) -> dict[str, int] | None:
        """See `Maintenance.link_state`."""
        if self._port.config.link_layer is LinkLayer.OFF:
            return None
        (told,) = self._read_registers([LINK_STATE_LINE], LINK_STATE)
        return told

    def _read_registers(self, lines: Iterable[int], layout: Layout) -> list[dict[str, int]]:
        """Register lines of the first aperture's window."""
        places = {line: self._host_address(register_address(self._port.config, 0, line)) for line in lines}
        reached = {line: address for line, address in places.items() if address is not None}
        if reached:
            (result,) = self._port.run([Read(np.array(list(reached.values()), np.uint64))])
            self._own_reads += len(reached)
            self._told |= {line: data.tobytes() for line, data in zip(reached, result.data, strict=True)}
        return [layout.unpack(self._told.get(line, bytes(LINE_BYTES))) for line in places]

    def _host_address(self, address: int) -> int | None:
        """Where a host finds an address of the device."""
        return address if self.decoders is None else self.decoders.host_address(address)

    def erase(self) -> None:
        """See `Maintenance.erase`."""
        if self._restart is None:
            self._lacks("cannot be erased while it runs; open another one")
        self._restart(self._port)
        if self.decoders is not None:
            self.decoders.program_again()
        self._lines.clear()
        self._told.clear()
        self._own_reads = 0

    def repair(self, address: int, data: bytes) -> NoReturn:
        """RuntimeError: the host writes the line."""
        self._lacks("lets nobody but its tenants write a line")

    def withhold(self, address: int, size: int) -> NoReturn:
        """RuntimeError: its owner table knows tenants alone."""
        self._lacks("cannot keep memory from its tenants")

    def give(self, address: int, size: int) -> NoReturn:
        """RuntimeError, for nothing is withheld."""
        self._lacks("cannot keep memory from its tenants")

    def _lacks(self, text: str) -> NoReturn:
        raise RuntimeError(f"the {self._port.kind} device {text}")
