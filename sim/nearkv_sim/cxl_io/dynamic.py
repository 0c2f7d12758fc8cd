"""Dynamic capacity: extents that a fabric manager offers, and that the host accepts and gives back.

The region is the upper part of the device's memory. What has not been accepted no tenant can claim; what is
given back is erased first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.cxl_registers import PAYLOAD_BYTES
from nearkv_hw.abi.mailbox import (
    CAPACITY_UNIT,
    CHANGED_EXTENT,
    DYNAMIC_CAPACITY_EVENT,
    DYNAMIC_CONFIG,
    DYNAMIC_LIMITS,
    DYNAMIC_REGION,
    EXTENT,
    EXTENT_CHANGE,
    EXTENT_LIMIT,
    EXTENTS,
    GET_DYNAMIC_CONFIG,
    GET_EXTENTS,
    Effect,
    EventLog,
    ExtentEvent,
    Opcode,
    ReturnCode,
)

from ..maintenance import Ability, Maintenance
from .command import Command, Commands, Failed, entries
from .events import Events

BLOCK_BYTES = EXTENT_BYTES
"""Capacity comes and goes in blocks of this size: what a tenant can own."""
_EXTENTS_AT_ONCE = (PAYLOAD_BYTES - EXTENTS.size) // EXTENT.size
_MORE = 1


@dataclass(frozen=True, order=True)
class Piece:
    """A run of blocks, in bytes of the device."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.length

    def meets(self, other: Piece) -> bool:
        """Whether they have a block in common."""
        return self.start < other.end and other.start < self.end

    def holds(self, other: Piece) -> bool:
        """Whether the other lies in it."""
        return self.start <= other.start and other.end <= self.end


