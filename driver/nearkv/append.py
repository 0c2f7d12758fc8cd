"""How rows get onto the device: pages, rows and entries first, then the one line that commits them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import RowLayout, table_bytes
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_sim.port import Addresses, Fence, Lines, Operation, Write

from .allocator import Pages
from .codec import one
from .coded import Coded
from .directory import Directory
from .errors import AccessError, ArgumentError, OutOfMemoryError
from .heads import HeadTables
from .own_pages import OwnPages
from .quantise.formats import CacheFormat
from .rows import RowReader
from .summaries import Summaries
from .table import PageTable, RowAddresses, table_addresses
from .tenant import Tenant


class Appending:
    """Rows on their way to the ends of several page tables of one layer.

    Making it takes the memory that is needed, or nothing, and reads what has to be copied of last pages that
    others have, too. Then come `writes`, a fence, `renames` with another one if there are any, `commits`, and
    `done` (or `undo`).

    Parameters
    ----------
    tenant, pages, layout, addresses, directory : of the cache.
    tables : different page tables.
    rows : rows to append to each.

    Members
    -------
    tables : the page tables once the rows are committed: the same ones, or larger copies elsewhere.

    Raises
    ------
    OutOfMemoryError, ArgumentError : when there is no room, or a context would become too long.
    AccessError : when a line that has to be copied is poisoned.
    """

    def __init__(
        self,
        tenant: Tenant,
        pages: Pages,
        layout: RowLayout,
        addresses: RowAddresses,
        directory: Directory,
        tables: Many[PageTable],
        rows: int,
    ) -> None:
        longest = max((table.committed for table in tables), default=0) + rows
        if longest > MAX_ROWS:
            raise ArgumentError(f"{rows} more rows make a context of {longest}; it may have {MAX_ROWS}")
        self.tables: list[PageTable] = []
        self._tenant = tenant
        self._pages = pages
        self._layout = layout
        self._addresses = addresses
        self._directory = directory
        self._before = list(tables)
        self._rows = rows
        self._taken: list[npt.NDArray[np.uint64]] = []
        self._own = OwnPages(tenant, pages, layout, addresses)
        self._renamed: set[int] = set()
        """Tables whose last page is another one from now on, by their place in the list."""
        try:
            for table in tables:
                self.tables.append(self._with_room(table))
            self._own.read()
        except (OutOfMemoryError, AccessError):
            self.undo()
            raise

    def writes(self, coded: Coded) -> list[Operation]:
        """The operations that write rows of each table, and the entries of new pages.

        Not those of tables whose last page is another one: `renames` has them.
        """
        areas = coded.row_bytes(self._layout)
        copies = self._own.writes()
        addresses, data = [], []
        shared: list[tuple[Addresses, Lines, npt.NDArray[np.uint64]]] = []
        for index, (before, table) in enumerate(zip(self._before, self.tables, strict=True)):
            begin = before.committed
            rows = np.arange(begin, begin + self._rows)
            for places, own in zip(self._addresses.of(table, rows), areas, strict=True):
                if places is None or own is None:
                    continue
                lines, enables = places.to_lines(own[index])
                if enables is not None:
                    whole = places.addresses.reshape(-1), lines.reshape(-1, LINE_BYTES), enables.reshape(-1)
                    shared.append(whole)
                    continue
                addresses.append(places.addresses.reshape(-1))
                data.append(lines.reshape(-1, LINE_BYTES))
            if table is not before:
                entries = table.entry_lines(0, table.entries)
                addresses.append(one(table.address))
                data.append(table.header(begin + self._rows))
            elif self._taken[index].size and index not in self._renamed:
                entries = table.entry_lines(table.pages, self._page_count(table))
            else:
                continue
            addresses.append(entries[0])
            data.append(entries[1])
        writes: list[Operation] = []
        if addresses:
            writes.append(self._tenant.write(np.concatenate(addresses), np.concatenate(data)))
        if shared:
            where, lines, enables = (np.concatenate(parts) for parts in zip(*shared, strict=True))
            writes.append(replace(self._tenant.write(where, lines), enables=enables))
        # a copy is written before rows that share a line with it
        return [*copies, Fence(), *writes] if copies and shared else [*copies, *writes]

    def renames(self) -> list[Operation]:
        """The operations that name pages that took the place of others, with a fence behind them."""
        writes: list[Operation] = [
            self._tenant.write(*table.entry_lines(table.pages - 1, self._page_count(table)))
            for index, table in enumerate(self.tables)
            if index in self._renamed and table is self._before[index]
        ]
        return [*writes, Fence()] if writes else []

    def summaries(self, summaries: Summaries, coded: Coded, layer: int) -> list[Write]:
        """The operations that write the summaries of the pages in which the rows lie."""
        k, scales = coded.codes[0], coded.scales[0]
        writes = []
        for index, (before, table) in enumerate(zip(self._before, self.tables, strict=True)):
            own = None if scales is None else scales[index]
            addresses, lines = summaries.added(table, before.committed, k[index], own, layer)
            writes.append(self._tenant.write(addresses, lines))
        return writes

    def commits(self) -> list[Write]:
        """The operations that make the rows exist, a line for each table: its header, or where it moved."""
        stayed: list[PageTable] = []
        moved: list[PageTable] = []
        for before, table in zip(self._before, self.tables, strict=True):
            (stayed if table is before else moved).append(table)
        writes = []
        if named := [table for table in moved if table.named]:
            writes.append(self._directory.move(named))
        if stayed:
            headers = [table.header(table.committed + self._rows) for table in stayed]
            writes.append(self._tenant.write(table_addresses(stayed), np.concatenate(headers)))
        return writes

    def done(self) -> None:
        """The mirror follows what was written."""
        for before, table in zip(self._before, self.tables, strict=True):
            table.pages = self._page_count(table)
            table.committed += self._rows
            if self._rows:
                table.extremes = table.next_extremes
            if table is not before:
                self._tenant.retire(self._tenant.arena.give, before.address, before.size_bytes)
        self._own.done()

    def undo(self) -> None:
        """Give back what was taken, when nothing was committed."""
        self._own.undo()
        for before, table in zip(self._before, self.tables, strict=False):
            if table is not before:
                self._tenant.arena.give(table.address, table.size_bytes)
            table.drop(before.pages)
        for taken in self._taken:
            self._pages.give(taken.reshape(-1))

    def _page_count(self, table: PageTable) -> int:
        return -(-(table.committed + self._rows) // self._layout.page_rows)

    def _with_room(self, table: PageTable) -> PageTable:
        """The table, or a larger copy, with the new pages named in it."""
        wanted = self._page_count(table) - table.pages
        heads = table.heads
        taken = np.zeros((heads, wanted), np.uint64)
        self._taken.append(taken)
        copied = bool(self._rows) and self._own.shared(table, table.committed)
        if not wanted:
            if copied:
                self._own_last_page(table, table)
            return table
        for head in range(heads):
            try:
                taken[head] = self._pages.take(wanted, self._next_channel(table, head))
            except OutOfMemoryError:
                self._taken[-1] = taken[:head]
                raise
        before = table
        if table.pages + wanted > table.entries:
            entries = max(2 * table.entries, table.pages + wanted)
            table = table.grown(self._tenant.arena.take(table_bytes(heads, entries)), entries)
        table.put(table.pages, taken)
        if copied:
            try:
                self._own_last_page(before, table)
            except OutOfMemoryError:
                if table is not before:
                    self._tenant.arena.give(table.address, table.size_bytes)
                before.drop(before.pages)
                raise
        return table

    def _own_last_page(self, before: PageTable, table: PageTable) -> None:
        self._own.take(before, table, table.committed)
        self._renamed.add(len(self.tables))

    def _next_channel(self, table: PageTable, head: int) -> int | None:
        """The channel after that of the head's last page, or None for its first page."""
        if not table.pages:
            return None
        last = int(table.page_addresses(table.pages - 1, table.pages)[head, 0])
        if not last:  # it was released
            return None
        return (self._tenant.config.slice_of(last) + 1) % self._tenant.config.slices


