"""Rows abreast: short rows that share a line and are taken in one step, each in lanes of its own.

Where a unit has four lanes to each 16-bit element of a line, its lanes are four blocks. Two rows of a line
have two blocks each, four rows one: a row of 32 bytes has up to 64 elements, one of 16 bytes up to 32, as
many as there are lanes in its blocks. `abreast`, the log2 of the rows, is zero where a step is of one row,
which has all blocks. What blocks and rows have in common is chosen here.
"""

from amaranth.hdl import Mux


def of_rows(abreast, blocks, operation):
    """Of each row `operation` over its blocks; of rows that there are not, whatever.

    Parameters
    ----------
    abreast : log2 of the rows of the step.
    blocks : a value of every block, of one or four.
    operation : of two values; of a shape that holds all.
    """
    if len(blocks) == 1:
        return blocks
    low, high = operation(*blocks[:2]), operation(*blocks[2:])
    one_or_two = Mux(abreast[0], low, operation(low, high))
    return [Mux(abreast[1], blocks[0], one_or_two), Mux(abreast[1], blocks[1], high), *blocks[2:]]


def of_blocks(abreast, rows):
    """Of each block what its row has."""
    if len(rows) == 1:
        return rows
    second = Mux(abreast[0], rows[1], rows[0])
    return [
        rows[0],
        Mux(abreast[1], rows[1], rows[0]),
        Mux(abreast[1], rows[2], second),
        Mux(abreast[1], rows[3], second),
    ]


def first_blocks(abreast, blocks):
    """Of each row what its first block has."""
    if len(blocks) == 1:
        return blocks
    return [blocks[0], Mux(abreast[1], blocks[1], blocks[2]), *blocks[2:]]


def has_block(abreast, number, block):
    """Whether block `block` is that of the number `number` in its row, whichever row that is."""
    other = number ^ block
    if not len(abreast):
        return other == 0
    return ~(other[0] & ~abreast[1]) & ~(other[1] & ~abreast.any())
