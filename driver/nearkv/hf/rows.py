"""Where a model's K and V rows live: on the device, in host memory with the reference, or both and
compared."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearkv import check, reference
from nearkv.codec import DTYPES
from nearkv.quantise import Quantised, attention_arguments, cache_format, quantise

if TYPE_CHECKING:
    from nearkv.cache import KVCache
    from nearkv.device import Device
    from nearkv.sequences import Sequence as DeviceSequence


@dataclass(frozen=True)
class RowShape:
    """What a model's rows look like: layers, KV heads, and the elements of a K and of a V row."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int


class RowStore(ABC):
    """The rows of a batch of sequences, all layers.

    Queries and rows are rounded to `dtype`, to nearest even, on their way in, and rows are then quantised
    where `kv_format` says so; all arithmetic after that is the contract's.

    Parameters
    ----------
    dtype : "fp16" or "bf16".
    kv_format : a preset of `nearkv.quantise`; rows of `dtype` if not given.
    """

    def __init__(self, dtype: str, kv_format: str | None = None) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(reversed(DTYPES))}, not {dtype!r}")
        self.dtype = dtype
        self.torch_dtype = DTYPES[dtype]
        self.form = cache_format(kv_format or dtype)
        self.narrow = self.form.k.form.bits < 16
        if not self.narrow and self.form.name != dtype:
            raise ValueError(f"kv_format={kv_format!r} has rows of 16 bits; give dtype={kv_format!r} instead")

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add rows: k [batch, rows, kv_heads, head_dim] and v [batch, rows, kv_heads, value_dim], any
        float type."""
        self._append(layer, k.to(self.torch_dtype), v.to(self.torch_dtype))

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        visible: Tensor | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of q [batch, query_rows, q_heads, head_dim] over the layer's rows.

        `visible` is bool [batch, query_rows, rows]; None lets query row i see all but the last
        query_rows - 1 - i rows. `sinks` has one logit per query head. `softcap` is as in `KVCache.attend`.

        Returns
        -------
        float32 [batch, query_rows, q_heads, value_dim].
        """
        q = q.to(self.torch_dtype)
        if q.shape[1] > 1 and visible is None:
            visible = causal(q.shape[0], q.shape[1], self.rows(layer), q.device)
        return self._attend(layer, q, scale, visible, sinks, softcap)

    @abstractmethod
    def _append(self, layer: int, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def _attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        visible: Tensor | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor: ...

    @abstractmethod
    def rows(self, layer: int) -> int:
        """Rows that the layer holds."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Sequences that the store holds, 0 before the first rows."""

    @abstractmethod
    def crop(self, rows: int) -> None:
        """Keep the first `rows` rows of every sequence and layer."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> None:
        """Make the batch the sequences `indices`; one that stands twice becomes two independent sequences."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows."""


def row_ranges(visible: Tensor) -> list[tuple[int, int]] | None:
    """(begin, end) of the rows that each sequence of bool [batch, rows] sees, or None when one sees gaps."""
    starts = visible[:, 0].to(torch.int64) + (visible[:, 1:] & ~visible[:, :-1]).sum(-1)
    if (starts > 1).any():
        return None
    begins = visible.to(torch.int8).argmax(-1)
    return [(b, b + n) for b, n in zip(begins.tolist(), visible.sum(-1).tolist(), strict=True)]


def causal(batch: int, query_rows: int, rows: int, device: torch.device) -> Tensor:
    """The bottom-right causal mask: bool [batch, query_rows, rows]."""
    last = torch.arange(rows - query_rows, rows, device=device)
    return (torch.arange(rows, device=device) <= last[:, None]).expand(batch, query_rows, rows)


class ReferenceRows(RowStore):
    """Rows in host tensors, attention by `nearkv.reference`."""

    def __init__(self, dtype: str, kv_format: str | None = None) -> None:
        super().__init__(dtype, kv_format)
        self._k: dict[int, Quantised] = {}
        self._v: dict[int, Quantised] = {}

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        for held, new, form in ((self._k, k, self.form.k), (self._v, v, self.form.v)):
            assert form is not None
            before = held.get(layer)
            if self.narrow:
                own = quantise(new, form, head_scale=before.head_scale if before else None)
            else:
                own = Quantised(form, new.view(torch.int16), None, None, 0)
            held[layer] = own if before is None else _joined(before, own)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        visible: Tensor | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        rows = attention_arguments(*self.quantised(layer))
        k, v = rows.pop("k"), rows.pop("v")
        out: Tensor = reference.decode_attention(
            q, k, v, scale=scale, visible=visible, sinks=sinks, softcap=softcap, **rows
        )
        return out

    def quantised(self, layer: int) -> tuple[Quantised, Quantised]:
        """The layer's rows: K and V, codes [batch, rows, kv_heads, dim]."""
        return self._k[layer], self._v[layer]

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return self._k[layer].codes.shape[1] if layer in self._k else 0

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return next((k.codes.shape[0] for k in self._k.values()), 0)

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        self._change(lambda tensor: tensor[:, :rows])

    def select(self, indices: Sequence[int]) -> None:
        """See `RowStore.select`."""
        index = torch.tensor(list(indices), dtype=torch.int64)
        self._change(lambda tensor: tensor[index.to(tensor.device)])

    def reset(self) -> None:
        """See `RowStore.reset`."""
        self._change(lambda tensor: tensor[:0])
        if not self.narrow:  # a scale per head stays what the first rows made it
            self._k.clear()
            self._v.clear()

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for held in (self._k, self._v):
            for layer, rows in held.items():
                scales = None if rows.scales is None else change(rows.scales)
                held[layer] = replace(rows, codes=change(rows.codes), scales=scales)


def _joined(before: Quantised, new: Quantised) -> Quantised:
    """Rows after others."""

    def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else torch.cat([first, second], dim=1)

    codes = both(before.codes, new.codes)
    assert codes is not None
    return replace(before, codes=codes, scales=both(before.scales, new.scales))


class DeviceRows(RowStore):
    """Rows on the device. One query row is computed there; several (a prompt) on the host, over the same
    rows.

    The host keeps no rows but those of a prompt that is being taken in: when a call's rows are the whole
    context they are at hand, and otherwise they are read back from the device.
    """

    def __init__(
        self,
        device: Device,
        shape: RowShape,
        dtype: str,
        *,
        kv_format: str | None = None,
        page_rows: int = 16,
        tenant: int = 0,
    ) -> None:
        super().__init__(dtype, kv_format)
        self.shape = shape
        self.cache: KVCache = device.kv_cache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dtype=kv_format or dtype,
            page_rows=page_rows,
            tenant=tenant,
        )
        self.device_calls = 0
        self.kv_bytes = 0
        """K and V bytes, in whole lines, that the device calls so far had to look at."""
        self._row_bytes = shape.kv_heads * self.cache.row_bytes
        self.sequences: list[DeviceSequence] = []
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if not self.sequences:
            self.sequences = [self.cache.sequence() for _ in range(k.shape[0])]
        if len(self.sequences) != k.shape[0]:
            raise ValueError(f"the cache holds {len(self.sequences)} sequences, got rows of {k.shape[0]}")
        self._prompt.pop(layer, None)
        if k.shape[1] > 1 and self.rows(layer) == 0 and not self.narrow:
            self._prompt[layer] = (k, v)
        self.cache.append(self.sequences, layer=layer, k=k, v=v)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        visible: Tensor | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        ranges = self.device_ranges(layer, q, visible)
        if ranges is not None:
            self.device_calls += 1
            self.kv_bytes += sum(end - begin for begin, end in ranges) * self._row_bytes
            rows = None if visible is None else ranges
            out: Tensor = self.cache.attend(
                self.sequences, layer=layer, q=q[:, 0], scale=scale, rows=rows, sinks=sinks, softcap=softcap
            )
            return out[:, None]
        if layer not in self._prompt:
            last = causal(self.batch, q.shape[1], self.rows(layer), q.device)
            if visible is not None and torch.equal(visible, last):
                visible = None  # what several query rows see by themselves
            result: Tensor = self.cache.attend(
                self.sequences,
                layer=layer,
                q=q,
                scale=scale,
                visible=visible,
                sinks=sinks,
                softcap=softcap,
            )
            return result
        k, v = self._prompt.pop(layer)
        return reference.decode_attention(
            q, k, v, scale=scale, visible=visible, sinks=sinks, softcap=softcap, k_format=self.dtype
        )

    def device_ranges(self, layer: int, q: Tensor, visible: Tensor | None) -> list[tuple[int, int]] | None:
        """The row range of each sequence when the device computes the call, None when the host does."""
        if q.shape[1] > 1:
            return None
        if visible is None:
            return [(0, self.rows(layer))] * self.batch
        return row_ranges(visible[:, 0])

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return self.cache.length(self.sequences[0], layer=layer) if self.sequences else 0

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return len(self.sequences)

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        for sequence in self.sequences:
            self.cache.crop(sequence, rows)

    def select(self, indices: Sequence[int]) -> None:
        """See `RowStore.select`."""
        if self.sequences:
            self.sequences = self.cache.select(self.sequences, indices)

    def reset(self) -> None:
        """See `RowStore.reset`."""
        for sequence in self.sequences:
            self.cache.free(sequence)
        self.sequences = []
        self._prompt.clear()


