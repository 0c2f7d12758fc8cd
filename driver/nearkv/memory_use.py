"""What a tenant's memory holds, and how much of it lies idle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """A tenant's device memory, in bytes where nothing else is said.

    Members
    -------
    capacity_bytes : of the device.
    owned_bytes : extents that the tenant claimed, with those of earlier sessions that were taken over.
    free_bytes : extents that hold nothing.
    page_bytes : pages in use, each once.
    pages, shared_pages : how many these are, and how many of them several page tables name.
    free_page_bytes : extents that hold pages, without these.
    other_bytes : page tables, records, and areas for queries and results.
    free_other_bytes : extents that hold some of those, without them.
    largest_free_run_bytes : the longest run of these.
    """

    capacity_bytes: int
    owned_bytes: int
    free_bytes: int
    page_bytes: int
    pages: int
    shared_pages: int
    free_page_bytes: int
    other_bytes: int
    free_other_bytes: int
    largest_free_run_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of extents in use that lies idle, 0 to 1: what pages of one size leave to no other."""
        idle = self.free_page_bytes + self.free_other_bytes
        held = self.owned_bytes - self.free_bytes
        return idle / held if held else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, `fragmentation` included."""
        return {**asdict(self), "fragmentation": self.fragmentation}


@dataclass(frozen=True)
class CacheUse:
    """What one cache has.

    Members
    -------
    sequences : how many there are.
    rows : of all sequences and layers, released ones left out; a row that several share counts for each.
    pages : that page tables name, counted once for each table.
    page_bytes, table_bytes : bytes of these pages, and of the page tables.
    host_bytes : that the driver keeps of them on the host.
    evicted : sequences that went for lack of memory.
    prefixes : that are published; their page tables and pages are not counted above.
    prefix_hits, prefix_misses : look-ups that found one, and that found none.
    prefixes_reclaimed : that went for lack of memory.
    """

    sequences: int
    rows: int
    pages: int
    page_bytes: int
    table_bytes: int
    host_bytes: int
    evicted: int
    prefixes: int
    prefix_hits: int
    prefix_misses: int
    prefixes_reclaimed: int

    def to_dict(self) -> dict[str, int]:
        """All of it as plain values."""
        return asdict(self)
