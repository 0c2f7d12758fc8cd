"""Room for requests: rows of their own, blocks that they share, prefixes brought from where they are."""

from __future__ import annotations

from collections.abc import Sequence

from .loads import Load, Loads
from .machine import Machine
from .sequence import Running
from .tiers import Block, Store


class Rooms:
    """Gives requests their rows and takes them back.

    Parameters
    ----------
    machine : the system.
    store : its memory.
    loads : what is on its way.
    prefix_cache : whether blocks are shared.

    Members
    -------
    staging_free : rows of prompts for which GPU memory has room beside their homes.
    """

    def __init__(self, machine: Machine, store: Store, loads: Loads, *, prefix_cache: bool) -> None:
        self.staging_free = machine.staging_rows
        self._unsent = 0.0
        self._machine = machine
        self._store = store
        self._loads = loads
        self._prefix_cache = prefix_cache

    def give(self, one: Running) -> bool:
        """Rows for a prompt, in blocks that are there and in homes; False if there are not enough."""
        store, homes = self._store, self._machine.homes
        size = store.block_tokens
        names = one.request.blocks[: (one.prompt - 1) // size] if self._prefix_cache else ()
        found = self._usable(store.found(names), one)
        new = one.prompt - len(found) * size
        extra = self._machine.extra_rows(one.whole)
        need = new + extra
        room = sum(store.tiers[at].room for at in range(len(homes)))
        for block in found:  # blocks below come up; blocks at home without users are room no longer
            need += size if block.tier >= len(homes) or not block.users else 0
        if need > room:
            return False
        hits = [0] * len(store.tiers)
        for block in found:
            hits[block.tier] += size
        if not one.preemptions:
            one.hits = hits
        self._use(one, found)
        parts = self._parts(new, extra)
        for at in range(len(homes)):
            store.take(at, parts[0][at] + parts[1][at])
        one.own, one.unshared, one.extra = list(parts[0]), list(parts[0]), parts[1]
        one.found = one.worked = len(found) * size
        one.found_away = sum(size for block in found if block.tier == 1) if len(homes) > 1 else 0
        one.first_rows = parts[0][0]
        return True

    def share(self, one: Running, before: int) -> None:
        """Make blocks of what has been worked out of a prompt since its first `before` rows."""
        size = self._store.block_tokens
        if not self._prefix_cache:
            return
        for name in one.request.blocks[before // size : one.worked // size]:
            home = next((at for at in (0, 1) if one.unshared[at] >= size), None)
            if home is None:  # what is left lies in two homes
                return
            one.unshared[home] -= size
            block = self._store.share(name, home)
            if block is not None:
                one.own[home] -= size
                one.blocks.append(block)

    def unstage(self, one: Running) -> None:
        """The prompt is worked out; GPU memory holds its rows no longer beside their home."""
        self.staging_free += one.staged
        one.staged = 0

    def take_back(self, one: Running) -> None:
        """All that a request has; the end of its prompt is the first to be pushed out."""
        self.unstage(one)
        for at in range(len(self._machine.homes)):
            self._store.give_back(at, one.own[at] + one.extra[at])
        for block in reversed(one.blocks):
            self._store.unpin(block)
        one.release()

    def sent(self) -> float:
        """Bytes that were brought to the devices since the last call."""
        sent, self._unsent = self._unsent, 0.0
        return sent

    def _usable(self, found: list[Block], one: Running) -> list[Block]:
        """Of the blocks found those that can be used: two full homes may have no place for a whole one."""
        homes = self._machine.homes
        size = self._store.block_tokens
        below = next((at for at, block in enumerate(found) if block.tier >= len(homes)), len(found))
        if len(homes) == 1 or below == len(found):
            return found
        room = sum(self._store.tiers[at].room for at in range(len(homes)))
        room -= sum(size for block in found[:below] if not block.users)
        needed = one.prompt - below * size + self._machine.extra_rows(one.whole)
        return found if needed + size <= room else found[:below]

    def _parts(self, new: int, extra: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many new rows, and rows for windowed layers, go to each home: whole blocks to the first."""
        if len(self._machine.homes) == 1:
            return (new, 0), (extra, 0)
        first, second = (self._store.tiers[at].room for at in (0, 1))
        if new + extra <= first:
            return (new, 0), (extra, 0)
        here = min(new, first)
        whole = here - here % self._store.block_tokens
        if new - whole + extra <= second:
            return (whole, new - whole), (0, extra)
        return (here, new - here), (min(extra, first - here), extra - min(extra, first - here))

    def _use(self, one: Running, found: Sequence[Block]) -> None:
        """Pin the blocks of a prompt, and have those brought that lie where they cannot be used."""
        store, machine = self._store, self._machine
        size, homes = store.block_tokens, len(machine.homes)
        for block in found:
            store.pin(block)
        coming: dict[int, Load] = {}
        staged = 0
        if machine.staging_rows:
            one.staged = staged = min(one.prompt, self.staging_free)
            self.staging_free -= staged
        for number, block in enumerate(found):
            source = block.tier
            if source >= homes:
                store.bring(block, next(at for at in range(homes) if store.tiers[at].room >= size))
                if block.tier == machine.device:
                    self._unsent += size * machine.homes[block.tier].row_bytes
            elif source == 1 and machine.fetches and block.users == 1 and store.tiers[0].room >= size:
                store.bring(block, 0)
            elif block.arrives is not None and block.arrives.bytes_left > 0:
                one.loads.append(block.arrives)
                continue
            elif (number + 1) * size > staged:
                continue
            if source not in coming:
                coming[source] = self._loads.start(source)
            load = coming[source]
            load.bytes_left += size * machine.places[source].row_bytes
            if block.tier != source:
                block.arrives = load
        one.loads += coming.values()
        one.blocks = list(found)
