"""The host's mirror of a page table: what is on the device, at hand for address arithmetic."""

from __future__ import annotations

from collections.abc import Sequence as Many
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
    changes : how often pages were named or forgotten.
    committed : rows that are completely written.
    released : (begin, end) of the rows that were released: nobody sees them, pages between the two are gone.
    extremes : least and largest K of the last page where it is not full, in caches that keep summaries.
    next_extremes : the same once rows under way are committed.
    named : whether the directory names it once it is written; what it does not name ends with its host.
    jobs_end : number in the tenant's ring of the first descriptor after the last one that reads the table.
    """

    def __init__(
        self, address: int, entries: int, *, heads: int, layer: int, sequence: int, cache: int
    ) -> None:
        self.address = address
        self.entries = table_entry_lines(entries) * ENTRIES_PER_LINE
        self.pages = 0
        self.changes = 0
        self.committed = 0
        self.released = 0, 0
        self.named = True
        self.jobs_end = 0
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

    @property
    def host_bytes(self) -> int:
        """Bytes of this mirror's arrays."""
        return self._entries.nbytes + self._header.nbytes

    @classmethod
    def read(cls, address: int, header: dict[str, int], entries: npt.NDArray[np.uint64]) -> PageTable:
        """The mirror of a table on the device, from its header's fields and entries [heads, n] of pages."""
        of = {name: header[name] for name in ("heads", "layer", "sequence", "cache")}
        table = cls(address, header["entries"], **of)
        table._entries[:, : entries.shape[1]] = entries
        table.pages = entries.shape[1]
        table.committed = header["committed_rows"]
        table.released = header["released_begin"], header["released_end"]
        return table

    def header(self, committed: int, released: tuple[int, int] | None = None) -> Lines:
        """The header line [1, 64] that commits so many rows, and with `released` releases some."""
        line = self._header.copy()
        column(TABLE, "committed_rows", line)[:] = committed
        begin, end = self.released if released is None else released
        if end:
            column(TABLE, "released_begin", line)[:] = begin
            column(TABLE, "released_end", line)[:] = end
        return line

    @property
    def held_pages(self) -> npt.NDArray[np.intp]:
        """The pages that were not released, by their number, rising; those of rows under way, too."""
        return np.flatnonzero(self._entries[0])

    @property
    def rows(self) -> int:
        """How many rows were not released."""
        begin, end = self.released
        return self.committed - (end - begin)

    @property
    def held_rows(self) -> npt.NDArray[np.int64]:
        """The rows that were not released, rising."""
        begin, end = self.released
        return np.concatenate([np.arange(begin), np.arange(end, self.committed)])

    def addresses(self) -> Addresses:
        """The addresses of all pages that it has, of all heads."""
        return self.addresses_of(0, self.pages)

    def addresses_of(self, begin: int, end: int) -> Addresses:
        """The addresses of pages `begin` to `end` of all heads, those that it has."""
        held = self._entries[:, begin:end]
        found: Addresses = (held[held != 0] >> _ENTRY_SHIFT) << _LINE_SHIFT
        return found

    def page_addresses(self, begin: int, end: int) -> Addresses:
        """The addresses of pages `begin` to `end`, [heads, end - begin]."""
        addresses: Addresses = (self._entries[:, begin:end] >> _ENTRY_SHIFT) << _LINE_SHIFT
        return addresses

    def put(self, page: int, addresses: Addresses) -> None:
        """Name pages [heads, n] from page index `page` on; they count only once `pages` says so."""
        entries = (addresses >> _LINE_SHIFT) << _ENTRY_SHIFT | _ENTRY_VALID
        self._entries[:, page : page + addresses.shape[1]] = entries
        self.changes += 1

    def replace(self, head: int, page: int, address: int) -> None:
        """Name another page in the place of one head's."""
        self._entries[head, page] = np.uint64(address) >> _LINE_SHIFT << _ENTRY_SHIFT | _ENTRY_VALID
        self.changes += 1

    def drop(self, page: int) -> None:
        """Forget the pages from index `page` on."""
        self._entries[:, page:] = 0
        self.changes += 1
        self.pages = min(self.pages, page)

    def cut(self, rows: int, page_rows: int) -> Addresses:
        """Keep the first `rows` rows, if there are more; returns the addresses of the pages that go."""
        if rows >= self.committed:
            return np.empty(0, np.uint64)
        kept = -(-rows // page_rows)
        gone = self.addresses_of(kept, self.pages)
        self.drop(kept)
        self.committed, self.released = rows, self.released_of(rows)
        return gone

    def released_of(self, rows: int) -> tuple[int, int]:
        """The rows that are released once there are so many rows."""
        return (0, 0) if rows <= self.released[0] else self.released

    def forget(self, begin: int, end: int) -> None:
        """Forget pages `begin` to `end`, which lie among others."""
        self._entries[:, begin:end] = 0
        self.changes += 1

    def grown(self, address: int, entries: int, sequence: int | None = None) -> PageTable:
        """A table with the same content, elsewhere and with room for so many entries; of another sequence,
        where that is given."""
        owner = self.sequence if sequence is None else sequence
        table = PageTable(
            address, entries, heads=self.heads, layer=self.layer, sequence=owner, cache=self._cache
        )
        table._entries[:, : self.pages] = self._entries[:, : self.pages]
        table.pages, table.committed, table.extremes = self.pages, self.committed, self.extremes
        table.released = self.released
        table.named = self.named
        return table

    def begin(self, rows: int, page_rows: int) -> None:
        """Begin after so many rows, whole pages, that lie elsewhere: here they are as if released."""
        self.pages, self.committed, self.released = rows // page_rows, rows, (0, rows)
        self.named = False

    def entry_lines(self, begin: int, end: int) -> tuple[Addresses, Lines]:
        """The lines with the entries of pages `begin` to `end`, all heads: addresses [n], data [n, 64]."""
        first, last = begin // ENTRIES_PER_LINE, -(-end // ENTRIES_PER_LINE)
        head = np.arange(self.heads, dtype=np.uint64) * np.uint64(
            table_entry_lines(self.entries) * LINE_BYTES
        )
        addresses = head[:, None] + span(self.address + (1 + first) * LINE_BYTES, last - first)
        data = np.ascontiguousarray(self._entries[:, first * ENTRIES_PER_LINE : last * ENTRIES_PER_LINE])
        return addresses.reshape(-1), data.view(np.uint8).reshape(-1, LINE_BYTES)


def table_addresses(tables: Many[PageTable]) -> npt.NDArray[np.uint64]:
    """Where the tables lie."""
    return np.array([table.address for table in tables], np.uint64)


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
        """Rows [heads, rows, pitch] as lines [heads, lines, 64]; the bytes to write of each, None for all.

        A line that holds a row before these is written in part; one that begins with these, as a whole.
        """
        heads, lines = self.addresses.shape
        if not self.shared:
            return data.reshape(heads, lines, LINE_BYTES), None
        parts = LINE_BYTES // self.pitch
        found = np.zeros((heads, lines, parts, self.pitch), np.uint8)
        found[:, self.line, self.slot] = data
        enabled = np.zeros((lines, parts, self.pitch), np.bool_)
        enabled[self.line, self.slot] = True
        # rows that begin a line have all of it: what was there before, lost or not, is gone
        enabled[self.line[self.slot == 0]] = True
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

    Members
    -------
    one_row : where in a page the lines of each of its rows are, [page_rows, areas, 1, lines]; None where rows
        share lines, or areas differ in them.
    one_pitch : bytes of a row in all areas then.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._shift = np.uint64(layout.page_rows.bit_length() - 1)
        self._mask = np.uint64(layout.page_rows - 1)
        self._areas = list(zip(layout.areas, layout.pitches, strict=True))
        self._steps = {pitch: span(0, pitch // LINE_BYTES) for _, pitch in self._areas}
        held = [(area, pitch) for area, pitch in self._areas if pitch]
        self.one_pitch = max(layout.pitches)
        self.one_row: npt.NDArray[np.uint64] | None = None
        if len({pitch for _, pitch in held}) == 1 and held[0][1] >= LINE_BYTES:
            begin = np.array([area for area, _ in held], np.uint64)
            row = np.arange(layout.page_rows, dtype=np.uint64)[:, None] * np.uint64(held[0][1])
            self.one_row = ((begin + row)[..., None] + self._steps[held[0][1]])[:, :, None]

    def of_one_row(self, table: PageTable, row: int) -> Addresses:
        """The lines of one row, [areas, heads, lines], where there is `one_row`."""
        assert self.one_row is not None
        page, within = divmod(row, len(self.one_row))
        addresses: Addresses = table.page_addresses(page, page + 1) + self.one_row[within]
        return addresses

    def of(self, table: PageTable, rows: npt.NDArray[np.int64]) -> list[Places | None]:
        """Where rising rows lie: K codes, K scales, V codes, V scales; None for what the cache has not."""
        numbers = rows.astype(np.uint64)
        first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        page_rows = int(self._mask) + 1
        pages = table.page_addresses(first // page_rows, -(-last // page_rows))
        page = ((numbers >> self._shift) - np.uint64(first // page_rows)).astype(np.intp)
        return self.at(pages[:, page], page, numbers & self._mask)

    def at(
        self, base: Addresses, page: npt.NDArray[np.intp], within: npt.NDArray[np.uint64]
    ) -> list[Places | None]:
        """As `of`, for rows that no table names: the addresses of their pages [heads, rows], a number that
        tells these apart [rows], and which rows of them they are [rows]. Rows of one line stand together."""
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
