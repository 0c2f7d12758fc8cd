"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence

from .loads import Load
from .tiers import Block
from .trace import Request


class Running:
    """What the engine knows of a request from its arrival to its last token.

    Parameters
    ----------
    number : its place in the trace.
    request : what is asked for.
    tiers : how many there are.

    Members
    -------
    generated : tokens that it has been answered with.
    blocks : shared blocks that it uses.
    own : rows of its own in each home, those for windowed layers not included.
    unshared : of these, rows of the prompt that can still become blocks.
    extra : rows that its windowed layers take, in which home.
    found : rows of its prompt that were there.
    found_away : of these, those in the second home.
    first_rows : rows of its prompt, apart from what was found, in the first home.
    worked : rows of its prompt that are there or worked out.
    staged : rows of its prompt that GPU memory holds meanwhile.
    loads : what has yet to come before its prompt can be worked on.
    joined : steps, and rows grown in each home, when it began to decode.
    near : whether it has rows on the devices.
    admitted_s, first_s, last_s : when it was first admitted, and had its first and latest token; -1 before.
    hits : rows found at its first admission, by tier.
    preemptions : how often it had to give its rows back.
    reached : most rows of its prompt, and of what it was answered, that it had when it gave them back.
    repeated : of these, rows that it worked out again; more than once, if need be.
    """

    __slots__ = (
        "admitted_s",
        "blocks",
        "extra",
        "first_rows",
        "first_s",
        "found",
        "found_away",
        "generated",
        "hits",
        "joined",
        "last_s",
        "loads",
        "near",
        "number",
        "own",
        "preemptions",
        "reached",
        "repeated",
        "request",
        "staged",
        "unshared",
        "worked",
    )

    def __init__(self, number: int, request: Request, tiers: int) -> None:
        self.number = number
        self.request = request
        self.generated = 0
        self.admitted_s = self.first_s = self.last_s = -1.0
        self.hits = [0] * tiers
        self.preemptions = self.reached = self.repeated = 0
        self.release()

    def release(self) -> None:
        """Forget what was held."""
        self.blocks: list[Block] = []
        self.own = [0, 0]
        self.unshared = [0, 0]
        self.extra = (0, 0)
        self.found = self.found_away = self.first_rows = self.worked = self.staged = 0
        self.loads: list[Load] = []
        self.joined: tuple[int, Sequence[int]] = (0, (0, 0))
        self.near = False

    @property
    def prompt(self) -> int:
        """Tokens to work on before it decodes: the prompt, and after a preemption what it was answered."""
        return self.request.prompt + self.generated

    @property
    def whole(self) -> int:
        """Rows that it has in the end; those of the last token are never asked for."""
        return self.request.prompt + self.request.output - 1

    @property
    def ready(self) -> bool:
        """Whether everything that it waits for has come."""
        return all(load.bytes_left <= 0 for load in self.loads)

    def away(self, rows: int, *, staging: bool) -> int:
        """Of the first so many rows of its prompt, those that GPU memory does not hold."""
        if staging:
            return max(0, rows - self.staged)
        return self.found_away + max(0, rows - self.found - self.first_rows)
