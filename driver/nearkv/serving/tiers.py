"""Rows in tiers of memory: who has them, which prefixes are kept, and what makes room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .loads import Load


class Block:
    """Rows of a prompt's block that requests share.

    Parameters
    ----------
    name : of its tokens and of all before them.
    tier : where it lies.

    Members
    -------
    users : running requests whose prompt has it; kept for later ones when there are none.
    arrives : the load that brings it, or None.
    """

    __slots__ = ("arrives", "name", "tier", "users")

    def __init__(self, name: int, tier: int) -> None:
        self.name = name
        self.tier = tier
        self.users = 1
        self.arrives: Load | None = None


class Tier:
    """One kind of memory.

    Parameters
    ----------
    rows : that have room.

    Members
    -------
    used : rows that running requests have, those of blocks with users included.
    kept : blocks without users, the least recently used one first.
    moved_in : rows that came down from the tier above.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.used = 0
        self.kept: OrderedDict[int, Block] = OrderedDict()
        self.moved_in = 0

    @property
    def room(self) -> int:
        """Rows that a request could have, if all that is kept makes room."""
        return self.rows - self.used


class Store:
    """Tiers, one below the other, and the blocks in them.

    A block that has to make room goes to the tier below, as its most recently used one, and out of the last.

    Parameters
    ----------
    rows : room of every tier.
    block_tokens : rows of a block.

    Members
    -------
    tiers : from the first one down.
    blocks : those that are anywhere, by name.
    """

    def __init__(self, rows: Sequence[int], block_tokens: int) -> None:
        self.tiers = [Tier(one) for one in rows]
        self.block_tokens = block_tokens
        self.blocks: dict[int, Block] = {}

    def found(self, names: Sequence[int]) -> list[Block]:
        """Blocks of the longest beginning that is there."""
        found = []
        for name in names:
            block = self.blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def free(self, at: int) -> int:
        """Rows of a tier in which there is nothing."""
        tier = self.tiers[at]
        return tier.rows - tier.used - len(tier.kept) * self.block_tokens

    def make_free(self, at: int, rows: int) -> None:
        """Have so many free rows; a tier's `room` says how many there can be."""
        while self.free(at) < rows:
            self._push_out(at)

    def take(self, at: int, rows: int) -> None:
        """Rows for a request."""
        self.make_free(at, rows)
        self.tiers[at].used += rows

    def give_back(self, at: int, rows: int) -> None:
        """Rows that a request has no longer."""
        self.tiers[at].used -= rows

    def pin(self, block: Block) -> None:
        """One more request uses a block where it lies."""
        if not block.users:
            tier = self.tiers[block.tier]
            del tier.kept[block.name]
            tier.used += self.block_tokens
        block.users += 1

    def unpin(self, block: Block) -> None:
        """One request fewer uses it; the last one leaves it as the most recently used."""
        block.users -= 1
        if not block.users:
            tier = self.tiers[block.tier]
            tier.used -= self.block_tokens
            tier.kept[block.name] = block

    def bring(self, block: Block, at: int) -> None:
        """Move a block that one request uses to another tier, which has room."""
        self.tiers[block.tier].used -= self.block_tokens
        block.tier = at
        self.take(at, self.block_tokens)

    def share(self, name: int, at: int) -> Block | None:
        """A block of rows that a request has worked out and holds; None if there is one of that name."""
        if name in self.blocks:
            return None
        block = self.blocks[name] = Block(name, at)
        return block

    def _push_out(self, at: int) -> None:
        _, block = self.tiers[at].kept.popitem(last=False)
        below = at + 1
        if below < len(self.tiers) and self.tiers[below].room >= self.block_tokens:
            self.make_free(below, self.block_tokens)
            block.tier = below
            self.tiers[below].kept[block.name] = block
            self.tiers[below].moved_in += self.block_tokens
        else:
            del self.blocks[block.name]
