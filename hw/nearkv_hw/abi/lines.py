"""The line: the unit of every transfer."""

LINE_BYTES = 64
LINE_BITS = LINE_BYTES * 8
LINE_SHIFT = 6
"""log2 of LINE_BYTES: a line address is a byte address shifted right by this."""


def lines_of(size_bytes: int) -> int:
    """Whole lines that hold `size_bytes`."""
    return -(-size_bytes // LINE_BYTES)
