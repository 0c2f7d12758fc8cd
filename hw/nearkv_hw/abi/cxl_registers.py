"""CXL's memory-mapped registers: of the component and of the memory device.

CXL 3.1 specification, sections 8.2.4 (component registers) and 8.2.8 (device registers).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from .registers import Access, Bits, Block, Register

CACHE_MEM_OFFSET = 0x1000
"""Where the CXL.cache and CXL.mem registers begin in the component's block."""


class ComponentCapability(IntEnum):
    """Capabilities of the component that the device has."""

    RAS = 2
    """Errors of the CXL.mem path."""
    LINK = 4
    """The link layer."""
    HDM = 5
    """HDM decoders."""


COMPONENT_HEADER = Register(
    "header", 0x00, 32,
    Bits("id", 16, reset=1),
    Bits("version", 4, reset=1),
    Bits("cache_mem_version", 4, reset=1),
    Bits("count", 8, "entries that follow", reset=len(ComponentCapability)),
)  # fmt: skip
COMPONENT_ENTRY = Register(
    "entry", 0x00, 32, Bits("id", 16, "`ComponentCapability`"), Bits("version", 4), Bits("pointer", 12)
)

COMPONENT_PLACES: dict[ComponentCapability, tuple[int, int]] = {
    ComponentCapability.RAS: (2, 0x100),
    ComponentCapability.LINK: (2, 0x180),
    ComponentCapability.HDM: (3, 0x200),
}
"""Version of each capability, and where its registers are from `CACHE_MEM_OFFSET` on."""


class Uncorrectable(IntFlag):
    """Errors that cannot be put right."""

    MEM_DATA_PARITY = 1 << 4
    MEM_ADDRESS_PARITY = 1 << 5
    MEM_ENABLE_PARITY = 1 << 6
    MEM_ECC = 1 << 7
    REINIT_THRESHOLD = 1 << 8
    RESERVED_ENCODING = 1 << 9
    POISON = 1 << 10
    """Poison was received."""
    OVERFLOW = 1 << 11
    INTERNAL = 1 << 14


class Correctable(IntFlag):
    """Errors that were put right."""

    MEM_ECC = 1 << 1
    CRC_THRESHOLD = 1 << 2
    RETRY_THRESHOLD = 1 << 3
    MEM_POISON = 1 << 5
    PHYSICAL = 1 << 6


_UNCORRECTABLE = sum(Uncorrectable)
_CORRECTABLE = sum(Correctable)

RAS = Block(
    "RAS", 0x58,
    Register("uncorrectable_status", 0x00, 32,
             Bits("status", 17, "`Uncorrectable`", access=Access.RW1C)),
    Register("uncorrectable_mask", 0x04, 32,
             Bits("mask", 17, "which are not reported", access=Access.RW, reset=_UNCORRECTABLE)),
    Register("uncorrectable_severity", 0x08, 32,
             Bits("severity", 17, "which are fatal", access=Access.RW, reset=_UNCORRECTABLE)),
    Register("correctable_status", 0x0C, 32, Bits("status", 7, "`Correctable`", access=Access.RW1C)),
    Register("correctable_mask", 0x10, 32,
             Bits("mask", 7, "which are not reported", access=Access.RW, reset=_CORRECTABLE)),
    Register("control", 0x14, 32,
             Bits("first", 6, "the first uncorrectable error's bit"),
             Bits("reserved_6", 3),
             Bits("multiple_headers", 1)),
    *(Register(f"header_log_{n}", 0x18 + 4 * n, 32, Bits("log", 32)) for n in range(16)),
)  # fmt: skip

_CREDITS = (
    Bits("cache_req", 10), Bits("cache_rsp", 10), Bits("cache_data", 10),
    Bits("mem_message", 10, "of the device's messages without data: Req received, NDR sent"),
    Bits("mem_data", 10, "of those with data: RwD received, DRS sent"),
)  # fmt: skip

LINK = Block(
    "link", 0x38,
    Register("capability", 0x00, 64,
             Bits("version", 4, "of the link layer: 2 is CXL 2.0 and later", reset=2),
             Bits("version_received", 4, "from the host's INIT.Param"),
             Bits("wrap", 8, "entries that its retry buffer counts to"),
             Bits("wrap_received", 8, "the host's"),
             Bits("retries_received", 5), Bits("reinits_received", 5), Bits("write_pointer_received", 8),
             Bits("sequence_received", 8), Bits("free_received", 8), Bits("no_reset", 1, reset=1)),
    Register("control", 0x08, 64,
             Bits("reset", 1), Bits("init_stall", 1), Bits("credit_stall", 1),
             Bits("init_state", 2, "3: done", reset=3), Bits("buffer_consumed", 8)),
    Register("rx_credit_control", 0x10, 64, *_CREDITS, doc="places for what is received"),
    Register("rx_credit_status", 0x18, 64, *_CREDITS, doc="credits that are to be returned"),
    Register("tx_credit_status", 0x20, 64, *_CREDITS, doc="credits for what is sent"),
    Register("ack_timer", 0x28, 32, Bits("ack_force", 8), Bits("ack_flush", 10)),
    Register("defeature", 0x30, 32, Bits("no_mdh", 1, "no multi-data headers", access=Access.RW)),
)  # fmt: skip


