"""KV caches: K and V rows of many sequences per layer and head, in device memory, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Literal, Unpack, overload

import torch
from nearkv_sim.port import Operation

from .append import Appending
from .attention import Answer, Options
from .cache_prefixes import PrefixMemory
from .calls import OPTIONS
from .codec import FORMATS
from .coded import Coded
from .errors import (
    AccessError,
    ArgumentError,
    DeviceError,
    DtypeError,
    OutOfMemoryError,
)
from .quantise.rows import Quantised
from .reference import Partial
from .sequences import Sequence
from .streams import Event, Pending, Stream
from .table import table_addresses


class KVCache(PrefixMemory):
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
        self._append_some(sequence, layer, k, v, k_scales, v_scales, self._tenant.run)

    def append_async(
        self,
        sequence: Sequence | Many[Sequence],
        *,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
        stream: Stream | None = None,
    ) -> Event:
        """`append` that does not wait for the link: rows travel with the next call that does.

        Calls that come later have the rows, in any stream, and `length` counts them. A host that dies may
        lose them until the event is waited for.

        Parameters
        ----------
        sequence, layer, k, v, k_scales, v_scales : as `append` has them.
        stream : a stream of the device; by default one that all of the tenant's caches share.

        Returns
        -------
        The event after it in the stream.

        Raises
        ------
        What `append` raises; then nothing is appended.
        """
        stream = stream or self._tenant.stream
        stream.begin()
        self._append_some(sequence, layer, k, v, k_scales, v_scales, self._tenant.enqueue)
        return stream.record()

    def _append_some(
        self,
        sequence: Sequence | Many[Sequence],
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None,
        k_scales: torch.Tensor | None,
        v_scales: torch.Tensor | None,
        carry_out: Callable[[list[Operation]], object],
    ) -> None:
        if isinstance(sequence, Sequence):
            tables = [self._open_sequences().table(sequence, layer)]
            sequences: Many[Sequence] = [sequence]
            coded = self._coder.code(layer, k, v, k_scales, v_scales)
        else:
            sequences = sequence
            tables = self._open_sequences().batch(sequences, layer, distinct=True)
            coded = self._coder.code(layer, k, v, k_scales, v_scales, len(tables))
        appending = self._start(tables, sequences, coded.rows)
        carry_out(self._writer.program(appending, coded, layer))
        self._appended(appending, sequences, layer, coded)

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
        table = self._open_sequences().table(sequence, layer)
        with self._forgetting_poison([table]):
            held = self._held_rows(sequence, layer)
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
        return self._calls.head_scales(layer)

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
        query_positions : int64 [query_rows] or [batch, query_rows]. With a tree: where query rows, and so
            their own rows, stand, for window and bias. With `visible` for each query row, and no window:
            where they stand, for the bias, and they need be none of the rows: `visible` is all that says
            what they see.
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
        if any(sequence.shared is not None for sequence in sequences):
            return self._attend_shared(
                sequences,
                layer,
                q,
                return_lse=return_lse,
                partial=partial,
                select_pages=select_pages,
                **options,
            )
        call = self._calls.make(
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

    def attend_async(
        self,
        sequences: Many[Sequence],
        *,
        layer: int,
        q: torch.Tensor,
        return_lse: bool = False,
        partial: bool = False,
        select_pages: int | None = None,
        stream: Stream | None = None,
        **options: Unpack[Options],
    ) -> Pending[Any]:
        """`attend` that does not wait: the device works while the host goes on.

        What becomes of the sequences afterwards, appends, crops and their end included, has no part in the
        result. What the device leaves to the host is worked out at once.

        Parameters
        ----------
        sequences, layer, q, return_lse, partial, select_pages, options : as `attend` has them.
        stream : a stream of the device; by default one that all of the tenant's caches share.

        Returns
        -------
        What `attend` returns, once its `result` is asked for, which raises what the device answered.

        Raises
        ------
        What `attend` raises before the device is asked.

        Examples
        --------
        >>> import nearkv, torch
        >>> dev = nearkv.open("model")
        >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=4, dtype="fp16")
        >>> s = kv.sequence()
        >>> row = torch.ones(1, 1, 4).half()
        >>> _ = kv.append_async(s, layer=0, k=row, v=row)
        >>> first = kv.attend_async([s], layer=0, q=row)
        >>> _ = kv.append_async(s, layer=0, k=row, v=3 * row)
        >>> second = kv.attend_async([s], layer=0, q=row)
        >>> first.result().tolist(), second.result().tolist()
        ([[[1.0, 1.0, 1.0, 1.0]]], [[[2.0, 2.0, 2.0, 2.0]]])
        >>> dev.close()
        """
        tables = self._open_sequences().batch(sequences, layer)
        self._evictor.touch(sequences)
        call = self._calls.make(
            layer,
            q,
            tables,
            [table.committed for table in tables],
            return_lse=return_lse,
            partial=partial,
            select_pages=select_pages,
            **options,
        )
        stream = stream or self._tenant.stream
        stream.begin()
        stream.make_room()
        if not call.on_units or any(sequence.shared is not None for sequence in sequences):
            asked: dict[str, Any] = {
                "return_lse": return_lse,
                "partial": partial,
                "select_pages": select_pages,
            }
            answer = self.attend(sequences, layer=layer, q=q, **asked, **options)
            return stream.add(Pending(lambda: answer, lambda: True))
        posted = self._jobs.post(call.batch(table_addresses(tables)))
        for table in tables:
            table.jobs_end = posted.ticket.end
        jobs = self._jobs
        pages = [table.page_addresses(0, table.pages) for table in tables]

        def finish() -> Answer:
            with self._forgetting_poison(pages):
                return call.answer(jobs.finish(posted))

        return stream.add(Pending(lambda: call.answer(jobs.finish(posted)), lambda: jobs.is_complete(posted)))

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
        given, key = (k, v, q), None
        if k_scales is None and v_scales is None and select_pages is None:
            key = self._steps.key(layer, tables, given, options)
        step = self._steps.find(key, tables)
        if step is not None:
            self._evictor.make_room(0, sequences)
            self._evictor.touch(sequences)
            try:
                result = step.run(given)
            except (DeviceError, AccessError) as error:
                step.done()
                self._forget_poison(error, tables)
                raise
            step.done()
            return result
        if other := sorted(options.keys() - OPTIONS):
            raise ArgumentError(
                f"append_attend has no option {', '.join(other)}: it returns the result alone; "
                "use append and then attend"
            )
        coded = self._coder.code(layer, k, v, k_scales, v_scales, len(tables))
        if any(sequence.shared is not None for sequence in sequences):
            lengths = [table.committed + coded.rows for table in tables]
            self._calls.make(layer, q, tables, lengths, select_pages=select_pages, **options)  # checks it all
            self.append(sequences, layer=layer, k=k, v=v, k_scales=k_scales, v_scales=v_scales)
            return self._attend_shared(sequences, layer, q, select_pages=select_pages, **options)
        appending = self._start(tables, sequences, coded.rows)
        try:
            appended = self._writer.program(appending, coded, layer)
            lengths = [table.committed + coded.rows for table in tables]
            call = self._calls.make(layer, q, tables, lengths, select_pages=select_pages, **options)
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
        if appending.tables == tables:
            self._steps.note(key, tables, call, coded, given)
        assert not isinstance(answer, Partial)
        return answer

    # Below: parts of the above

    def _appended(self, appending: Appending, sequences: Many[Sequence], layer: int, coded: Coded) -> None:
        appending.done()
        self._totals.saturated += coded.saturated
        self._sequences.replace(sequences, layer, appending.tables)
