"""Copy on write: a page that several tables have is copied before one of them writes its rows there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from nearkv_hw.abi.memory import RowLayout
from nearkv_sim.port import Addresses, Lines, Write

from .allocator import Pages
from .errors import OutOfMemoryError
from .table import PageTable, RowAddresses
from .tenant import Tenant


@dataclass
class _Copy:
    """A page of each head, before and after."""

    table: PageTable
    page: int
    before: Addresses
    after: Addresses
    read: Addresses
    written: Addresses


class OwnPages:
    """Pages in which tables are about to write, each made the table's own.

    First `take` for each table; then `read`; the content of the copies goes to the device with `writes`, and
    once that is complete `entries` name them. In the mirror they are named at once. Then comes `done`, or
    `undo`.

    Parameters
    ----------
    tenant, pages, layout, addresses : of the cache.
    """

    def __init__(self, tenant: Tenant, pages: Pages, layout: RowLayout, addresses: RowAddresses) -> None:
        self._tenant = tenant
        self._pages = pages
        self._layout = layout
        self._addresses = addresses
        self._copies: list[_Copy] = []
        self._content: Lines | None = None

    def __bool__(self) -> bool:
        return bool(self._copies)

    def shared(self, table: PageTable, rows: int) -> bool:
        """Whether others have the page, too, in which row number `rows` lies, and rows before it."""
        if not rows % self._layout.page_rows or not self._pages.shared:
            return False
        page = rows // self._layout.page_rows
        return bool(self._pages.shares(table.page_addresses(page, page + 1)).any())

    def take(self, before: PageTable, table: PageTable, rows: int) -> None:
        """Put a page of its own into the table where row number `rows` lies.

        Parameters
        ----------
        before : the table as it is on the device.
        table : the same one, or the larger one that takes its place.
        rows : the rows before this one are copied.

        Raises
        ------
        OutOfMemoryError : when there is no page left; what was taken for other tables stays taken.
        """
        page = rows // self._layout.page_rows
        old = before.page_addresses(page, page + 1)
        new = np.zeros_like(old)
        for head in range(before.heads):
            try:
                new[head] = self._pages.take(1, self._tenant.config.slice_of(int(old[head, 0])))
            except OutOfMemoryError:
                self._pages.give(new[:head].reshape(-1))
                raise
        read = self._lines(before, rows)
        table.put(page, new)
        self._copies.append(_Copy(table, page, old, new, read, self._lines(table, rows)))

    def read(self) -> None:
        """Read what is to be copied.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        if self._copies:
            self._content = self._tenant.read(np.concatenate([copy.read for copy in self._copies]))

    def writes(self) -> list[Write]:
        """The operations that write the copies."""
        if self._content is None:
            return []
        places = np.concatenate([copy.written for copy in self._copies])
        return [self._tenant.write(places, self._content)]

    def entries(self) -> list[Write]:
        """The operations that name the copies in their tables."""
        return [
            self._tenant.write(*copy.table.entry_lines(copy.page, copy.page + 1)) for copy in self._copies
        ]

    def done(self) -> None:
        """The copies are there: what they were made of is the others'."""
        for copy in self._copies:
            self._tenant.retire(self._pages.give, copy.before.reshape(-1))

    def undo(self) -> None:
        """Nothing was written."""
        for copy in self._copies:
            copy.table.put(copy.page, copy.before)
            self._pages.give(copy.after.reshape(-1))
        self._copies = []

    def _lines(self, table: PageTable, rows: int) -> Addresses:
        """The lines of the last page's rows before row number `rows`."""
        first = rows - rows % self._layout.page_rows
        places = self._addresses.of(table, np.arange(first, rows))
        return np.concatenate([own.addresses.reshape(-1) for own in places if own is not None])
