"""Event logs: records that wait until the host clears them, and the interrupts that tell of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nearkv_hw.abi.cxl_registers import PAYLOAD_BYTES
from nearkv_hw.abi.mailbox import (
    CLEAR_EVENTS,
    DYNAMIC_CAPACITY,
    DYNAMIC_CAPACITY_EVENT,
    EVENT_INTERRUPTS,
    EVENT_LOG_LIMIT,
    EVENT_RECORD,
    EVENT_RECORDS,
    GENERAL_MEDIA,
    GENERAL_MEDIA_EVENT,
    Effect,
    EventLog,
    InterruptMode,
    Opcode,
    ReturnCode,
    uuid_number,
)

from .clock import Timestamp
from .command import Command, Commands, Failed

_MODE_BITS = 0xF
_MESSAGE_SHIFT = 4
_RECORDS_AT_ONCE = (PAYLOAD_BYTES - EVENT_RECORDS.size) // EVENT_RECORD.size
_ALL = 1
_OVERFLOW, _MORE = 1, 2
_KINDS = {GENERAL_MEDIA_EVENT: GENERAL_MEDIA, DYNAMIC_CAPACITY_EVENT: DYNAMIC_CAPACITY}


@dataclass
class _Log:
    """A log: records by their handles, the oldest first, and those that found no room."""

    records: dict[int, bytes] = field(default_factory=dict)
    lost: int = 0
    first_lost_ns: int = 0
    last_lost_ns: int = 0


class Events:
    """The device's event logs.

    Parameters
    ----------
    timestamp : the device's time.
    interrupt : sends a message signalled interrupt.
    """

    def __init__(self, timestamp: Timestamp, interrupt: Callable[[int], None]) -> None:
        self._timestamp = timestamp
        self._interrupt = interrupt
        self._next_handle = 1
        self.reset()

    def reset(self) -> None:
        """No records, no interrupts."""
        self._logs = {log: _Log() for log in EventLog}
        self._policy = dict.fromkeys(EventLog, 0)

    def waiting(self) -> int:
        """Bits of the logs with records."""
        return sum(1 << log for log, kept in self._logs.items() if kept.records)

    def add(self, log: EventLog, kind: str, /, **data: int) -> None:
        """A new record; where the log is full it is lost and counted.

        Parameters
        ----------
        log : where it goes.
        kind : the UUID of what it tells.
        data : fields of `GENERAL_MEDIA` or `DYNAMIC_CAPACITY`, as its kind says.
        """
        kept, now_ns = self._logs[log], self._timestamp.now_ns()
        if len(kept.records) == EVENT_LOG_LIMIT:
            kept.first_lost_ns = kept.first_lost_ns if kept.lost else now_ns
            kept.lost, kept.last_lost_ns = min(kept.lost + 1, 0xFFFF), now_ns
            return
        handle = self._next_handle
        self._next_handle = handle % 0xFFFF + 1  # 0 is none
        kept.records[handle] = EVENT_RECORD.pack_bytes(
            uuid=uuid_number(kind),
            length=EVENT_RECORD.size,
            flags=min(log, EventLog.FATAL) if log is not EventLog.DYNAMIC_CAPACITY else EventLog.INFORMATION,
            handle=handle,
            timestamp=now_ns,
            data=_KINDS[kind].pack(data),
        )
        setting = self._policy[log]
        if setting & _MODE_BITS == InterruptMode.MESSAGE:
            self._interrupt(setting >> _MESSAGE_SHIFT)

    def commands(self) -> Commands:
        """The mailbox's commands."""
        return {
            Opcode.GET_EVENT_RECORDS: Command(self._get, length=1),
            Opcode.CLEAR_EVENT_RECORDS: Command(
                self._clear, length=CLEAR_EVENTS.size, entry=2, effects=Effect.IMMEDIATE_LOG
            ),
            Opcode.GET_EVENT_INTERRUPTS: Command(self._get_policy),
            Opcode.SET_EVENT_INTERRUPTS: Command(
                self._set_policy, length=EVENT_INTERRUPTS.size, effects=Effect.IMMEDIATE_POLICY
            ),
        }

    def _log(self, number: int) -> _Log:
        if number not in self._logs:
            raise Failed(ReturnCode.INVALID_INPUT)
        return self._logs[EventLog(number)]

    def _get(self, payload: bytes) -> bytes:
        log = self._log(payload[0])
        records = list(log.records.values())[:_RECORDS_AT_ONCE]
        flags = _OVERFLOW * bool(log.lost) | _MORE * (len(records) < len(log.records))
        head = EVENT_RECORDS.pack_bytes(
            flags=flags,
            overflow_count=log.lost,
            first_overflow=log.first_lost_ns,
            last_overflow=log.last_lost_ns,
            count=len(records),
        )
        return head + b"".join(records)

    def _clear(self, payload: bytes) -> bytes:
        given = CLEAR_EVENTS.unpack(payload[: CLEAR_EVENTS.size])
        listed = payload[CLEAR_EVENTS.size :]
        handles = [int.from_bytes(listed[i : i + 2], "little") for i in range(0, len(listed), 2)]
        log = self._log(given["log"])
        if given["flags"] & _ALL:
            if not log.lost:  # that is what it is for
                raise Failed(ReturnCode.INVALID_INPUT)
            log.records.clear()
        else:
            if len(handles) != given["count"]:
                raise Failed(ReturnCode.PAYLOAD_LENGTH)
            if not handles:
                raise Failed(ReturnCode.INVALID_INPUT)
            if handles != list(log.records)[: len(handles)]:  # in the order of time
                raise Failed(ReturnCode.INVALID_HANDLE)
            for handle in handles:
                del log.records[handle]
        log.lost = log.first_lost_ns = log.last_lost_ns = 0
        return b""

    def _get_policy(self, _: bytes) -> bytes:
        return EVENT_INTERRUPTS.pack_bytes({log.name.lower(): value for log, value in self._policy.items()})

    def _set_policy(self, payload: bytes) -> bytes:
        given = EVENT_INTERRUPTS.unpack(payload)
        if any(value & _MODE_BITS > InterruptMode.FIRMWARE for value in given.values()):
            raise Failed(ReturnCode.INVALID_INPUT)
        self._policy = {log: given[log.name.lower()] for log in EventLog}
        return b""
