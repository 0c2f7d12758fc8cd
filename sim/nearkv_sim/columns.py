"""Packed records as columns: a field of many lines at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.bits import Layout


def column(layout: Layout, name: str, lines: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """A byte-aligned field of packed records [..., bytes] as a view, to read or to assign.

    Raises
    ------
    ValueError : when the field is no aligned whole number of bytes.
    """
    kind, index = _place(layout, name)
    return lines.view(kind)[..., index]


def number(layout: Layout, name: str, lines: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """An unsigned field of packed records [..., bytes] that does not cross a word of 64 bits, as numbers."""
    word, shift, mask = _bits(layout, name)
    found: npt.NDArray[np.uint64] = lines.view("<u8")[..., word] >> shift & mask
    return found.astype(np.int64)


@cache
def _place(layout: Layout, name: str) -> tuple[np.dtype[Any], int]:
    field, offset = layout[name], layout.offset(name)
    if field.width not in (8, 16, 32, 64) or offset % field.width:
        raise ValueError(f"{layout.name}.{name} is no aligned whole number of bytes")
    return np.dtype(f"<{'i' if field.signed else 'u'}{field.width // 8}"), offset // field.width


@cache
def _bits(layout: Layout, name: str) -> tuple[int, np.uint64, np.uint64]:
    word, shift = divmod(layout.offset(name), 64)
    width = layout[name].width
    if shift + width > 64 or layout[name].signed:
        raise ValueError(f"{layout.name}.{name} is no unsigned field of one word")
    return word, np.uint64(shift), np.uint64((1 << width) - 1)
