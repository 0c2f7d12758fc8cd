"""A layer's part of a token, prepared: what differs from one to the next goes into lines laid out before."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from nearkv_hw.abi.descriptor import ATTEND
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import TABLE
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Fence, Operation, Write

from .allocator import Pages
from .attention import PLAIN, Answer, Call
from .codec import codes_of
from .coded import Coded
from .jobs import Jobs
from .table import PageTable, RowAddresses, table_addresses
from .tenant import Tenant

_KEPT = 256


class Step:
    """One row more for each of several page tables, and attention over all rows there are then.

    It takes no memory: it is for tables that have room in a last page of their own, and for rows that are
    stored as they come, in whole lines. What it posts is what `RowWriter` and `Jobs` make of the same call.

    Parameters
    ----------
    tenant, pages, addresses, jobs : of the cache.
    tables : different page tables of one layer.
    call : over them, which a device's units can do, with options that say all by their value.

    Members
    -------
    tables : see above.
    """

    def __init__(
        self,
        tenant: Tenant,
        pages: Pages,
        addresses: RowAddresses,
        jobs: Jobs,
        tables: list[PageTable],
        call: Call,
    ) -> None:
        assert addresses.one_row is not None
        self._tenant = tenant
        self._pages = pages
        self._addresses = addresses
        self._jobs = jobs
        self.tables = list(tables)
        self._call = call
        self._page_rows, areas, _, lines = addresses.one_row.shape
        count, heads = len(tables), tables[0].heads
        self._at: list[tuple[int, int]] = [(-1, -1)] * count
        """Page of each table's next row, and the table's changes when `_base` was found."""
        self._base = np.zeros((count, areas, heads, lines), np.uint64)
        self._rows = np.zeros((count, areas, heads, lines * LINE_BYTES), np.uint8)
        self._batch = call.batch(table_addresses(tables))
        self._prepared = jobs.prepare(self._batch)
        self._lay_out()

    def _lay_out(self) -> None:
        """Lines that change with every token, and where in them."""
        batch, plan = self._batch, self._prepared.plan
        count = len(self.tables)
        headers = np.concatenate([table.header(0) for table in self.tables])
        queries = np.zeros((len(plan.query_places), LINE_BYTES), np.uint8)
        self._lines = np.concatenate([headers, queries])
        self._places = np.concatenate([self._tenant.hosts(table_addresses(self.tables)), plan.query_places])
        self._committed = column(TABLE, "committed_rows", self._lines[:count])
        of_queries = self._lines[count:].reshape(*batch.q.shape[:3], -1)
        self._queries = of_queries.view(np.int16)[..., : batch.q.shape[3]]
        self._descriptors = self._prepared.descriptors.copy()
        column(ATTEND, "table", self._descriptors)[:] = batch.tables[:, None]
        self._row_begin = column(ATTEND, "row_begin", self._descriptors)
        self._row_end = column(ATTEND, "row_end", self._descriptors)

    @property
    def outdated(self) -> bool:
        """Whether the areas that it names went elsewhere."""
        return self._prepared.plan.moves != self._tenant.moves

    def fits(self) -> bool:
        """Whether each table has room in a last page that no other table has, and all its rows."""
        if self.outdated:
            return False
        for table in self.tables:
            if not table.committed % self._page_rows or table.committed >= MAX_ROWS or table.released[1]:
                return False
            if self._pages.shared:
                last = table.page_addresses(table.pages - 1, table.pages)
                if self._pages.shares(last).any():
                    return False
        return True

    def run(self, coded: Coded, q: torch.Tensor) -> Answer:
        """Append the rows, and attend; the mirror is the caller's to follow.

        Parameters
        ----------
        coded : a row of each sequence.
        q : queries of the call's shape and type.

        Raises
        ------
        DeviceError, AccessError : the rows are there then, the result is not.
        """
        lengths = np.array([table.committed + 1 for table in self.tables], np.int64)
        areas = (own for own in coded.codes if own is not None)
        for area, own in enumerate(areas):
            values = own.numpy()
            self._rows.view(values.dtype)[:, area, :, : values.shape[-1]] = values[:, 0]
        self._committed[:] = lengths
        self._queries[:] = codes_of(q).numpy().reshape(self._queries.shape)
        begin = self._call.first_row(lengths)
        self._row_begin[:] = begin[:, None]
        self._row_end[:] = lengths[:, None]
        # what is posted is never changed afterwards: each token has lines of its own
        program: list[Operation] = [
            Write(self._row_places(), self._rows.reshape(-1, LINE_BYTES).copy()),
            Fence(),
            Write(self._places, self._lines.copy()),
        ]
        descriptors = self._descriptors.reshape(-1, LINE_BYTES).copy()
        rows = int(np.add.reduce(lengths - begin))
        finished = self._jobs.run_prepared(self._batch, self._prepared, descriptors, program, rows)
        return self._call.answer(finished)

    def done(self) -> None:
        """The mirror follows what was written."""
        for table in self.tables:
            table.committed += 1

    def _row_places(self) -> Addresses:
        """Host addresses of the lines of each table's next row."""
        offsets = []
        for index, table in enumerate(self.tables):
            page, within = divmod(table.committed, self._page_rows)
            if self._at[index] != (page, table.changes):
                first = self._addresses.of_one_row(table, page * self._page_rows)
                self._base[index] = self._tenant.hosts(first)
                self._at[index] = page, table.changes
            offsets.append(within)
        step = np.array(offsets, np.uint64) * np.uint64(self._addresses.one_pitch)
        places: Addresses = (self._base + step[:, None, None, None]).reshape(-1)
        return places


class Steps:
    """The steps of a cache that repeat, by what they have in common.

    Parameters
    ----------
    tenant, pages, addresses, jobs : of the cache.
    summaries : whether its pages have summaries, which no step writes.
    """

    def __init__(
        self, tenant: Tenant, pages: Pages, addresses: RowAddresses, jobs: Jobs, *, summaries: bool
    ) -> None:
        self._of_cache = (tenant, pages, addresses, jobs)
        self._never = summaries or addresses.one_row is None or not tenant.config.units
        self._kept: dict[tuple[Any, ...], Step | None] = {}

    def key(
        self, layer: int, tables: Many[PageTable], coded: Coded, q: torch.Tensor, options: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """What a call has in common with others like it, or None where it is none that is prepared."""
        if self._never or coded.rows != 1 or not isinstance(q, torch.Tensor):
            return None
        if any(own is not None and own.dtype != torch.int16 for own in coded.codes):
            return None
        if not all(type(value) in PLAIN for value in options.values()):
            return None
        return layer, *map(id, tables), q.shape, q.dtype, q.layout, q.device, repr(options)

    def find(self, key: tuple[Any, ...] | None, tables: list[PageTable]) -> Step | None:
        """The step that is prepared for these tables and fits."""
        step = None if key is None else self._kept.get(key)
        return step if step is not None and step.tables == tables and step.fits() else None

    def note(self, key: tuple[Any, ...] | None, tables: list[PageTable], call: Call) -> None:
        """A call was carried out, and the tables are where they were: prepare the next, if it is the second
        of its kind."""
        if key is None or not call.follows_lengths:
            return
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = None
        elif (step := self._kept[key]) is None or step.outdated or step.tables != tables:
            self._kept[key] = Step(*self._of_cache, tables, call)
