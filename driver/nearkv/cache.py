"""KV caches: sequences of K and V rows per layer and head, in device memory, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.memory import RowLayout
from nearkv_sim.port import Operation

from .append import Appending, RowWriter
from .arguments import whole_number
from .attention import Answer, Call, Held, Options, table_addresses
from .codec import FORMATS
from .coded import Coded, Coder
from .cuts import Cuts
from .errors import (
    AccessError,
    ArgumentError,
    ClosedError,
    DeviceError,
    DtypeError,
    OutOfMemoryError,
)
from .eviction import Evictor, Watermark, least_important
from .heads import GivenHeads, HeadTables
from .jobs import Jobs
from .memory_use import CacheUse
from .quantise.formats import CacheFormat
from .quantise.rows import Quantised
from .recovery import FoundCache
from .reference import Partial
from .rows import Context, RowReader, Rows
from .sequences import Sequence, Sequences
from .stats import AttentionTotals
from .table import PageTable
from .tenant import Tenant


class KVCache:
    """Keys and values of many sequences; `Device.kv_cache` makes it.

    What it knows of them is a mirror: page tables, committed lengths and the directory lie on the device. A
    row exists once the line that commits it was written, after the row itself. One thread at a time may use
    a device's caches.

    Members
    -------
    layers, kv_heads, head_dim, value_dim, page_rows : the geometry.
    format : how K and V are stored, a `nearkv.quantise.CacheFormat`.
    dtype : torch.bfloat16 or torch.float16 where K and V are of it, and queries have to be; else None, and
        queries may be of either.

    Examples
    --------
    >>> import nearkv, torch
    >>> dev = nearkv.open("model")
    >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=4, dtype="fp16")
    >>> s = kv.sequence()
    >>> kv.append(s, layer=0, k=torch.zeros(2, 1, 4).half(), v=torch.ones(2, 1, 4).half())
    >>> kv.attend([s], layer=0, q=torch.zeros(1, 1, 4).half())
    tensor([[[1., 1., 1., 1.]]])
    >>> dev.close()
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
        self._jobs = Jobs(tenant, layout, self._heads, kv_heads, totals)
        self._reader = RowReader(tenant, layout)
        self._pages = tenant.pages(layout.page_bytes)
        self._writer = RowWriter(tenant, self._pages, layout, form, self._heads)
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
        self._evictor = Evictor(self._sequences, lambda: tenant.page_bytes)
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

    def close(self) -> None:
        """Free all sequences and the cache's own memory. A second call does nothing."""
        if self._closed:
            return
        self._sequences.close()
        self._heads.give()
        self._closed = True

    def abandon(self) -> None:
        """The device ends, and its memory with it: close without writing anything."""
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

    def free(self, sequence: Sequence) -> None:
        """End a sequence; its memory is used again."""
        self._open_sequences().free(sequence)

    def crop(self, sequence: Sequence, rows: int, layer: int | None = None) -> None:
        """Keep the first `rows` rows, in one layer or in all; a layer with fewer rows stays as it is.

        Raises
        ------
        ArgumentError : when `rows` is negative or more than any of the layers has, or among rows that were
            released.
        """
        self._cuts.crop(self._tables(sequence, layer), rows)

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
            ones would not be one run.
        """
        self._cuts.release(self._tables(sequence, layer), kept_rows, before)

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
                self._cuts.release([table], kept_rows, before)

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

    # Rows

    def append(
        self,
        sequence: Sequence | Many[Sequence],
        *,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> None:
        """Append rows to a sequence, or to several at once.

        Numbers are brought into the cache's format by `nearkv.quantise`; what saturates is counted in
        `Stats.saturated`. A scale per head and a codebook that were not given to `kv_cache` are found from a
        layer's first rows and then stay. Codes are taken as they are.

        Parameters
        ----------
        sequence : one sequence, or a list of different ones.
        layer : which layer.
        k, v : [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim]; for a list of sequences
            [batch, rows, ...]. Numbers of the cache's type (bf16 and fp16 caches) or of float32, bfloat16 or
            float16 (other formats); or codes, int16 for formats of 16 bits and uint8, one to a code, for
            others. Without v where V is part of the K row.
        k_scales, v_scales : with codes, the codes of their scales [rows, kv_heads, blocks], uint8, or int16
            (bfloat16, float16) for scale formats of 16 bits.

        Raises
        ------
        ShapeError, DtypeError, ArgumentError, UnknownHandleError, ClosedError, OutOfMemoryError : then
            nothing is appended.
        """
        if isinstance(sequence, Sequence):
            tables = [self._open_sequences().table(sequence, layer)]
            sequences: Many[Sequence] = [sequence]
            coded = self._coder.code(layer, k, v, k_scales, v_scales)
        else:
            sequences = sequence
            tables = self._open_sequences().batch(sequences, layer, distinct=True)
            coded = self._coder.code(layer, k, v, k_scales, v_scales, len(tables))
        self._append(tables, sequences, layer, coded)

    def read(self, sequence: Sequence, *, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the device holds: k [rows, kv_heads, head_dim] and v [rows, kv_heads, value_dim].
        Rows that were released are left out.

        Of the cache's type for bf16 and fp16; of other formats the numbers as float32, rounded once where a
        scale per head makes them longer. `read_codes` has all of it.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        k, v = self.read_codes(sequence, layer=layer)

        def numbers(rows: Quantised) -> torch.Tensor:
            kind = next((d for d, form in FORMATS.items() if form == rows.format.form), None)
            return rows.values().float() if kind is None else rows.codes.view(kind)

        own = numbers(k)
        return own, own[..., : self.value_dim] if v is None else numbers(v)

    def read_codes(self, sequence: Sequence, *, layer: int) -> tuple[Quantised, Quantised | None]:
        """The rows that the device holds, as codes with their scales; V is None where it is part of K. Rows
        that were released are left out.

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        held = self._reader.read(self._open_sequences().table(sequence, layer))
        heads = self._heads
        k = Quantised(
            self.format.k, held.k, held.k_scales, heads.scale("k", layer), 0, heads.codebook("k", layer)
        )
        if self.format.v is None or held.v is None:
            return k, None
        scale, book = heads.scale("v", layer), heads.codebook("v", layer)
        return k, Quantised(self.format.v, held.v, held.v_scales, scale, 0, book)

    def head_scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K's and V's scale per head of a layer, float32 [kv_heads]; None without, or before the first rows.

        V's is what `nearkv.finish` of a partial needs.
        """
        value = "k" if self.format.v is None else "v"
        return self._heads.scale("k", layer), self._heads.scale(value, layer)

    # Attention

    @overload
    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: Literal[False] = ...,
        partial: Literal[False] = ...,
        select_pages: None = ...,
        **options: Unpack[Options],
    ) -> torch.Tensor: ...

    @overload
    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: Literal[True],
        partial: Literal[False] = ...,
        select_pages: None = ...,
        **options: Unpack[Options],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: Literal[False] = ...,
        partial: Literal[True],
        select_pages: None = ...,
        **options: Unpack[Options],
    ) -> Partial: ...

    @overload
    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: bool = ...,
        partial: bool = ...,
        select_pages: int,
        **options: Unpack[Options],
    ) -> tuple[Any, ...]: ...

    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: bool = False,
        partial: bool = False,
        select_pages: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Attention of each sequence's queries over its rows in a layer: one doorbell for the whole batch.

        A row is seen where all that is said of rows allows it; rows that no query row sees are not read.
        Devices without the feature leave several query rows, and rows in more than one run, to the host,
        which works them out with `nearkv.reference` from rows read back over the link, as it does everything
        where there are no attention units (placement "host"); the bits are the same.

        Parameters
        ----------
        sequences : the batch; a sequence may stand in it several times.
        layer : which layer.
        q : [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim] of the cache's type, or of
            either (bf16, fp16) where it has none; query head h uses KV head h // (q_heads / kv_heads). Of
            several query rows the last one is the last row of the context, and each sees the rows up to its
            own.
        scale : multiplies q·k before the softmax; 1/sqrt(head_dim) when not given.
        softcap : scores become softcap * tanh(score / softcap), above 0 and at most 709.78.
        alibi_slopes : float32 [q_heads]; slope * (row's position - query row's position) is added to a score
            of natural base.
        window : rows that a query row sees at most, its own included.
        kept_rows : first rows of the context that a window leaves visible.
        rows : (begin, end), or one pair per sequence: only these rows are seen.
        visible : bool [batch, rows] or [batch, query_rows, rows], a column per row of the longest sequence:
            the rows that may be seen, apart from window and causal order. Not together with `rows`.
        tree : bool [query_rows, query_rows] or [batch, query_rows, query_rows]: the last rows are those of
            the query rows, which see them as it says, and all rows before; in place of the causal order. At
            most 255 query rows.
        query_positions : int64 [query_rows] or [batch, query_rows], with a tree: where query rows, and so
            their own rows, stand, for window and bias.
        sinks : float32 [q_heads], one more logit per query head, in the denominator alone.
        out_dtype : torch.float32 (the default), torch.bfloat16 or torch.float16.
        return_lse : return (result, log-sum-exp), the latter natural base, float32
            [batch, (query_rows,) q_heads].
        partial : return a `Partial`, for `nearkv.merge` and `nearkv.finish` (which takes V's scale per head,
            `head_scales`). A sink belongs to one of the partials that are merged.
        select_pages : attend to so many pages of each sequence and KV head alone, those whose summaries
            promise the highest scores, always the newest among them; needs a cache with summaries. What is
            returned is then a tuple, with the pages, bool [batch, kv_heads, pages], at its end.

        Returns
        -------
        Tensor [batch, (query_rows,) q_heads, value_dim]: +0, with a log-sum-exp of -Inf, where no row is
        seen.

        Raises
        ------
        ShapeError, DtypeError, ArgumentError, UnknownHandleError, ClosedError : before the device is asked;
            also for what the device has not.
        DeviceError, AccessError, DeviceTimeoutError : when it answers with a fault, or not at all.
        """
        tables = self._open_sequences().batch(sequences, layer)
        self._evictor.touch(sequences)
        lengths = [table.committed for table in tables]
        call = self._call(
            layer,
            q,
            tables,
            lengths,
            return_lse=return_lse,
            partial=partial,
            select_pages=select_pages,
            **options,
        )
        return self._answer(call, tables)

    def append_attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        q: torch.Tensor,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
        select_pages: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """`append` and then `attend` over what is there then, in one program: a layer's part of a token.

        Parameters
        ----------
        sequences : different sequences.
        k, v, k_scales, v_scales : as `append` has them, [batch, rows, kv_heads, dim], appended first.
        q : as `attend` has it.
        layer, select_pages, options : as `attend` has them. What the device leaves to the host is refused.

        Raises
        ------
        What `append` and `attend` raise. After a DeviceError or AccessError the rows are there, the result
        is not.
        """
        tables = self._open_sequences().batch(sequences, layer, distinct=True)
        known: set[str] = set(Options.__annotations__)
        if other := sorted(options.keys() - known):
            raise ArgumentError(
                f"append_attend has no option {', '.join(other)}: it returns the result alone; "
                "use append and then attend"
            )
        coded = self._coder.code(layer, k, v, k_scales, v_scales, len(tables))
        appending = self._start(tables, sequences, coded.rows)
        try:
            appended = self._writer.program(appending, coded, layer)
            lengths = [table.committed + coded.rows for table in tables]
            call = self._call(layer, q, tables, lengths, select_pages=select_pages, **options)
            if not call.on_units and self._tenant.config.units:
                raise ArgumentError(
                    "the host has to work this out (several query rows or gaps in visible, on this device): "
                    "use append and then attend"
                )
            answer = self._answer(call, appending.tables, appended)
        except (OutOfMemoryError, ArgumentError, DtypeError):
            self._writer.undo(appending, coded, layer)
            raise
        except (DeviceError, AccessError):
            self._appended(appending, sequences, layer, coded)
            raise
        self._appended(appending, sequences, layer, coded)
        assert not isinstance(answer, Partial)
        return answer

    # Below: checks, and the parts of the above

    def _open_sequences(self) -> Sequences:
        if self._closed:
            raise ClosedError("the KV cache is closed; make another one with kv_cache()")
        return self._sequences

    def _fork(self, sequence: Sequence, keep: Many[Sequence], rows: int | None = None) -> Sequence:
        """A fork, which is as important as what it was made from."""
        known = self._open_sequences()
        copy = self._evictor.with_room(lambda: known.fork(sequence, rows), keep)
        copy.priority = sequence.priority
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

    def _call(
        self,
        layer: int,
        q: torch.Tensor,
        tables: list[PageTable],
        lengths: list[int],
        *,
        return_lse: bool = False,
        partial: bool = False,
        select_pages: int | None = None,
        **options: Unpack[Options],
    ) -> Call:
        unknown = [name for name in options if name not in Options.__annotations__]
        if unknown:
            raise ArgumentError(
                f"attend() has no option {unknown[0]!r}; there are {', '.join(Options.__annotations__)}"
            )
        k_scale, v_scale = self.head_scales(layer)
        held = Held(
            layer=layer,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            page_rows=self.page_rows,
            form=self.format,
            dtype=self.dtype,
            summaries=self._layout.summaries,
            features=self._tenant.features,
            units=self._tenant.config.units,
            k_scale=k_scale,
            v_scale=v_scale,
            k_lut=self._heads.codebook("k", layer),
            v_lut=self._heads.codebook("v", layer),
        )
        return Call(
            q,
            np.array(lengths, np.int64),
            held,
            released=np.array([table.released for table in tables], np.int64),
            return_lse=return_lse,
            partial=partial,
            select_pages=select_pages,
            **options,
        )

    def _answer(self, call: Call, tables: list[PageTable], before: Many[Operation] = ()) -> Answer:
        """The device's answer, after `before`, or the host's where the device has none."""
        if call.on_units:
            return call.on_device(self._jobs, table_addresses(tables), before)

        def fetch(wanted: list[Rows]) -> list[Context]:
            fetched = self._reader.fetch(list(zip(tables, wanted, strict=True)), before)
            self._totals.add_fetched(
                cycles=fetched.cycles, lines=fetched.lines, jobs=len(tables) * self.kv_heads
            )
            return fetched.contexts

        return call.on_host(fetch)

    def _append(self, tables: list[PageTable], sequences: Many[Sequence], layer: int, coded: Coded) -> None:
        appending = self._start(tables, sequences, coded.rows)
        self._tenant.run(self._writer.program(appending, coded, layer))
        self._appended(appending, sequences, layer, coded)

    def _appended(self, appending: Appending, sequences: Many[Sequence], layer: int, coded: Coded) -> None:
        appending.done()
        self._totals.saturated += coded.saturated
        self._sequences.replace(sequences, layer, appending.tables)


def _dtype_of(form: CacheFormat) -> torch.dtype | None:
    """The torch type of both K and V, if there is one."""
    rows = {form.k.form, (form.v or form.k).form}
    return next((dtype for dtype, kind in FORMATS.items() if rows == {kind}), None)
