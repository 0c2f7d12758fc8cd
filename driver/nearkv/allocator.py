"""Where things lie in a tenant's memory. Pure bookkeeping: nothing here reads or writes the device.

Extents come from a `claim` function and are kept until `Extents.release`. Pages of one size share extents of
one channel (`Pages`); everything else, tables and staging areas, lies in an arena of runs (`Arena`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES, lines_of

from .errors import OutOfMemoryError

Run = tuple[int, int]
"""Consecutive extents: the first, and how many."""
Claim = Callable[[Sequence[Run]], Sequence[bool]]
"""Claim runs, each as a whole or not at all: which of them are the tenant's now."""
_TRIES = 32
"""Extents that were not to be had before and are claimed at once."""


class Extents:
    """The extents that a tenant owns, and those it has not tried yet.

    Parameters
    ----------
    claim : takes extents on the device.
    extents, channels : of the device; consecutive extents lie in consecutive channels. Of a logical device
        the first extent behind its own.
    in_use : extents that the tenant owned before and that hold what this driver did not write.
    any_free : whether any extent of the device is nobody's, and when it is called with True, whether some
        became so, which it waits for as long as the device is about it.
    at_quota : whether the last claims were refused because the tenant owns as much as it may.
    no_room : makes an error for lack of memory from its text.
    first : the first extent that the tenant can have.

    Members
    -------
    owned : extents that were claimed here or adopted, free or not.
    """

    def __init__(
        self,
        claim: Claim,
        *,
        extents: int,
        channels: int,
        in_use: frozenset[int] = frozenset(),
        any_free: Callable[[bool], bool] = lambda wait: not wait,
        at_quota: Callable[[], bool] = lambda: False,
        no_room: Callable[[str], OutOfMemoryError] = OutOfMemoryError,
        first: int = 0,
    ) -> None:
        self.no_room = no_room
        self._at_quota = at_quota
        self._claim = claim
        self._any_free = any_free
        self._extents = extents
        self._channels = channels
        self._in_use = in_use
        self._next = first
        self._free: set[int] = set()
        self._rising: list[list[int]] = [[] for _ in range(channels)]
        """Per channel a heap of free extents; those that were taken in a run are still in it."""
        self._missed: set[int] = set()
        """Extents that were tried in vain, or given back."""
        self._closed = False
        self.owned = 0

    @property
    def free(self) -> int:
        """Extents that are claimed and hold nothing."""
        return len(self._free)

    def removed(self, extents: range) -> None:
        """Extents are the tenant's no longer, if they were: they are not given out until they can be had."""
        gone = self._free.intersection(extents)
        self.owned -= len(gone)
        self._free -= gone
        self._missed |= gone

    def release(self) -> list[Run]:
        """Give all free extents out of hand, for the device to take back."""
        runs: list[Run] = []
        for extent in sorted(self._free):
            if runs and sum(runs[-1]) == extent:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((extent, 1))
        self.removed(range(self._extents))
        return runs

    def take(self, channel: int) -> int | None:
        """An extent of a channel, or None when there is none left."""
        rising = self._rising[channel]
        while True:
            while rising:
                found = heappop(rising)
                if found in self._free:
                    self._free.remove(found)
                    return found
            if not self._grow(self._channels - self._next % self._channels, channel):
                return None

    def take_near(self, channel: int) -> int | None:
        """An extent of a channel, or of the next one that has any left; None when none has."""
        for offset in range(self._channels):
            extent = self.take((channel + offset) % self._channels)
            if extent is not None:
                return extent
        return None

    def take_run(self, count: int) -> int | None:
        """The first of `count` consecutive extents, or None when there is no such run left."""
        while True:
            for first in sorted(self._free):
                if all(first + i in self._free for i in range(count)):
                    self._free.difference_update(range(first, first + count))
                    return first
            if not self._grow(count):
                return None

    def give(self, extent: int) -> None:
        """An extent that `take` gave is free again."""
        self._free.add(extent)
        heappush(self._rising[extent % self._channels], extent)

    @contextmanager
    def no_more(self) -> Iterator[None]:
        """Within the block no extent is claimed."""
        before, self._closed = self._closed, True
        try:
            yield
        finally:
            self._closed = before

    def adopt(self, owned: Iterable[int], used: Container[int]) -> None:
        """Take over what an earlier session of the tenant claimed; what is not used is free."""
        self._in_use = frozenset(owned)
        self.owned += len(self._in_use)
        for extent in self._in_use:
            if extent not in used:
                self.give(extent)

    def _grow(self, count: int, channel: int | None = None) -> bool:
        """Claim some of the next `count` extents, skipping what is taken; False at the end of the memory.

        There, and only there, it tries what was not to be had before: of a channel, or else `count` in a row.
        """
        if self._closed:
            return False
        first, self._next = self._next, min(self._next + count, self._extents)
        if first < self._next:
            wanted = [e for e in range(first, self._next) if e not in self._in_use]
            if wanted and not self._own(wanted) and self._at_quota():
                self._next = first
                self._missed.difference_update(wanted)
                return False
            return True
        for wait in (False, True):
            if self._missed and self._any_free(wait) and self._retry(count, channel):
                return True
        return False

    def _own(self, wanted: list[int]) -> int:
        """Claim extents, all of them at once where that can be; how many are the tenant's now."""
        taken = wanted
        whole = bool(wanted) and len(wanted) == wanted[-1] - wanted[0] + 1
        if not (whole and self._claim([(wanted[0], len(wanted))])[0]):
            answers = self._claim([(extent, 1) for extent in wanted]) if wanted else []
            taken = [extent for extent, own in zip(wanted, answers, strict=True) if own]
        self._missed.update(wanted)
        self._missed.difference_update(taken)
        self.owned += len(taken)
        for extent in taken:
            self.give(extent)
        return len(taken)

    def _retry(self, count: int, channel: int | None) -> bool:
        """Claim extents that were not to be had before; whether there is anything new."""
        tries: Iterable[list[int]]
        if channel is None and count > 1:
            known = self._missed | self._free
            starts = sorted(e for e in known if all(e + n in known for n in range(count)))
            tries = ([e for e in range(first, first + count) if e in self._missed] for first in starts)
            return any(self._own(some) == len(some) for some in tries)
        wanted = sorted(e for e in self._missed if channel in (None, e % self._channels))
        tries = (wanted[begin : begin + _TRIES] for begin in range(0, len(wanted), _TRIES))
        return any(map(self._own, tries))


