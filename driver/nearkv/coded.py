"""Rows as a cache stores them: checked, and quantised where they come as numbers; codes stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.memory import RowLayout

from .arguments import dense
from .codec import FORMATS, codes_of, codes_to_bytes
from .errors import ArgumentError, DtypeError, ShapeError
from .heads import HeadTables
from .quantise.formats import CacheFormat, RowFormat
from .quantise.rows import FLOATS, Quantised, quantise


@dataclass(frozen=True)
class Coded:
    """Rows of several sequences.

    Members
    -------
    codes, scales : of K and V, tensors [batch, rows, kv_heads, dim or blocks]; None for what a cache has not.
    found : what a layer's first rows called for, by "k" and "v": scale per head and codebook.
    saturated : elements that were beyond what the format has.
    """

    codes: tuple[torch.Tensor, torch.Tensor | None]
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    found: dict[str, Quantised]
    saturated: int = 0

    @property
    def rows(self) -> int:
        """Rows of each sequence."""
        return self.codes[0].shape[1]

    @property
    def areas(self) -> tuple[torch.Tensor | None, ...]:
        """K codes, K scales, V codes and V scales, as pages have them."""
        return self.codes[0], self.scales[0], self.codes[1], self.scales[1]

    def row_bytes(self, layout: RowLayout) -> list[npt.NDArray[np.uint8] | None]:
        """The rows' bytes in each area of a page, [batch, kv_heads, rows, pitch]."""
        forms = (layout.k.element, layout.k.scale, layout.value.element, layout.value.scale)
        return [
            None if codes is None or form is None else codes_to_bytes(codes.transpose(1, 2), form, pitch)
            for codes, form, pitch in zip(self.areas, forms, layout.pitches, strict=True)
        ]


class Coder:
    """Brings rows into a cache's format.

    Parameters
    ----------
    form : the format.
    kv_heads, head_dim, value_dim : of a row.
    heads : scales and codebooks of the cache's heads.
    """

    def __init__(
        self, form: CacheFormat, kv_heads: int, head_dim: int, value_dim: int, heads: HeadTables
    ) -> None:
        self._form = form
        self._kv_heads = kv_heads
        self._dims = {"k": head_dim, "v": value_dim}
        self._dtypes = {kind.name: dtype for dtype, kind in FORMATS.items()}
        alike = form.v is not None and form.v.element == form.k.element
        self._plain = self._dtypes.get(form.k.element) if alike else None
        self._heads = heads

    def code(
        self, layer: int, k: Any, v: Any, k_scales: Any, v_scales: Any, batch: int | None = None
    ) -> Coded:
        """Rows [rows, kv_heads, dim], or [batch, rows, ...], as the device stores them.

        Raises
        ------
        ShapeError, DtypeError, ArgumentError : for what does not fit the cache.
        """
        if batch is not None and k_scales is None and v_scales is None and self._as_stored(k, v):
            k = dense("k", k, (batch, "rows", self._kv_heads, self._dims["k"]))
            v = dense("v", v, (batch, "rows", self._kv_heads, self._dims["v"]))
            return Coded((codes_of(k), codes_of(v)), (None, None), {})
        leading: tuple[int | str, ...] = ("rows",) if batch is None else (batch, "rows")
        parts: dict[str, Quantised] = {"k": self._part("k", self._form.k, layer, k, k_scales, leading)}
        if self._form.v is None:
            if v is not None or v_scales is not None:
                raise ArgumentError("V is part of the K row in this cache (latent); leave v and v_scales")
        else:
            parts["v"] = self._part("v", self._form.v, layer, v, v_scales, leading)
            rows = [part.codes.shape[len(leading) - 1] for part in parts.values()]
            if rows[0] != rows[1]:
                raise ShapeError(f"k has {rows[0]} rows and v has {rows[1]}, must have the same")

        def of_batch(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor.unsqueeze(0) if tensor is not None and batch is None else tensor

        own = parts.get("v")
        codes = of_batch(parts["k"].codes)
        assert codes is not None
        return Coded(
            (codes, None if own is None else of_batch(own.codes)),
            (of_batch(parts["k"].scales), None if own is None else of_batch(own.scales)),
            {name: part for name, part in parts.items() if self._heads.missing(name, layer)},
            sum(part.saturated for part in parts.values()),
        )

    def _as_stored(self, k: Any, v: Any) -> bool:
        """Whether both are numbers of 16 bits, equally many, that the cache stores as they come."""
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
            return False
        return k.dtype == v.dtype == self._plain and k.shape[:2] == v.shape[:2]

    def _part(
        self,
        name: str,
        form: RowFormat,
        layer: int,
        given: Any,
        scales: Any,
        leading: tuple[int | str, ...],
    ) -> Quantised:
        tensor = dense(name, given, (*leading, self._kv_heads, self._dims[name]))
        if tensor.dtype == _storage(form):
            return self._taken(name, form, layer, tensor, scales)
        if scales is not None:
            raise ArgumentError(f"{name}_scales go with codes; {name} holds {tensor.dtype} values")
        if form.form.bits == 16:
            own = self._dtypes[form.form.name]
            if tensor.dtype != own:
                raise DtypeError(
                    f"{name} is {tensor.dtype}, the cache holds {form.element}; convert with {name}.to({own})"
                )
            return Quantised(form, codes_of(tensor), None, None, 0)
        if tensor.dtype not in FLOATS:
            kinds = ", ".join(map(str, FLOATS))
            raise DtypeError(
                f"{name} is {tensor.dtype}, must be values ({kinds}) or codes ({_storage(form)}) of "
                f"{form.element}"
            )
        return quantise(
            tensor.detach().cpu(),
            form,
            head_scale=self._heads.scale(name, layer),
            codebook=self._heads.codebook(name, layer),
        )

    def _taken(self, name: str, form: RowFormat, layer: int, codes: torch.Tensor, scales: Any) -> Quantised:
        """Codes that were made elsewhere."""
        missing = self._heads.missing(name, layer)
        if missing:
            raise ArgumentError(
                f"{name} holds codes, and nothing says what multiplies them; give {missing}= to kv_cache()"
            )
        codes = codes.detach().cpu()
        if form.form.bits < 8 and codes.numel() and int(codes.amax()) >> form.form.bits:
            raise ArgumentError(
                f"{name}: codes of {form.element} are below {1 << form.form.bits}, got {int(codes.amax())}"
            )
        if form.scale_form is None:
            if scales is not None:
                raise ArgumentError(f"{name}_scales: {form.element} has no scales along the row here")
            return Quantised(form, codes, None, None, 0)
        blocks = form.blocks(self._dims[name])
        if scales is None:
            raise ArgumentError(
                f"{name} holds codes of {form.element} with {form.scale} scales; give {name}_scales "
                f"[..., kv_heads, {blocks}]"
            )
        kept = dense(f"{name}_scales", scales, (*codes.shape[:-1], blocks)).detach().cpu()
        if FORMATS.get(kept.dtype) == form.scale_form:
            kept = kept.view(torch.int16)
        wanted = torch.int16 if form.scale_form.bits == 16 else torch.uint8
        if kept.dtype != wanted:
            raise DtypeError(f"{name}_scales is {kept.dtype}, codes of {form.scale} are {wanted}")
        return Quantised(form, codes, kept, None, 0)


def _storage(form: RowFormat) -> torch.dtype:
    """The type that codes of a format are kept in."""
    return torch.int16 if form.form.bits == 16 else torch.uint8
