"""The poison list: what the device knows of lost lines, and commands that add to it and take from it."""

from __future__ import annotations

from nearkv_hw.abi.config import EXTENT_SHIFT, DeviceConfig
from nearkv_hw.abi.cxl_registers import PAYLOAD_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.mailbox import (
    CLEAR_POISON,
    GENERAL_MEDIA_EVENT,
    GET_POISON,
    POISON_ENTRY,
    POISON_LIST,
    POISON_LIST_LIMIT,
    Effect,
    EventLog,
    Opcode,
    PoisonSource,
    ReturnCode,
)

from ..maintenance import Ability, Maintenance
from .clock import Timestamp
from .command import Command, Commands, Failed
from .events import Events

_ENTRIES_AT_ONCE = (PAYLOAD_BYTES - POISON_LIST.size) // POISON_ENTRY.size
_VOLATILE, _UNCORRECTABLE, _CHANNEL = 1, 1, 1
_MORE, _OVERFLOW = 1, 2
_HOST_READ, _HOST_WRITE, _INJECTED = 1, 2, 4


class PoisonList:
    """Poisoned lines as the host learns of them.

    Parameters
    ----------
    config : the device's.
    maintenance : how lines are poisoned and found.
    events, timestamp : the device's logs and time.
    """

    def __init__(
        self, config: DeviceConfig, maintenance: Maintenance, events: Events, timestamp: Timestamp
    ) -> None:
        self._config = config
        self._maintenance = maintenance
        self._events = events
        self._timestamp = timestamp
        self._told: set[int] = set()
        self._following: tuple[bytes, int] | None = None
        """A request whose answer was not all, and how many entries of it the host has."""
        self._overflow_ns = 0
        self._overflowed = False

    def poll(self) -> None:
        """Tell of lines that reads have found since, and of those that hosts have poisoned."""
        found = self._maintenance.poisoned()
        self._told &= set(found)
        for address, source in found.items():
            if address not in self._told:
                self._told.add(address)
                if source is PoisonSource.INTERNAL:
                    self._tell(EventLog.FAILURE, address, _HOST_READ)
                elif source is PoisonSource.EXTERNAL:
                    self._tell(EventLog.INFORMATION, address, _HOST_WRITE)
        if len(found) > POISON_LIST_LIMIT and not self._overflowed:
            self._overflowed, self._overflow_ns = True, self._timestamp.now_ns()

    def commands(self) -> Commands:
        """The mailbox's commands, as far as the device lets itself be poisoned and repaired."""
        found: Commands = {Opcode.GET_POISON: Command(self._get, length=GET_POISON.size, media=True)}
        if Ability.POISON in self._maintenance.abilities:
            found[Opcode.INJECT_POISON] = Command(
                self._inject, length=8, effects=Effect.IMMEDIATE_DATA, media=True
            )
        if Ability.REPAIR in self._maintenance.abilities:
            found[Opcode.CLEAR_POISON] = Command(
                self._clear, length=CLEAR_POISON.size, effects=Effect.IMMEDIATE_DATA, media=True
            )
        return found

    def _tell(self, log: EventLog, address: int, transaction: int) -> None:
        channel = (address >> EXTENT_SHIFT) % self._config.channels
        self._events.add(
            log, GENERAL_MEDIA_EVENT, address=address | _VOLATILE, descriptor=_UNCORRECTABLE,
            transaction=transaction, valid=_CHANNEL, channel=channel,
        )  # fmt: skip

    def _address(self, address: int) -> int:
        if address % LINE_BYTES:
            raise Failed(ReturnCode.INVALID_INPUT)
        if address >= self._config.capacity_bytes:
            raise Failed(ReturnCode.INVALID_ADDRESS)
        return address

    def _get(self, payload: bytes) -> bytes:
        asked = GET_POISON.unpack(payload)
        begin = self._address(asked["address"])
        end = begin + asked["length"] * LINE_BYTES
        if end > self._config.capacity_bytes:
            raise Failed(ReturnCode.INVALID_ADDRESS)
        listed = list(self._maintenance.poisoned().items())[:POISON_LIST_LIMIT]
        inside = [(address, source) for address, source in listed if begin <= address < end]
        start = self._following[1] if self._following and self._following[0] == payload else 0
        end_at = start + _ENTRIES_AT_ONCE
        self._following = (payload, end_at) if end_at < len(inside) else None
        flags = _MORE * bool(self._following) | _OVERFLOW * self._overflowed
        inside = inside[start:end_at]
        head = POISON_LIST.pack_bytes(flags=flags, overflow=self._overflow_ns, count=len(inside))
        return head + b"".join(
            POISON_ENTRY.pack_bytes(address=address | source, length=1) for address, source in inside
        )

    def _inject(self, payload: bytes) -> bytes:
        address = self._address(int.from_bytes(payload, "little"))
        known = self._maintenance.poisoned()
        if address not in known:
            if len(known) >= POISON_LIST_LIMIT:
                raise Failed(ReturnCode.POISON_LIMIT)
            self._maintenance.poison(address)
            self._tell(EventLog.INFORMATION, address, _INJECTED)
        return b""

    def _clear(self, payload: bytes) -> bytes:
        given = CLEAR_POISON.unpack(payload)
        address = self._address(given["address"])
        self._maintenance.repair(address, given["data"].to_bytes(LINE_BYTES, "little"))
        if len(self._maintenance.poisoned()) <= POISON_LIST_LIMIT:
            self._overflowed, self._overflow_ns = False, 0
        return b""
