"""The host's mirror of a cache's directory: where the page table of each sequence and layer lies."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_sim.port import Addresses, Write

from .codec import span
from .table import PageTable
from .tenant import Tenant

_ADDRESS_BYTES = 8
_PER_LINE = LINE_BYTES // _ADDRESS_BYTES


class Directory:
    """`sequences * layers` addresses of page tables, zero where there is none.

    Parameters
    ----------
    tenant : in whose memory it lies.
    sequences : slots.
    layers : tables of a slot.
    at : where it lies already, and what it holds there; by default it is made.

    Raises
    ------
    OutOfMemoryError : when there is no room for it.
    """

    def __init__(
        self, tenant: Tenant, sequences: int, layers: int, at: tuple[int, Addresses] | None = None
    ) -> None:
        self.sequences = sequences
        self.layers = layers
        self._tenant = tenant
        self._lines = lines_of(sequences * layers * _ADDRESS_BYTES)
        self._tables = np.zeros(self._lines * _PER_LINE, np.uint64)
        if at is not None:
            self.address, held = at
            self._tables[: len(held)] = held
        else:
            self.address = tenant.arena.take(self._lines * LINE_BYTES)

    def put(self, slot: int, layer: int, addresses: Many[int]) -> Write:
        """Set the tables of a slot from `layer` on; returns the operation that does so on the device."""
        begin = slot * self.layers + layer
        end = begin + len(addresses)
        self._tables[begin:end] = addresses
        return self._write(begin // _PER_LINE, -(-end // _PER_LINE))

    def move(self, tables: Many[PageTable]) -> Write:
        """Set where these tables lie now; returns the operation that does so, a line at once."""
        where = [table.sequence * self.layers + table.layer for table in tables]
        self._tables[where] = [table.address for table in tables]
        lines = np.unique(np.array(where) // _PER_LINE)
        data = self._tables.reshape(-1, _PER_LINE)[lines].view(np.uint8)
        return self._tenant.write((self.address + lines * LINE_BYTES).astype(np.uint64), data)

    def write_all(self) -> Write:
        """The operation that writes the whole directory."""
        return self._write(0, self._lines)

    def larger(self) -> Directory:
        """A directory with twice the slots and the same tables, elsewhere."""
        grown = Directory(self._tenant, 2 * self.sequences, self.layers)
        grown._tables[: len(self._tables)] = self._tables
        return grown

    def give(self) -> None:
        """The directory's memory is free again."""
        self._tenant.arena.give(self.address, self._lines * LINE_BYTES)

    def _write(self, first: int, last: int) -> Write:
        data = self._tables[first * _PER_LINE : last * _PER_LINE].view(np.uint8).reshape(-1, LINE_BYTES)
        return self._tenant.write(span(self.address + first * LINE_BYTES, last - first), data.copy())
