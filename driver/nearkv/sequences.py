"""Handles of a cache's sequences, and what lies on the device of each: page tables, and the directory."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import (
    CACHE_MAGIC,
    ENTRIES_PER_LINE,
    LAYOUT_VERSION,
    NO_SEQUENCE,
    RULES,
    RowLayout,
    table_bytes,
)
from nearkv_sim.port import Fence, Operation

from .allocator import Pages
from .codec import one
from .directory import Directory
from .errors import (
    ArgumentError,
    ClosedError,
    DtypeError,
    EvictedError,
    OutOfMemoryError,
    ShapeError,
    UnknownHandleError,
)
from .quantise.formats import CacheFormat
from .recovery import FoundCache
from .table import PageTable
from .tenant import Tenant

if TYPE_CHECKING:
    from .library import SharedRows

_FIRST_ENTRIES = ENTRIES_PER_LINE
"""Pages that a new page table has room for; it doubles when they are used up."""
_FIRST_SLOTS = 8
"""Slots of a new directory; likewise."""


class Sequence:
    """A handle of one sequence of a cache; `KVCache.sequence` makes it, `KVCache.free` ends it.

    Members
    -------
    slot : its place in the cache's directory on the device.
    priority : None for one that stays; others may go when memory runs short, the lowest number first.
    shared : its first rows, where they lie in a prefix that hosts share; else None.
    used : when it was used last, in calls of its cache.
    """

    __slots__ = ("__weakref__", "_evicted", "_owner", "_tables", "priority", "shared", "slot", "used")

    def __init__(self, owner: Sequences, slot: int, tables: list[PageTable]) -> None:
        self._owner = owner
        self._tables: list[PageTable] | None = tables
        self._evicted = False
        self.slot = slot
        self.priority: int | None = None
        self.shared: SharedRows | None = None
        self.used = 0

    @property
    def evicted(self) -> bool:
        """Whether it went because memory ran short."""
        return self._evicted

    def __repr__(self) -> str:
        if self._tables is None:
            return f"<{'evicted' if self._evicted else 'freed'} sequence {self.slot}>"
        return f"<sequence {self.slot} with {max(table.committed for table in self._tables)} rows>"


class Sequences:
    """A cache's record and directory on the device, and the sequences in it.

    Parameters
    ----------
    tenant : in whose memory they lie.
    pages : where sequences' pages come from.
    layout : of their rows.
    layers, kv_heads : tables of a sequence, and heads of a table.
    form : how numbers become rows.
    tables : device addresses of what heads have in common, as the cache record names them.
    found : the cache as an earlier session left it; by default an empty one is made.

    Members
    -------
    directory : the mirror of the directory; another one after it grew.

    Raises
    ------
    OutOfMemoryError : when there is no room for record and directory.
    """

    def __init__(
        self,
        tenant: Tenant,
        pages: Pages,
        layout: RowLayout,
        *,
        layers: int,
        kv_heads: int,
        form: CacheFormat,
        tables: dict[str, int],
        found: FoundCache | None = None,
    ) -> None:
        self._tenant = tenant
        self._pages = pages
        self._layers = layers
        self._page_rows = layout.page_rows
        self._kv_heads = kv_heads
        self._geometry = {
            "magic": CACHE_MAGIC,
            "version": LAYOUT_VERSION,
            **_storage(layout),
            **tables,
            **_rules(form),
            "page_rows_log2": layout.page_rows.bit_length() - 1,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
        }
        self._first_prefix = 0
        self._slots: list[Sequence | None] = [None] * _FIRST_SLOTS
        self._free = list(range(_FIRST_SLOTS))
        """A heap of free slots."""
        if found is not None:
            self._take_over(found)
            return
        self.directory = Directory(tenant, _FIRST_SLOTS, layers)
        try:
            self._record = tenant.arena.take(LINE_BYTES)
        except OutOfMemoryError:
            self.directory.give()
            raise
        tenant.run([self.directory.write_all()])
        tenant.link(self._record, self._record_values())

    def _take_over(self, found: FoundCache) -> None:
        """What an earlier session left is this one's, and what it left undone is undone."""
        self._record = found.address
        self._first_prefix = found.fields["prefixes"]
        self._slots = [
            None if tables is None else Sequence(self, slot, tables)
            for slot, tables in enumerate(found.slots)
        ]
        self._free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        at = found.fields["directory"], found.directory
        self.directory = Directory(self._tenant, len(found.slots), self._layers, at)
        program: list[Operation] = [
            self._tenant.write(*table.entry_lines(0, table.entries)) for table in found.stale
        ]
        if found.unclean:
            program.append(self.directory.write_all())
        if program:
            self._tenant.run(program)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence in self._slots if sequence is not None])

    @property
    def record(self) -> int:
        """Device address of the cache's record."""
        return self._record

    def new(self) -> Sequence:
        """A new, empty sequence; OutOfMemoryError when there is no room for its tables."""
        slot = self._free_slot()
        return self._add(slot, self._new_tables(slot))

    def beginning(self, rows: int) -> Sequence:
        """A new sequence whose first rows, whole pages of them, lie elsewhere. The directory does not name
        it, so that nobody who takes over takes it for whole; OutOfMemoryError as `new`."""
        slot = self._free_slot()
        tables = self._new_tables(slot, room=rows // self._page_rows)
        for table in tables:
            table.begin(rows, self._page_rows)
        return self._add(slot, tables)

    def fork(self, of: list[PageTable], rows: int | None = None) -> Sequence:
        """A new sequence that has the pages of some tables, too, or those of their first rows;
        OutOfMemoryError when there is no room for its tables."""
        slot = self._free_slot()
        return self._add(slot, self._shared_tables(slot, of, rows))

    def detached(self, sequence: Sequence, rows: int) -> list[PageTable]:
        """Page tables of no sequence with the pages of a sequence's first rows, for `table_writes` to bring
        to the device; OutOfMemoryError when there is no room for them."""
        return self._shared_tables(NO_SEQUENCE, self.tables(sequence), rows)

    def give_detached(self, tables: Many[PageTable]) -> None:
        """Nothing names these tables any more."""
        self._give_tables(tables)

    def first_prefix(self, address: int) -> Operation:
        """The operation that has the cache record name this prefix record."""
        self._first_prefix = address
        return self._tenant.record_write(self._record, self._record_values())

    def table_writes(self, tables: Many[PageTable]) -> list[Operation]:
        """The operations that write page tables as a whole."""
        program: list[Operation] = []
        for table in tables:
            program.append(self._tenant.write(one(table.address), table.header(table.committed)))
            program.append(self._tenant.write(*table.entry_lines(0, table.entries)))
        return program

    def _shared_tables(self, slot: int, of: list[PageTable], rows: int | None) -> list[PageTable]:
        tables = self._new_tables(slot, of)
        for table in tables:
            if rows is not None:
                table.cut(rows, self._page_rows)
            self._pages.share(table.addresses())
        return tables

    def _give_tables(self, tables: Many[PageTable]) -> None:
        for table in tables:
            self._tenant.retire(self._pages.give, table.addresses())
            self._tenant.retire(self._tenant.arena.give, table.address, table.size_bytes)

    def at(self, slot: int) -> Sequence:
        """The sequence in a slot; UnknownHandleError when there is none."""
        known = isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot < len(self._slots)
        sequence = self._slots[slot] if known else None
        if sequence is None:
            raise UnknownHandleError(f"slot {slot!r} of the cache has no sequence")
        return sequence

    def free(self, sequence: Sequence) -> None:
        """End a sequence and give its memory back."""
        tables = self.tables(sequence)
        self._tenant.run([self.directory.put(sequence.slot, 0, [0] * self._layers)])
        self._give_tables(tables)
        sequence._tables = None
        if sequence.shared is not None:
            sequence.shared.let_go()
        self._slots[sequence.slot] = None
        heappush(self._free, sequence.slot)

    def evict(self, sequence: Sequence) -> None:
        """End a sequence as `free` does; its handle knows why."""
        self.free(sequence)
        sequence._evicted = True

    def close(self) -> None:
        """Free all sequences, the record and the directory."""
        for sequence in self:
            self.free(sequence)
        self._tenant.unlink(self._record)
        self._tenant.arena.give(self._record, LINE_BYTES)
        self.directory.give()

    def tables(self, sequence: Sequence) -> list[PageTable]:
        """The page tables of a handle, one per layer; an error when it is none of this cache's."""
        if not isinstance(sequence, Sequence):
            raise DtypeError(f"a sequence is what kv.sequence() returned, not {type(sequence).__name__}")
        if sequence._owner is not self:
            raise UnknownHandleError(f"{sequence!r} belongs to another cache")
        if sequence._evicted:
            raise EvictedError(
                f"sequence {sequence.slot} went because memory ran short: it had a priority; append its rows "
                "to a new one"
            )
        if sequence._tables is None:
            raise ClosedError(f"sequence {sequence.slot} was freed")
        return sequence._tables

    def table(self, sequence: Sequence, layer: int) -> PageTable:
        """The page table of a handle in a layer."""
        tables = self.tables(sequence)
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self._layers:
            raise UnknownHandleError(f"layer={layer!r}: the cache has layers 0 to {self._layers - 1}")
        return tables[layer]

    def batch(self, sequences: Many[Sequence], layer: int, *, distinct: bool = False) -> list[PageTable]:
        """The page tables of a batch in a layer; with `distinct`, an error when a sequence stands twice."""
        if not isinstance(sequences, Many):
            raise DtypeError(f"a batch is a list of sequences, not {type(sequences).__name__}")
        tables = [self.table(sequence, layer) for sequence in sequences]
        if not tables:
            raise ShapeError("the batch has no sequence, must have at least one")
        if distinct and len({id(table) for table in tables}) != len(tables):
            raise ArgumentError(
                f"{[s.slot for s in sequences]} names a sequence twice: rows would have no order"
            )
        return tables

    def replace(self, sequences: Many[Sequence], layer: int, tables: Many[PageTable]) -> None:
        """The mirror follows tables that moved."""
        for sequence, table in zip(sequences, tables, strict=True):
            self.tables(sequence)[layer] = table

    def _free_slot(self) -> int:
        """The lowest free slot, which `_add` takes."""
        if not self._free:
            self._double()
        return self._free[0]

    def _new_tables(self, slot: int, of: Many[PageTable] | None = None, room: int = 0) -> list[PageTable]:
        """A slot's tables with room for so many entries at least, empty or with the content of others."""
        tables: list[PageTable] = []
        try:
            for layer in range(self._layers):
                entries = max(_FIRST_ENTRIES, room, 0 if of is None else of[layer].pages)
                address = self._tenant.arena.take(table_bytes(self._kv_heads, entries))
                if of is None:
                    place = {"layer": layer, "sequence": slot, "cache": self._record}
                    tables.append(PageTable(address, entries, heads=self._kv_heads, **place))
                else:
                    tables.append(of[layer].grown(address, entries, slot))
        except OutOfMemoryError:
            for table in tables:
                self._tenant.arena.give(table.address, table.size_bytes)
            raise
        return tables

    def _add(self, slot: int, tables: list[PageTable]) -> Sequence:
        """Write tables, and then name them in the directory."""
        program = [*self.table_writes(tables), Fence()]
        if tables[0].named:
            program += [self.directory.put(slot, 0, [table.address for table in tables])]
        self._tenant.run(program)
        heappop(self._free)  # the lowest, which is this one
        sequence = self._slots[slot] = Sequence(self, slot, tables)
        return sequence

    def _double(self) -> None:
        """Twice the slots: a larger directory first, then the record that names it."""
        old, self.directory = self.directory, self.directory.larger()
        self._tenant.run([self.directory.write_all()])
        self._tenant.rewrite(self._record, self._record_values())
        for slot in range(len(self._slots), self.directory.sequences):
            heappush(self._free, slot)
        self._slots += [None] * len(self._slots)
        old.give()

    def _record_values(self) -> dict[str, int]:
        return {
            **self._geometry,
            "sequences": self.directory.sequences,
            "directory": self.directory.address,
            "prefixes": self._first_prefix,
        }


def _rules(form: CacheFormat) -> dict[str, int]:
    """How numbers become rows, as the cache record says it."""
    parts = {"k": form.k, "v": form.v}
    rules = {f"{part}_rule": RULES.index(row.rule.value) for part, row in parts.items() if row}
    return rules | {f"{part}_head_scale": int(row.head_scale) for part, row in parts.items() if row}


def _storage(layout: RowLayout) -> dict[str, int]:
    """How rows are stored, as the cache record says it."""
    return {"latent": int(layout.latent), "summaries": int(layout.summaries), **layout.row_fields}
