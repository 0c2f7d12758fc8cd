"""Numbers as people write them: 4k, 1m, 512g."""

from __future__ import annotations

import re

from nearkv.errors import ArgumentError

_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def quantity(text: str | int, what: str = "number") -> int:
    """A whole number with a binary multiple: k is 1,024.

    Raises
    ------
    ArgumentError : saying what was given and how to write it.

    Examples
    --------
    >>> quantity("128k"), quantity(7)
    (131072, 7)
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+)([kmgt]?)", text.strip().lower())
    if found is None:
        raise ArgumentError(
            f"{what}={text!r}: write a whole number, with k, m, g or t for multiples of 1,024: 4096 or 4k"
        )
    return int(found[1]) * _MULTIPLES[found[2]]
