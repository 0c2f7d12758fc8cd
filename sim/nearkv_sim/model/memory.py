"""Device memory as a sparse image of lines, with an owner for every extent."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Status
from nearkv_hw.abi.config import EXTENT_SHIFT, SCRUB_INTERVAL_CYCLES
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.mailbox import PoisonSource
from nearkv_hw.abi.owner import Violation

from ..port import Lines
from .audit import OwnerPage
from .counters import Counters

LineIndices = npt.NDArray[np.int64]
"""Lines of the device by number (device address / 64), any shape."""
Mask = npt.NDArray[np.bool_]

EXTENT_LINES_SHIFT = EXTENT_SHIFT - LINE_SHIFT
NOBODY = -1
WITHHELD = -2
"""Owner of an extent that no tenant may have."""
SCRUBBING = -3
"""Owner of an extent that was given back and is not free yet."""
_EXTENT_LINES = 1 << EXTENT_LINES_SHIFT
_SCRUB_CYCLES = SCRUB_INTERVAL_CYCLES * _EXTENT_LINES
_WORD_BITS = 64
_WORD_CHECK_BITS = 8
_ALL_BYTES = (1 << LINE_BYTES) - 1
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number; Python names it from 3.13 on


class Memory:
    """The lines of a device, all zero at first; only what is written takes room on the host.

    Every access names a tenant and is checked against the extent's owner. Lines beyond the memory are
    nobody's; to touch them is no violation. A line is kept with check bits that correct one inverted bit in
    each of its words and find two.

    Parameters
    ----------
    config : size and channels.
    counters : the device's; violations and the channels' fabric_reads and fabric_writes are counted here.

    Members
    -------
    lines : uint8 [lines, 64], the image itself, unchecked.
    owners : int8 [extents], the tenant, NOBODY, WITHHELD or SCRUBBING.
    page : the owner's page.
    """

    def __init__(self, config: DeviceConfig, counters: Counters) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._image = mmap.mmap(-1, config.capacity_bytes, flags=flags)
        self.lines: Lines = np.frombuffer(self._image, dtype=np.uint8).reshape(-1, LINE_BYTES)
        self._owners = np.full(config.extents + 1, NOBODY, dtype=np.int8)
        self.owners = self._owners[:-1]  # the last one stands for whatever lies beyond the memory
        self._flipped: dict[int, set[int]] = {}
        self._bad: set[int] = set()
        """Lines that were written with poison."""
        self._spoilt: set[int] = set()
        self._found: set[int] = set()
        self._channels = config.slices
        self._counters = counters
        self.page = OwnerPage(config, counters)
        self._scrubbing: dict[int, int] = {}
        """Extents that were given back, and the device's cycle in which each is free."""

    def allowed(self, lines: LineIndices, tenant: int) -> Mask:
        """Which lines the tenant may touch; nothing is counted."""
        owned: Mask = self._owners[np.minimum(lines >> EXTENT_LINES_SHIFT, len(self.owners))] == tenant
        return owned

    def check(self, lines: LineIndices, tenant: int, counter: str = "fabric_reads") -> Mask:
        """Which lines the tenant may touch: counted as accesses, the others in the memory as violations."""
        allowed = self.allowed(lines, tenant)
        touched = lines
        if not allowed.all():
            kind = Violation.READ if counter == "fabric_reads" else Violation.WRITE
            self.refuse(lines[~allowed & (lines < len(self.lines))], tenant, kind)
            touched = lines[allowed]
        channels = self.channels_of(touched)
        self._counters.channels[counter] += np.bincount(channels, minlength=self._channels)
        return allowed

    def refuse(self, lines: LineIndices, tenant: int, kind: Violation, each: int | LineIndices = 1) -> None:
        """Count violations, for each of these lines so many, and log them."""
        if len(lines):
            self._counters.device["violations"] += int(np.broadcast_to(each, lines.shape).sum())
            self.page.report(lines, tenant, kind)

    def read(self, lines: LineIndices, tenant: int) -> tuple[Lines, Mask]:
        """Lines [n, 64], zero where the tenant may not read, and where it may."""
        allowed = self.check(lines, tenant)
        if allowed.all():
            return self.lines[lines], allowed
        data = np.zeros((len(lines), LINE_BYTES), dtype=np.uint8)
        data[allowed] = self.lines[lines[allowed]]
        return data, allowed

    def write(
        self,
        lines: LineIndices,
        data: Lines,
        tenant: int,
        enables: npt.NDArray[np.uint64] | None = None,
        *,
        poison: bool = False,
    ) -> Mask:
        """Write lines, or their enabled bytes, where the tenant may; returns where.

        With `poison` the lines are poisoned from then on, until they are written as a whole without.
        """
        allowed = self.check(lines, tenant, "fabric_writes")
        if not allowed.all():
            lines, data = lines[allowed], data[allowed]
            enables = None if enables is None else enables[allowed]
        if not self.intact:
            self._overwrite(lines, enables)
        if poison:
            self._bad.update(lines.tolist())
        if enables is None:
            self.lines[lines] = data
        else:
            # byte by byte, so that two partial writes of one line both take effect
            row, byte = np.nonzero(enabled_bytes(enables))
            self.lines[lines[row], byte] = data[row, byte]
        return allowed

    def write_run(self, first: int, data: Lines) -> None:
        """Write a run of lines in one extent that is the writer's, to a memory that is intact."""
        self.lines[first : first + len(data)] = data
        slice_ = (first >> EXTENT_LINES_SHIFT) % self._channels
        self._counters.channels["fabric_writes"][slice_] += len(data)

    def flip(self, line: int, bits: Sequence[int]) -> None:
        """Invert bits of a line: 0 to 511 its data, 512 to 575 its check bits, eight for each word of 64.

        The image keeps what was written: one inverted bit in a word is corrected when the line is read, and
        a line with two or more in a word is poisoned.
        """
        flipped = self._flipped.setdefault(line, set())
        flipped ^= set(bits)
        if not flipped:
            del self._flipped[line]

    def spoil(self, line: int) -> None:
        """Poison a line, as two inverted bits of a word do."""
        self._flipped.setdefault(line, set()).update((0, 1))
        self._spoilt.add(line)

    def repair(self, line: int, data: bytes) -> None:
        """Write a line, whoever owns it; it is in order afterwards."""
        self._flipped.pop(line, None)
        self._bad.discard(line)
        self.lines[line] = np.frombuffer(data, np.uint8)

    def lost(self) -> dict[int, PoisonSource]:
        """Poisoned lines that are known: from a write, from `spoil`, or because a read found them."""
        lost = {line for line, bits in self._flipped.items() if not _correctable(bits)}
        self._spoilt &= lost
        self._found &= lost
        known = dict.fromkeys(self._bad, PoisonSource.EXTERNAL) | dict.fromkeys(
            self._found, PoisonSource.INTERNAL
        )
        return dict(sorted((known | dict.fromkeys(self._spoilt, PoisonSource.INJECTED)).items()))

    @property
    def withheld(self) -> Mask:
        """Which extents no tenant may have, [extents]."""
        kept: Mask = self.owners == WITHHELD
        return kept

    @withheld.setter
    def withheld(self, kept: Mask) -> None:
        self.owners[kept] = WITHHELD

    def withhold(self, first: int, count: int) -> None:
        """Erase extents and keep them from all tenants."""
        self._erase(first, count)
        self.owners[first : first + count] = WITHHELD
        for extent in range(first, first + count):
            self._scrubbing.pop(extent, None)

    def give(self, first: int, count: int) -> None:
        """Let tenants claim extents that were withheld."""
        owners = self.owners[first : first + count]
        owners[owners == WITHHELD] = NOBODY

    @property
    def intact(self) -> bool:
        """Whether no bit of any line is inverted, and no line poisoned."""
        return not (self._flipped or self._bad)

    def poisoned(self, lines: LineIndices) -> Mask:
        """Which of the lines, each read once, cannot be corrected; counted, as the corrected ones are."""
        lost = np.isin(lines, list(self._bad)) if self._bad else np.zeros(lines.shape, dtype=np.bool_)
        for line in self._flipped:
            here = lines == line
            if here.any():
                lost |= here & self._count(line, int(np.count_nonzero(here)))
        return lost

    def spoilt(self, begin: LineIndices, end: LineIndices, reads: int) -> Mask:
        """Which runs of lines, each read `reads` times, hold one that cannot be corrected; counted, too."""
        lost = np.zeros(begin.shape, dtype=np.bool_)
        for line in self._bad:
            lost |= (begin <= line) & (line < end)
        for line in self._flipped:
            here = (begin <= line) & (line < end)
            if here.any():
                lost |= here & self._count(line, reads * int(np.count_nonzero(here)))
        return lost

    def _count(self, line: int, reads: int) -> bool:
        """Count reads of a line with inverted bits; whether it cannot be corrected."""
        lost = not _correctable(self._flipped[line])
        slice_ = int(self.channels_of(np.array(line)))
        self._counters.memory["uncorrectable" if lost else "corrected"][slice_] += reads
        if lost:
            self._found.add(line)
        return lost

    def _overwrite(self, lines: LineIndices, enables: npt.NDArray[np.uint64] | None) -> None:
        """Inverted bits are gone with a write, but for what is lost of a line that is written in part."""
        whole = np.ones(lines.shape, np.bool_) if enables is None else enables == np.uint64(_ALL_BYTES)
        for line, all_bytes in zip(lines.tolist(), whole.tolist(), strict=True):
            if line in self._flipped and (all_bytes or _correctable(self._flipped[line])):
                del self._flipped[line]
            if all_bytes:
                self._bad.discard(line)

    def claim(self, first: int, count: int, tenant: int) -> tuple[Status, int]:
        """Give extents to a tenant, all or none; how that ends, as a completion record says it."""
        self.settle()
        owners = self.owners[first : first + count]
        fresh = owners != tenant
        taken = np.flatnonzero((owners != NOBODY) & fresh)
        if len(taken):
            busy = owners[taken[0]] == SCRUBBING
            return Status.EXTENT_BUSY if busy else Status.EXTENT_TAKEN, first + int(taken[0])
        quota = self.page.quotas[tenant]
        if int(np.count_nonzero(self.owners == tenant)) + int(np.count_nonzero(fresh)) > quota:
            return Status.OVER_QUOTA, quota
        owners[:] = tenant
        return Status.OK, 0

    def release(self, first: int, count: int, tenant: int) -> int:
        """Take those of the extents that a tenant owns back from it; how many there are.

        They are zero from now on, and free once a device has written that: each slice one after the other.
        """
        self.settle()
        own = (first + np.flatnonzero(self.owners[first : first + count] == tenant)).tolist()
        ends = [self._counters.device["cycles"]] * self._channels
        for extent, end in self._scrubbing.items():
            ends[extent % self._channels] = max(ends[extent % self._channels], end)
        for extent in own:
            self._erase(extent, 1)
            self.owners[extent] = SCRUBBING
            ends[extent % self._channels] += _SCRUB_CYCLES
            self._scrubbing[extent] = ends[extent % self._channels]
        return len(own)

    def settle(self) -> None:
        """What has been scrubbed by the present cycle is free."""
        now = self._counters.device["cycles"]
        for extent in [extent for extent, end in self._scrubbing.items() if end <= now]:
            del self._scrubbing[extent]
            self.owners[extent] = NOBODY
            self._counters.extents["scrub_lines"] += _EXTENT_LINES
        self._counters.extents["scrubbing"] = len(self._scrubbing)
        self._counters.extents["free"] = int(np.count_nonzero(self.owners == NOBODY))

    @property
    def scrubbed_at(self) -> int:
        """The cycle in which all that was given back is free."""
        return max(self._scrubbing.values(), default=0)

    def _erase(self, first: int, count: int) -> None:
        """Extents become zero, and no line of them is poisoned any longer."""
        begin, end = first << EXTENT_LINES_SHIFT, first + count << EXTENT_LINES_SHIFT
        self._image.madvise(mmap.MADV_DONTNEED, first << EXTENT_SHIFT, count << EXTENT_SHIFT)
        for line in [line for line in self._flipped if begin <= line < end]:
            del self._flipped[line]
        self._bad = {line for line in self._bad if not begin <= line < end}

    def channels_of(self, lines: LineIndices) -> LineIndices:
        """The channel in which each line lies."""
        return (lines >> EXTENT_LINES_SHIFT) % self._channels


def _correctable(flipped: set[int]) -> bool:
    """Whether no word of a line has more than one inverted bit."""
    words = [
        bit // _WORD_BITS if bit < LINE_BITS else (bit - LINE_BITS) // _WORD_CHECK_BITS for bit in flipped
    ]
    return len(set(words)) == len(words)


def enabled_bytes(enables: npt.NDArray[np.uint64]) -> Mask:
    """Byte enables, bit b for byte b: uint64 [n] to bool [n, 64]."""
    return (enables[:, None] >> np.arange(LINE_BYTES, dtype=np.uint64) & np.uint64(1)).astype(bool)
