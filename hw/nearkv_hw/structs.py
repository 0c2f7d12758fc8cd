"""Amaranth structs from the abi's packed layouts; values of any shape as bits, and among the abi's codes."""

from amaranth.hdl import Cat, signed, unsigned
from amaranth.lib import data

from .abi.bits import Layout


def layout_of(layout: Layout) -> data.StructLayout:
    """The struct whose bits are those of `layout`."""
    return data.StructLayout({f.name: signed(f.width) if f.signed else unsigned(f.width) for f in layout})


def bits_of(value):
    """A value of any shape as bits that can be read and driven."""
    return value.as_value() if hasattr(value, "as_value") else value


def among(value, codes):
    """Whether a value is one of some codes."""
    return Cat(value == int(code) for code in codes).any()
