"""Where the codes and scales of a row lie, worked out from its format as descriptors give it."""

from amaranth.hdl import Const, Mux

from .abi.formats import SCALE_BLOCKS, SCALE_CODES, SCALE_FORMATS
from .abi.lines import LINE_BITS

_BLOCK_SHIFTS = [size.bit_length() - 1 for size in SCALE_BLOCKS]


def scale_number(name):
    """The number of a scale format where zero stands for none."""
    return SCALE_CODES[name] + 1


def is_scale(scale, name):
    """Whether a scale format is the one of that name."""
    return scale == scale_number(name)


def wide_scale(scale):
    """Whether a scale has two bytes, not one."""
    return sum_of(is_scale(scale, name) for name, form in SCALE_FORMATS.items() if form.bits == 16)


def sum_of(conditions):
    """Whether one of the conditions holds."""
    found = Const(0)
    for condition in conditions:
        found = found | condition
    return found


def lines_less_one(dim, width, line_bits=LINE_BITS):
    """Lines of a row of `dim` codes of a `CodeWidth`, less one."""
    return (dim - 1) >> (line_bits.bit_length() - 5) >> width


def block_number(element, block):
    """The block that an element is in; `block` as descriptors have it, 0 for the whole row."""
    number = Const(0)
    for code, shift in enumerate(_BLOCK_SHIFTS, start=1):
        number = Mux(block == code, element >> shift, number)
    return number


def scale_shift(dim, scale, block):
    """log2 of the bytes from one row's scales to the next row's."""
    last = block_number(dim - 1, block)
    shift = Const(0)
    for bit in range(len(last)):
        shift = Mux(last[bit], bit + 1, shift)
    return shift + wide_scale(scale)
