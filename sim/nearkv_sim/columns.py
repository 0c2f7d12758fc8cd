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


@cache
def _place(layout: Layout, name: str) -> tuple[np.dtype[Any], int]:
    field, offset = layout[name], layout.offset(name)
    if field.width not in (8, 16, 32, 64) or offset % field.width:
        raise ValueError(f"{layout.name}.{name} is no aligned whole number of bytes")
    return np.dtype(f"<{'i' if field.signed else 'u'}{field.width // 8}"), offset // field.width
