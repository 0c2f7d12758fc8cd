"""A cache's prefixes, the tenant's own and those that hosts share, and attention over their rows."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from typing import Any, Literal, Unpack, overload

import numpy as np
import torch
from nearkv_hw.abi import Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.port import Addresses, Operation

from . import host_attention
from .arguments import whole_number
from .attention import Answer, Call, Options
from .cache_memory import SequenceMemory
from .errors import AccessError, ArgumentError, DeviceError, OutOfMemoryError, StalePrefixError
from .library.client import SharedPrefix, SharedRows
from .prefixes import Prefix, tokens_of
from .reference import Partial, merge
from .rows import Context, Rows
from .sequences import Sequence
from .table import PageTable, table_addresses


class PrefixMemory(SequenceMemory):
    """`SequenceMemory` with prefixes; `KVCache` adds rows and attention."""

    @overload
    def publish(
        self, sequence: Sequence, tokens: object, *, salt: bytes = ..., shared: Literal[False] = ...
    ) -> Prefix: ...

    @overload
    def publish(
        self, sequence: Sequence, tokens: object, *, salt: bytes = ..., shared: Literal[True]
    ) -> SharedPrefix: ...

    def publish(
        self, sequence: Sequence, tokens: object, *, salt: bytes = b"", shared: bool = False
    ) -> Prefix | SharedPrefix:
        """Keep a sequence's first rows, those of these tokens, for sequences that begin alike.

        Nothing is copied: the prefix has the sequence's pages, too, in every layer, and outlives it. It goes
        when it is dropped, or when memory runs short (the one that was not used for longest first).

        Parameters
        ----------
        tokens : their ids, a list or a tensor of integers; one for each row, from the first one on.
        salt : what keeps prefixes apart that have the same tokens but other rows: the name of an adapter.
            Those of other caches and tenants are apart anyhow.
        shared : whether hosts of other tenants may have it, too, if they ask for shared ones and know tokens
            and salt; of a device that `nearkv serve --library` serves. Its rows are copied once, into the
            library's memory; it goes when that runs short and nobody uses it.

        Returns
        -------
        A handle; that of the prefix which is there already, where one has the same tokens and salt.

        Raises
        ------
        ArgumentError : when some layer has not so many rows, or some were released.
        DtypeError : for tokens that are no integers.
        OutOfMemoryError : when there is no room for its page tables, or for its rows in the library.

        Examples
        --------
        >>> import nearkv, torch
        >>> dev = nearkv.open("model")
        >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=4, dtype="fp16")
        >>> s = kv.sequence()
        >>> kv.append(s, layer=0, k=torch.ones(3, 1, 4).half(), v=torch.ones(3, 1, 4).half())
        >>> _ = kv.publish(s, [7, 8, 9])
        >>> other, rows = kv.sequence_like([7, 8, 5, 6])
        >>> rows, kv.length(other)
        (2, 2)
        >>> dev.close()
        """
        known = self._open_sequences()
        tables = known.tables(sequence)
        if shared:
            rows = len(tokens_of(tokens))
            self._check_whole(sequence, tables, rows)
            return self._shared.publish(
                lambda layer: self._held_rows(sequence, layer).at(np.arange(rows)), tokens, salt
            )
        published = self._evictor.with_room(
            lambda: self._prefixes.publish(sequence, tokens, salt), [sequence]
        )
        try:
            self._cuts.summarise(self._prefixes.tables_of(published))
        except (OutOfMemoryError, AccessError):
            self._prefixes.drop(published)
            raise
        return published

    @overload
    def find_prefix(
        self, tokens: object, *, salt: bytes = ..., shared: Literal[False] = ...
    ) -> tuple[Prefix | None, int]: ...

    @overload
    def find_prefix(
        self, tokens: object, *, salt: bytes = ..., shared: Literal[True]
    ) -> tuple[SharedPrefix | None, int]: ...

    def find_prefix(
        self, tokens: object, *, salt: bytes = b"", shared: bool = False
    ) -> tuple[Prefix | SharedPrefix | None, int]:
        """The published prefix that begins with most of these tokens, and with how many of them.

        Tokens are compared, not their hashes alone. (None, 0) where no prefix begins with the first.
        Prefixes are found by blocks of `page_rows` tokens: one that differs within its first block,
        and is not shorter than that, is passed over.

        Parameters
        ----------
        tokens, salt : as `publish` has them.
        shared : look among those that hosts share, not among the tenant's own.
        """
        self._open_sequences()
        if shared:
            return self._shared.find(tokens, salt)
        return self._prefixes.find(tokens, salt)

    def sequence_like(
        self,
        tokens: object,
        *,
        salt: bytes = b"",
        most_rows: int | None = None,
        priority: int | None = None,
        shared: bool = False,
    ) -> tuple[Sequence, int]:
        """A new sequence with the rows of the longest published prefix of these tokens; how many these are.

        Parameters
        ----------
        tokens, salt : as `publish` has them.
        most_rows : rows at most, `len(tokens) - 1` for a model that has to see the last token itself.
        priority : as `sequence` has it.
        shared : prefixes that hosts share count, too; of these whole pages are had. Such a sequence attends
            to the library's rows and its own, and ends with its host.

        Raises
        ------
        What `find_prefix` and `fork` raise.
        """
        most = 1 << 32 if most_rows is None else whole_number("most_rows", most_rows, 0, 1 << 32)
        prefix, rows = self.find_prefix(tokens, salt=salt)
        rows = min(rows, most)
        if shared:
            common, more = self.find_prefix(tokens, salt=salt, shared=True)
            more = min(more, most) // self.page_rows * self.page_rows
            if common is not None and more > rows:
                with suppress(StalePrefixError):  # it went meanwhile
                    return self.fork_prefix(common, more, priority=priority), more
        if prefix is None or not rows:
            return self.sequence(priority), 0
        return self.fork_prefix(prefix, rows, priority=priority), rows

    def fork_prefix(
        self, prefix: Prefix | SharedPrefix, rows: int | None = None, *, priority: int | None = None
    ) -> Sequence:
        """A new sequence with the rows of a prefix, or the first `rows` of them; of a shared one those of
        whole pages.

        Raises
        ------
        StalePrefixError : when the prefix is no longer there.
        ArgumentError, OutOfMemoryError, AccessError : as `fork`.
        """
        known = self._open_sequences()
        if isinstance(prefix, SharedPrefix):
            wanted = prefix.rows if rows is None else whole_number("rows", rows, 0, prefix.rows)
            return self._begin_shared(self._shared.hold(prefix, wanted), (), priority)
        tables = self._prefixes.tables_of(prefix)
        if rows is not None:
            whole_number("rows", rows, 0, prefix.rows)
        copy = self._evictor.with_room(lambda: known.fork(tables, rows), (), prefix)
        copy.priority = priority
        return self._made(copy, rows)

    def drop_prefix(self, prefix: Prefix) -> None:
        """Forget a prefix; its pages are free once no sequence has them. One that hosts share goes by itself.

        Raises
        ------
        StalePrefixError : when it is no longer there.
        """
        self._open_sequences()
        if isinstance(prefix, SharedPrefix):
            raise ArgumentError(
                "a shared prefix is the library's: it goes when memory runs short and nobody uses it"
            )
        self._prefixes.drop(prefix)

    def pin_prefix(self, prefix: Prefix, pinned: bool) -> None:
        """Have a prefix stay when memory runs short, or go like others again."""
        self._open_sequences()
        if pinned and prefix in self._prefixes:
            self._prefixes.pinned.add(prefix)
        else:
            self._prefixes.pinned.discard(prefix)

    def reclaim_prefix(self) -> bool:
        """Forget the prefix that was not used for longest and is not pinned; False when there is none."""
        self._open_sequences()
        return self._prefixes.reclaim()

    def read_prefix(self, prefix: Prefix, *, layer: int, rows: int) -> Context:
        """The first rows of a prefix in a layer, as codes.

        Raises
        ------
        StalePrefixError : when the prefix is no longer there.
        AccessError : when a line is poisoned.
        """
        self._open_sequences()
        table = self._prefixes.tables_of(prefix)[whole_number("layer", layer, 0, self.layers - 1)]
        return self._reader.read(table, np.arange(whole_number("rows", rows, 0, prefix.rows)))

    @property
    def prefixes(self) -> list[Prefix]:
        """The prefixes that are published, the newest first."""
        self._open_sequences()
        return list(self._prefixes)

    def attend_prefix(
        self,
        prefix: Prefix,
        *,
        layer: int,
        q: torch.Tensor,
        lengths: list[int],
        seen_rows: int,
        **options: Unpack[Options],
    ) -> Partial:
        """The partial of queries over the first rows of a prefix, for contexts that begin with it and go on
        elsewhere.

        Parameters
        ----------
        prefix : a handle.
        layer, options : as `attend` has them.
        q : of each context, as of each sequence.
        lengths : of the whole contexts.
        seen_rows : rows of the prefix that are seen, whatever options say.

        Raises
        ------
        StalePrefixError : when the prefix is no longer there.
        What `attend` raises.
        """
        whole_number("layer", layer, 0, self.layers - 1)
        table = self._prefixes.tables_of(prefix)[layer]
        whole_number("seen_rows", seen_rows, 0, prefix.rows)
        for length in lengths:
            whole_number("a length", length, seen_rows, 1 << 62)
        tables = [table] * len(lengths)
        call = self._calls.make(layer, q, tables, lengths, elsewhere=seen_rows, partial=True, **options)
        answer = self._answer(call, tables)
        assert isinstance(answer, Partial)
        return answer

    # Below: parts of the above, and of `KVCache`

    def _begin_shared(self, shared: SharedRows, keep: Many[Sequence], priority: int | None) -> Sequence:
        """A new sequence that begins with rows of the library."""
        known = self._open_sequences()
        try:
            sequence = self._evictor.with_room(lambda: known.beginning(shared.rows), keep)
        except BaseException:
            shared.let_go()
            raise
        sequence.priority, sequence.shared = priority, shared
        self._evictor.touch([sequence])
        return sequence

    def _check_whole(self, sequence: Sequence, tables: list[PageTable], rows: int) -> None:
        """ArgumentError when some layer lacks some of a sequence's first rows."""
        shortest = min(table.committed for table in tables)
        if not 1 <= rows <= shortest:
            raise ArgumentError(f"{rows} tokens: must be 1 to {shortest}, the rows that all layers have")
        for table in tables:
            begin, end = table.released
            elsewhere = 0 if sequence.shared is None else sequence.shared.seen[table.layer]
            if max(begin, elsewhere) < min(rows, end):
                raise ArgumentError(
                    f"rows {max(begin, elsewhere)} to {end} of layer {table.layer} were released; a "
                    "prefix has all its rows"
                )

    def _held_rows(self, sequence: Sequence, layer: int) -> Context:
        """The rows of a sequence that were not released, wherever they lie."""
        own = self._reader.read(self._open_sequences().table(sequence, layer))
        if sequence.shared is None or not sequence.shared.seen[layer]:
            return own
        return self._shared.read(sequence.shared, layer).then(own)

    def _attend_shared(
        self,
        sequences: Many[Sequence],
        layer: int,
        q: torch.Tensor,
        *,
        return_lse: bool = False,
        partial: bool = False,
        select_pages: int | None = None,
        out_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Answer:
        """`attend` where sequences begin with rows of the library: its partial of these, and of their own
        rows the tenant's."""
        tables = self._open_sequences().batch(sequences, layer)
        lengths = [table.committed for table in tables]
        if select_pages is not None:
            raise ArgumentError(
                "select_pages is for sequences whose pages are all the tenant's; leave shared"
            )
        checks: dict[str, Any] = {"partial": partial, "return_lse": return_lse, "out_dtype": out_dtype}
        self._calls.make(layer, q, tables, lengths, **checks, **options)
        own = self._answer(self._calls.make(layer, q, tables, lengths, partial=True, **options), tables)
        assert isinstance(own, Partial)
        uses = [sequence.shared for sequence in sequences]
        merged = merge(own, self._shared.attend(uses, lengths, layer=layer, q=q, **options))
        if partial:
            return merged
        out = host_attention.finish(merged, out_dtype, self._calls.head_scales(layer)[1])
        return (out, host_attention.log_sum_exp(merged)) if return_lse else out

    def _answer(self, call: Call, tables: list[PageTable], before: Many[Operation] = ()) -> Answer:
        """The device's answer, after `before`, or the host's where the device has none."""
        if call.on_units:
            with self._forgetting_poison(tables):
                return call.on_device(self._jobs, table_addresses(tables), before)

        def fetch(wanted: list[Rows]) -> list[Context]:
            fetched = self._reader.fetch(list(zip(tables, wanted, strict=True)), before)
            self._totals.add_fetched(
                cycles=fetched.cycles, lines=fetched.lines, jobs=len(tables) * self.kv_heads
            )
            return fetched.contexts

        with self._forgetting_poison(tables):
            return call.on_host(fetch)

    @contextmanager
    def _forgetting_poison(self, pages: Many[PageTable] | Many[Addresses]) -> Iterator[None]:
        """A prefix with a page whose content is lost is found no more."""
        try:
            yield
        except (DeviceError, AccessError) as error:
            self._forget_poison(error, pages)
            raise

    def _forget_poison(
        self, error: DeviceError | AccessError, pages: Many[PageTable] | Many[Addresses]
    ) -> None:
        if isinstance(error, AccessError):
            if error.poison:
                within = error.address % EXTENT_BYTES % self._layout.page_bytes
                named = [p.addresses() if isinstance(p, PageTable) else p.ravel() for p in pages]
                self._prefixes.forget_pages(
                    {error.address - within}.intersection(np.concatenate(named).tolist())
                )
        elif error.status is Status.POISON and error.sequence is not None:
            own = pages[error.sequence]
            known = own.page_addresses(0, own.pages) if isinstance(own, PageTable) else own
            self._prefixes.forget_pages(set(known[:, error.detail : error.detail + 1].ravel().tolist()))
