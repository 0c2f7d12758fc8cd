"""Commands that tell what the memory device is and how it fares."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.cxl_registers import PAYLOAD_BYTES
from nearkv_hw.abi.mailbox import (
    ALERTS,
    CAPACITY_UNIT,
    CEL_ENTRY,
    COMMAND_EFFECTS_LOG,
    EVENT_LOG_LIMIT,
    GENERAL_MEDIA_EVENT,
    GET_LOG,
    HEALTH,
    IDENTIFY,
    LIFE_UNKNOWN,
    LOG_ENTRY,
    PARTITION,
    POISON_LIST_LIMIT,
    SET_ALERTS,
    SET_PARTITION,
    SUPPORTED_LOGS,
    TEMPERATURE_UNKNOWN,
    VOLATILE_ALERT,
    Effect,
    EventLog,
    Opcode,
    ReturnCode,
    uuid_number,
)

from ..maintenance import Ability, Maintenance
from .clock import Timestamp
from .command import Command, Commands, Failed
from .events import Events

_FIRMWARE = b"nearkv"
_THRESHOLD = 2
_CORRECTED_HIGH = 1 << 4
_DIRTY = 1


class MemoryDevice:
    """Identity, partitions, health, alerts, shutdown state, time and logs.

    Parameters
    ----------
    config : the device's.
    static_bytes : of its memory, what is not dynamic capacity.
    maintenance, events, timestamp : the device's.
    all_commands : every command of the mailbox, for the command effects log.
    """

    def __init__(
        self,
        config: DeviceConfig,
        static_bytes: int,
        maintenance: Maintenance,
        events: Events,
        timestamp: Timestamp,
        all_commands: Callable[[], Commands],
    ) -> None:
        self._config = config
        self._static_units = static_bytes // CAPACITY_UNIT
        self._maintenance = maintenance
        self._events = events
        self._timestamp = timestamp
        self._all_commands = all_commands
        self._dirty = 0
        self._dirty_shutdowns = 0
        self._alert_enabled = False
        self._alert_at = 0
        self._alerted = False

    def reset(self) -> None:
        """A shutdown that nobody declared clean counts as dirty."""
        self._dirty_shutdowns += self._dirty
        self._dirty = 0

    def poll(self) -> None:
        """Warn once when corrected errors reach the threshold."""
        over = self._over_threshold()
        if over and not self._alerted:
            self._events.add(EventLog.WARNING, GENERAL_MEDIA_EVENT, descriptor=_THRESHOLD)
        self._alerted = over

    def commands(self) -> Commands:
        """The mailbox's commands."""
        policy, configuration = Effect.IMMEDIATE_POLICY, Effect.IMMEDIATE_CONFIGURATION
        return {
            Opcode.GET_TIMESTAMP: Command(lambda _: self._timestamp.now_ns().to_bytes(8, "little")),
            Opcode.SET_TIMESTAMP: Command(self._set_timestamp, length=8, effects=policy),
            Opcode.GET_SUPPORTED_LOGS: Command(self._supported_logs),
            Opcode.GET_LOG: Command(self._get_log, length=GET_LOG.size, media=True),
            Opcode.IDENTIFY: Command(self._identify),
            Opcode.GET_PARTITION: Command(self._partition, media=True),
            Opcode.SET_PARTITION: Command(
                self._set_partition, length=SET_PARTITION.size, effects=configuration, media=True
            ),
            Opcode.GET_HEALTH: Command(self._health),
            Opcode.GET_ALERTS: Command(self._alerts),
            Opcode.SET_ALERTS: Command(self._set_alerts, length=SET_ALERTS.size, effects=policy),
            Opcode.GET_SHUTDOWN: Command(lambda _: bytes([self._dirty])),
            Opcode.SET_SHUTDOWN: Command(self._set_shutdown, length=1, effects=policy),
        }

    def _set_timestamp(self, payload: bytes) -> bytes:
        self._timestamp.set(int.from_bytes(payload, "little"))
        return b""

    def _effects_log(self) -> bytes:
        return b"".join(
            CEL_ENTRY.pack_bytes(opcode=opcode, effects=command.effects)
            for opcode, command in sorted(self._all_commands().items())
        )

    def _supported_logs(self, _: bytes) -> bytes:
        entry = LOG_ENTRY.pack_bytes(uuid=uuid_number(COMMAND_EFFECTS_LOG), size=len(self._effects_log()))
        return SUPPORTED_LOGS.pack_bytes(count=1) + entry

    def _get_log(self, payload: bytes) -> bytes:
        asked = GET_LOG.unpack(payload)
        if asked["uuid"] != uuid_number(COMMAND_EFFECTS_LOG):
            raise Failed(ReturnCode.INVALID_LOG)
        log, end = self._effects_log(), asked["start"] + asked["length"]
        if end > len(log) or asked["length"] > PAYLOAD_BYTES:
            raise Failed(ReturnCode.INVALID_INPUT)
        return log[asked["start"] : end]

    def _identify(self, _: bytes) -> bytes:
        poison = POISON_LIST_LIMIT if Ability.POISON in self._maintenance.abilities else 0
        return IDENTIFY.pack_bytes(
            firmware=int.from_bytes(_FIRMWARE, "little"),
            total=self._static_units,
            volatile=self._static_units,
            information_log=EVENT_LOG_LIMIT,
            warning_log=EVENT_LOG_LIMIT,
            failure_log=EVENT_LOG_LIMIT,
            fatal_log=EVENT_LOG_LIMIT,
            poison_list=POISON_LIST_LIMIT,
            inject_limit=poison,
            dynamic_log=EVENT_LOG_LIMIT,
        )

    def _partition(self, _: bytes) -> bytes:
        return PARTITION.pack_bytes(active_volatile=self._static_units)

    def _set_partition(self, payload: bytes) -> bytes:
        if SET_PARTITION.unpack(payload)["volatile"] != self._static_units:  # nothing can be persistent
            raise Failed(ReturnCode.INVALID_INPUT)
        return b""

    def _over_threshold(self) -> bool:
        return self._alert_enabled and self._maintenance.corrected() >= self._alert_at

    def _health(self, _: bytes) -> bytes:
        return HEALTH.pack_bytes(
            additional=_CORRECTED_HIGH * self._over_threshold(),
            life_used=LIFE_UNKNOWN,
            temperature=TEMPERATURE_UNKNOWN,
            dirty_shutdowns=self._dirty_shutdowns,
            corrected_volatile=min(self._maintenance.corrected(), 0xFFFFFFFF),
        )

    def _alerts(self, _: bytes) -> bytes:
        return ALERTS.pack_bytes(
            valid=VOLATILE_ALERT * self._alert_enabled,
            programmable=VOLATILE_ALERT,
            volatile_warning=self._alert_at,
        )

    def _set_alerts(self, payload: bytes) -> bytes:
        given = SET_ALERTS.unpack(payload)
        if given["valid"] & ~VOLATILE_ALERT:
            raise Failed(ReturnCode.INVALID_INPUT)
        if given["valid"] & VOLATILE_ALERT:
            self._alert_enabled = bool(given["enable"] & VOLATILE_ALERT)
            self._alert_at = given["volatile_warning"]
        return b""

    def _set_shutdown(self, payload: bytes) -> bytes:
        if payload[0] > _DIRTY:
            raise Failed(ReturnCode.INVALID_INPUT)
        self._dirty = payload[0]
        return b""
