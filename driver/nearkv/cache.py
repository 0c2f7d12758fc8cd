"""KV caches: sequences of K and V rows per layer and head, in device memory, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.memory import RowLayout
from nearkv_sim.port import Fence, Operation

from .append import Appending
from .arguments import tensor_of, whole_number
from .attention import Answer, Call, Options, table_addresses
from .codec import FORMATS, one
from .errors import (
    AccessError,
    ArgumentError,
    ClosedError,
    DeviceError,
    OutOfMemoryError,
    ShapeError,
)
from .jobs import Jobs
from .reference import Partial
from .rows import Context, RowReader, Rows
from .sequences import Sequence, Sequences
from .stats import AttentionTotals
from .table import PageTable, RowAddresses
from .tenant import Tenant


class KVCache:
    """Keys and values of many sequences; `Device.kv_cache` makes it.

    What it knows of them is a mirror: page tables, committed lengths and the directory lie on the device. A
    row exists once the line that commits it was written, after the row itself. One thread at a time may use
    a device's caches.

    Members
    -------
    layers, kv_heads, head_dim, value_dim, page_rows : the geometry.
    dtype : torch.bfloat16 or torch.float16, of K, V and queries.

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
        *,
        layers: int,
        kv_heads: int,
        dtype: torch.dtype,
    ) -> None:
        self.layers = layers
        self.kv_heads = kv_heads
        self.head_dim = layout.head_dim
        self.value_dim = layout.value_dim
        self.page_rows = layout.page_rows
        self.dtype = dtype
        self._tenant = tenant
        self._layout = layout
        self._addresses = RowAddresses(layout)
        self._totals = totals
        self._jobs = Jobs(tenant, layout, dtype, kv_heads, totals)
        self._reader = RowReader(tenant, layout, dtype)
        self._pages = tenant.pages(layout.page_bytes)
        self._sequences = Sequences(
            tenant,
            self._pages,
            layout,
            element_code=FORMATS[dtype].code,
            layers=layers,
            kv_heads=kv_heads,
        )
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
    def closed(self) -> bool:
        """Whether the cache or its device was closed."""
        return self._closed

    def close(self) -> None:
        """Free all sequences and the cache's own memory. A second call does nothing."""
        if self._closed:
            return
        self._sequences.close()
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
            f"{FORMATS[self.dtype].name}, pages of {self.page_rows} rows, {state}>"
        )

    # Sequences

    def sequence(self) -> Sequence:
        """A new, empty sequence.

        Raises
        ------
        OutOfMemoryError : when there is no room for its page tables.
        """
        return self._open_sequences().new()

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
        ArgumentError : when `rows` is negative or more than any of the layers has.
        """
        known = self._open_sequences()
        tables = known.tables(sequence) if layer is None else [known.table(sequence, layer)]
        whole_number("rows", rows, 0, max(table.committed for table in tables))
        kept = -(-rows // self.page_rows)
        cut = [table for table in tables if table.committed > rows]
        program: list[Operation] = [self._tenant.write(one(t.address), t.header(rows)) for t in cut]
        program.append(Fence())
        dropped = []
        for table in cut:
            pages, table.committed = table.pages, rows
            if pages > kept:
                dropped.append(table.page_addresses(kept, pages).reshape(-1))
                table.drop(kept)
                program.append(self._tenant.write(*table.entry_lines(kept, pages)))
        if cut:
            self._tenant.run(program)
        for page_addresses in dropped:
            self._pages.give(page_addresses)

    def reset(self) -> None:
        """Forget all rows of all sequences; the sequences stay."""
        for sequence in self._open_sequences():
            self.crop(sequence, 0)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with a copy of all rows, for beams and shared prompts.

        Raises
        ------
        OutOfMemoryError, AccessError : when there is no room for the copy, or a line is poisoned; there is no
            new sequence then.
        """
        tables = self._open_sequences().tables(sequence)
        copy = self.sequence()
        try:
            for layer, table in enumerate(tables):
                if table.committed:
                    k, v = self.read(sequence, layer=layer)
                    self.append(copy, layer=layer, k=k, v=v)
        except (OutOfMemoryError, AccessError):
            self.free(copy)
            raise
        return copy

    # Rows

    def append(
        self, sequence: Sequence | Many[Sequence], *, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Append rows to a sequence, or to several at once.

        Parameters
        ----------
        sequence : one sequence, or a list of different ones.
        layer : which layer.
        k, v : [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim] of the cache's type; for a list of
            sequences [batch, rows, ...].

        Raises
        ------
        ShapeError, DtypeError, ArgumentError, UnknownHandleError, ClosedError, OutOfMemoryError : then
            nothing is appended.
        """
        if isinstance(sequence, Sequence):
            tables = [self._open_sequences().table(sequence, layer)]
            k, v = self._rows_of(k, v)
            k, v = k.unsqueeze(0), v.unsqueeze(0)
            sequences: Many[Sequence] = [sequence]
        else:
            sequences = sequence
            tables = self._open_sequences().batch(sequences, layer, distinct=True)
            k, v = self._rows_of(k, v, len(tables))
        appending = self._appending(tables, k.shape[1])
        self._tenant.run([*appending.writes(k, v), Fence(), *appending.commits()])
        self._appended(appending, sequences, layer)

    def read(self, sequence: Sequence, *, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that the device holds: k [rows, kv_heads, head_dim] and v [rows, kv_heads, value_dim].

        Raises
        ------
        AccessError : when a line is poisoned.
        """
        return self._reader.read(self._open_sequences().table(sequence, layer))

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
        **options: Unpack[Options],
    ) -> Partial: ...

    def attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: bool = False,
        partial: bool = False,
        **options: Unpack[Options],
    ) -> Answer:
        """Attention of each sequence's queries over its rows in a layer: one doorbell for the whole batch.

        Several query rows, and a `visible` that is not one range of rows per sequence, are worked on the host
        with `nearkv.reference` from rows read back over the link, and so is everything on a device without
        attention units (placement "host"); the bits are the same. Rows that no query row sees are not read.

        Parameters
        ----------
        sequences : the batch; a sequence may stand in it several times.
        layer : which layer.
        q : [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim] of the cache's type; query
            head h uses KV head h // (q_heads / kv_heads). Of several query rows the last one is the last row
            of the context, and each sees the rows up to its own.
        scale : multiplies q·k before the softmax; 1/sqrt(head_dim) when not given.
        window : rows that a query row sees at most, its own included.
        rows : (begin, end), or one pair per sequence: only these rows are seen.
        visible : bool [batch, rows] or [batch, query_rows, rows], a column per row of the longest sequence:
            the rows that may be seen, apart from window and causal order. Not together with `rows`.
        sinks : float32 [q_heads], one more logit per query head, in the denominator alone.
        out_dtype : torch.float32 (the default), torch.bfloat16 or torch.float16.
        return_lse : return (result, log-sum-exp), the latter natural base, float32
            [batch, (query_rows,) q_heads].
        partial : return a `Partial`, for `nearkv.merge` and `nearkv.finish`. A sink belongs to one of the
            partials that are merged.

        Returns
        -------
        Tensor [batch, (query_rows,) q_heads, value_dim]: +0, with a log-sum-exp of -Inf, where no row is
        seen.

        Raises
        ------
        ShapeError, DtypeError, ArgumentError, UnknownHandleError, ClosedError : before the device is asked.
        DeviceError, AccessError, DeviceTimeoutError : when it answers with a fault, or not at all.
        """
        tables = self._open_sequences().batch(sequences, layer)
        call = self._call(q, [t.committed for t in tables], return_lse=return_lse, partial=partial, **options)
        return self._answer(call, tables)

    def append_attend(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """`append` and then `attend` over what is there then, in one program: a layer's part of a token.

        Parameters
        ----------
        sequences : different sequences.
        k, v : [batch, rows, kv_heads, dim], appended first.
        q : [batch, q_heads, head_dim], of the last row.
        layer, options : as `attend` has them; `visible` must be one range of rows per sequence.

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
        k, v = self._rows_of(k, v, len(tables))
        call = self._call(q, [table.committed + k.shape[1] for table in tables], **options)
        if call.bounds is None:
            raise ArgumentError("several query rows or gaps in visible: use append and then attend")
        appending = self._appending(tables, k.shape[1])
        appended: list[Operation] = [*appending.writes(k, v), Fence(), *appending.commits()]
        try:
            answer = self._answer(call, appending.tables, appended)
        except OutOfMemoryError:
            appending.undo()
            raise
        except (DeviceError, AccessError):
            self._appended(appending, sequences, layer)
            raise
        self._appended(appending, sequences, layer)
        assert isinstance(answer, torch.Tensor)
        return answer

    # Below: checks, and the parts of the above

    def _open_sequences(self) -> Sequences:
        if self._closed:
            raise ClosedError("the KV cache is closed; make another one with kv_cache()")
        return self._sequences

    def _rows_of(self, k: Any, v: Any, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        leading: tuple[int | str, ...] = ("rows",) if batch is None else (batch, "rows")
        k = tensor_of("k", k, (*leading, self.kv_heads, self.head_dim), self.dtype)
        v = tensor_of("v", v, (*leading, self.kv_heads, self.value_dim), self.dtype)
        rows = len(leading) - 1
        if k.shape[rows] != v.shape[rows]:
            raise ShapeError(f"k has {k.shape[rows]} rows and v has {v.shape[rows]}, must have the same")
        return k, v

    def _call(
        self,
        q: torch.Tensor,
        lengths: list[int],
        *,
        return_lse: bool = False,
        partial: bool = False,
        **options: Unpack[Options],
    ) -> Call:
        unknown = [name for name in options if name not in Options.__annotations__]
        if unknown:
            raise ArgumentError(
                f"attend() has no option {unknown[0]!r}; there are {', '.join(Options.__annotations__)}"
            )
        return Call(
            q,
            np.array(lengths, np.int64),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            return_lse=return_lse,
            partial=partial,
            **options,
        )

    def _answer(self, call: Call, tables: list[PageTable], before: Many[Operation] = ()) -> Answer:
        """The device's answer, after `before`, or the host's where the device has none."""
        if call.bounds is not None and self._tenant.config.units:
            return call.on_device(self._jobs, table_addresses(tables), before)

        def fetch(wanted: list[Rows]) -> list[Context]:
            fetched = self._reader.fetch(list(zip(tables, wanted, strict=True)), before)
            self._totals.add_fetched(
                cycles=fetched.cycles, lines=fetched.lines, jobs=len(tables) * self.kv_heads
            )
            return fetched.contexts

        return call.on_host(fetch)

    def _appending(self, tables: list[PageTable], rows: int) -> Appending:
        directory = self._sequences.directory
        return Appending(self._tenant, self._pages, self._layout, self._addresses, directory, tables, rows)

    def _appended(self, appending: Appending, sequences: Many[Sequence], layer: int) -> None:
        appending.done()
        self._sequences.replace(sequences, layer, appending.tables)
