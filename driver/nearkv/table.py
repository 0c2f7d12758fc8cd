"""The host's mirror of a page table: what is on the device, at hand for address arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
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
    extremes : least and largest K of the last page where it is not full, in caches that keep summaries.
    next_extremes : the same once rows under way are committed.
    """

    def __init__(
        self, address: int, entries: int, *, heads: int, layer: int, sequence: int, cache: int
    ) -> None:
        self.address = address
        self.entries = table_entry_lines(entries) * ENTRIES_PER_LINE
        self.pages = 0
        self.committed = 0
        self.extremes: torch.Tensor | None = None
        self.next_extremes: torch.Tensor | None = None
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
        table.pages, table.committed, table.extremes = self.pages, self.committed, self.extremes
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


@dataclass(frozen=True)
class Places:
    """Where rows lie in one area of their pages.

    Members
    -------
    addresses : of the lines that hold them, each once, [heads, lines].
    pitch : bytes of a row.
    line : for rows that share lines, the line that holds each row, [rows].
    slot : and which part of it, [rows].
    """

    addresses: Addresses
    pitch: int
    line: npt.NDArray[np.intp]
    slot: npt.NDArray[np.intp]

    @property
    def shared(self) -> bool:
        """Whether rows share lines."""
        return self.pitch < LINE_BYTES

    def to_lines(self, data: npt.NDArray[np.uint8]) -> tuple[Lines, npt.NDArray[np.uint64] | None]:
        """Rows [heads, rows, pitch] as lines [heads, lines, 64]; the bytes to write of each, None for all."""
        heads, lines = self.addresses.shape
        if not self.shared:
            return data.reshape(heads, lines, LINE_BYTES), None
        parts = LINE_BYTES // self.pitch
        found = np.zeros((heads, lines, parts, self.pitch), np.uint8)
        found[:, self.line, self.slot] = data
        enabled = np.zeros((lines, parts, self.pitch), np.bool_)
        enabled[self.line, self.slot] = True
        bits = np.packbits(enabled.reshape(lines, LINE_BYTES), axis=1, bitorder="little").view("<u8")
        return found.reshape(heads, lines, LINE_BYTES), np.broadcast_to(bits[:, 0], (heads, lines))

    def to_rows(self, lines: Lines) -> npt.NDArray[np.uint8]:
        """The bytes of rows [heads, rows, pitch] from lines [heads, lines, 64]."""
        heads = len(self.addresses)
        if not self.shared:
            return lines.reshape(heads, -1, self.pitch)
        parts = lines.reshape(heads, -1, LINE_BYTES // self.pitch, self.pitch)
        rows: npt.NDArray[np.uint8] = parts[:, self.line, self.slot]
        return rows


class RowAddresses:
    """Where the lines of rows lie, for the pages of one cache.

    Parameters
    ----------
    layout : of the cache's pages.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._shift = np.uint64(layout.page_rows.bit_length() - 1)
        self._mask = np.uint64(layout.page_rows - 1)
        self._areas = list(zip(layout.areas, layout.pitches, strict=True))
        self._steps = {pitch: span(0, pitch // LINE_BYTES) for _, pitch in self._areas}

    def of(self, table: PageTable, rows: npt.NDArray[np.int64]) -> list[Places | None]:
        """Where rising rows lie: K codes, K scales, V codes, V scales; None for what the cache has not."""
        numbers = rows.astype(np.uint64)
        first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        page_rows = int(self._mask) + 1
        pages = table.page_addresses(first // page_rows, -(-last // page_rows))
        page = ((numbers >> self._shift) - np.uint64(first // page_rows)).astype(np.intp)
        base = pages[:, page]
        within = numbers & self._mask
        return [
            self._places(base, page, within, area, pitch) if pitch else None for area, pitch in self._areas
        ]

    def _places(
        self,
        base: Addresses,
        page: npt.NDArray[np.intp],
        within: npt.NDArray[np.uint64],
        area: int,
        pitch: int,
    ) -> Places:
        offset = np.uint64(area) + within * np.uint64(pitch)
        if pitch >= LINE_BYTES:
            addresses = (base + offset)[:, :, None] + self._steps[pitch]
            none = np.empty(0, np.intp)
            return Places(addresses.reshape(len(base), -1), pitch, none, none)
        begin = offset & ~np.uint64(LINE_BYTES - 1)
        new = np.ones(len(page), np.bool_)
        new[1:] = (begin[1:] != begin[:-1]) | (page[1:] != page[:-1])
        slot = ((offset - begin) // np.uint64(pitch)).astype(np.intp)
        return Places((base + begin)[:, new], pitch, np.cumsum(new) - 1, slot)
