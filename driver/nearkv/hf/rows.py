"""Where a model's K and V rows live, as the cache and the attention function see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from nearkv.codec import DTYPES
from nearkv.quantise import cache_format


@dataclass(frozen=True)
class RowShape:
    """What a model's rows look like.

    Members
    -------
    layers, kv_heads : layers, and KV heads of each.
    head_dim, value_dim : elements of a K row and of a V row.
    latent : one row for all heads; V is the first value_dim elements of the K row.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: bool = False


class Scoring(NamedTuple):
    """What becomes of scores, and how far back a query sees.

    Members
    -------
    scale : multiplies q·k before the softmax.
    window : rows that a query row sees at most, its own included; None for all.
    sinks : one logit per query head, or None.
    softcap : as in `KVCache.attend`, or None.
    value_dim : elements of a latent row that are V; None where V has rows of its own.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    value_dim: int | None = None


class RowStore(ABC):
    """The rows of a batch of sequences, all layers.

    Queries and rows are rounded to `dtype`, to nearest even, on their way in, and rows are then quantised
    where `kv_format` says so; all arithmetic after that is the contract's.

    Parameters
    ----------
    dtype : "fp16" or "bf16".
    kv_format : a preset of `nearkv.quantise`; rows of `dtype` if not given.

    Members
    -------
    recording : whether rows that windows have left stay until the next `crop`.
    ragged : whether sequences may have different lengths; masks, which know one length, do not count then.
    """

    ragged = False

    def __init__(self, dtype: str, kv_format: str | None = None) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(reversed(DTYPES))}, not {dtype!r}")
        self.dtype = dtype
        self.recording = False
        self.torch_dtype = DTYPES[dtype]
        self.form = cache_format(kv_format or dtype)
        self.narrow = self.form.k.form.bits < 16
        if not self.narrow and self.form.name != dtype:
            raise ValueError(f"kv_format={kv_format!r} has rows of 16 bits; give dtype={kv_format!r} instead")

    def append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Add rows: k [batch, rows, kv_heads, head_dim] and v [batch, rows, kv_heads, value_dim], any
        float type; no v for latents."""
        self._append(layer, k.to(self.torch_dtype), None if v is None else v.to(self.torch_dtype))

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        visible: Tensor | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        value_dim: int | None = None,
    ) -> Tensor:
        """Attention of q [batch, query_rows, q_heads, head_dim] over the layer's rows.

        Parameters
        ----------
        visible : bool [batch, query_rows, rows]; None lets query row i see all but the last
            query_rows - 1 - i rows.
        window, sinks, softcap, value_dim : as `Scoring` has them. A window narrows what `visible` shows.

        Returns
        -------
        float32 [batch, query_rows, q_heads, value_dim].
        """
        q = q.to(self.torch_dtype)
        return self._attend(layer, q, visible, Scoring(scale, window, sinks, softcap, value_dim))

    @abstractmethod
    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None: ...

    @abstractmethod
    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor: ...

    @abstractmethod
    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """K and V as they are held, as numbers [batch, rows, kv_heads, dim]; no V for latents."""

    @abstractmethod
    def rows(self, layer: int) -> int:
        """Rows that the layer holds, of the longest sequence."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Sequences that the store holds, 0 before the first rows."""

    @abstractmethod
    def crop(self, rows: int) -> None:
        """Keep the first `rows` rows of every sequence and layer.

        Raises
        ------
        ArgumentError : when rows that the next query of a layer with a window would see are no longer there.
        """

    def record_past(self) -> None:
        """Keep rows that windows have left from here on, each time until the next `crop`."""
        self.recording = True

    @abstractmethod
    def select(self, indices: Many[int]) -> None:
        """Make the batch the sequences `indices`; one that stands twice becomes two independent sequences."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows."""

    @abstractmethod
    def fresh(self) -> Self:
        """An empty store of the same kind, in the same place."""

    @abstractmethod
    def fork(self) -> Self:
        """A store with the same rows that goes its own way from here."""

    @classmethod
    def together(cls, stores: Many[RowStore]) -> RowStore:
        """The sequences of several stores as one ragged batch; rows that it is given become theirs."""
        return JointRows(stores)


class JointRows(RowStore):
    """Several stores of one kind as a batch, each asked on its own."""

    ragged = True

    def __init__(self, stores: Many[RowStore]) -> None:
        first = stores[0]
        super().__init__(first.dtype, first.form.name if first.narrow else None)
        self._stores = list(stores)

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        for index, store in enumerate(self._stores):
            own = slice(index, index + 1)
            store._append(layer, k[own], None if v is None else v[own])

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        if visible is not None:
            raise ValueError("sequences of different lengths have no common mask; leave visible")
        parts = [s._attend(layer, q[i : i + 1], None, scoring) for i, s in enumerate(self._stores)]
        return torch.cat(parts)

    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """See `RowStore.read`."""
        self._refuse("read")

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return max(store.rows(layer) for store in self._stores)

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return len(self._stores)

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        self._refuse("crop")

    def select(self, indices: Many[int]) -> None:
        """See `RowStore.select`."""
        self._refuse("select")

    def reset(self) -> None:
        """See `RowStore.reset`."""
        self._refuse("reset")

    def fresh(self) -> Self:
        """See `RowStore.fresh`."""
        self._refuse("fresh")

    def fork(self) -> Self:
        """See `RowStore.fork`."""
        self._refuse("fork")

    def _refuse(self, name: str) -> NoReturn:
        raise TypeError(f"{name}: these rows belong to {len(self._stores)} stores; ask each of them")


def row_ranges(visible: Tensor) -> list[tuple[int, int]] | None:
    """(begin, end) of the rows that each sequence of bool [batch, rows] sees, or None when one sees gaps."""
    starts = visible[:, 0].to(torch.int64) + (visible[:, 1:] & ~visible[:, :-1]).sum(-1)
    if (starts > 1).any():
        return None
    begins = visible.to(torch.int8).argmax(-1)
    return [(b, b + n) for b, n in zip(begins.tolist(), visible.sum(-1).tolist(), strict=True)]


def causal(batch: int, query_rows: int, rows: int, device: torch.device, window: int | None = None) -> Tensor:
    """The bottom-right causal mask, of the last `window` rows at most: bool [batch, query_rows, rows]."""
    last = torch.arange(rows - query_rows, rows, device=device)[:, None]
    index = torch.arange(rows, device=device)
    seen = index <= last
    if window is not None:
        seen &= index > last - window
    return seen.expand(batch, query_rows, rows)
