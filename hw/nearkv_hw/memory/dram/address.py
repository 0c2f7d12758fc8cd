"""Where a line of a channel lies in its DRAM: the hardware's side of `abi.dram`'s address map."""

from amaranth.hdl import Cat
from amaranth.utils import exact_log2


def subchannel_of(part, line):
    """The sub-channel that holds a channel's line, and the line's number there."""
    bits = exact_log2(part.subchannels)
    return line[:bits], line[bits:]


def place_of(part, line):
    """Bank, row and column of a sub-channel's line: values without registers.

    Neighbouring lines alternate between two bank groups. A pair of rows holds 2 * row_lines of them, and the
    next pair lies in other banks; which ones depends on the row's Gray code, so that runs of lines a power of
    two apart meet in different banks, and no run goes from one row of a bank straight to its next.
    """
    column_bits = exact_log2(part.row_lines)
    bank_bits = exact_log2(part.banks) - 1
    pair = line[1 + column_bits :]
    row = pair[bank_bits:]
    scatter = (row ^ row >> 1)[:bank_bits]
    return Cat(line[0], pair[:bank_bits] ^ scatter), row, line[1 : 1 + column_bits]
