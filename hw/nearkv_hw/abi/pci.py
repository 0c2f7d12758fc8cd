"""The device's configuration space: what PCI Express and CXL's DVSECs say of it.

CXL 3.1 specification, section 8.1 (DVSECs); PCI Express 6.0, sections 7.5 to 7.9 (the rest).
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise

from .registers import Access, Bits, Block, Register

CONFIG_BYTES = 4096
"""Bytes of a function's configuration space."""

VENDOR_ID = 0x1234
"""No vendor's: PCI-SIG has not assigned it, and a research model has none of its own."""
DEVICE_ID = 0x6E6B
CXL_VENDOR_ID = 0x1E98
"""Whose DVSECs CXL's are."""

COMPONENT_BAR, COMPONENT_BYTES = 0, 1 << 16
"""The BAR of the component registers, and its size; the device's and the CPMU's follow."""
DEVICE_BAR, DEVICE_BYTES = 2, 1 << 12
CPMU_BAR, CPMU_BYTES = 4, 1 << 12

MSI_VECTORS = 8
"""Interrupts that the device has; the mailbox takes the first, event logs those that they are given."""


class ExtendedId(IntEnum):
    """Extended capabilities of the device."""

    SERIAL_NUMBER = 0x0003
    DVSEC = 0x0023


class DvsecId(IntEnum):
    """CXL's DVSECs."""

    DEVICE = 0
    """CXL device: what protocols it has, and its ranges before HDM decoders are enabled."""
    GPF_DEVICE = 5
    """What a global persistent flush of the device takes."""
    FLEX_BUS_PORT = 7
    """Protocols of the link."""
    REGISTER_LOCATOR = 8
    """Where its registers are."""


class BlockId(IntEnum):
    """Register blocks in the register locator."""

    EMPTY = 0
    COMPONENT = 1
    BAR_VIRTUALIZATION = 2
    DEVICE = 3
    CPMU = 4


def _constant(name: str, offset: int, width: int, reset: int, doc: str = "") -> Register:
    return Register(name, offset, width, Bits(name, width, reset=reset), doc=doc)


def _bar(number: int, size: int) -> tuple[Register, Register]:
    bits = size.bit_length() - 1
    low = Register(
        f"bar{number}", 0x10 + 4 * number, 32,
        Bits("io", 1, "0: memory"),
        Bits("kind", 2, "2: 64 bits", reset=2),
        Bits("prefetchable", 1),
        Bits("size", bits - 4, "always zero, by which its size is found"),
        Bits("low", 32 - bits, "base address", access=Access.RW),
    )  # fmt: skip
    high = Register(
        f"bar{number + 1}", 0x14 + 4 * number, 32, Bits("high", 32, "base address", access=Access.RW)
    )
    return low, high


HEADER = Block(
    "configuration header", 0x40,
    _constant("vendor_id", 0x00, 16, VENDOR_ID),
    _constant("device_id", 0x02, 16, DEVICE_ID),
    Register(
        "command", 0x04, 16,
        Bits("io", 1),
        Bits("memory", 1, "memory accesses to its BARs", access=Access.RW),
        Bits("master", 1, "its interrupts", access=Access.RW),
        Bits("reserved_3", 5),
        Bits("serr", 1, access=Access.RW),
        Bits("reserved_9", 1),
        Bits("no_intx", 1, access=Access.RW),
    ),
    Register(
        "status", 0x06, 16,
        Bits("reserved_0", 4), Bits("capabilities", 1, "it has a list of them", reset=1),
    ),
    _constant("revision", 0x08, 8, 1),
    _constant("interface", 0x09, 8, 0x10, "CXL memory device"),
    _constant("subclass", 0x0A, 8, 0x02, "CXL"),
    _constant("base_class", 0x0B, 8, 0x05, "memory controller"),
    Register("cache_line", 0x0C, 8, Bits("cache_line", 8, access=Access.RW)),
    _constant("header_type", 0x0E, 8, 0),
    *_bar(COMPONENT_BAR, COMPONENT_BYTES),
    *_bar(DEVICE_BAR, DEVICE_BYTES),
    *_bar(CPMU_BAR, CPMU_BYTES),
    _constant("subsystem_vendor", 0x2C, 16, VENDOR_ID),
    _constant("subsystem", 0x2E, 16, DEVICE_ID),
    _constant("capabilities", 0x34, 8, 0x40, "where the first one is"),
    Register("interrupt_line", 0x3C, 8, Bits("interrupt_line", 8, access=Access.RW)),
)  # fmt: skip


def _capability(identifier: int, next_at: int) -> tuple[Register, Register]:
    return _constant("id", 0, 8, identifier), _constant("next", 1, 8, next_at, "where the next one is")


POWER_AT, MSI_AT, EXPRESS_AT = 0x40, 0x48, 0x60
"""Where the capabilities are."""

POWER = Block(
    "power management", 0x08,
    *_capability(0x01, MSI_AT),
    Register("capability", 0x02, 16, Bits("version", 3, reset=3)),
    Register(
        "control", 0x04, 16,
        Bits("state", 2, "0: D0, 3: D3hot", access=Access.RW),
        Bits("reserved_2", 1),
        Bits("no_soft_reset", 1, "its state outlives D3hot", reset=1),
    ),
)  # fmt: skip