@dataclass
class CheckTally:
    """What the comparison of device and reference has come to."""

    calls: int = 0
    equal: int = 0
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    """For each unequal call, the command that replays it."""


class CheckedRows(RowStore):
    """Rows on the device and, separately, the host's own copy: each device result is held against the
    reference.

    Parameters
    ----------
    device_rows : where results come from.
    replay_folder : where an unequal call is written.
    """

    def __init__(self, device_rows: DeviceRows, replay_folder: Path) -> None:
        kv_format = device_rows.form.name if device_rows.narrow else None
        super().__init__(device_rows.dtype, kv_format)
        self.device_rows = device_rows
        self.own = ReferenceRows(device_rows.dtype, kv_format)
        self.tally = CheckTally()
        self._replay_folder = replay_folder

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.device_rows.append(layer, k, v)
        with self._checking():
            self.own.append(layer, k, v)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        visible: Tensor | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        ranges = self.device_rows.device_ranges(layer, q, visible)
        out = self.device_rows.attend(layer, q, scale=scale, visible=visible, sinks=sinks, softcap=softcap)
        if ranges is not None:
            with self._checking():
                self._check(layer, q[:, 0], out[:, 0], scale, ranges, sinks, softcap)
        return out

    def _check(
        self,
        layer: int,
        q: Tensor,
        result: Tensor,
        scale: float,
        ranges: list[tuple[int, int]],
        sinks: Tensor | None,
        softcap: float | None,
    ) -> None:
        cache, sequences = self.device_rows.cache, self.device_rows.sequences
        k, v = self.own.quantised(layer)
        held = [rows.codes if self.narrow else rows.codes.view(self.torch_dtype) for rows in (k, v)]
        scales = [
            (None if k.scales is None else k.scales[i], None if v.scales is None else v.scales[i])
            for i in range(self.batch)
        ]
        heads = {"k_scale": k.head_scale, "v_scale": v.head_scale}
        case = check.case_of(
            cache,
            q=q,
            contexts=list(zip(*held, strict=True)),
            scale=scale,
            ranges=ranges,
            sinks=sinks,
            softcap=softcap,
            scales=scales,
            heads={name: tensor for name, tensor in heads.items() if tensor is not None},
        )
        verdict = check.attention(
            cache, sequences, layer=layer, case=case, result=result, directory=self._replay_folder
        )
        self.tally.calls += 1
        self.tally.equal += verdict.equal
        if verdict.command is not None:
            self.tally.commands.append(verdict.command)

    @contextmanager
    def _checking(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.tally.seconds += time.perf_counter() - start

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return self.device_rows.rows(layer)

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return self.device_rows.batch

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        self.device_rows.crop(rows)
        self.own.crop(rows)

    def select(self, indices: Sequence[int]) -> None:
        """See `RowStore.select`."""
        self.device_rows.select(indices)
        self.own.select(indices)

    def reset(self) -> None:
        """See `RowStore.reset`."""
        self.device_rows.reset()
        self.own.reset()
