"""CXL's performance monitoring unit: what it counts, and its registers (CXL 3.1, sections 8.2.7 and 13.2)."""

from __future__ import annotations

from dataclasses import dataclass

from .cxl import M2SReqOp, M2SRwDOp
from .pci import CXL_VENDOR_ID
from .registers import Access, Bits, Block, Register

COUNTER_BITS = 64
FIXED_FUNCTION = 1
"""The type of a counter that always counts the same events."""


@dataclass(frozen=True)
class Counter:
    """A counter of the device.

    Parameters
    ----------
    name : what it counts.
    group : the events' group.
    events : which of the group, a bit for each; they are added up.
    """

    name: str
    group: int
    events: int


COUNTERS = (
    Counter("clock_ticks", 0x00, 1),
    Counter("m2s_req", 0x20, 1 << M2SReqOp.MEM_RD | 1 << M2SReqOp.MEM_RD_DATA),
    Counter("m2s_rwd", 0x21, 1 << M2SRwDOp.MEM_WR | 1 << M2SRwDOp.MEM_WR_PTL),
)
"""The device's cycles, the reads and the writes that its link brought: the device counters of these."""

CPMU = Block(
    "CPMU", 0x1000,
    Register(
        "capability", 0x00, 64,
        Bits("counters", 6, "how many, less one", reset=len(COUNTERS) - 1),
        Bits("reserved_6", 2),
        Bits("width", 8, "bits of a counter", reset=COUNTER_BITS),
        Bits("reserved_16", 4),
        Bits("events", 5, "event registers, less one", reset=len(COUNTERS) - 1),
        Bits("reserved_25", 7),
        Bits("filters", 8),
        Bits("reserved_40", 4),
        Bits("message", 4, "of its interrupts"),
        Bits("writable", 1, "counters that are frozen can be written", reset=1),
        Bits("freeze", 1, "counters can be frozen", reset=1),
        Bits("interrupt", 1, "it has interrupts"),
        Bits("reserved_51", 9),
        Bits("version", 4, reset=1),
    ),
    Register("overflow", 0x10, 64, Bits("overflow", 64, "counters that overflowed", access=Access.RW1C)),
    Register("freeze", 0x18, 64, Bits("freeze", len(COUNTERS), "which stand still", access=Access.RW)),
    *(
        Register(
            f"event_{n}", 0x100 + 8 * n, 64,
            Bits("events", 32, reset=counter.events),
            Bits("group", 16, reset=counter.group),
            Bits("vendor", 16, reset=CXL_VENDOR_ID),
        )
        for n, counter in enumerate(COUNTERS)
    ),
    *(
        Register(
            f"configuration_{n}", 0x200 + 8 * n, 64,
            Bits("kind", 2, "1: fixed function", reset=FIXED_FUNCTION),
            Bits("reserved_2", 6),
            Bits("enable", 1, "it counts", access=Access.RW),
            Bits("reserved_9", 15),
            Bits("events", 32, "what it counts", reset=counter.events),
            Bits("reserved_56", 3),
            Bits("event", 5, "the event register", reset=n),
        )
        for n, counter in enumerate(COUNTERS)
    ),
    *(
        Register(
            f"counter_{n}", 0xC00 + 8 * n, 64,
            Bits("count", COUNTER_BITS, counter.name, access=Access.RW),
        )
        for n, counter in enumerate(COUNTERS)
    ),
)  # fmt: skip
