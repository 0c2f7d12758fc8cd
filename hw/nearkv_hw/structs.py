"""Amaranth structs from the abi's packed layouts."""

from amaranth.hdl import signed, unsigned
from amaranth.lib import data

from .abi.bits import Layout


def layout_of(layout: Layout) -> data.StructLayout:
    """The struct whose bits are those of `layout`."""
    return data.StructLayout({f.name: signed(f.width) if f.signed else unsigned(f.width) for f in layout})