MSI = Block(
    "message signalled interrupts", 0x10,
    *_capability(0x05, EXPRESS_AT),
    Register(
        "control", 0x02, 16,
        Bits("enable", 1, access=Access.RW),
        Bits("capable", 3, "log2 of its interrupts", reset=MSI_VECTORS.bit_length() - 1),
        Bits("enabled", 3, "log2 of those that it may send", access=Access.RW),
        Bits("wide", 1, "addresses have 64 bits", reset=1),
    ),
    Register("address_low", 0x04, 32, Bits("reserved_0", 2), Bits("low", 30, access=Access.RW)),
    Register("address_high", 0x08, 32, Bits("high", 32, access=Access.RW)),
    Register("data", 0x0C, 16, Bits("data", 16, access=Access.RW)),
)  # fmt: skip

EXPRESS = Block(
    "PCI Express", 0x3C,
    *_capability(0x10, 0),
    Register("capability", 0x02, 16, Bits("version", 4, reset=2), Bits("kind", 4, "0: endpoint")),
    Register(
        "device_capability", 0x04, 32,
        Bits("payload", 3, "128 * 2^n bytes", reset=1),
        Bits("reserved_3", 12),
        Bits("role_based_errors", 1, reset=1),
        Bits("reserved_16", 12),
        Bits("function_reset", 1),
    ),
    Register(
        "device_control", 0x08, 16,
        Bits("report", 4, "which errors it reports", access=Access.RW),
        Bits("relaxed", 1),
        Bits("payload", 3, access=Access.RW),
        Bits("reserved_8", 4),
        Bits("read_request", 3, access=Access.RW, reset=2),
    ),
    Register("device_status", 0x0A, 16, Bits("errors", 4, access=Access.RW1C)),
    Register(
        "link_capability", 0x0C, 32,
        Bits("speed", 4, "5: 32 GT/s, 6: 64 GT/s"),
        Bits("width", 6, "lanes"),
    ),
    Register("link_control", 0x10, 16, Bits("aspm", 2, access=Access.RW)),
    Register("link_status", 0x12, 16, Bits("speed", 4), Bits("width", 6)),
    Register("device_capability_2", 0x24, 32, Bits("reserved_0", 32)),
    Register(
        "link_capability_2", 0x2C, 32, Bits("reserved_0", 1), Bits("speeds", 7, "bit n - 1: speed n"),
    ),
    Register("link_control_2", 0x30, 16, Bits("speed", 4, "the one that is wanted", access=Access.RW)),
)  # fmt: skip


def _extended(identifier: int, version: int) -> Register:
    return Register(
        "extended", 0x00, 32,
        Bits("id", 16, reset=identifier), Bits("version", 4, reset=version), Bits("next", 12),
        doc="the extended capability, and where the next one is",
    )  # fmt: skip


def _dvsec(identifier: DvsecId, revision: int, length: int) -> tuple[Register, ...]:
    return (
        _extended(ExtendedId.DVSEC, 1),
        Register(
            "header", 0x04, 32,
            Bits("vendor", 16, reset=CXL_VENDOR_ID),
            Bits("revision", 4, reset=revision),
            Bits("length", 12, reset=length),
        ),
        _constant("dvsec_id", 0x08, 16, identifier),
    )  # fmt: skip


SERIAL = Block(
    "serial number", 0x0C,
    _extended(ExtendedId.SERIAL_NUMBER, 1),
    Register("low", 0x04, 32, Bits("low", 32)),
    Register("high", 0x08, 32, Bits("high", 32)),
)  # fmt: skip


def _range(n: int, offset: int) -> tuple[Register, ...]:
    return (
        Register(f"range{n}_size_high", offset, 32, Bits("size_63_32", 32)),
        Register(
            f"range{n}_size_low", offset + 0x04, 32,
            Bits("valid", 1, "the size is known"),
            Bits("active", 1, "the memory can be used"),
            Bits("media_type", 3, "0: volatile"),
            Bits("memory_class", 3, "0: memory"),
            Bits("desired_interleave", 5),
            Bits("timeout", 3, "how long until it is active"),
            Bits("reserved_16", 12),
            Bits("size_31_28", 4),
        ),
        Register(f"range{n}_base_high", offset + 0x08, 32, Bits("base_63_32", 32, access=Access.RWL)),
        Register(
            f"range{n}_base_low", offset + 0x0C, 32,
            Bits("reserved_0", 28), Bits("base_31_28", 4, access=Access.RWL),
        ),
    )  # fmt: skip


