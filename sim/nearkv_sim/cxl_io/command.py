"""What mailbox commands are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.mailbox import Effect, Opcode, ReturnCode

NO_EFFECT = Effect(0)
Run = Callable[[bytes], bytes]
"""Carries a command out: from its input to its output; `Failed` where it cannot."""


class Failed(Exception):
    """A command that ends with another return code than success.

    Parameters
    ----------
    code : the return code.
    """

    def __init__(self, code: ReturnCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(frozen=True)
class Command:
    """A command that the device has.

    Parameters
    ----------
    run : carries it out.
    length : bytes of its input, or the least of them where `entry` is not 0.
    entry : bytes of each entry of the list at the input's end.
    effects : what it changes.
    media : whether it needs the memory, so that it fails while that is disabled.
    """

    run: Run
    length: int = 0
    entry: int = 0
    effects: Effect = NO_EFFECT
    media: bool = False

    def fits(self, length: int) -> bool:
        """Whether the input may have so many bytes."""
        if not self.entry:
            return length == self.length
        return length >= self.length and (length - self.length) % self.entry == 0


Commands = dict[Opcode, Command]


def entries(layout: Layout, payload: bytes, start: int, count: int) -> list[dict[str, int]]:
    """The list at the end of a payload; `Failed` unless it is as long as it says."""
    size = layout.size
    if len(payload) != start + count * size:
        raise Failed(ReturnCode.PAYLOAD_LENGTH)
    return [layout.unpack(payload[start + i * size :][:size]) for i in range(count)]
