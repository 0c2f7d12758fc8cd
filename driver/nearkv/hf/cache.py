"""The cache that transformers sees: it hands new rows to a `RowStore` and gives back placeholders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .rows import RowStore

HANDLE = "_nearkv"
"""Attribute of a placeholder that names store and layer for the attention function."""


class NearKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `NearKVCache`."""

    is_sliding = False  # every row is kept; the mask carries a sliding layer's window
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, store: RowStore, index: int) -> None:
        super().__init__()
        self.store = store
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Note type and device of the model's tensors."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, rows, dim]; returns placeholders of the full context's shape, without
        memory."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2))
        rows = self.get_seq_length()
        keys, values = (
            states.new_zeros(1).expand(states.shape[0], states.shape[1], rows, states.shape[3])
            for states in (key_states, value_states)
        )
        setattr(keys, HANDLE, (self.store, self.index))
        return keys, values

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
    """

    def __init__(self, store: RowStore, layers: int) -> None:
        super().__init__(layers=[NearKVLayer(store, i) for i in range(layers)])
        self.store = store

    def crop(self, tokens_to_remove: int) -> None:
        """Remove -tokens_to_remove rows from the end; ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the rows to remove as a negative number or 0, not {tokens_to_remove}"
            )
        if tokens_to_remove:
            self.store.crop(max(0, self.get_seq_length() + tokens_to_remove))

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
