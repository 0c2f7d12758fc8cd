"""Which sequences go when memory runs short: those that their owner said may go, and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeVar

from .arguments import whole_number
from .errors import ArgumentError, OutOfMemoryError
from .prefixes import Prefix, Prefixes
from .sequences import Sequence, Sequences
from .tenant import Tenant

Made = TypeVar("Made")


def least_important(sequence: Sequence) -> Any:
    """The order in which sequences go: the lowest priority first, then the one not used for longest."""
    return sequence.priority, sequence.used


@dataclass(frozen=True)
class Watermark:
    """When sequences go.

    Members
    -------
    high_bytes : of pages that the tenant may have; None while there is memory.
    low_bytes : that it has at most when enough sequences went.
    order : a key of a sequence; those with the least go first.
    on_evict : is told of each one before it goes.
    """

    high_bytes: int | None = None
    low_bytes: int | None = None
    order: Callable[[Sequence], Any] = least_important
    on_evict: Callable[[Sequence], None] = lambda sequence: None

    def __post_init__(self) -> None:
        if self.high_bytes is None:
            if self.low_bytes is not None:
                raise ArgumentError(f"low_bytes={self.low_bytes}: give high_bytes, too")
            return
        whole_number("high_bytes", self.high_bytes, 0, 1 << 62)
        if self.low_bytes is not None:
            whole_number("low_bytes", self.low_bytes, 0, self.high_bytes)


class Evictor:
    """Ends what may go when there are too many pages, or no memory: prefixes first, the one not used for
    longest, and then sequences that have a priority.

    Parameters
    ----------
    tenant, sequences, prefixes : of the cache.

    Members
    -------
    watermark : when sequences go.
    evicted : how many went.
    """

    def __init__(self, tenant: Tenant, sequences: Sequences, prefixes: Prefixes) -> None:
        self.watermark = Watermark()
        self.evicted = 0
        self._sequences = sequences
        self._prefixes = prefixes
        self._tenant = tenant
        self._clock = 0

    def touch(self, sequences: Many[Sequence]) -> None:
        """These sequences are used now."""
        self._clock += 1
        for sequence in sequences:
            sequence.used = self._clock

    def make_room(self, size_bytes: int, keep: Collection[Sequence]) -> None:
        """End sequences until so many bytes more are below the high mark, if there are any that may go.

        Parameters
        ----------
        keep : sequences that stay.
        """
        mark = self.watermark
        if mark.high_bytes is None or self._tenant.page_bytes + size_bytes <= mark.high_bytes:
            return
        low = mark.high_bytes if mark.low_bytes is None else mark.low_bytes
        while self._tenant.page_bytes + size_bytes > low and self._prefixes.reclaim():
            pass
        for sequence in self._candidates(keep):
            if self._tenant.page_bytes + size_bytes <= low:
                return
            self._evict(sequence)

    def with_room(
        self, make: Callable[[], Made], keep: Collection[Sequence], kept_prefix: Prefix | None = None
    ) -> Made:
        """What `make` returns; as long as it finds no memory a prefix or a sequence goes, but not these.

        Raises
        ------
        OutOfMemoryError : when no other may go.
        """
        candidates = None
        while True:
            try:
                return self._tenant.with_memory(make)
            except OutOfMemoryError:
                if self._prefixes.reclaim(kept_prefix):
                    continue
                candidates = iter(self._candidates(keep)) if candidates is None else candidates
                sequence = next(candidates, None)
                if sequence is None:
                    raise
                self._evict(sequence)

    def _candidates(self, keep: Collection[Sequence]) -> list[Sequence]:
        staying = set(map(id, keep))
        found = [s for s in self._sequences if s.priority is not None and id(s) not in staying]
        return sorted(found, key=self.watermark.order)

    def _evict(self, sequence: Sequence) -> None:
        self.watermark.on_evict(sequence)
        self._sequences.evict(sequence)
        self.evicted += 1
