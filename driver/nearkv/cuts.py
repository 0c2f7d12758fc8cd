"""Rows that go: the end of a context that is cropped, and rows that fell out of a window."""

from __future__ import annotations

from collections.abc import Sequence as Many

from nearkv_hw.abi.memory import RowLayout
from nearkv_sim.port import Addresses, Fence, Operation

from .allocator import Pages
from .append import RowWriter
from .arguments import whole_number
from .codec import one
from .errors import ArgumentError
from .rows import RowReader
from .table import PageTable
from .tenant import Tenant


class Cuts:
    """Takes rows out of page tables: the header says so first, then entries go, then pages are free.

    Parameters
    ----------
    tenant, pages, layout, writer, reader : of the cache.
    """

    def __init__(
        self, tenant: Tenant, pages: Pages, layout: RowLayout, writer: RowWriter, reader: RowReader
    ) -> None:
        self._tenant = tenant
        self._pages = pages
        self._page_rows = layout.page_rows
        self._writer = writer
        self._reader = reader

    def crop(self, tables: Many[PageTable], rows: int) -> None:
        """Keep the first `rows` rows of tables that have more.

        Raises
        ------
        ArgumentError : when `rows` is more than any of the tables has, or among rows that were released.
        OutOfMemoryError, AccessError : when a summary has to be written anew on a page that others have, too.
        """
        self.check(tables, rows)
        cut = [table for table in tables if table.committed > rows]
        if not cut:
            return
        self._tenant.settle(cut)
        own = self._writer.own_last_pages(cut, rows)
        if own:
            self._tenant.run(own.writes())
        # the rows that are left of a last page have other extremes
        program = self._writer.summarise_again(cut, rows, self._reader)
        program.append(Fence())
        for table in cut:
            header = table.header(rows, table.released_of(rows))
            program.append(self._tenant.write(one(table.address), header))
        program += [Fence(), *own.entries()]
        dropped: list[Addresses] = []
        for table in cut:
            pages = table.pages
            dropped.append(table.cut(rows, self._page_rows))
            if table.pages < pages:
                program.append(self._tenant.write(*table.entry_lines(table.pages, pages)))
        self._tenant.run(program)
        own.done()
        for page_addresses in dropped:
            self._tenant.retire(self._pages.give, page_addresses)

    def check(self, tables: Many[PageTable], rows: int) -> None:
        """ArgumentError as `crop` has it."""
        whole_number("rows", rows, 0, max(table.committed for table in tables))
        for table in tables:
            begin, end = table.released
            if begin < rows < min(end, table.committed):
                raise ArgumentError(
                    f"rows={rows}: rows {begin} to {end} of layer {table.layer} were released; keep {end} "
                    f"rows or more, or {begin} or fewer"
                )

    def summarise(self, tables: Many[PageTable]) -> None:
        """Write the summaries of last pages that are not full anew: nobody knows how far they came.

        A page that several tables have, with different rows of it, becomes each one's own.

        Raises
        ------
        OutOfMemoryError, AccessError : as `crop` has them.
        """
        for table in tables:
            rows = table.committed
            if not rows % self._page_rows:
                continue
            self._tenant.settle([table])
            own = self._writer.own_last_pages([table], rows)
            if own:
                self._tenant.run(own.writes())
            program = self._writer.summarise_again([table], rows, self._reader)
            if program:
                self._tenant.run([*program, Fence(), *own.entries()])
            own.done()

    def release(self, tables: Many[PageTable], begin: int, end: int) -> None:
        """Take rows `begin` to `end` out of sight for good; pages that lie between are free.

        Raises
        ------
        ArgumentError : when a table has not so many rows, or its released rows would not be one run.
        """
        whole_number("before", end, 0, min(table.committed for table in tables))
        whole_number("kept_rows", begin, 0, end)
        wanted = []
        for table in tables:
            first, last = table.released
            if first < last and not (begin <= last and end >= first):
                raise ArgumentError(
                    f"rows {first} to {last} of layer {table.layer} were released, and rows {begin} to {end} "
                    "do not meet them; released rows are one run"
                )
            wanted.append((min(begin, first), max(end, last)) if first < last else (begin, end))
        changed = [
            (table, released)
            for table, released in zip(tables, wanted, strict=True)
            if released != table.released and released[0] < released[1]
        ]
        self._tenant.settle(table for table, _ in changed)
        program: list[Operation] = [
            self._tenant.write(one(table.address), table.header(table.committed, released))
            for table, released in changed
        ]
        program.append(Fence())
        dropped = []
        for table, released in changed:
            table.released = released
            first, last = -(-released[0] // self._page_rows), released[1] // self._page_rows
            gone = table.held_pages
            gone = gone[(gone >= first) & (gone < last)]
            if not len(gone):
                continue
            first, last = int(gone[0]), int(gone[-1]) + 1
            dropped.append(table.addresses_of(first, last))
            table.forget(first, last)
            program.append(self._tenant.write(*table.entry_lines(first, last)))
        if changed:
            self._tenant.run(program)
        for page_addresses in dropped:
            self._tenant.retire(self._pages.give, page_addresses)
