"""The mailbox: commands, return codes, and what they carry (CXL 3.1 specification, section 8.2.9).

Payloads are `Layout`s; those that end in a list say what each of its entries is.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from uuid import UUID

from .bits import Field, Layout


class ReturnCode(IntEnum):
    """How a command ended."""

    SUCCESS = 0x00
    BACKGROUND_STARTED = 0x01
    INVALID_INPUT = 0x02
    UNSUPPORTED = 0x03
    INTERNAL_ERROR = 0x04
    RETRY = 0x05
    BUSY = 0x06
    MEDIA_DISABLED = 0x07
    INVALID_HANDLE = 0x0E
    INVALID_ADDRESS = 0x0F
    POISON_LIMIT = 0x10
    MEDIA_FAILURE = 0x11
    ABORTED = 0x12
    SECURITY_STATE = 0x13
    PASSPHRASE = 0x14
    WRONG_MAILBOX = 0x15
    PAYLOAD_LENGTH = 0x16
    INVALID_LOG = 0x17
    EXHAUSTED = 0x1D
    EXTENT_LIST = 0x1E


class Opcode(IntEnum):
    """Commands that the device has."""

    GET_EVENT_RECORDS = 0x0100
    CLEAR_EVENT_RECORDS = 0x0101
    GET_EVENT_INTERRUPTS = 0x0102
    SET_EVENT_INTERRUPTS = 0x0103
    GET_TIMESTAMP = 0x0300
    SET_TIMESTAMP = 0x0301
    GET_SUPPORTED_LOGS = 0x0400
    GET_LOG = 0x0401
    IDENTIFY = 0x4000
    GET_PARTITION = 0x4100
    SET_PARTITION = 0x4101
    GET_HEALTH = 0x4200
    GET_ALERTS = 0x4201
    SET_ALERTS = 0x4202
    GET_SHUTDOWN = 0x4203
    SET_SHUTDOWN = 0x4204
    GET_POISON = 0x4300
    INJECT_POISON = 0x4301
    CLEAR_POISON = 0x4302
    SANITIZE = 0x4400
    SECURE_ERASE = 0x4401
    GET_SECURITY = 0x4500
    SET_PASSPHRASE = 0x4501
    DISABLE_PASSPHRASE = 0x4502
    UNLOCK = 0x4503
    FREEZE = 0x4504
    PASSPHRASE_ERASE = 0x4505
    GET_DYNAMIC_CONFIG = 0x4800
    GET_DYNAMIC_EXTENTS = 0x4801
    ADD_DYNAMIC_RESPONSE = 0x4802
    RELEASE_DYNAMIC = 0x4803


class Effect(IntFlag):
    """What a command changes, in the command effects log."""

    COLD_RESET = 1 << 0
    IMMEDIATE_CONFIGURATION = 1 << 1
    IMMEDIATE_DATA = 1 << 2
    IMMEDIATE_POLICY = 1 << 3
    IMMEDIATE_LOG = 1 << 4
    SECURITY = 1 << 5
    BACKGROUND = 1 << 6


COMMAND_EFFECTS_LOG = "0da9c0b5-bf41-4b78-8f79-96b1623b3f17"
GENERAL_MEDIA_EVENT = "fbcd0a77-c260-417f-85a9-088b1621eba6"
DYNAMIC_CAPACITY_EVENT = "ca95afa7-f183-4018-8c2f-95268e101a2a"
"""UUIDs of logs and event records; on the wire their bytes stand in the order of the text."""


def uuid_number(text: str) -> int:
    """A UUID as the number that its field holds."""
    return int.from_bytes(UUID(text).bytes, "little")


CAPACITY_UNIT = 256 << 20
"""Capacities are counted in this many bytes."""
POISON_LIST_LIMIT = 256
"""Lines that the poison list holds, and that can be injected."""
EVENT_LOG_LIMIT = 64
"""Records that an event log holds."""
EXTENT_LIMIT = 128
"""Extents of dynamic capacity that the device keeps track of."""
PASSPHRASE_BYTES = 32
PASSPHRASE_ATTEMPTS = 3
"""Wrong passphrases in a row after which no more are heard until reset."""


class EventLog(IntEnum):
    """Event logs."""

    INFORMATION = 0
    WARNING = 1
    FAILURE = 2
    FATAL = 3
    DYNAMIC_CAPACITY = 4


class InterruptMode(IntEnum):
    """How an event log interrupts; the lowest bits of its setting."""

    NONE = 0
    MESSAGE = 1
    """A message signalled interrupt; its number is in bits 7:4."""
    FIRMWARE = 2


class PoisonSource(IntEnum):
    """Where a poisoned line comes from."""

    UNKNOWN = 0
    EXTERNAL = 1
    """The host wrote it so."""
    INTERNAL = 2
    """The memory lost it."""
    INJECTED = 3
    """Inject Poison."""


class SecurityFlag(IntFlag):
    """The state of the security."""

    USER_PASSPHRASE = 1 << 0
    MASTER_PASSPHRASE = 1 << 1
    LOCKED = 1 << 2
    FROZEN = 1 << 3
    USER_ATTEMPTS = 1 << 4
    MASTER_ATTEMPTS = 1 << 5


class ExtentEvent(IntEnum):
    """What a dynamic capacity event record tells."""

    ADD = 0
    RELEASE = 1
    FORCED_RELEASE = 2
    CONFIGURATION = 3
    ADD_RESPONSE = 4
    RELEASED = 5


def _layout(name: str, size: int, *fields: Field) -> Layout:
    return Layout(name, 8 * size, *fields)


CEL_ENTRY = _layout(
    "command effects log entry", 4, Field("opcode", 16, "`Opcode`"), Field("effects", 16, "`Effect`")
)

IDENTIFY = _layout(
    "Identify", 0x45,
    Field("firmware", 128, "revision, as text"),
    Field("total", 64, "capacity, in 256 MiB"),
    Field("volatile", 64, "of it, what can only be volatile"),
    Field("persistent", 64, "of it, what can only be persistent"),
    Field("alignment", 64, "of partitions; 0: there is nothing to divide"),
    Field("information_log", 16, "records that the event log holds"),
    Field("warning_log", 16, "likewise"),
    Field("failure_log", 16, "likewise"),
    Field("fatal_log", 16, "likewise"),
    Field("label_bytes", 32, "of its label storage area"),
    Field("poison_list", 24, "lines that the poison list holds"),
    Field("inject_limit", 16, "lines that can be injected"),
    Field("poison_capabilities", 8, "bit 0: injects persistent poison; bit 1: scans"),
    Field("telemetry", 8, "bit 0: egress; bit 1: throughput"),
    Field("dynamic_log", 16, "records that the dynamic capacity log holds"),
)  # fmt: skip

PARTITION = _layout(
    "Get Partition Info", 0x20,
    Field("active_volatile", 64, "in 256 MiB"),
    Field("active_persistent", 64, "in 256 MiB"),
    Field("next_volatile", 64, "in 256 MiB; 0: no change is pending"),
    Field("next_persistent", 64, "in 256 MiB"),
)  # fmt: skip
SET_PARTITION = _layout(
    "Set Partition Info", 0x0A,
    Field("volatile", 64, "in 256 MiB"), Field("flags", 8, "bit 0: at once"), Field("reserved", 8),
)  # fmt: skip

SUPPORTED_LOGS = _layout("Get Supported Logs", 8, Field("count", 16, "entries that follow"))
LOG_ENTRY = _layout("log", 20, Field("uuid", 128), Field("size", 32, "bytes"))
GET_LOG = _layout("Get Log", 0x18, Field("uuid", 128), Field("start", 32), Field("length", 32))

HEALTH = _layout(
    "Get Health Info", 0x12,
    Field("health", 8, "bit 0: needs maintenance; bit 1: performance is degraded; bit 2: replace it"),
    Field("media", 8, "0: normal; 1: not ready; 3: all data lost"),
    Field("additional", 8, "bits 5:4: corrected errors, normal or above the warning"),
    Field("life_used", 8, "percent; 255: not known"),
    Field("temperature", 16, "degrees Celsius; 0x7FFF: not known"),
    Field("dirty_shutdowns", 32),
    Field("corrected_volatile", 32, "errors of volatile memory that were put right"),
    Field("corrected_persistent", 32),
)  # fmt: skip
TEMPERATURE_UNKNOWN = 0x7FFF
LIFE_UNKNOWN = 0xFF

ALERTS = _layout(
    "Get Alert Configuration", 0x10,
    Field("valid", 8, "which warnings are set; bit 3: corrected errors of volatile memory"),
    Field("programmable", 8, "which can be"),
    Field("life_critical", 8), Field("life_warning", 8),
    Field("over_critical", 16), Field("under_critical", 16),
    Field("over_warning", 16), Field("under_warning", 16),
    Field("volatile_warning", 16, "corrected errors from which on the device warns"),
    Field("persistent_warning", 16),
)  # fmt: skip
SET_ALERTS = _layout(
    "Set Alert Configuration", 0x0C,
    Field("valid", 8, "which are in the payload"),
    Field("enable", 8, "which are turned on; the others of those are turned off"),
    Field("life_warning", 8), Field("reserved", 8),
    Field("over_warning", 16), Field("under_warning", 16),
    Field("volatile_warning", 16), Field("persistent_warning", 16),
)  # fmt: skip
VOLATILE_ALERT = 1 << 3
"""The one that the device has."""

EVENT_RECORDS = _layout(
    "Get Event Records", 0x20,
    Field("flags", 8, "bit 0: overflow; bit 1: more records"),
    Field("reserved_1", 8),
    Field("overflow_count", 16),
    Field("first_overflow", 64, "ns, as Set Timestamp set it"),
    Field("last_overflow", 64),
    Field("count", 16, "records that follow"),
)  # fmt: skip
EVENT_RECORD = _layout(
    "event record", 0x80,
    Field("uuid", 128, "what kind it is"),
    Field("length", 8, "bytes"),
    Field("flags", 24, "bits 1:0: the log"),
    Field("handle", 16),
    Field("related", 16),
    Field("timestamp", 64, "ns, as Set Timestamp set it"),
    Field("maintenance", 8),
    Field("reserved_29", 8 * 15),
    Field("data", 8 * 0x50, "as its kind says"),
)  # fmt: skip
GENERAL_MEDIA = _layout(
    "general media event", 0x50,
    Field("address", 64, "device address, bits 5:0 flags; bit 0: volatile memory"),
    Field("descriptor", 8, "bit 0: uncorrectable; bit 1: threshold"),
    Field("kind", 8, "0: ECC error; 1: invalid address"),
    Field("transaction", 8, "0: unknown; 1: host read; 2: host write; 4: host injects poison"),
    Field("valid", 16, "bit 0: the channel"),
    Field("channel", 8),
    Field("rank", 8),
)  # fmt: skip
EXTENT = _layout(
    "extent", 40,
    Field("start", 64, "device address"), Field("length", 64, "bytes"), Field("tag", 128),
    Field("sequence", 16),
)  # fmt: skip
DYNAMIC_CAPACITY = _layout(
    "dynamic capacity event", 0x50,
    Field("kind", 8, "`ExtentEvent`"),
    Field("valid", 8),
    Field("host", 16),
    Field("region", 8),
    Field("flags", 8, "bit 0: more records of this event follow"),
    Field("reserved_6", 16),
    Field("extent", 320, "`EXTENT`"),
    Field("reserved_48", 8 * 0x18),
    Field("extents_available", 32),
    Field("tags_available", 32),
)  # fmt: skip
CLEAR_EVENTS = _layout(
    "Clear Event Records", 6,
    Field("log", 8, "`EventLog`"), Field("flags", 8, "bit 0: all"), Field("count", 8, "handles that follow"),
)  # fmt: skip
EVENT_INTERRUPTS = _layout(
    "Event Interrupt Policy", 5,
    *(Field(log.name.lower(), 8, "bits 3:0 `InterruptMode`, 7:4 the message") for log in EventLog),
)  # fmt: skip

GET_POISON = _layout("Get Poison List", 16, Field("address", 64), Field("length", 64, "lines"))
POISON_LIST = _layout(
    "Poison List", 0x20,
    Field("flags", 8, "bit 0: more; bit 1: the list overflowed"),
    Field("reserved_1", 8),
    Field("overflow", 64, "ns, when it did"),
    Field("count", 16, "entries that follow"),
)  # fmt: skip
POISON_ENTRY = _layout(
    "poison list entry", 16,
    Field("address", 64, "bits 2:0 `PoisonSource`"), Field("length", 32, "lines"),
)  # fmt: skip
CLEAR_POISON = _layout("Clear Poison", 72, Field("address", 64), Field("data", 512, "the line's new data"))

SET_PASSPHRASE = _layout(
    "Set Passphrase", 0x60,
    Field("kind", 8, "0: master; 1: user"), Field("reserved_1", 8 * 31),
    Field("current", 256), Field("new", 256),
)  # fmt: skip
PASSPHRASE = _layout(
    "Disable Passphrase, Passphrase Secure Erase", 0x40,
    Field("kind", 8, "0: master; 1: user"), Field("reserved_1", 8 * 31), Field("current", 256),
)  # fmt: skip

GET_DYNAMIC_CONFIG = _layout(
    "Get Dynamic Capacity Configuration", 2, Field("count", 8, "regions"), Field("first", 8)
)
DYNAMIC_CONFIG = _layout(
    "Dynamic Capacity Configuration", 8, Field("available", 8, "regions"), Field("count", 8, "that follow")
)
DYNAMIC_REGION = _layout(
    "dynamic capacity region", 40,
    Field("base", 64, "device address"),
    Field("decode_length", 64, "in 256 MiB"),
    Field("length", 64, "bytes"),
    Field("block", 64, "bytes"),
    Field("handle", 32, "of its attributes in the device's tables"),
    Field("flags", 8, "bit 0: blocks can be shared; bit 1: they keep their data"),
)  # fmt: skip
DYNAMIC_LIMITS = _layout(
    "limits, after the regions", 16,
    Field("extents", 32), Field("extents_available", 32), Field("tags", 32), Field("tags_available", 32),
)  # fmt: skip
GET_EXTENTS = _layout("Get Dynamic Capacity Extent List", 8, Field("count", 32), Field("first", 32))
EXTENTS = _layout(
    "Dynamic Capacity Extent List", 16,
    Field("count", 32, "extents that follow"), Field("total", 32), Field("generation", 32),
)  # fmt: skip
EXTENT_CHANGE = _layout(
    "Add Dynamic Capacity Response, Release Dynamic Capacity", 8,
    Field("count", 32, "extents that follow"), Field("flags", 8, "bit 0: more follow in another command"),
)  # fmt: skip
CHANGED_EXTENT = _layout("changed extent", 24, Field("start", 64), Field("length", 64))