class DeviceCapability(IntEnum):
    """Capabilities of the memory device."""

    STATUS = 0x0001
    """Which events wait."""
    MAILBOX = 0x0002
    """The primary mailbox."""
    MEMORY_STATUS = 0x4000
    """What state the memory is in."""


DEVICE_ARRAY = Register(
    "array", 0x00, 64,
    Bits("id", 16),
    Bits("version", 8, reset=1),
    Bits("kind", 4, "1: memory device", reset=1),
    Bits("reserved_28", 4),
    Bits("count", 16, "headers that follow", reset=len(DeviceCapability)),
)  # fmt: skip
DEVICE_HEADER = Register(
    "header", 0x00, 64,
    Bits("id", 16, "`DeviceCapability`"), Bits("version", 8), Bits("reserved_24", 8), Bits("offset", 32),
)  # fmt: skip
"""The capability's length, 32 bits, follows."""

PAYLOAD_SHIFT = 11
"""log2 of the bytes that a mailbox command carries."""
PAYLOAD_BYTES = 1 << PAYLOAD_SHIFT
PAYLOAD_OFFSET = 0x20
"""Where in the mailbox's registers the payload is."""

STATUS = Block(
    "device status", 0x08,
    Register("events", 0x00, 64,
             Bits("information", 1), Bits("warning", 1), Bits("failure", 1), Bits("fatal", 1),
             Bits("dynamic_capacity", 1), doc="logs with records that wait"),
)  # fmt: skip
MAILBOX = Block(
    "mailbox", PAYLOAD_OFFSET + PAYLOAD_BYTES,
    Register("capabilities", 0x00, 32,
             Bits("payload_size", 5, "log2 of bytes", reset=PAYLOAD_SHIFT),
             Bits("doorbell_interrupt", 1, "it can interrupt when a command is done", reset=1),
             Bits("background_interrupt", 1, "and when a background operation is", reset=1),
             Bits("message", 4, "the message of its interrupts"),
             Bits("ready_time", 8),
             Bits("kind", 4)),
    Register("control", 0x04, 32,
             Bits("doorbell", 1, "a one starts the command; zero again when it is done", access=Access.RW),
             Bits("interrupt", 1, "interrupt when it is done", access=Access.RW),
             Bits("background_interrupt", 1, "interrupt when a background operation is", access=Access.RW)),
    Register("command", 0x08, 64,
             Bits("opcode", 16, "`Opcode`", access=Access.RW),
             Bits("length", 21, "bytes of the payload", access=Access.RW)),
    Register("status", 0x10, 64,
             Bits("background", 1, "a background operation runs"),
             Bits("reserved_1", 31),
             Bits("return_code", 16, "`ReturnCode`"),
             Bits("vendor", 16)),
    Register("background", 0x18, 64,
             Bits("opcode", 16, "the latest background operation"),
             Bits("percentage", 7, "how far it is"),
             Bits("reserved_23", 9),
             Bits("return_code", 16, "`ReturnCode`"),
             Bits("vendor", 16)),
    *(Register(f"payload_{n}", PAYLOAD_OFFSET + 8 * n, 64, Bits("payload", 64, access=Access.RW))
      for n in range(PAYLOAD_BYTES // 8)),
)  # fmt: skip


class MediaStatus(IntEnum):
    """State of the memory."""

    NOT_READY = 0
    READY = 1
    ERROR = 2
    DISABLED = 3


MEMORY_STATUS = Block(
    "memory device status", 0x08,
    Register("status", 0x00, 64,
             Bits("fatal", 1), Bits("halt", 1, "the firmware has stopped"),
             Bits("media", 2, "`MediaStatus`"), Bits("mailbox_ready", 1, reset=1),
             Bits("reset_needed", 3)),
)  # fmt: skip

DEVICE_PLACES: dict[DeviceCapability, tuple[int, Block]] = {
    DeviceCapability.STATUS: (0x80, STATUS),
    DeviceCapability.MEMORY_STATUS: (0x90, MEMORY_STATUS),
    DeviceCapability.MAILBOX: (0x100, MAILBOX),
}
"""Where each capability's registers are in the device's block."""
