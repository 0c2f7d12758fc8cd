"""The cache that transformers sees: it hands new rows to a `RowStore` and gives back placeholders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .placeholder import Placeholder
from .rows import RowShape, RowStore


class NearKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `NearKVCache`.

    Parameters
    ----------
    store : where its rows are.
    index : of the layer in the store.
    latent_dim : elements of a latent row that are V; 0 where V has rows of its own.
    """

    is_sliding = False  # rows keep their numbers, whatever a window has left; masks and calls carry it
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, store: RowStore, index: int, latent_dim: int = 0) -> None:
        self.is_initialized = False  # not super().__init__(): keys and values are read where they are
        self.store = store
        self.index = index
        self.latent_dim = latent_dim

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Note type and device of the model's tensors."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rows; returns placeholders of the full context's shape, without memory.

        Parameters
        ----------
        key_states, value_states : [batch, kv_heads, rows, dim]; of latent attention the latents
            [batch, 1, rows, rank] and what carries positions, [batch, 1, rows, dim].
        """
        if isinstance(key_states, Placeholder):
            raise RuntimeError(
                f"{key_states!r} came back as new rows: another attention implementation than 'nearkv' ran; "
                "leave the model's attn_implementation as nearkv.hf.attach set it"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.latent_dim:
            if key_states.shape[1] != 1 or key_states.shape[3] != self.latent_dim:
                raise ValueError(
                    f"a latent row has one head of {self.latent_dim} elements, got {list(key_states.shape)}"
                )
            rows = torch.cat([key_states, value_states], dim=-1)
            self.store.append(self.index, rows.transpose(1, 2), None)
        else:
            self.store.append(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2))
        keys = self._placeholder(key_states)
        alike = key_states.shape == value_states.shape and key_states.dtype == value_states.dtype
        return keys, keys if alike else self._placeholder(value_states)

    def _placeholder(self, of: Tensor) -> Placeholder:
        """For all rows, of which these are the newest."""
        batch, heads, _, dim = of.shape
        return Placeholder((batch, heads, self.get_seq_length(), dim), of.dtype, of.device, self)

    @property
    def keys(self) -> Tensor | None:
        """K as the layer holds it, read back: [batch, kv_heads, rows, head_dim] in the model's type.

        Rows that a window has left are zeros. Of latent rows the whole row. None before the first rows, as
        transformers' own layers have it.
        """
        return self._read(0)

    @property
    def values(self) -> Tensor | None:
        """V, likewise; None for latents, whose V is in the K row."""
        return self._read(1)

    def _read(self, part: int) -> Tensor | None:
        if not self.is_initialized or not self.store.batch:
            return None
        rows = self.store.read(self.index)[part]
        return None if rows is None else rows.transpose(1, 2).to(self.device, self.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows after the next `query_length` are in, and the offset of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Rows in the layer."""
        return self.store.rows(self.index)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class NearKVCache(Cache):  # type: ignore[misc]
    """A transformers cache whose rows live in a `RowStore`.

    Changes of the batch (crop, reorder, repeat, select) are made for all layers at once, since a
    sequence is one thing on the device.

    Parameters
    ----------
    store : where rows are.
    shape : of the model's rows, from `nearkv.hf.row_shape`.
    """

    def __init__(self, store: RowStore, shape: RowShape) -> None:
        latent_dim = shape.value_dim if shape.latent else 0
        super().__init__(layers=[NearKVLayer(store, i, latent_dim) for i in range(shape.layers)])
        self.store = store
        self.shape = shape

    def fresh(self) -> NearKVCache:
        """An empty cache in the same place."""
        return NearKVCache(self.store.fresh(), self.shape)

    def fork(self) -> NearKVCache:
        """A cache with the same rows that goes its own way from here: another turn, another reader of a
        prompt."""
        return NearKVCache(self.store.fork(), self.shape)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove -tokens_to_remove rows from the end.

        Raises
        ------
        ValueError : for a positive number.
        ArgumentError : for so many that rows would be seen again which a window had left and which are no
            longer there: more than the store's `crop_rows`, without `activate_past_recording`.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the rows to remove as a negative number or 0, not {tokens_to_remove}"
            )
        self.store.crop(max(0, self.get_seq_length() + tokens_to_remove))

    def activate_past_recording(self) -> None:
        """Keep rows that windows have left from here on, each time until the next `crop`, which may then go
        back as far as it likes. Assisted decoding asks for it."""
        self.store.record_past()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch the sequences `beam_idx`."""
        self.store.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.store.select([i for i in range(self.store.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices` (numbers or a bool mask)."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.store.select(chosen.tolist())

    def reset(self) -> None:
        """Forget all rows."""
        self.store.reset()