class RowWriter:
    """Appends rows to a cache's tables, with what goes with them: scales and codebooks of heads, summaries.

    Parameters
    ----------
    tenant, pages, layout, form, heads : of the cache.

    Members
    -------
    addresses : of the cache's rows.
    """

    def __init__(
        self, tenant: Tenant, pages: Pages, layout: RowLayout, form: CacheFormat, heads: HeadTables
    ) -> None:
        self._tenant = tenant
        self._pages = pages
        self._layout = layout
        self.addresses = RowAddresses(layout)
        self._heads = heads
        self._summaries = Summaries(layout, form, heads) if layout.summaries else None

    def start(self, directory: Directory, tables: Many[PageTable], rows: int) -> Appending:
        """Take what so many rows in each table need; OutOfMemoryError or ArgumentError as `Appending` has
        them."""
        if self._summaries is not None:
            self._tenant.settle(tables)  # a job that selects pages reads their summaries
        return Appending(self._tenant, self._pages, self._layout, self.addresses, directory, tables, rows)

    def program(self, appending: Appending, coded: Coded, layer: int) -> list[Operation]:
        """The operations that write the rows, and then commit them."""
        for part, found in coded.found.items():
            self._heads.learn(part, layer, found.head_scale, found.codebook)
        writes: list[Operation] = [*appending.writes(coded)]
        if coded.found:
            writes += self._heads.writes()
        if self._summaries is not None:
            writes += appending.summaries(self._summaries, coded, layer)
        return [*writes, Fence(), *appending.renames(), *appending.commits()]

    def undo(self, appending: Appending, coded: Coded, layer: int) -> None:
        """Give back what was taken, and forget what was learnt, when nothing was committed."""
        appending.undo()
        self._heads.forget(coded.found, layer)

    def own_last_pages(self, tables: Many[PageTable], rows: int) -> OwnPages:
        """What is needed before `summarise_again`: summaries are not written where others see them.

        Raises
        ------
        OutOfMemoryError, AccessError : as `OwnPages` has them; nothing is taken then.
        """
        own = OwnPages(self._tenant, self._pages, self._layout, self.addresses)
        if self._summaries is not None:
            try:
                for table in tables:
                    if own.shared(table, rows):
                        own.take(table, table, rows)
                own.read()
            except (OutOfMemoryError, AccessError):
                own.undo()
                raise
        return own

    def summarise_again(self, tables: Many[PageTable], rows: int, reader: RowReader) -> list[Operation]:
        """The operations that write summaries of last pages that were cut to so many rows of a context."""
        if self._summaries is None:
            return []
        left = np.arange(rows - rows % self._layout.page_rows, rows)
        writes: list[Operation] = []
        for table in tables:
            table.extremes = None
            if len(left):
                again = self._summaries.again(table, reader.read(table, left), rows)
                writes.append(self._tenant.write(*again))
        return writes
