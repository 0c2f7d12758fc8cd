"""The line: the unit of every transfer."""

LINE_BYTES = 64
LINE_BITS = LINE_BYTES * 8
LINE_SHIFT = 6
"""log2 of LINE_BYTES: a line address is a byte address shifted right by this."""


def lines_of(size_bytes: int) -> int:
    """Whole lines that hold `size_bytes`."""
    return -(-size_bytes // LINE_BYTES)


SHORT_PITCHES = (16, 32)
"""Bytes from one row to the next where rows are shorter than a line and share it."""


def row_pitch(size_bytes: int) -> int:
    """Bytes from one row of `size_bytes` to the next: 16, 32 or whole lines."""
    return next((pitch for pitch in SHORT_PITCHES if size_bytes <= pitch), lines_of(size_bytes) * LINE_BYTES)
