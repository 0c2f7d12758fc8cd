"""Rows of sequences over the link: what is read back, and what the host reads for attention of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import RowLayout
from nearkv_hw.abi.window import DEVICE_COUNTERS, DEVICE_COUNTERS_LINE, register_address
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, Fence, Lines, Operation, Read

from .codec import lines_to_rows, one
from .table import PageTable, RowAddresses
from .tenant import Tenant

Rows = npt.NDArray[np.int64]
"""Indices of rows of a context, rising."""
Context = tuple[torch.Tensor, torch.Tensor]
"""k [rows, kv_heads, head_dim] and v [rows, kv_heads, value_dim]."""


@dataclass(frozen=True)
class Fetched:
    """Rows that were read.

    Members
    -------
    contexts : the rows of each table that was asked for.
    lines : lines that were read.
    cycles : device cycles from the first read to the last answer.
    """

    contexts: list[Context]
    lines: int
    cycles: int


class RowReader:
    """Reads rows of a cache's sequences, all of a call in one program, so that the link is kept full.

    Parameters
    ----------
    tenant : whose memory it is.
    layout : of the cache's rows.
    dtype : of its elements.
    """

    def __init__(self, tenant: Tenant, layout: RowLayout, dtype: torch.dtype) -> None:
        self._tenant = tenant
        self._layout = layout
        self._dtype = dtype
        self._addresses = RowAddresses(layout)
        self._counters = one(register_address(tenant.config, tenant.aperture, DEVICE_COUNTERS_LINE))

    def read(self, table: PageTable) -> Context:
        """All rows of a table.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        places = self._places([(table, np.arange(table.committed))])
        return self._contexts(places, self._tenant.read(places.addresses))[0]

    def fetch(self, wanted: Many[tuple[PageTable, Rows]], before: Many[Operation] = ()) -> Fetched:
        """Some rows of several tables, after `before`, and what that took.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        places = self._places(wanted)
        *_, began, read, ended = self._tenant.run(
            [
                *before,
                Fence(),
                Read(self._counters),
                Read(self._tenant.hosts(places.addresses)),
                Fence(),
                Read(self._counters),
            ]
        )
        lines = self._tenant.checked(read, places.addresses)
        began_at, ended_at = (int(column(DEVICE_COUNTERS, "cycles", r.data)[0]) for r in (began, ended))
        return Fetched(self._contexts(places, lines), len(lines), ended_at - began_at)

    def _places(self, wanted: Many[tuple[PageTable, Rows]]) -> _Places:
        parts = [part for table, rows in wanted for part in self._lines(table, rows)]
        addresses = np.concatenate([np.empty(0, np.uint64), *(part.reshape(-1) for part in parts)])
        order = dealt(addresses, self._tenant.config)
        return _Places([part.shape for part in parts], addresses[order], order)

    def _lines(self, table: PageTable, rows: Rows) -> tuple[Addresses, Addresses]:
        """The lines of rows: K [heads, rows, lines] and V [heads, rows, lines]."""
        begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        k, v = self._addresses.of(table, begin, end)
        return (k, v) if len(rows) == end - begin else (k[:, rows - begin], v[:, rows - begin])

    def _contexts(self, places: _Places, lines: Lines) -> list[Context]:
        """The rows that were read, from their lines in the order in which these were."""
        ordered = np.empty_like(lines)
        ordered[places.order] = lines
        sizes = [math.prod(shape) for shape in places.shapes]
        parts = [
            part.reshape(*shape, LINE_BYTES).swapaxes(0, 1)
            for part, shape in zip(np.split(ordered, np.cumsum(sizes)[:-1]), places.shapes, strict=True)
        ]
        return [
            (
                lines_to_rows(k, self._layout.head_dim, self._dtype),
                lines_to_rows(v, self._layout.value_dim, self._dtype),
            )
            for k, v in zip(parts[0::2], parts[1::2], strict=True)
        ]


@dataclass(frozen=True)
class _Places:
    """Where rows lie.

    Members
    -------
    shapes : of K's lines of the first table, V's, K's of the second, ...
    addresses : device addresses of all these lines, in the order in which they are read.
    order : where each of them belongs among all lines of these shapes.
    """

    shapes: list[tuple[int, ...]]
    addresses: Addresses
    order: npt.NDArray[np.intp]


def dealt(addresses: Addresses, config: DeviceConfig) -> npt.NDArray[np.intp]:
    """An order of device addresses in which the slices of the memory take turns, and each sees its own
    rising: what keeps all of them busy, and their DRAM rows open."""
    rising = np.argsort(addresses, kind="stable")
    extents, extent = np.unique(addresses[rising] >> np.uint64(EXTENT_SHIFT), return_inverse=True)
    slices = np.array([config.slice_of(int(e) << EXTENT_SHIFT) for e in extents], np.intp)[extent]
    together = np.argsort(slices, kind="stable")
    first = np.searchsorted(slices[together], np.arange(config.slices))
    turn = np.empty(len(addresses), np.intp)
    turn[together] = np.arange(len(addresses)) - first[slices[together]]
    order: npt.NDArray[np.intp] = rising[np.lexsort((slices, turn))]
    return order
