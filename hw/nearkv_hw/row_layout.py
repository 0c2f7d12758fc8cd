"""Where the codes and scales of a row lie, worked out from its format as descriptors give it."""

from amaranth.hdl import Const, Mux

from .abi.lines import LINE_BITS
from .abi.rows import BLOCK_CODES, SCALES_BY_CODE
from .structs import among


def wide_scale(scale):
    """Whether a scale has two bytes, not one."""
    return is_scale(scale, *(form for form in SCALES_BY_CODE.values() if form.bits == 16))


def is_scale(scale, *forms):
    """Whether a scale, as descriptors have it, is of one of some formats."""
    return among(scale, [code for code, form in SCALES_BY_CODE.items() if form in forms])


def lines_less_one(dim, width, line_bits=LINE_BITS):
    """Lines of a row of `dim` codes of a `CodeWidth`, less one."""
    return (dim - 1) >> (line_bits.bit_length() - 5) >> width


def block_number(element, block):
    """The block that an element is in; `block` as descriptors have it, 0 for the whole row."""
    number = Const(0)
    for size, code in BLOCK_CODES.items():
        if size is not None:
            number = Mux(block == code, element >> size.bit_length() - 1, number)
    return number


def scale_shift(dim, scale, block):
    """log2 of the bytes from one row's scales to the next row's."""
    last = block_number(dim - 1, block)
    shift = Const(0)
    for bit in range(len(last)):
        shift = Mux(last[bit], bit + 1, shift)
    return shift + wide_scale(scale)