DEVICE_DVSEC = Block(
    "DVSEC for CXL devices", 0x3C,
    *_dvsec(DvsecId.DEVICE, 3, 0x3C),
    Register(
        "capability", 0x0A, 16,
        Bits("cache", 1, "CXL.cache"),
        Bits("io", 1, "CXL.io", reset=1),
        Bits("mem", 1, "CXL.mem", reset=1),
        Bits("mem_hwinit", 1, "memory is ready without software", reset=1),
        Bits("hdm_count", 2, "ranges", reset=1),
        Bits("cache_writeback", 1),
        Bits("reset", 1, "CXL reset"),
        Bits("reset_timeout", 3),
        Bits("reset_clears", 1),
        Bits("tsp", 1),
        Bits("mld", 1, "several logical devices"),
        Bits("viral", 1),
        Bits("pm_init", 1, "reports power management initialisation"),
    ),
    Register(
        "control", 0x0C, 16,
        Bits("cache_enable", 1),
        Bits("io_enable", 1, reset=1),
        Bits("mem_enable", 1, "CXL.mem is on", access=Access.RWL),
        Bits("reserved_3", 11),
        Bits("viral_enable", 1),
    ),
    Register("status", 0x0E, 16, Bits("reserved_0", 14), Bits("viral", 1)),
    Register("control_2", 0x10, 16, Bits("reserved_0", 16)),
    Register("status_2", 0x12, 16, Bits("reserved_0", 16)),
    Register("lock", 0x14, 16, Bits("lock", 1, "control and ranges stay until reset", access=Access.RWO)),
    Register("capability_2", 0x16, 16, Bits("reserved_0", 16)),
    *_range(1, 0x18),
    *_range(2, 0x28),
    Register("capability_3", 0x38, 32, Bits("reserved_0", 32)),
)  # fmt: skip

GPF_DVSEC = Block(
    "DVSEC for a global persistent flush", 0x10,
    *_dvsec(DvsecId.GPF_DEVICE, 0, 0x10),
    Register("duration", 0x0A, 16, Bits("base", 4, "how long its phase 2 takes"), Bits("reserved_4", 4),
             Bits("scale", 4)),
    Register("power", 0x0C, 32, Bits("power", 32, "mW in phase 2")),
)  # fmt: skip

_PROTOCOLS = (
    Bits("cache", 1),
    Bits("io", 1, reset=1),
    Bits("mem", 1, reset=1),
    Bits("reserved_3", 2),
    Bits("flits_68", 1, "68-byte flits and VH"),
    Bits("mld", 1),
    Bits("reserved_7", 6),
    Bits("flits_256_low", 1, "latency-optimised 256-byte flits"),
    Bits("pbr", 1, "port-based routing"),
)

FLEX_BUS_DVSEC = Block(
    "DVSEC for the Flex Bus port", 0x20,
    *_dvsec(DvsecId.FLEX_BUS_PORT, 2, 0x20),
    Register("capability", 0x0A, 16, *_PROTOCOLS),
    Register("control", 0x0C, 16, *_PROTOCOLS),
    Register("status", 0x0E, 16, *_PROTOCOLS),
    Register("received", 0x10, 32, Bits("received", 24, "modified TS data of phase 1")),
    Register("capability_2", 0x14, 32, Bits("reserved_0", 32)),
    Register("control_2", 0x18, 32, Bits("reserved_0", 32)),
    Register("status_2", 0x1C, 32, Bits("reserved_0", 32)),
)  # fmt: skip


def _locator_entry(n: int, bar: int, block: BlockId) -> tuple[Register, Register]:
    return (
        Register(
            f"block{n}_low", 0x0C + 8 * n, 32,
            Bits("bar", 3, reset=bar), Bits("reserved_3", 5), Bits("block", 8, reset=block),
            Bits("offset_31_16", 16),
        ),
        _constant(f"block{n}_high", 0x10 + 8 * n, 32, 0),
    )  # fmt: skip


LOCATOR_DVSEC = Block(
    "DVSEC for the register locator", 0x24,
    *_dvsec(DvsecId.REGISTER_LOCATOR, 0, 0x24),
    *_locator_entry(0, COMPONENT_BAR, BlockId.COMPONENT),
    *_locator_entry(1, DEVICE_BAR, BlockId.DEVICE),
    *_locator_entry(2, CPMU_BAR, BlockId.CPMU),
)  # fmt: skip

EXTENDED: tuple[tuple[str, int, Block], ...] = (
    ("serial", 0x100, SERIAL),
    ("cxl", 0x110, DEVICE_DVSEC),
    ("gpf", 0x150, GPF_DVSEC),
    ("flex_bus", 0x160, FLEX_BUS_DVSEC),
    ("locator", 0x180, LOCATOR_DVSEC),
)
"""Extended capabilities: name, place and registers, in the order of their list."""

_PLACES = (
    ("header", 0, HEADER),
    ("power", POWER_AT, POWER),
    ("msi", MSI_AT, MSI),
    ("express", EXPRESS_AT, EXPRESS),
    *EXTENDED,
)


def _all() -> Block:
    following = {name: after[1] for (name, _, _), after in pairwise(EXTENDED)}
    registers = []
    for name, at, block in _PLACES:
        for register in block:
            resets = {"next": following.get(name, 0)} if register.name == "extended" else {}
            registers.append(register.moved(at + register.at, f"{name}.{register.name}", **resets))
    return Block("configuration space", CONFIG_BYTES, *registers)


CONFIG_SPACE = _all()
"""All of it; a register's name is its capability's, a dot, and its own there: "cxl.capability"."""
