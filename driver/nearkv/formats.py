"""How a cache stores its rows: from what a caller says to a `CacheFormat`, and what a device needs for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nearkv_hw.abi import Feature
from nearkv_hw.abi.descriptor import MAX_HEAD_DIM, MAX_LARGE_DIM
from nearkv_hw.abi.formats import ROW_FORMATS
from nearkv_hw.abi.memory import RowLayout

from .codec import FORMATS
from .errors import ArgumentError, DtypeError
from .quantise.formats import PRESETS, CacheFormat, RowFormat

Pair = str | tuple[str | None, str | None] | None
Blocks = int | tuple[int | None, int | None] | None
Dtype = str | torch.dtype | RowFormat


def chosen_format(
    dtype: Dtype, value_dtype: Dtype | None, scale_dtype: Pair, scale_block: Blocks, *, latent: bool
) -> CacheFormat:
    """What `Device.kv_cache` was asked for.

    Parameters
    ----------
    dtype, value_dtype : of K, and of V where it differs: a preset's name, an element format's (which it is
        whenever scale_dtype says how it is scaled), a torch type or a `RowFormat`.
    scale_dtype, scale_block : of scales along the row, for both or as pairs.
    latent : V is part of the K row.

    Raises
    ------
    ArgumentError, DtypeError : for names and combinations that there are not.
    """
    scales = scale_dtype if isinstance(scale_dtype, tuple) else (scale_dtype, scale_dtype)
    blocks = scale_block if isinstance(scale_block, tuple) else (scale_block, scale_block)
    for name, pair in (("scale_dtype", scales), ("scale_block", blocks)):
        if len(pair) != 2:
            raise ArgumentError(f"{name}={pair!r}: must be one for both, or a pair, K's and V's")
    k, name = _row(dtype, scales[0], blocks[0], 0)
    if latent:
        if value_dtype is not None:
            raise ArgumentError(f"value_dtype={value_dtype!r}: with latent=True V is part of the K row")
        return CacheFormat(f"{name} latent", k)
    v, value_name = _row(dtype if value_dtype is None else value_dtype, scales[1], blocks[1], 1)
    return CacheFormat(name if value_name == name else f"{name}/{value_name}", k, v)


def _row(dtype: Dtype, scale: str | None, block: int | None, which: int) -> tuple[RowFormat, str]:
    if isinstance(dtype, RowFormat):
        if scale is not None or block is not None:
            raise ArgumentError("a RowFormat says itself how it is scaled; leave scale_dtype and scale_block")
        return dtype, described(dtype)
    if isinstance(dtype, torch.dtype) and dtype in FORMATS:
        dtype = FORMATS[dtype].name
    if not isinstance(dtype, str):
        raise DtypeError(f"dtype={dtype!r}: a cache holds {_names()}")
    if scale is None and block is None and dtype in PRESETS:
        preset = PRESETS[dtype]
        row = preset.k if which == 0 else preset.v
        assert row is not None
        return row, dtype
    if dtype not in ROW_FORMATS:
        raise DtypeError(f"dtype={dtype!r}: a cache holds {_names()}")
    row = RowFormat(dtype, scale, block)
    return row, described(row)


def described(row: RowFormat) -> str:
    """A short name of a row format: "int8", "int8 fp16:32" for a scale per 32 elements."""
    scaled = "" if row.scale is None else f" {row.scale}:{row.block or 'row'}"
    return f"{row.element}{scaled}{' per head' if row.head_scale else ''}"


def _names() -> str:
    names = list(dict.fromkeys([*PRESETS, *ROW_FORMATS]))
    return ", ".join(repr(name) for name in names)


@dataclass(frozen=True)
class Needs:
    """What a device has to have for a cache, feature by feature, with what asks for it."""

    reasons: dict[Feature, str]

    def refuse(self, features: Feature, kind: str) -> None:
        """ArgumentError when the device lacks one of them."""
        for feature, reason in self.reasons.items():
            if feature not in features:
                raise ArgumentError(f"{reason}: this {kind} device has {_allowed(features, feature)}")


def needs_of(form: CacheFormat, layout: RowLayout) -> Needs:
    """What a cache of this format and layout needs of a device."""
    reasons: dict[Feature, str] = {}
    for name, row in (("K", form.k), ("V", form.v)):
        if row is None:
            continue
        if row.form.codebook:
            reasons.setdefault(Feature.CODEBOOKS, f"{name} is {row.element}")
        if row.form.bits < 16:
            reasons.setdefault(Feature.NARROW, f"{name} is {row.element}")
        if row.scale is not None:
            reasons.setdefault(Feature.SCALES, f"{name} has {row.scale} scales along the row")
    if form.v is None:
        reasons[Feature.LATENT] = "V is part of the K row (latent)"
    if max(layout.head_dim, layout.value_dim) > MAX_HEAD_DIM:
        reasons[Feature.LARGE_ROWS] = f"head_dim={layout.head_dim}, value_dim={layout.value_dim}"
    if layout.summaries:
        reasons[Feature.SELECTION] = "pages with summaries"
    return Needs(reasons)


def _allowed(features: Feature, missing: Feature) -> str:
    """What a device without a feature allows instead."""
    narrow = Feature.NARROW in features
    formats = [f.name for f in ROW_FORMATS.values() if f.bits == 16 or (narrow and not f.codebook)]
    return {
        Feature.LARGE_ROWS: f"rows of 1 to {MAX_HEAD_DIM} elements (others up to {MAX_LARGE_DIM})",
        Feature.LATENT: "K and V rows of their own only",
        Feature.SELECTION: "pages without summaries only",
        Feature.SCALES: "no scales along the row, only elements of " + ", ".join(formats),
    }.get(missing, "elements of " + ", ".join(formats) + " only")
