"""HDM decoders in software: the registers as a host finds them, and interleaving as a formula.

A chunk of an interleaved range belongs to the device at position chunk mod ways, and is there the
(chunk div ways)-th.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import hdm
from nearkv_hw.abi.hdm import ADDRESS_BITS, UNIT_SHIFT, WAYS
from nearkv_hw.abi.registers import Block

from .registers import RegisterFile

_UNIT = 1 << UNIT_SHIFT
_UNITS = ("base", "size", "skip")
NOWHERE = np.uint64((1 << ADDRESS_BITS) - 64)
"""A line of no device, where addresses lead that nobody decodes."""


def device_offset(distance: int, ways: int, granularity: int) -> tuple[int, int]:
    """Where a byte of an interleaved range is.

    Parameters
    ----------
    distance : bytes from the range's start.
    ways, granularity : devices of the set, and bytes of a chunk.

    Returns
    -------
    The position in the set of the device that has it, and the byte's offset in what that device gives.
    """
    chunk, within = divmod(distance, granularity)
    return chunk % ways, chunk // ways * granularity + within


def host_distance(offset: int, position: int, ways: int, granularity: int) -> int:
    """The other way: from a byte of the device at `position` to its distance from the range's start."""
    turn, within = divmod(offset, granularity)
    return (turn * ways + position) * granularity + within


@dataclass(frozen=True)
class CommittedRange:
    """A range in force, all in bytes.

    Parameters
    ----------
    base, end : its first host address, and the first one behind it.
    device, device_after : where its part of the device's memory begins and ends.
    ways, granularity : of its interleaving.
    """

    base: int
    end: int
    device: int
    device_after: int
    ways: int = 1
    granularity: int = 256


class HdmDecoders:
    """The HDM decoder capability.

    Rules are those of `nearkv_hw.endpoint.hdm.decoders`, with which it agrees in every bit.

    Parameters
    ----------
    decoders : how many, one of `abi.hdm.COUNT_CODES`.
    capacity_bytes : the device's memory, in whole 256 MiB.
    dvsec : ranges of the DVSEC at first.

    Members
    -------
    committed : the ranges in force, by decoder; None where a decoder is not committed.
    dvsec : ranges that decode until the decoders are enabled: base and size in bytes, two at most.
    """

    def __init__(self, decoders: int, capacity_bytes: int, *, dvsec: Sequence[tuple[int, int]] = ()) -> None:
        if capacity_bytes < _UNIT or capacity_bytes % _UNIT:
            raise ValueError(f"capacity_bytes must be a multiple of {_UNIT}, not {capacity_bytes!r}")
        self.capacity_bytes = capacity_bytes
        self._registers = RegisterFile(hdm.registers(decoders))
        self.committed: list[CommittedRange | None] = [None] * decoders
        self._dvsec = tuple(dvsec)

    @property
    def dvsec(self) -> Sequence[tuple[int, int]]:
        """The ranges of the DVSEC."""
        return self._dvsec

    @dvsec.setter
    def dvsec(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._dvsec = tuple(ranges)
        self._ranges_changed()

    def _ranges_changed(self) -> None:
        """The ranges of the DVSEC were set; who has them elsewhere, too, passes them on."""

    @property
    def block(self) -> Block:
        """The registers, as they are declared."""
        return self._registers.block

    def reset(self) -> None:
        """Nothing is programmed, nothing locked."""
        self._registers.reset()
        self.committed = [None] * len(self.committed)

    def read(self, offset: int, size: int = 4) -> int:
        """What a host reads at an offset of the capability."""
        return self._registers.read(offset, size)

    def write(self, offset: int, value: int, size: int = 4) -> None:
        """A host's write of a whole register; ValueError for less or more than one."""
        if size != 4:
            raise ValueError(f"HDM decoder registers are written 4 bytes at a time, not {size}")
        n, at = divmod(offset - hdm.FIRST_DECODER, hdm.DECODER_STRIDE)
        if n < 0 or at >= hdm.DECODER.size or not any(r.at == at for r in hdm.DECODER):
            self._registers.write(offset, size, value)
            return
        before = self._control(n)
        if before["committed"] and before["lock_on_commit"]:
            return
        self._registers.write(offset, size, value)
        if at != hdm.CONTROL.at:
            return
        after = self._control(n)
        if not after["commit"]:
            self.committed[n] = None
            self._registers.set(f"control_{n}", committed=0, error=0)
        elif not before["commit"]:
            self.committed[n] = found = self._checked(n, after)
            self._registers.set(f"control_{n}", committed=int(bool(found)), error=int(not found))

    @property
    def enabled(self) -> bool:
        """Whether the decoders decode, not the ranges of the DVSEC."""
        return bool(self._registers.field("global_control", "enable"))

    def translate(self, address: int) -> int | None:
        """The device address of a host address; None where no range has it."""
        for found in self._in_force():
            if found.base <= address < found.end:
                return found.device + device_offset(address - found.base, found.ways, found.granularity)[1]
        return None

    def translate_all(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The device addresses of host addresses, [n]; `NOWHERE` where no range has one."""
        found = np.full_like(addresses, NOWHERE)
        for part in self._in_force():
            inside = (addresses >= part.base) & (addresses < part.end)
            if inside.any():
                chunk, within = np.divmod(addresses[inside] - np.uint64(part.base), part.granularity)
                place = chunk // np.uint64(part.ways) * np.uint64(part.granularity) + within
                found[inside] = place + np.uint64(part.device)
        return found

    def host_address(self, address: int, position: int = 0) -> int | None:
        """A host address that leads to a device address; None where none does.

        Parameters
        ----------
        address : of the device.
        position : the device's place in the interleave set; a decoder translates all positions alike.
        """
        for part in self._in_force():
            if part.device <= address < part.device_after:
                distance = host_distance(address - part.device, position, part.ways, part.granularity)
                return part.base + distance
        return None

    def _in_force(self) -> Iterator[CommittedRange]:
        """The ranges that decode now."""
        if self.enabled:
            yield from (found for found in self.committed if found)
            return
        behind = 0
        for base, size in self.dvsec:
            yield CommittedRange(base, base + size, behind, behind + size)
            behind += size

    def _control(self, n: int) -> dict[str, int]:
        return hdm.CONTROL.unpack(self._registers[f"control_{n}"])

    def _checked(self, n: int, control: dict[str, int]) -> CommittedRange | None:
        """The range that decoder n would decode, if that is in order."""
        base, size, skip = (
            self._registers[f"{name}_high_{n}"] << 32 | self._registers[f"{name}_low_{n}"] for name in _UNITS
        )
        before, after = self.committed[:n], self.committed[n:]
        ways = WAYS.get(control["ways"])
        previous = before[-1] if before else CommittedRange(0, 0, 0, 0)
        if ways is None or control["granularity"] > hdm.MAX_GRANULARITY or previous is None:
            return None
        device = previous.device_after + skip
        granularity = 256 << control["granularity"]
        found = CommittedRange(base, base + size, device, device + size // ways, ways, granularity)
        in_order = all(before) and not any(after)
        fits = size and not size % (ways * _UNIT) and previous.end <= base and found.end <= 1 << ADDRESS_BITS
        return found if in_order and fits and found.device_after <= self.capacity_bytes else None
