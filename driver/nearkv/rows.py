"""Rows of sequences over the link: what is read back, and what the host reads for attention of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

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

from .codec import bytes_to_codes, one
from .table import PageTable, Places, RowAddresses
from .tenant import Tenant

Rows = npt.NDArray[np.int64]
"""Indices of rows of a context, rising."""


@dataclass(frozen=True)
class Context:
    """Rows of a sequence as the device holds them.

    Members
    -------
    k, v : codes [rows, kv_heads, dim], or None: V is part of the K row.
    k_scales, v_scales : codes [rows, kv_heads, blocks], or None.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None

    @property
    def areas(self) -> tuple[torch.Tensor | None, ...]:
        """K codes, K scales, V codes and V scales, as pages have them."""
        return self.k, self.k_scales, self.v, self.v_scales

    def spread(self, held: npt.NDArray[np.bool_]) -> Context:
        """These rows where `held` says so, with rows of zeros between them."""

        found = self.zeros(len(held))
        found.put(held, self)
        return found

    def at(self, places: npt.NDArray[Any]) -> Context:
        """The rows at these places, numbers or a mask."""
        pick = torch.from_numpy(places)
        return self._mapped(lambda codes: codes[pick])

    def then(self, others: Context) -> Context:
        """These rows and then others like them."""
        joined = [
            None if own is None or more is None else torch.cat([own, more])
            for own, more in zip(self.areas, others.areas, strict=True)
        ]
        k, k_scales, v, v_scales = joined
        assert k is not None
        return Context(k, v, k_scales, v_scales)

    def zeros(self, count: int) -> Context:
        """So many rows of zeros like these."""
        return self._mapped(lambda codes: codes.new_zeros(count, *codes.shape[1:]))

    def put(self, places: npt.NDArray[Any], rows: Context) -> None:
        """Overwrite the rows at these places, numbers or a mask."""
        into = torch.from_numpy(places)
        for area, own in zip(self.areas, rows.areas, strict=True):
            if area is not None and own is not None:
                area[into] = own

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Context:
        k, k_scales, v, v_scales = (None if area is None else change(area) for area in self.areas)
        assert k is not None
        return Context(k, v, k_scales, v_scales)


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
    """

    def __init__(self, tenant: Tenant, layout: RowLayout) -> None:
        self._tenant = tenant
        self._layout = layout
        self._addresses = RowAddresses(layout)
        self._counters = one(register_address(tenant.config, tenant.aperture, DEVICE_COUNTERS_LINE))

    def read(self, table: PageTable, rows: Rows | None = None) -> Context:
        """Rows of a table, all that were not released if not given.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        places = self._places([(table, table.held_rows if rows is None else rows)])
        return self._contexts(places, self._tenant.read(places.addresses))[0]

    def fetch(self, wanted: Many[tuple[PageTable, Rows]], before: Many[Operation] = ()) -> Fetched:
        """Some rows of several tables, after `before`, and what that took. Of pages that were released come
        zeros.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        held = [(table, rows[self._held(table, rows)]) for table, rows in wanted]
        places = self._places(held)
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
        contexts = [
            context if len(own) == len(rows) else context.spread(self._held(table, rows))
            for context, (_, own), (table, rows) in zip(
                self._contexts(places, lines), held, wanted, strict=True
            )
        ]
        return Fetched(contexts, len(lines), ended_at - began_at)

    def _held(self, table: PageTable, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of the rows lie in pages that were not released."""
        begin, end = table.released
        if begin == end:
            return np.ones(len(rows), np.bool_)
        return np.isin(rows // self._layout.page_rows, table.held_pages)

    def _places(self, wanted: Many[tuple[PageTable, Rows]]) -> _Places:
        areas = [self._addresses.of(table, rows) for table, rows in wanted]
        parts = [places.addresses.reshape(-1) for own in areas for places in own if places]
        addresses = np.concatenate([np.empty(0, np.uint64), *parts])
        order = dealt(addresses, self._tenant.config)
        return _Places(areas, addresses[order], order)

    def _contexts(self, places: _Places, lines: Lines) -> list[Context]:
        """The rows that were read, from their lines in the order in which these were."""
        ordered = np.empty_like(lines)
        ordered[places.order] = lines
        layout, value = self._layout, self._layout.value
        kinds = (
            (layout.k.element, layout.head_dim),
            (layout.k.scale, layout.k.blocks(layout.head_dim)),
            (value.element, layout.value_dim),
            (value.scale, value.blocks(layout.value_dim)),
        )
        contexts, at = [], 0
        for own in places.areas:
            found: list[torch.Tensor | None] = []
            for where, (form, elements) in zip(own, kinds, strict=True):
                if where is None or form is None:
                    found.append(None)
                    continue
                size = where.addresses.size
                data = where.to_rows(ordered[at : at + size].reshape(*where.addresses.shape, LINE_BYTES))
                found.append(bytes_to_codes(data.swapaxes(0, 1), form, elements))
                at += size
            k, k_scales, v, v_scales = found
            assert k is not None
            contexts.append(Context(k, v, k_scales, v_scales))
        return contexts


@dataclass(frozen=True)
class _Places:
    """Where rows lie.

    Members
    -------
    areas : of each table, K codes, K scales, V codes and V scales.
    addresses : device addresses of all their lines, in the order in which they are read.
    order : where each of them belongs among the lines of `areas`.
    """

    areas: list[list[Places | None]]
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
