"""What a KV cache is apart from its rows: its life, its sequences, and the memory that they have."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, Self

import torch
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import RowLayout

from .append import Appending, RowWriter
from .arguments import whole_number
from .calls import Calls
from .codec import FORMATS
from .coded import Coder
from .cuts import Cuts
from .errors import (
    AccessError,
    ArgumentError,
    ClosedError,
    OutOfMemoryError,
)
from .eviction import Evictor, Watermark, least_important
from .heads import GivenHeads, HeadTables
from .jobs import Jobs
from .library.client import SharedPrefixes
from .memory_use import CacheUse
from .prefixes import Prefixes
from .quantise.formats import CacheFormat
from .recovery import FoundCache
from .rows import RowReader
from .sequences import Sequence, Sequences
from .stats import AttentionTotals
from .step import Steps
from .table import PageTable
from .tenant import Tenant


class SequenceMemory:
    """The sequences of a cache and what becomes of their pages; `KVCache` adds rows and attention.

    Parameters
    ----------
    tenant : in whose memory the cache lies.
    totals : where the device's figures are counted.
    layout, form, heads : how rows are stored, and what their heads have in common.
    found : the cache as an earlier session left it; by default an empty one is made.

    Raises
    ------
    OutOfMemoryError : when there is no room for its records.
    """

    def __init__(
        self,
        tenant: Tenant,
        totals: AttentionTotals,
        layout: RowLayout,
        form: CacheFormat,
        heads: GivenHeads,
        found: FoundCache | None = None,
    ) -> None:
        layers, kv_heads = heads.layers, heads.kv_heads
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_dim = layout.head_dim
        self.value_dim = layout.value_dim
        self.page_rows = layout.page_rows
        self.format = form
        self.dtype = _dtype_of(form)
        self._tenant = tenant
        self._layout = layout
        self._totals = totals
        at = None if found is None else (found.fields["head_scales"], found.fields["codebooks"])
        self._heads = HeadTables(tenant, heads, at)
        self._coder = Coder(form, kv_heads, layout.head_dim, layout.value_dim, self._heads)
        self._calls = Calls(tenant, layout, form, self._heads, kv_heads, self.dtype)
        self._jobs = Jobs(tenant, layout, self._heads, kv_heads, totals)
        self._reader = RowReader(tenant, layout)
        self._pages = tenant.pages(layout.page_bytes)
        self._writer = RowWriter(tenant, self._pages, layout, form, self._heads)
        self._steps = Steps(
            tenant, self._pages, self._writer.addresses, self._jobs, summaries=layout.summaries
        )
        self._cuts = Cuts(tenant, self._pages, layout, self._writer, self._reader)
        self._sequences = Sequences(
            tenant,
            self._pages,
            layout,
            layers=layers,
            kv_heads=kv_heads,
            form=form,
            tables={"head_scales": self._heads.head_scales, "codebooks": self._heads.codebooks},
            found=found,
        )
        if found is not None:
            self._cuts.summarise(found.tables)
        self._prefixes = Prefixes(
            tenant,
            self._sequences,
            parameters=repr((layers, kv_heads, form, layout)).encode(),
            block_tokens=layout.page_rows,
            found=() if found is None else found.prefixes,
        )
        self._shared = SharedPrefixes(tenant, layout, form, layers, kv_heads, self._heads)
        self._evictor = Evictor(tenant, self._sequences, self._prefixes)
        self._closed = False

    # Life

    @property
    def device_config(self) -> DeviceConfig:
        """What the device says that it is made of."""
        return self._tenant.config

    @property
    def device_kind(self) -> str:
        """How the device runs: "model", "rtl", "cocotb", ..."""
        return self._tenant.device_kind

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of one KV head takes on the device: codes and scales, at their pitches."""
        return self._layout.row_bytes

    @property
    def closed(self) -> bool:
        """Whether the cache or its device was closed."""
        return self._closed

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._layout.page_bytes

    @property
    def page_tables(self) -> list[PageTable]:
        """All page tables of sequences and prefixes."""
        known = self._open_sequences()
        return [*self._prefixes.tables, *(table for sequence in known for table in known.tables(sequence))]

    def belongs_to(self, tenant: Tenant) -> bool:
        """Whether the cache lies in the memory of a session of a tenant."""
        return self._tenant is tenant

    def address_of(self, sequence: Sequence, *, layer: int, row: int, kv_head: int = 0) -> int:
        """The device address of the line that holds a row's first K codes.

        Raises
        ------
        ArgumentError : for a row that there is not, or that was released.
        """
        table = self._open_sequences().table(sequence, layer)
        whole_number("row", row, 0, table.committed - 1)
        whole_number("kv_head", kv_head, 0, self.kv_heads - 1)
        if table.released[0] <= row < table.released[1]:
            raise ArgumentError(f"row={row}: it was released")
        page, within = divmod(row, self.page_rows)
        base = int(table.page_addresses(page, page + 1)[kv_head, 0])
        return (base + self._layout.k_offset(within)) // LINE_BYTES * LINE_BYTES

    def close(self) -> None:
        """Free all sequences and the cache's own memory. A second call does nothing.

        Extents of the tenant that hold nothing then go back to the device, which writes zeros over them
        before anybody has them again.
        """
        if self._closed:
            return
        self._prefixes.close()
        self._sequences.close()
        self._heads.give()
        self._closed = True
        self._tenant.release_free()

    def abandon(self) -> None:
        """The device ends, and its memory with it: close without writing anything."""
        for sequence in self._sequences:
            if sequence.shared is not None:
                sequence.shared.let_go()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(list(self._sequences))} sequences"
        return (
            f"<KV cache of {self.layers} layers, {self.kv_heads} KV heads, {self.head_dim}/{self.value_dim} "
            f"{self.format.name}, pages of {self.page_rows} rows, {state}>"
        )

    # Sequences

    def sequence(self, priority: int | None = None) -> Sequence:
        """A new, empty sequence.

        Parameters
        ----------
        priority : None for a sequence that stays until it is freed; a number for one that may go when memory
            runs short (`keep_below`), the lowest first. `Sequence.priority` changes it.

        Raises
        ------
        OutOfMemoryError : when there is no room for its page tables.
        """
        sequence = self._evictor.with_room(self._open_sequences().new, ())
        sequence.priority = priority
        self._evictor.touch([sequence])
        return sequence

    def keep_below(
        self,
        high_bytes: int | None,
        low_bytes: int | None = None,
        *,
        order: Callable[[Sequence], Any] = least_important,
        on_evict: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """Have sequences that have a priority end when the tenant's pages would be more than `high_bytes`.

        They go one after the other until `low_bytes` (`high_bytes` if not given) are left, never those of the
        call that needs the room. Whatever the marks, they go when there is no memory left. A handle of one
        that went raises EvictedError.

        Parameters
        ----------
        high_bytes, low_bytes : of pages of all caches of the tenant; None for no mark.
        order : a key of sequences, those with the least go first; by default priority, then last use.
        on_evict : called with each one before it goes.

        Raises
        ------
        ArgumentError : for marks that are none, or in the wrong order.
        """
        self._evictor.watermark = Watermark(high_bytes, low_bytes, order, on_evict)

    def memory(self) -> CacheUse:
        """What the cache has on the device, and what the driver keeps of it on the host."""
        tables = [table for sequence in self._open_sequences() for table in self._sequences.tables(sequence)]
        pages = sum(len(table.held_pages) * table.heads for table in tables)
        return CacheUse(
            sequences=len(tables) // self.layers,
            rows=sum(table.rows for table in tables),
            pages=pages,
            page_bytes=pages * self._layout.page_bytes,
            table_bytes=sum(table.size_bytes for table in tables),
            host_bytes=sum(table.host_bytes for table in tables),
            evicted=self._evictor.evicted,
            prefixes=len(self._prefixes),
            prefix_hits=self._prefixes.hits,
            prefix_misses=self._prefixes.misses,
            prefixes_reclaimed=self._prefixes.reclaimed,
        )

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that there are, by slot."""
        return list(self._open_sequences())

    def sequence_at(self, slot: int) -> Sequence:
        """The sequence in a slot of the directory.

        Raises
        ------
        UnknownHandleError : when there is none.
        """
        return self._open_sequences().at(slot)

    def length(self, sequence: Sequence, layer: int = 0) -> int:
        """Committed rows of a sequence in a layer."""
        return self._open_sequences().table(sequence, layer).committed

    def released(self, sequence: Sequence, layer: int = 0) -> tuple[int, int]:
        """(begin, end) of a sequence's rows in a layer that were released: nobody sees them, and `read`
        leaves them out."""
        table = self._open_sequences().table(sequence, layer)
        shared = 0 if sequence.shared is None else sequence.shared.seen[layer]
        begin, end = table.released
        return (max(begin, shared), end) if shared < end else (0, 0)

    def free(self, sequence: Sequence) -> None:
        """End a sequence; its memory is used again."""
        self._open_sequences().free(sequence)

    def crop(self, sequence: Sequence, rows: int, layer: int | None = None) -> None:
        """Keep the first `rows` rows, in one layer or in all; a layer with fewer rows stays as it is.

        Raises
        ------
        ArgumentError : when `rows` is negative or more than any of the layers has, or among rows that were
            released, or that are a shared prefix's.
        """
        tables, shared = self._tables(sequence, layer), sequence.shared
        if shared is not None and isinstance(rows, int) and 0 < rows < shared.rows:
            raise ArgumentError(
                f"rows={rows}: the first {shared.rows} rows are a shared prefix's, which stays whole; keep "
                "so many, or none"
            )
        self._cuts.crop(tables, rows)
        if shared is not None and not rows:
            for table in tables:
                shared.seen[table.layer] = 0

    def release(
        self, sequence: Sequence, before: int, *, kept_rows: int = 0, layer: int | None = None
    ) -> None:
        """Forget the rows before row number `before`, in one layer or in all, for windows that leave them.

        The others keep their numbers. Nobody sees the released rows again, whatever a call says; pages in
        which there are no other rows are free.

        Parameters
        ----------
        kept_rows : first rows of the context that stay.

        Raises
        ------
        ArgumentError : when a layer has fewer rows, or other rows were released before so that the released
            ones would not be one run; or for a part of a shared prefix's rows.
        """
        self._release(sequence, self._tables(sequence, layer), kept_rows, before)

    def slide(self, sequence: Sequence, window: int, *, kept_rows: int = 0, layer: int | None = None) -> None:
        """Release the pages that a window of so many rows has left, from the last row on.

        Parameters
        ----------
        window, kept_rows : as `attend` has them.

        Raises
        ------
        ArgumentError : as `release`.
        """
        whole_number("window", window, 1, 1 << 62)
        whole_number("kept_rows", kept_rows, 0, 1 << 62)
        for table in self._tables(sequence, layer):
            before = max(table.committed - window, 0) // self.page_rows * self.page_rows
            if before > max(kept_rows, table.released[1]):
                self._release(sequence, [table], kept_rows, before)

    def reset(self) -> None:
        """Forget all rows of all sequences; the sequences stay."""
        for sequence in self._open_sequences():
            self.crop(sequence, 0)

    def fork(self, sequence: Sequence, rows: int | None = None) -> Sequence:
        """A new sequence with the same rows, or the first `rows` of them, for beams and shared prompts.

        The rows are not copied: both have the same pages, and who appends to one that is not full first gets
        a copy of it.

        Raises
        ------
        ArgumentError : as `crop`, of `rows`.
        OutOfMemoryError, AccessError : when there is no room for the page tables, or a line is poisoned;
            there is no new sequence then.
        """
        tables = self._open_sequences().tables(sequence)
        if rows is not None:
            self._cuts.check(tables, rows)
        return self._fork(sequence, [sequence], rows)

    def select(self, sequences: Many[Sequence], indices: Many[int]) -> list[Sequence]:
        """The sequences at these places of a list, as a beam search chooses among its beams.

        One that is chosen keeps its handle, where it stands again it is forked; those that are not chosen
        are freed.

        Raises
        ------
        ArgumentError : for a place that is none, or a list that names a sequence twice.
        OutOfMemoryError : when there is no room for a fork; all is as it was then.
        """
        known = self._open_sequences()
        known.batch(sequences, 0, distinct=True)
        for index in indices:
            whole_number("index", index, 0, len(sequences) - 1)
        chosen: list[Sequence] = []
        forks: list[Sequence] = []
        once: set[int] = set()
        try:
            for index in indices:
                if index in once:
                    forks.append(self._fork(sequences[index], sequences))
                chosen.append(forks[-1] if index in once else sequences[index])
                once.add(index)
        except OutOfMemoryError:
            for fork in forks:
                known.free(fork)
            raise
        for index, sequence in enumerate(sequences):
            if index not in once:
                known.free(sequence)
        return chosen

    # Below: parts of the above, and of `KVCache`

    def _open_sequences(self) -> Sequences:
        if self._closed:
            raise ClosedError("the KV cache is closed; make another one with kv_cache()")
        return self._sequences

    def _fork(self, sequence: Sequence, keep: Many[Sequence], rows: int | None = None) -> Sequence:
        """A fork, which is as important as what it was made from."""
        known = self._open_sequences()
        shared = None if sequence.shared is None else sequence.shared.another()
        try:
            copy = self._evictor.with_room(lambda: known.fork(known.tables(sequence), rows), keep)
        except BaseException:
            if shared is not None:
                shared.let_go()
            raise
        copy.priority, copy.shared = sequence.priority, shared
        return self._made(copy, rows)

    def _release(self, sequence: Sequence, tables: list[PageTable], kept_rows: int, before: int) -> None:
        """Release rows of tables of a sequence, some of which may lie in the library."""
        shared = sequence.shared
        if shared is None or not any(shared.seen[table.layer] for table in tables):
            self._cuts.release(tables, kept_rows, before)
            return
        if before < shared.rows or kept_rows > shared.rows:
            raise ArgumentError(
                f"rows {kept_rows} to {before}: the first {shared.rows} are a shared prefix's; release all "
                "rows from one of them to its end and what follows"
            )
        self._cuts.release(tables, 0, before)
        for table in tables:
            shared.seen[table.layer] = min(shared.seen[table.layer], kept_rows)

    def _made(self, copy: Sequence, rows: int | None) -> Sequence:
        """A fork of all or some rows, with a summary of its last page."""
        known = self._open_sequences()
        self._evictor.touch([copy])
        if rows is not None:
            try:
                self._cuts.summarise(known.tables(copy))
            except (OutOfMemoryError, AccessError):
                known.free(copy)
                raise
        return copy

    def _start(self, tables: list[PageTable], sequences: Many[Sequence], rows: int) -> Appending:
        """Take what so many rows more of each sequence need, from others if need be."""
        new = [-(-(table.committed + rows) // self.page_rows) - table.pages for table in tables]
        self._evictor.make_room(sum(new) * self.kv_heads * self._layout.page_bytes, sequences)
        started = self._evictor.with_room(
            lambda: self._writer.start(self._sequences.directory, tables, rows), sequences
        )
        self._evictor.touch(sequences)
        return started

    def _tables(self, sequence: Sequence, layer: int | None) -> list[PageTable]:
        """The page tables of a sequence, in one layer or in all."""
        known = self._open_sequences()
        return known.tables(sequence) if layer is None else [known.table(sequence, layer)]


def _dtype_of(form: CacheFormat) -> torch.dtype | None:
    """The torch type of both K and V, if there is one."""
    rows = {form.k.form, (form.v or form.k).form}
    return next((dtype for dtype, kind in FORMATS.items() if rows == {kind}), None)
