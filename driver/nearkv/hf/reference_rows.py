"""Rows in host tensors, attention by the reference."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from nearkv import reference
from nearkv.quantise import Quantised, RowFormat, attention_arguments, quantise

from .rows import RowStore, Scoring, causal


class ReferenceRows(RowStore):
    """Rows in host tensors, attention by `nearkv.reference`."""

    def __init__(self, dtype: str, kv_format: str | None = None) -> None:
        super().__init__(dtype, kv_format)
        self._k: dict[int, Quantised] = {}
        self._v: dict[int, Quantised] = {}
        # what the first rows of each layer called for, common to all stores that are made of this one
        self._head_scales: dict[tuple[str, int], Tensor | None] = {}

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        self._join("k", layer, k, self.form.k)
        if v is not None:
            assert self.form.v is not None
            self._join("v", layer, v, self.form.v)

    def _join(self, part: str, layer: int, new: Tensor, form: RowFormat) -> None:
        held = self._k if part == "k" else self._v
        if self.narrow:
            own = quantise(new, form, head_scale=self._head_scales.get((part, layer)))
            self._head_scales[part, layer] = own.head_scale
        else:
            own = Quantised(form, new.view(torch.int16), None, None, 0)
        held[layer] = _joined(held[layer], own) if layer in held else own

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        rows = attention_arguments(*self.quantised(layer))
        k, v = rows.pop("k"), rows.pop("v")
        if v is None:
            rows["value_dim"] = scoring.value_dim
        if q.shape[1] > 1 or scoring.window is not None:
            seen = causal(q.shape[0], q.shape[1], k.shape[1], q.device, scoring.window)
            visible = seen if visible is None else seen & visible
        out: Tensor = reference.decode_attention(
            q,
            k,
            v,
            scale=scoring.scale,
            visible=visible,
            sinks=scoring.sinks,
            softcap=scoring.softcap,
            **rows,
        )
        return out

    def quantised(self, layer: int) -> tuple[Quantised, Quantised | None]:
        """The layer's rows: K and V, codes [batch, rows, kv_heads, dim]; no V for latents."""
        return self._k[layer], self._v.get(layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """See `RowStore.read`."""
        k, v = self.quantised(layer)
        return k.values(), None if v is None else v.values()

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

    def select(self, indices: Many[int]) -> None:
        """See `RowStore.select`."""
        index = torch.tensor(list(indices), dtype=torch.int64)
        self._change(lambda tensor: tensor[index.to(tensor.device)])

    def reset(self) -> None:
        """See `RowStore.reset`."""
        self._k.clear()
        self._v.clear()

    def fresh(self) -> Self:
        """See `RowStore.fresh`."""
        made = type(self)(self.dtype, self.form.name if self.narrow else None)
        made._head_scales = self._head_scales
        return made

    def fork(self) -> Self:
        """See `RowStore.fork`."""
        made = self.fresh()
        made._k, made._v = dict(self._k), dict(self._v)
        return made

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
