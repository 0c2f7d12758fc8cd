"""A layer's part of a token, prepared: what differs from one to the next goes into lines laid out before."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from nearkv_hw.abi.descriptor import ATTEND
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import TABLE
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Fence, Lines, Operation, Write

from .allocator import Pages
from .attention import PLAIN, Answer, Call
from .coded import Coded
from .jobs import Jobs
from .table import PageTable, RowAddresses, table_addresses
from .tenant import Tenant

_KEPT = 256
_PLAIN = frozenset(PLAIN)
_FENCE = Fence()
Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""What a token brings: K and V, [batch, 1, kv_heads, dim], no V where it is part of K, and queries."""


class Step:
    """One row more for each of several page tables, and attention over all rows there are then.

    It takes no memory: it is for tables that have room in a last page of their own, and for rows that are
    stored as they come, in whole lines. What it posts is what `RowWriter` and `Jobs` make of the same call.

    Parameters
    ----------
    tenant, pages, addresses, jobs : of the cache.
    tables : different page tables of one layer.
    call : over them, which a device's units can do, with options that say all by their value.
    given : what the call was given; what comes later has the same shapes and types, all of 16 bits.

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
        given: Given,
    ) -> None:
        assert addresses.one_row is not None
        self._tenant = tenant
        self._pages = pages
        self._addresses = addresses
        self._jobs = jobs
        self.tables = list(tables)
        self._call = call
        self._windowed = call.windowed
        self._page_rows, areas, _, lines = addresses.one_row.shape
        count, heads = len(tables), tables[0].heads
        self._at: list[tuple[int, int]] = [(-1, -1)] * count
        """Page of each table's next row, and the table's changes when `_base` was found."""
        self._base = np.zeros((count, areas * heads * lines), np.uint64)
        """Where the first row of that page is."""
        self._offsets = np.zeros((count, 1), np.uint64)
        self._batch = call.batch(table_addresses(tables))
        self._prepared = jobs.prepare(self._batch)
        plan = self._prepared.plan
        self._moves = plan.moves
        self._places = np.concatenate([tenant.hosts(self._batch.tables), plan.query_places])
        self._lay_out(given)

    def _lay_out(self, given: Given) -> None:
        """All lines that a token posts, and where in them is what it changes."""
        count, jobs = self._prepared.descriptors.shape[:2]
        at = np.cumsum([0, self._base.size, len(self._places), count * jobs]).tolist()
        self._lines = np.zeros((at[3], LINE_BYTES), np.uint8)
        self._parts = tuple(slice(begin, end) for begin, end in pairwise(at))
        """Those of rows, of headers and queries, and of descriptors."""
        rows, others, descriptors = (self._lines[part] for part in self._parts)
        headers, queries = others[:count], others[count:]
        headers[:] = np.concatenate([table.header(0) for table in self.tables])
        self._committed = column(TABLE, "committed_rows", headers)
        descriptors = descriptors.reshape(count, jobs, LINE_BYTES)
        descriptors[:] = self._prepared.descriptors
        column(ATTEND, "table", descriptors)[:] = self._batch.tables[:, None]
        self._row_begin = column(ATTEND, "row_begin", descriptors).T
        self._row_end = column(ATTEND, "row_end", descriptors).T
        k, v, q = given
        areas = rows.reshape(count, 1 if v is None else 2, self.tables[0].heads, -1)
        self._into = (
            _numbers_in(areas[:, 0], k),
            None if v is None else _numbers_in(areas[:, 1], v),
            _numbers_in(queries.reshape(*self._batch.q.shape[:3], -1), q),
        )
        """What is given, as it lies in the lines."""

    @property
    def outdated(self) -> bool:
        """Whether the areas that it names went elsewhere."""
        return self._moves != self._tenant.moves

    def fits(self) -> bool:
        """Whether each table has room in a last page that no other table has, and all its rows."""
        if self.outdated:
            return False
        shared = self._pages.shared
        for table in self.tables:
            if not table.committed % self._page_rows or table.committed >= MAX_ROWS or table.released[1]:
                return False
            if shared:
                last = table.page_addresses(table.pages - 1, table.pages)
                if self._pages.shares(last).any():
                    return False
        return True

    def run(self, given: Given) -> Answer:
        """Append the rows, and attend; the mirror is the caller's to follow.

        Parameters
        ----------
        given : as that which it was made with, but for the numbers.

        Raises
        ------
        DeviceError, AccessError : the rows are there then, the result is not.
        """
        for into, one in zip(self._into, given, strict=True):
            if into is not None and one is not None:
                into.copy_(one.detach() if one.requires_grad else one)
        ends = [table.committed + 1 for table in self.tables]
        rows = sum(ends)
        self._committed[:] = ends
        self._row_end[:] = ends
        if self._windowed:
            begins = [self._call.first_row(end) for end in ends]
            rows -= sum(begins)
            self._row_begin[:] = begins
        # what is posted is never changed afterwards: each token has lines of its own
        lines = self._lines.copy()
        of_rows, others, descriptors = self._parts
        program: list[Operation] = [
            Write(self._row_places(), lines[of_rows]),
            _FENCE,
            Write(self._places, lines[others]),
        ]
        finished = self._jobs.run_prepared(self._batch, self._prepared, lines[descriptors], program, rows)
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
                self._base[index] = self._tenant.hosts(first).reshape(-1)
                self._at[index] = page, table.changes
            offsets.append(within * self._addresses.one_pitch)
        self._offsets[:, 0] = offsets
        places: Addresses = (self._base + self._offsets).reshape(-1)
        return places


def _numbers_in(lines: Lines, like: torch.Tensor) -> torch.Tensor:
    """The numbers that lie at the beginning of lines [..., bytes], of a tensor's shape and type."""
    codes = lines.view(np.int16)[..., : like.shape[-1]]
    with torch.inference_mode(False):  # a tensor that may be overwritten in any mode
        return torch.from_numpy(codes).view(like.dtype).view(like.shape)


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
        self, layer: int, tables: Many[PageTable], given: Given, options: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """What a call has in common with others like it, or None where it is none that is prepared."""
        if self._never or not _PLAIN.issuperset(map(type, options.values())):
            return None
        key: list[Any] = [layer, *map(id, tables), *options]
        for one in given:
            if isinstance(one, torch.Tensor):
                key += one.shape, one.dtype, one.layout, one.is_cpu or one.device
            elif one is not None:
                return None
        for value in options.values():
            # to Python 1, 1.0 and True are equal, and so are 0.0 and -0.0
            key += type(value), value or repr(value)
        return tuple(key)

    def find(self, key: tuple[Any, ...] | None, tables: list[PageTable]) -> Step | None:
        """The step that is prepared for these tables and fits."""
        step = None if key is None else self._kept.get(key)
        return step if step is not None and step.tables == tables and step.fits() else None

    def note(
        self, key: tuple[Any, ...] | None, tables: list[PageTable], call: Call, coded: Coded, given: Given
    ) -> None:
        """A call was carried out, and the tables are where they were: prepare the next, if it is the second
        of its kind.

        Parameters
        ----------
        coded : what became of the rows that were `given`.
        """
        if key is None or coded.rows != 1 or not call.follows_lengths:
            return
        if any(own is not None and own.dtype != torch.int16 for own in coded.codes):
            return
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = None
        elif (step := self._kept[key]) is None or step.outdated or step.tables != tables:
            self._kept[key] = Step(*self._of_cache, tables, call, given)
