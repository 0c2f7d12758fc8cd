"""The seam between the driver and a running device: programs of host memory accesses.

A host reaches a device only through CXL.mem reads and writes of lines. A *program* is a list of such accesses
that runs as one call, so that Python is never in the per-cycle loop. Every way to run the device (`rtl`,
`cocotb`, `model`, a served one) implements `Port`; the driver knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig

from .events import ALL, CAPACITY, EventKind, Recording
from .maintenance import Maintenance

Lines = npt.NDArray[np.uint8]
"""Lines of data, shape [n, 64]."""
Addresses = npt.NDArray[np.uint64]
"""Host byte addresses of lines, shape [n], multiples of 64."""


class Access(IntEnum):
    """How a read of a line was answered."""

    DATA = 0
    OUTSIDE = 1
    """MemData-NXM: no memory there, or none that the aperture may see."""
    POISON = 2


@dataclass(frozen=True)
class Write:
    """Write lines; with `enables` (uint64 [n], one bit per byte) only the enabled bytes (MemWrPtl).

    With `poison` the host says that the data is bad: memory keeps it so, and reads of it are poisoned.
    `ld_ids` (uint8 [n]) are the LD-IDs of the lines' messages, by default those of the logical devices whose
    apertures are addressed, as a switch would have them. Writes and reads between two fences may be carried
    out in any order.
    """

    addresses: Addresses
    data: Lines
    enables: npt.NDArray[np.uint64] | None = None
    poison: bool = False
    ld_ids: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Read:
    """Read lines; the program's result has a `ReadResult` for each of these, in order. `ld_ids` as of
    `Write`."""

    addresses: Addresses
    ld_ids: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Fence:
    """Everything before completes before anything after is sent."""


@dataclass(frozen=True)
class Poll:
    """Read the line at `address` until its lowest 8 bytes, masked, equal `value`. Fences before and after."""

    address: int
    mask: int
    value: int
    timeout_cycles: int = 50_000_000


Operation = Write | Read | Fence | Poll
Program = Sequence[Operation]


@dataclass(frozen=True)
class ReadResult:
    """What a `Read` brought: data [n, 64] (zero where there was none) and `Access` [n] as uint8."""

    data: Lines
    access: npt.NDArray[np.uint8]


class DeviceTimeout(Exception):
    """A `Poll` saw no matching line in time: the device hangs, or was given no work."""


class LinkDown(Exception):
    """The link to the device is gone: nobody knows how much of a program arrived."""


class Port(Protocol):
    """A device as a host sees it.

    Members
    -------
    config : what the device is made of.
    kind : "rtl", "cocotb", "model", ...
    """

    config: DeviceConfig
    kind: str

    @property
    def maintenance(self) -> Maintenance:
        """What can be done to it below its tenants."""

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out a program; DeviceTimeout when a poll ends in vain, LinkDown when the device can no
        longer be reached, ValueError for a misaligned line."""

    @property
    def link_bytes(self) -> int:
        """Bytes of lines that crossed the link, both directions, polling included."""

    def inject(self, address: int, bits: Sequence[int]) -> None:
        """Invert bits of a line in the DRAM, as a fault would; error correction sees them with the next read.

        Parameters
        ----------
        address : device address of the line.
        bits : 0 to 511 of its data, 512 to 575 of its check bits, eight for each word of 64.

        Raises
        ------
        ValueError : no line of the device, or no such bit.
        RuntimeError : the device has no DRAM that keeps check bits, or is closed.
        """

    def start_wave(self, path: Path) -> None:
        """Record an FST of everything from here on; RuntimeError where the device has no traces."""

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> None:
        """Record events from here on, the first `capacity` ones; RuntimeError where the device has none."""

    def recorded(self) -> Recording:
        """End the recording; what was recorded."""

    def close(self) -> None:
        """End the device; its memory is lost. A second call does nothing."""


class SimulatedPort(Port, Protocol):
    """A device at its RTL, whose HDM decoders have registers beside the link."""

    def write_decoder(self, word: int, value: int) -> None:
        """Write a 32-bit register of the HDM decoders.

        Parameters
        ----------
        word : its offset / 4 in the capability, or `abi.hdm.RESET_WORD` or one from `RANGE_WORD` on.
        value : what to write.

        Raises
        ------
        RuntimeError : the device has no decoders, or is closed.
        """

    def read_decoder(self, word: int) -> int:
        """A register of the capability, once no commit is under way; RuntimeError as `write_decoder`."""
