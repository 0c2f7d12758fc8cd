"""The host's mirror of a page table: what is on the device, at hand for address arithmetic."""

from __future__ import annotations

import numpy as np
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.memory import (
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    RowLayout,
    table_bytes,
    table_entry_lines,
)
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Lines

from .codec import record_line, span

_ENTRY_SHIFT = np.uint64(ENTRY.offset("line"))
_ENTRY_VALID = np.uint64(1 << ENTRY.offset("valid"))
_LINE_SHIFT = np.uint64(LINE_SHIFT)


class PageTable:
    """A page table of one sequence and layer.

    Parameters
    ----------
    address : device address of its header line.
    entries : pages that each head has room for, whole lines of them.
    heads, layer, sequence, cache : as in the header.

    Members
    -------
    address, entries, heads, layer, sequence : see above.
    pages : pages that each head has.
    committed : rows that are completely written.
    """

    def __init__(
        self, address: int, entries: int, *, heads: int, layer: int, sequence: int, cache: int
    ) -> None:
        self.address = address
        self.entries = table_entry_lines(entries) * ENTRIES_PER_LINE
        self.pages = 0
        self.committed = 0
        self.heads = heads
        self.layer = layer
        self.sequence = sequence
        self._cache = cache
        self._entries = np.zeros((heads, self.entries), np.uint64)
        self._header = record_line(
            TABLE,
            magic=TABLE_MAGIC,
            version=LAYOUT_VERSION,
            heads=heads,
            entries=self.entries,
            layer=layer,
            sequence=sequence,
            cache=cache,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes that the table takes."""
        return table_bytes(self.heads, self.entries)

    def header(self, committed: int) -> Lines:
        """The header line [1, 64] that commits so many rows."""
        line = self._header.copy()
        column(TABLE, "committed_rows", line)[:] = committed
        return line

    def page_addresses(self, begin: int, end: int) -> Addresses:
        """The addresses of pages `begin` to `end`, [heads, end - begin]."""
        addresses: Addresses = (self._entries[:, begin:end] >> _ENTRY_SHIFT) << _LINE_SHIFT
        return addresses

    def put(self, page: int, addresses: Addresses) -> None:
        """Name pages [heads, n] from page index `page` on; they count only once `pages` says so."""
        entries = (addresses >> _LINE_SHIFT) << _ENTRY_SHIFT | _ENTRY_VALID
        self._entries[:, page : page + addresses.shape[1]] = entries

    def drop(self, page: int) -> None:
        """Forget the pages from index `page` on."""
        self._entries[:, page:] = 0
        self.pages = min(self.pages, page)

    def grown(self, address: int, entries: int) -> PageTable:
        """A table with the same content, elsewhere and with more room."""
        table = PageTable(
            address, entries, heads=self.heads, layer=self.layer, sequence=self.sequence, cache=self._cache
        )
        table._entries[:, : self.entries] = self._entries
        table.pages, table.committed = self.pages, self.committed
        return table

    def entry_lines(self, begin: int, end: int) -> tuple[Addresses, Lines]:
        """The lines with the entries of pages `begin` to `end`, all heads: addresses [n], data [n, 64]."""
        first, last = begin // ENTRIES_PER_LINE, -(-end // ENTRIES_PER_LINE)
        head = np.arange(self.heads, dtype=np.uint64) * np.uint64(
            table_entry_lines(self.entries) * LINE_BYTES
        )
        addresses = head[:, None] + span(self.address + (1 + first) * LINE_BYTES, last - first)
        data = np.ascontiguousarray(self._entries[:, first * ENTRIES_PER_LINE : last * ENTRIES_PER_LINE])
        return addresses.reshape(-1), data.view(np.uint8).reshape(-1, LINE_BYTES)


class RowAddresses:
    """Where the lines of rows lie, for the pages of one cache.

    Parameters
    ----------
    layout : of the cache's pages.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._shift = np.uint64(layout.page_rows.bit_length() - 1)
        self._mask = np.uint64(layout.page_rows - 1)
        self._k_pitch = np.uint64(layout.k_lines * LINE_BYTES)
        self._v_pitch = np.uint64(layout.v_lines * LINE_BYTES)
        self._k_steps = span(layout.k_offset(0), layout.k_lines)
        self._v_steps = span(layout.v_offset(0), layout.v_lines)
        self._page_rows = layout.page_rows

    def of(self, table: PageTable, begin: int, end: int) -> tuple[Addresses, Addresses]:
        """The lines of rows `begin` to `end`: K [heads, rows, k_lines] and V [heads, rows, v_lines]."""
        rows = np.arange(begin, end, dtype=np.uint64)
        first = begin // self._page_rows
        pages = table.page_addresses(first, -(-end // self._page_rows))
        base = pages[:, (rows >> self._shift) - np.uint64(first), None]
        within = (rows & self._mask)[:, None]
        return base + (within * self._k_pitch + self._k_steps), base + (
            within * self._v_pitch + self._v_steps
        )
