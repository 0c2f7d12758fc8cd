"""HDM decoders between link and memory of a running device: what programs those of the RTL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.hdm import DVSEC_RANGES, RANGE_WORD, RESET_WORD, UNIT_SHIFT

from .cxl_io.hdm import HdmDecoders
from .port import SimulatedPort

_D = TypeVar("_D", bound=HdmDecoders)


class RunningDecoders(HdmDecoders):
    """Those of a device at its RTL: what is written goes there, what is read comes from there.

    What they decode is known here, too, so that software can tell where an address leads.

    Parameters
    ----------
    decoders, capacity_bytes, dvsec : as of `HdmDecoders`; the device has the ranges already.
    port : the device.
    """

    def __init__(
        self,
        decoders: int,
        capacity_bytes: int,
        port: SimulatedPort,
        *,
        dvsec: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(decoders, capacity_bytes, dvsec=dvsec)
        self._port = port
        self._written: list[tuple[int, int]] = []

    def read(self, offset: int, size: int = 4) -> int:
        """What a host reads at an offset of the capability."""
        super().read(offset, size)  # which refuses what is no access
        low, shift = offset & ~3, 8 * (offset & 3)
        words = [self._port.read_decoder(at // 4) for at in range(low, offset + size, 4)]
        return sum(word << 32 * n for n, word in enumerate(words)) >> shift & (1 << 8 * size) - 1

    def write(self, offset: int, value: int, size: int = 4) -> None:
        """A host's write of a whole register; ValueError for less or more than one."""
        super().write(offset, value, size)
        self._written.append((offset // 4, value))
        self._port.write_decoder(offset // 4, value)

    def reset(self) -> None:
        """Nothing is programmed, nothing locked."""
        super().reset()
        self._written.clear()
        self._port.write_decoder(RESET_WORD, 0)

    def program_again(self) -> None:
        """Program a device that was started anew as it was."""
        self._ranges_changed()
        for word, value in self._written:
            self._port.write_decoder(word, value)

    def _ranges_changed(self) -> None:
        ranges = [*self._dvsec, *[(0, 0)] * DVSEC_RANGES][:DVSEC_RANGES]
        for n, (base, size) in enumerate(ranges):
            self._port.write_decoder(RANGE_WORD + 2 * n, base >> UNIT_SHIFT)
            self._port.write_decoder(RANGE_WORD + 2 * n + 1, size >> UNIT_SHIFT)


def decoders_of(config: DeviceConfig, made: Callable[..., _D], *arguments: object) -> _D | None:
    """A device's decoders as they are after reset, `made` of their number, what they decode, and `arguments`.

    Until they are programmed they decode all addresses of the device, from host address 0 on. None where it
    has no decoders.
    """
    if not config.hdm_decoders:
        return None
    return made(config.hdm_decoders, config.address_bytes, *arguments, dvsec=every_address(config))


def every_address(config: DeviceConfig) -> list[tuple[int, int]]:
    """The ranges of the DVSEC that a device has after reset."""
    return [(0, config.address_bytes)]
