"""Command windows: descriptor and completion rings, doorbells, and the register lines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import ABI_VERSION, DeviceConfig, Feature
from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.numerics import CONTRACT_VERSION
from nearkv_hw.abi.owner import OWNER_OFFSET
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    COMPLETIONS_OFFSET,
    DESCRIPTORS_OFFSET,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    DOORBELL,
    DOORBELL_OFFSET,
    EXTENT_COUNTERS,
    EXTENT_COUNTERS_LINE,
    IDENTITY,
    IDENTITY_LINE,
    MAGIC,
    MEMORY_COUNTERS,
    MEMORY_COUNTERS_LINE,
    OPTIONS,
    OPTIONS_LINE,
    REGISTERS_OFFSET,
    RING,
    RING_LINE,
    options_of,
)

from ..port import Lines
from .counters import Counters
from .memory import Mask, Memory

_TAIL = DOORBELL["tail"]
_COUNT_MASK = (1 << _TAIL.width) - 1
_NO_LINE = bytes(LINE_BYTES)
_SLOT_LINES = DESCRIPTOR_BYTES // LINE_BYTES


class CommandWindow:
    """One aperture's window.

    Parameters
    ----------
    config, aperture, features : of which device, and which aperture.
    counters : the device's.
    memory : whose extents it tells of.

    Members
    -------
    tail, head, completed : descriptors posted, fetched and completed since reset, modulo 2^32.
    """

    def __init__(
        self,
        config: DeviceConfig,
        aperture: int,
        features: Feature,
        counters: Counters,
        memory: Memory,
    ) -> None:
        self.aperture = aperture
        self.tail = self.head = self.completed = 0
        self._config = config
        self._features = features
        self._counters = counters
        self._memory = memory
        self._descriptors: Lines = np.zeros((_SLOT_LINES * config.ring_slots, LINE_BYTES), dtype=np.uint8)
        self._completions: Lines = np.zeros((config.ring_slots, LINE_BYTES), dtype=np.uint8)

    def read(self, offset: int) -> bytes:
        """The line at a byte offset of window and owner's page; zero where nothing is."""
        slots = self._config.ring_slots
        if offset >= OWNER_OFFSET:
            return self._memory.page.line((offset - OWNER_OFFSET) // LINE_BYTES, self._memory.owners)
        if offset >= DESCRIPTORS_OFFSET:
            line = (offset - DESCRIPTORS_OFFSET) // LINE_BYTES
            return self._descriptors[line].tobytes() if line < _SLOT_LINES * slots else _NO_LINE
        if offset >= COMPLETIONS_OFFSET:
            slot = (offset - COMPLETIONS_OFFSET) // COMPLETION_BYTES
            return self._completions[slot].tobytes() if slot < slots else _NO_LINE
        if offset >= DOORBELL_OFFSET:
            return _NO_LINE
        return self._register((offset - REGISTERS_OFFSET) // LINE_BYTES)

    def read_lines(self, offsets: npt.NDArray[np.int64]) -> Lines:
        """The lines at byte offsets of the window."""
        if offsets[0] >= COMPLETIONS_OFFSET:
            slots = offsets - COMPLETIONS_OFFSET >> LINE_SHIFT
            if np.minimum.reduce(slots) >= 0 and np.maximum.reduce(slots) < self._config.ring_slots:
                records: Lines = self._completions[slots]
                return records
        lines = bytearray().join(self.read(offset) for offset in offsets.tolist())
        return np.frombuffer(lines, np.uint8).reshape(-1, LINE_BYTES)

    def post(self, offsets: npt.NDArray[np.int64], data: Lines) -> bool:
        """Write whole lines, if all of them are lines of descriptor slots; whether they are."""
        lines = offsets - DESCRIPTORS_OFFSET >> LINE_SHIFT
        if lines.min() < 0 or lines.max() >= len(self._descriptors):
            return False
        self._descriptors[lines] = data
        return True

    def write(self, offset: int, data: npt.NDArray[np.uint8], enabled: Mask, *, poison: bool = False) -> bool:
        """Write the enabled bytes of a line; true when that rang the doorbell.

        Only descriptor slots, the doorbell and the owner's page behind it all take writes. A doorbell that
        goes back, asks for more descriptors than the ring holds, lacks bytes of its count, or is poisoned, is
        refused and counted as an error. A poisoned write fills a slot's first line with zeros and its second
        with ones.
        """
        if offset == DOORBELL_OFFSET:
            return self._ring(data, enabled & (not poison))
        if offset >= OWNER_OFFSET:
            line = (offset - OWNER_OFFSET) // LINE_BYTES
            if poison or not self._memory.page.write(line, data, enabled):
                self._counters.device["errors"] += 1
            return False
        line = offset - DESCRIPTORS_OFFSET >> LINE_SHIFT
        if 0 <= line < len(self._descriptors):
            if poison:
                self._descriptors[line] = 0xFF if line % _SLOT_LINES else 0
            else:
                self._descriptors[line, enabled] = data[enabled]
        return False

    def fetch(self) -> tuple[int, Lines, Lines]:
        """How many descriptors of this ring came before those that are posted, and both lines of these."""
        first = self.head
        slots = (first + np.arange(self.tail - first & _COUNT_MASK)) % self._config.ring_slots
        self.head = self.tail
        lines = _SLOT_LINES * slots
        return first, self._descriptors[lines], self._descriptors[lines + 1]

    def complete(self, first: int, records: Lines) -> None:
        """Write the completion records of descriptors in a row, the first of them with this index."""
        self._completions[(first + np.arange(len(records))) % self._config.ring_slots] = records
        self.completed = first + len(records) & _COUNT_MASK

    def _ring(self, data: npt.NDArray[np.uint8], enabled: Mask) -> bool:
        tail = DOORBELL.unpack(data.tobytes())["tail"]
        whole = enabled[: _TAIL.width // 8].all()
        # The ring is empty whenever a doorbell is rung, so a count that goes back is beyond what it holds.
        if not whole or (tail - self.head & _COUNT_MASK) > self._config.ring_slots:
            self._counters.device["errors"] += 1
            return False
        self.tail = tail
        return True

    def _register(self, line: int) -> bytes:
        channel, memory = line - CHANNEL_COUNTERS_LINE, line - MEMORY_COUNTERS_LINE
        if line == IDENTITY_LINE:
            return IDENTITY.pack_bytes(self._identity())
        if line == DEVICE_COUNTERS_LINE:
            return DEVICE_COUNTERS.pack_bytes(self._counters.device)
        if line == EXTENT_COUNTERS_LINE:
            self._memory.settle()
            owned = int(np.count_nonzero(self._memory.owners == self.aperture))
            quota = self._memory.page.quotas[self.aperture]
            return EXTENT_COUNTERS.pack_bytes(self._counters.extents, owned=owned, quota=quota)
        if line == OPTIONS_LINE:
            return OPTIONS.pack_bytes(options_of(self._config))
        if line == RING_LINE:
            return RING.pack_bytes(tail=self.tail, head=self.head, completed=self.completed)
        if 0 <= channel < self._config.slices:
            return CHANNEL_COUNTERS.pack_bytes(
                {name: int(counts[channel]) for name, counts in self._counters.channels.items()}
            )
        if 0 <= memory < self._config.slices:
            return MEMORY_COUNTERS.pack_bytes(
                {name: int(counts[memory]) for name, counts in self._counters.memory.items()}
            )
        return _NO_LINE

    def _identity(self) -> dict[str, int]:
        known = {
            "magic": MAGIC,
            "abi_version": ABI_VERSION,
            "contract_version": CONTRACT_VERSION,
            "aperture": self.aperture,
            "extent_shift": EXTENT_SHIFT,
            "features": int(self._features),
        }
        names = (field.name for field in IDENTITY if not field.reserved)
        return {name: known[name] if name in known else getattr(self._config, name) for name in names}
