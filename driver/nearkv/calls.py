"""Attention calls of one cache: each checked, and what calls have in common checked once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from nearkv_hw.abi.memory import RowLayout

from .attention import PLAIN, Call, Held, Options
from .errors import ArgumentError
from .heads import HeadTables
from .quantise.formats import CacheFormat
from .table import PageTable
from .tenant import Tenant

OPTIONS = frozenset(Options.__annotations__)
"""What `KVCache.attend` takes besides sequences, layer, queries and what is to be returned."""
_KEPT = 256


class Calls:
    """Makes the attention calls of a cache.

    Decoding asks for the same again and again, with other queries over longer contexts. So calls are kept
    whose options are `PLAIN`, and made `again` when all that is checked of them is the same.

    Parameters
    ----------
    tenant, layout, form, heads, kv_heads, dtype : of the cache.
    """

    def __init__(
        self,
        tenant: Tenant,
        layout: RowLayout,
        form: CacheFormat,
        heads: HeadTables,
        kv_heads: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._tenant = tenant
        self._layout = layout
        self._form = form
        self._heads = heads
        self._kv_heads = kv_heads
        self._dtype = dtype
        self._kept: dict[tuple[Any, ...], Call] = {}

    def head_scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See `KVCache.head_scales`."""
        value = "k" if self._form.v is None else "v"
        return self._heads.scale("k", layer), self._heads.scale(value, layer)

    def make(
        self,
        layer: int,
        q: torch.Tensor,
        tables: list[PageTable],
        lengths: list[int],
        *,
        elsewhere: int | None = None,
        **options: Any,
    ) -> Call:
        """A call over the first `lengths` rows of tables; of these, those from row `elsewhere` on are not in
        the tables, and not seen.

        Raises
        ------
        ArgumentError : for options that `KVCache.attend` has not.
        ShapeError, DtypeError, ArgumentError : as `Call` has them.
        """
        rows = np.array(lengths, np.int64)
        key = None
        plain = isinstance(q, torch.Tensor) and all(type(value) in PLAIN for value in options.values())
        if plain and elsewhere is None and not any(table.released[1] for table in tables):
            key = layer, self._heads.changes, q.shape, q.dtype, repr(options)
            if (call := self._kept.get(key)) is not None:
                return call.again(q, rows)
        if elsewhere is None:
            released = np.array([table.released for table in tables], np.int64)
        else:
            released = np.array([(elsewhere, length) for length in lengths], np.int64)
        call = self._new(layer, q, rows, released, options)
        if key is not None:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = call
        return call

    def _new(self, layer: int, q: torch.Tensor, lengths: Any, released: Any, options: dict[str, Any]) -> Call:
        unknown = options.keys() - OPTIONS - {"return_lse", "partial", "select_pages"}
        if unknown:
            known = ", ".join(Options.__annotations__)
            raise ArgumentError(f"attend() has no option {min(unknown)!r}; there are {known}")
        k_scale, v_scale = self.head_scales(layer)
        layout, heads = self._layout, self._heads
        held = Held(
            layer=layer,
            kv_heads=self._kv_heads,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            page_rows=layout.page_rows,
            form=self._form,
            dtype=self._dtype,
            summaries=layout.summaries,
            features=self._tenant.features,
            units=self._tenant.config.units,
            k_scale=k_scale,
            v_scale=v_scale,
            k_lut=heads.codebook("k", layer),
            v_lut=heads.codebook("v", layer),
        )
        return Call(q, lengths, held, released=released, **options)