class Arena:
    """Runs of lines of any length, first fit; neighbours that are free become one run again.

    Parameters
    ----------
    extents : where more memory comes from.
    """

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        self._free: list[tuple[int, int]] = []

    def take(self, size_bytes: int) -> int:
        """The address of a run of whole lines; OutOfMemoryError when the device has no such run left."""
        size = max(-(-size_bytes // LINE_BYTES), 1) * LINE_BYTES
        while True:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
            count = -(-size // EXTENT_BYTES)
            first = self._extents.take_run(count)
            if first is None:
                raise self._extents.no_room(
                    f"no {count} consecutive extents left for {size} bytes; free sequences or caches, or "
                    "open the device with a larger capacity_bytes"
                )
            self._insert(first * EXTENT_BYTES, (first + count) * EXTENT_BYTES)

    def give(self, address: int, size_bytes: int) -> None:
        """A run that `take` gave is free again; extents that are wholly free are there for others."""
        begin, end = self._insert(address, address + max(-(-size_bytes // LINE_BYTES), 1) * LINE_BYTES)
        whole = range(-(-begin // EXTENT_BYTES), end // EXTENT_BYTES)
        if whole:
            rest = ((begin, whole.start * EXTENT_BYTES), (whole.stop * EXTENT_BYTES, end))
            index = self._free.index((begin, end))
            self._free[index : index + 1] = [run for run in rest if run[0] < run[1]]
            for extent in whole:
                self._extents.give(extent)

    @property
    def free_bytes(self) -> int:
        """Bytes of extents in which something lies that are free."""
        return sum(end - begin for begin, end in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the longest run of these."""
        return max((end - begin for begin, end in self._free), default=0)

    def adopt(self, used: Iterable[tuple[int, int]]) -> set[int]:
        """Take over extents in which runs (address, bytes) lie already; returns the extents.

        The runs do not overlap.
        """
        runs = sorted((begin, begin + max(lines_of(size), 1) * LINE_BYTES) for begin, size in used)
        extents = {e for begin, end in runs for e in range(begin // EXTENT_BYTES, -(-end // EXTENT_BYTES))}
        for extent in extents:
            self._insert(extent * EXTENT_BYTES, (extent + 1) * EXTENT_BYTES)
        for begin, end in runs:
            index = bisect_right(self._free, (begin, end)) - 1
            index += index < 0 or self._free[index][1] < end
            first, last = self._free[index]
            rest = ((first, begin), (end, last))
            self._free[index : index + 1] = [run for run in rest if run[0] < run[1]]
        return extents

    def _insert(self, begin: int, end: int) -> tuple[int, int]:
        """Add a free run; returns it with the free neighbours that it grew together with."""
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))
        return begin, end


class Pages:
    """Pages of one size, in extents of their own; no page crosses an extent.

    A page is free when as many gave it back as have it: `take` is the first, `share` adds others. Taking,
    sharing and giving back cost the same however many pages there are.

    Parameters
    ----------
    extents : where more memory comes from.
    page_bytes : bytes of a page.
    load : bytes of pages in use per channel, shared by all page sizes of the tenant; changed in place.

    Members
    -------
    page_bytes : see above.
    used : pages in use, however many have them.
    held_extents : extents in which there are pages.
    per_extent : pages that an extent has room for.
    """

    def __init__(self, extents: Extents, page_bytes: int, load: list[int]) -> None:
        self.page_bytes = page_bytes
        self.used = 0
        self.held_extents = 0
        self._extents = extents
        self._load = load
        self.per_extent = EXTENT_BYTES // page_bytes
        self._free: list[dict[int, list[int]]] = [{} for _ in load]
        """Per channel: extents with free pages, and the addresses of these."""
        self._others: dict[int, int] = {}
        """Pages that several have: how many besides the first."""

    @property
    def shared(self) -> int:
        """Pages that more than one has."""
        return len(self._others)

    @property
    def free_bytes(self) -> int:
        """Bytes of extents in which there are pages that are none of these; at the ends of extents, too."""
        return self.held_extents * EXTENT_BYTES - self.used * self.page_bytes

    def take(self, count: int, first_channel: int | None = None) -> npt.NDArray[np.uint64]:
        """The addresses of `count` pages, one channel after the other.

        They start at `first_channel`, or where the load is least; a channel that is full is passed over.

        Raises
        ------
        OutOfMemoryError : when there are not so many left; nothing is taken then.
        """
        channels = len(self._load)
        if first_channel is None:
            first_channel = min(range(channels), key=self._load.__getitem__)
        pages = np.zeros(count, np.uint64)
        missing: list[int] = []
        for offset in range(min(channels, count)):
            wanted = range(offset, count, channels)
            found = self._take_of((first_channel + offset) % channels, len(wanted))
            pages[offset : offset + len(found) * channels : channels] = found
            missing += wanted[len(found) :]
        missing.sort()
        for at, index in enumerate(missing):
            for channel in sorted(range(channels), key=self._load.__getitem__):
                found = self._take_of(channel, 1)
                if found:
                    pages[index] = found[0]
                    break
            else:
                self.give(np.delete(pages, missing[at:]))
                raise self._extents.no_room(
                    f"the device has no room for {count} pages of {self.page_bytes} bytes; free sequences "
                    "or caches, or open it with a larger capacity_bytes"
                )
        return pages

    def share(self, pages: npt.NDArray[np.uint64]) -> None:
        """One more has these pages, which are in use."""
        others = self._others
        for page in pages.tolist():
            others[page] = others.get(page, 0) + 1

    def shares(self, pages: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of the pages more than one has."""
        if not self._others:
            return np.zeros(pages.shape, np.bool_)
        found = [page in self._others for page in pages.reshape(-1).tolist()]
        return np.array(found, np.bool_).reshape(pages.shape)

    def give(self, pages: npt.NDArray[np.uint64]) -> None:
        """Who took or shared these pages has them no longer; those that nobody has are free."""
        others = self._others
        for page in pages.tolist():
            more = others.get(page)
            if more is not None:
                if more == 1:
                    del others[page]
                else:
                    others[page] = more - 1
                continue
            extent = page // EXTENT_BYTES
            channel = extent % len(self._load)
            self._load[channel] -= self.page_bytes
            self.used -= 1
            free = self._free[channel].setdefault(extent, [])
            free.append(page)
            if len(free) == self.per_extent:
                del self._free[channel][extent]
                self.held_extents -= 1
                self._extents.give(extent)

    def holders(self, page: int) -> int:
        """How many have a page that is in use."""
        return 1 + self._others.get(page, 0)

    def partly_used(self, channel: int) -> dict[int, list[int]]:
        """Extents of a channel with pages in use and free ones: the addresses of those in use."""
        return {
            extent: sorted(set(self._all_of(extent)).difference(free))
            for extent, free in self._free[channel].items()
        }

    def take_beside(self, source: int, count: int) -> list[int]:
        """The addresses of `count` pages in other extents of the channel of `source` that are in use already,
        the fullest first; there have to be so many."""
        channel = source % len(self._load)
        taken: list[int] = []
        for extent in sorted(self._free[channel], key=lambda extent: len(self._free[channel][extent])):
            free = self._free[channel][extent]
            while extent != source and free and len(taken) < count:
                taken.append(free.pop())
            if not free:
                del self._free[channel][extent]
        self.used += count
        self._load[channel] += count * self.page_bytes
        return taken

    def moved(self, before: int, after: int) -> None:
        """All who had a page have another one that was taken for it; the first is free."""
        if (more := self._others.pop(before, None)) is not None:
            self._others[after] = more
        self.give(np.array([before], np.uint64))

    def adopt(self, used: npt.NDArray[np.uint64]) -> set[int]:
        """Take over pages that are in use, named as often as somebody has them; returns their extents."""
        pages, counts = np.unique(used, return_counts=True)
        self._others.update(zip(pages[counts > 1].tolist(), (counts[counts > 1] - 1).tolist(), strict=True))
        extents = np.unique(pages // np.uint64(EXTENT_BYTES)).tolist()
        taken = set(pages.tolist())
        for extent in extents:
            free = [page for page in self._all_of(extent) if page not in taken]
            if free:
                self._free[extent % len(self._load)][extent] = free
            self._load[extent % len(self._load)] += (self.per_extent - len(free)) * self.page_bytes
        self.used += len(pages)
        self.held_extents += len(extents)
        return set(extents)

    def _take_of(self, channel: int, count: int) -> list[int]:
        """At most `count` pages of one channel: fewer when the channel is full."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._free[channel]:
                extent = self._extents.take(channel)
                if extent is None:
                    break
                self._free[channel][extent] = self._all_of(extent)
                self.held_extents += 1
            extent, free = next(iter(self._free[channel].items()))
            part = min(count - len(taken), len(free))
            taken += free[: -part - 1 : -1]
            del free[-part:]
            if not free:
                del self._free[channel][extent]
        self.used += len(taken)
        self._load[channel] += len(taken) * self.page_bytes
        return taken

    def _all_of(self, extent: int) -> list[int]:
        """The pages of an extent, the first one last."""
        base = extent * EXTENT_BYTES
        return list(range(base + (self.per_extent - 1) * self.page_bytes, base - 1, -self.page_bytes))
