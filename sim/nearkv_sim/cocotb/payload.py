"""Payloads of streams as Python values: structs are dicts, arrays lists, all else integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amaranth.hdl import Shape
from amaranth.lib import data
from nearkv_hw.abi.bits import Layout


def pack(shape: Any, value: Any) -> int:
    """The bits of `value`: an integer, a mapping for a struct (fields left out are zero), or a sequence.

    Raises
    ------
    ValueError : an unknown field, or a number that does not fit.
    """
    if isinstance(value, int):
        return _encode(Shape.cast(_flat(shape)), int(value))
    if isinstance(shape, Layout):
        return shape.pack(value)
    layout = _layout(shape)
    if layout is None:
        return _encode(Shape.cast(shape), int(getattr(value, "value", value)))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    fields = dict(iter(layout))
    bits = 0
    for key, item in items:
        if key not in fields:
            raise ValueError(f"no field {key!r}; there are {', '.join(map(str, fields))}")
        bits |= pack(fields[key].shape, item) << fields[key].offset
    return bits


def unpack(shape: Any, bits: int) -> Any:
    """The value of `bits`: a dict for a struct, a list for an array, else an integer."""
    if isinstance(shape, Layout):
        return shape.unpack(bits)
    layout = _layout(shape)
    if layout is None:
        flat = Shape.cast(shape)
        bits &= (1 << flat.width) - 1
        return bits - (1 << flat.width) if flat.signed and bits >> (flat.width - 1) else bits
    values = {key: unpack(field.shape, bits >> field.offset) for key, field in layout}
    return list(values.values()) if isinstance(layout, data.ArrayLayout) else values


def _layout(shape: Any) -> data.Layout | None:
    try:
        return data.Layout.cast(shape)
    except TypeError:
        return None


def _flat(shape: Any) -> Any:
    return shape.width if isinstance(shape, Layout) else shape


def _encode(shape: Any, value: int) -> int:
    low = -(1 << shape.width - 1) if shape.signed else 0
    high = (1 << shape.width - int(shape.signed)) - 1
    if not low <= value <= high:
        raise ValueError(f"{value} does not fit {shape!r}, which holds {low} to {high}")
    width: int = shape.width
    return value & ((1 << width) - 1)
