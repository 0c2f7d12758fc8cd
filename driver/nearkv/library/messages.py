"""What travels between a host and the library: what caches' rows are, partials, and errors."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import Status

from nearkv import errors
from nearkv.heads import HeadTables
from nearkv.quantise.formats import CacheFormat, RowFormat, Rule
from nearkv.reference import Partial

Array = npt.NDArray[Any]
Rows = tuple[torch.Tensor | None, ...]
"""K codes, K scales, V codes and V scales, as `nearkv.rows.Context` has them."""
_TABLES = (("k", "scale"), ("v", "scale"), ("k", "lut"), ("v", "lut"))


def form_fields(form: CacheFormat) -> dict[str, Any]:
    """How rows are stored, as a message says it."""

    def fields(row: RowFormat | None) -> dict[str, Any] | None:
        return None if row is None else {**asdict(row), "rule": row.rule.value}

    return {"k": fields(form.k), "v": fields(form.v)}


def form_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """The same as `Device.kv_cache` takes it.

    Raises
    ------
    ArgumentError, TypeError, ValueError : for what is no format.
    """
    k, v = (
        None if own is None else RowFormat(**{**own, "rule": Rule(own["rule"])})
        for own in (fields["k"], fields["v"])
    )
    return {"dtype": k, "value_dtype": v, "latent": v is None}


def head_arrays(heads: HeadTables, form: CacheFormat, layers: int) -> dict[str, Array] | None:
    """Scales and codebooks of all layers' heads by their names, or None where one is not known yet."""
    found: dict[str, Array] = {}
    for part, what in _TABLES:
        row = form.k if part == "k" else form.v
        if row is None or not (row.head_scale if what == "scale" else row.form.codebook):
            continue
        of = heads.scale if what == "scale" else heads.codebook
        known = [table for layer in range(layers) if (table := of(part, layer)) is not None]
        if len(known) < layers:
            return None
        found[f"{part}_{what}"] = torch.stack(known).numpy()
    return found


def rows_arrays(rows: Rows) -> tuple[list[bool], list[Array]]:
    """Which areas rows have, and these."""
    return [area is not None for area in rows], [area.numpy() for area in rows if area is not None]


def rows_of(present: Many[bool], arrays: Many[Array]) -> Rows:
    """The rows that `rows_arrays` took apart; they are the caller's own."""
    rest = iter(arrays)
    return tuple([torch.from_numpy(np.array(next(rest))) if there else None for there in present])


def partial_arrays(partial: Partial) -> list[Array]:
    """A partial's planes."""
    return [plane.numpy() for plane in partial.planes()]


def partial_of(arrays: Many[Array]) -> Partial:
    """The partial of these planes."""
    own = [np.array(array) for array in arrays]
    return Partial.from_planes((own[0], own[1], own[2]), (own[3], own[4], own[5]), own[6], own[7])


def failure(error: errors.NearkvError) -> dict[str, Any]:
    """An error of the library as an answer."""
    fields: dict[str, Any] = {}
    if isinstance(error, errors.AccessError):
        fields = {"address": error.address, "poison": error.poison}
    elif isinstance(error, errors.DeviceError):
        fields = {"status": int(error.status), "tag": error.tag, "detail": error.detail}
    return {"failed": type(error).__name__, "message": str(error), "fields": fields}


def raise_failure(answer: dict[str, Any]) -> None:
    """Raise the error that an answer says, if it says one."""
    if "failed" not in answer:
        return
    kind = getattr(errors, answer["failed"], errors.NearkvError)
    fields = answer["fields"]
    if "status" in fields:
        fields["status"] = Status(fields["status"])
    raise kind(answer["message"], **fields)