class DynamicCapacity:
    """One region of dynamic capacity.

    Parameters
    ----------
    base, size : where it lies in the device; multiples of 256 MiB. With size 0 there is none.
    maintenance, events : the device's.

    Members
    -------
    accepted, offered : extents that the host has, and those that it has not answered for.

    Raises
    ------
    ValueError : no such size.
    RuntimeError : memory of this device cannot be withheld.
    """

    def __init__(self, base: int, size: int, maintenance: Maintenance, events: Events) -> None:
        if size < 0 or size % CAPACITY_UNIT or base < 0:
            raise ValueError(
                f"dynamic_bytes must be a multiple of {CAPACITY_UNIT} of its memory, not {size!r}"
            )
        if size and Ability.WITHHOLD not in maintenance.abilities:
            raise RuntimeError("dynamic capacity needs a device that can withhold memory: open a model")
        self.region = Piece(base, size)
        self.accepted: list[Piece] = []
        self.offered: list[Piece] = []
        self._maintenance = maintenance
        self._events = events
        self._generation = 0
        self._changed: list[Callable[[int, int, bool], None]] = []
        if size:
            maintenance.withhold(base, size)

    def on_changed(self, changed: Callable[[int, int, bool], None]) -> None:
        """What else is to happen: with address and size of what came (True) or is gone (False)."""
        self._changed.append(changed)

    def offer(self, start: int, length: int) -> None:
        """As a fabric manager: offer an extent to the host, which answers with Add Dynamic Capacity Response.

        ValueError for one that is not whole blocks of the region, or meets another one.
        """
        piece = Piece(start, length)
        if not self._is_ours(piece) or any(map(piece.meets, self.accepted + self.offered)):
            raise ValueError(
                f"an extent must be whole blocks of {BLOCK_BYTES} bytes from {self.region.start:#x} to "
                f"{self.region.end:#x} that are not given yet, not {length:#x} bytes at {start:#x}"
            )
        self.offered.append(piece)
        self._tell(ExtentEvent.ADD, piece)

    def ask_back(self, start: int, length: int, *, forced: bool = False) -> None:
        """As a fabric manager: ask the host to give capacity back, or take it.

        ValueError for what the host has not.
        """
        piece = Piece(start, length)
        holder = next((have for have in self.accepted if have.holds(piece)), None)
        if holder is None or not self._is_ours(piece):
            raise ValueError(f"the host has no {length:#x} bytes at {start:#x}")
        if forced:
            self._take(holder, piece)
        self._tell(ExtentEvent.FORCED_RELEASE if forced else ExtentEvent.RELEASE, piece)

    def commands(self) -> Commands:
        """The mailbox's commands; none where there is no region."""
        if not self.region.length:
            return {}
        change = {"length": EXTENT_CHANGE.size, "entry": CHANGED_EXTENT.size}
        effects = Effect.IMMEDIATE_CONFIGURATION | Effect.IMMEDIATE_DATA
        return {
            Opcode.GET_DYNAMIC_CONFIG: Command(self._config, length=GET_DYNAMIC_CONFIG.size),
            Opcode.GET_DYNAMIC_EXTENTS: Command(self._list, length=GET_EXTENTS.size),
            Opcode.ADD_DYNAMIC_RESPONSE: Command(self._add, effects=effects, media=True, **change),
            Opcode.RELEASE_DYNAMIC: Command(self._release, effects=effects, media=True, **change),
        }

    def _is_ours(self, piece: Piece) -> bool:
        whole = piece.length > 0 and not (piece.start % BLOCK_BYTES or piece.length % BLOCK_BYTES)
        return whole and self.region.holds(piece)

    def _tell(self, kind: ExtentEvent, piece: Piece) -> None:
        self._events.add(
            EventLog.DYNAMIC_CAPACITY, DYNAMIC_CAPACITY_EVENT, kind=kind, extent=_packed(piece),
            extents_available=EXTENT_LIMIT - len(self.accepted),
        )  # fmt: skip

    def _config(self, payload: bytes) -> bytes:
        asked = GET_DYNAMIC_CONFIG.unpack(payload)
        if asked["first"] > 0:
            raise Failed(ReturnCode.INVALID_INPUT)
        count = min(asked["count"], 1)
        region = DYNAMIC_REGION.pack_bytes(
            base=self.region.start,
            decode_length=self.region.length // CAPACITY_UNIT,
            length=self.region.length,
            block=BLOCK_BYTES,
        )
        limits = DYNAMIC_LIMITS.pack_bytes(
            extents=EXTENT_LIMIT, extents_available=EXTENT_LIMIT - len(self.accepted)
        )
        return DYNAMIC_CONFIG.pack_bytes(available=1, count=count) + region * count + limits

    def _list(self, payload: bytes) -> bytes:
        asked = GET_EXTENTS.unpack(payload)
        first = asked["first"]
        if first > len(self.accepted):
            raise Failed(ReturnCode.INVALID_INPUT)
        count = min(asked["count"], len(self.accepted) - first, _EXTENTS_AT_ONCE)
        head = EXTENTS.pack_bytes(count=count, total=len(self.accepted), generation=self._generation)
        listed = self.accepted[first : first + count]
        return head + b"".join(_packed(piece).to_bytes(EXTENT.size, "little") for piece in listed)

    def _pieces(self, payload: bytes) -> list[Piece]:
        """The extents of a command, checked for themselves."""
        head = EXTENT_CHANGE.size
        given = EXTENT_CHANGE.unpack(payload[:head])
        listed = entries(CHANGED_EXTENT, payload, head, given["count"])
        pieces = [Piece(entry["start"], entry["length"]) for entry in listed]
        if any(not self.region.holds(piece) for piece in pieces):
            raise Failed(ReturnCode.INVALID_ADDRESS)
        if any(not self._is_ours(piece) for piece in pieces):
            raise Failed(ReturnCode.EXTENT_LIST)
        in_order = sorted(pieces)
        if any(a.meets(b) for a, b in pairwise(in_order)):
            raise Failed(ReturnCode.EXTENT_LIST)
        return pieces

    def _add(self, payload: bytes) -> bytes:
        pieces = self._pieces(payload)
        if len(self.accepted) + len(pieces) > EXTENT_LIMIT:
            raise Failed(ReturnCode.EXHAUSTED)
        if not self.offered and pieces:
            raise Failed(ReturnCode.INVALID_ADDRESS)
        # the oldest offer is answered: with parts of it, or with nothing
        if self.offered:
            if any(not self.offered[0].holds(piece) for piece in pieces):
                raise Failed(ReturnCode.INVALID_ADDRESS)
            self.offered.pop(0)
        for piece in pieces:
            self._maintenance.give(piece.start, piece.length)
            self.accepted.append(piece)
            self._happened(piece, given=True)
        self._generation += bool(pieces)
        return b""

    def _release(self, payload: bytes) -> bytes:
        pieces = self._pieces(payload)
        if not pieces:
            raise Failed(ReturnCode.INVALID_INPUT)
        holders = [next((have for have in self.accepted if have.holds(piece)), None) for piece in pieces]
        if None in holders:
            raise Failed(ReturnCode.INVALID_ADDRESS)
        for piece in pieces:
            self._take(next(have for have in self.accepted if have.holds(piece)), piece)
        return b""

    def _take(self, holder: Piece, piece: Piece) -> None:
        self.accepted.remove(holder)
        left = (Piece(holder.start, piece.start - holder.start), Piece(piece.end, holder.end - piece.end))
        self.accepted += [rest for rest in left if rest.length]
        self._maintenance.withhold(piece.start, piece.length)
        self._generation += 1
        self._happened(piece, given=False)

    def _happened(self, piece: Piece, *, given: bool) -> None:
        for changed in self._changed:
            changed(piece.start, piece.length, given)


def _packed(piece: Piece) -> int:
    return EXTENT.pack(start=piece.start, length=piece.length)
