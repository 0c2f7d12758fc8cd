"""What an append and a call bring to tiers: rows as codes, and where rows stand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nearkv.errors import ArgumentError, DtypeError, ShapeError
from nearkv.quantise.formats import RowFormat
from nearkv.quantise.rows import Quantised, quantise

from .tier import Geometry, Positions


def stored_rows(
    geometry: Geometry, layer: int, k: torch.Tensor, v: torch.Tensor | None, batch: int | None
) -> dict[str, Quantised]:
    """Rows of "k" and, where they have their own, of "v", as codes [batch, rows, kv_heads, dim].

    Parameters
    ----------
    k, v : numbers [batch, rows, kv_heads, dim]; without the first dimension where `batch` is None.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError : for what does not fit.
    """
    form = geometry.form
    found = {"k": _stored(geometry, "k", form.k, layer, k, batch)}
    if form.v is None:
        if v is not None:
            raise ArgumentError("v is part of the K row in this cache; leave it out")
        return found
    if v is None:
        raise ArgumentError("v is missing: this cache has V rows of its own")
    found["v"] = _stored(geometry, "v", form.v, layer, v, batch)
    of_k, of_v = (part.codes.shape[1] for part in found.values())
    if of_v != of_k:
        raise ShapeError(f"k has {of_k} rows and v has {of_v}")
    return found


def standing(lengths: Positions, query: Positions, tree: bool) -> Positions:
    """Where rows stand [batch, rows]: by their number, but those of a tree where its query rows do."""
    index = np.arange(int(lengths.max(initial=0)))
    held: npt.NDArray[np.int64] = np.broadcast_to(index, (len(lengths), len(index)))
    if not tree:
        return held
    own = index - (lengths - query.shape[1])[:, None]
    of_tree = np.take_along_axis(query, np.clip(own, 0, query.shape[1] - 1), axis=1)
    return np.where((own >= 0) & (own < query.shape[1]), of_tree, held)


def _stored(
    geometry: Geometry, name: str, form: RowFormat, layer: int, rows: torch.Tensor, batch: int | None
) -> Quantised:
    dim = geometry.head_dim if name == "k" else geometry.value_dim
    if not isinstance(rows, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor, not {type(rows).__name__}")
    wide = rows.unsqueeze(0) if batch is None else rows
    wanted = 1 if batch is None else batch, geometry.kv_heads, dim
    if wide.dim() != 4 or (wide.shape[0], *wide.shape[2:]) != wanted:
        lead = "" if batch is None else f"{batch}, "
        raise ShapeError(
            f"{name} has shape {list(rows.shape)}, must have [{lead}rows, {geometry.kv_heads}, {dim}]"
        )
    plain = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form.element)
    if plain is not None:
        if wide.dtype != plain:
            raise DtypeError(f"{name} is {wide.dtype}, this cache holds {plain}")
        return Quantised(form, wide.detach().contiguous().view(torch.int16), None, None, 0)
    known = geometry.heads.of(layer)
    scale, book = known.get(f"{name}_scale"), known.get(f"{name}_lut")
    return quantise(wide.detach().cpu(), form, head_scale=scale, codebook=book)
