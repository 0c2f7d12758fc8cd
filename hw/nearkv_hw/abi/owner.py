"""The owner's page: quotas and weights of tenants, and a log of what they tried.

It lies behind the command window of aperture 0, in a page of host addresses of its own, so that who owns the
device can keep it from who has that aperture. Every other aperture has nothing there.
"""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout
from .config import MAX_APERTURES, DeviceConfig
from .lines import LINE_BITS, LINE_BYTES
from .window import WINDOW_BYTES, window_base

OWNER_OFFSET = WINDOW_BYTES
OWNER_BYTES = 1 << 12

QUOTAS_LINE = 0
"""Owner's line of `QUOTAS`, which takes writes."""
HOLDINGS_LINE = 1
"""Owner's line of `HOLDINGS`."""
AUDIT_LINE = 2
"""Owner's line of `AUDIT`, whose `read` takes writes."""
WEIGHTS_LINE = 3
"""Owner's line of `WEIGHTS`, which takes writes."""
RECORDS_LINE = 16
"""Owner's line of record 0's `RECORD`; record i is i mod `RECORDS` lines further."""
RECORDS = 16
"""Records that the log holds."""

QUOTAS = Layout(
    "quotas",
    LINE_BITS,
    *(
        Field(f"tenant{n}", 32, "extents that the tenant may own, at reset all of the device")
        for n in range(MAX_APERTURES)
    ),
)
"""A tenant that owns more than a quota that was lowered keeps what it has."""

HOLDINGS = Layout(
    "holdings",
    LINE_BITS,
    *(Field(f"tenant{n}", 32, "extents that the tenant owns") for n in range(MAX_APERTURES)),
)

WEIGHT_BITS = 8
WEIGHT_LINES_LOG2 = 10
"""Log2 of the lines that a weight of 1 gets in a round."""
WEIGHTS = Layout(
    "weights",
    LINE_BITS,
    *(
        Field(
            f"tenant{n}", 32, "share of the attention units, from 1, as at reset, to 255; others are refused"
        )
        for n in range(MAX_APERTURES)
    ),
)
"""While several tenants have jobs waiting, the lines of their jobs are as their weights."""

AUDIT = Layout(
    "audit state",
    LINE_BITS,
    Field("recorded", 32, "records made since reset"),
    Field("read", 32, "of these, those that the owner has read and no longer needs; it writes this"),
    Field("lost", 64, "violations that found the log full and were nothing that it has"),
)

RECORD = Layout(
    "audit record",
    LINE_BITS,
    Field("address", 64, "device address of the line, the first of its extent that was tried"),
    Field("cycle", 64, "device cycle of the record"),
    Field("sequence", 32, "records before this one since reset"),
    Field("tenant", 8, "who tried"),
    Field("kind", 8, "`Violation`"),
)
"""While a record is not read, no other is made of the same tenant, extent and kind."""


class Violation(IntEnum):
    """What a tenant tried with an extent that it does not own."""

    READ = 0
    """A read by the host or on behalf of a job: its tables, queries and lists; its rows, too, where units
    stand behind the crossbar."""
    WRITE = 1
    """A write by the host, or of results."""
    UNIT_READ = 2
    """A read of rows by an attention unit."""


def owner_address(config: DeviceConfig, line: int) -> int:
    """Host address of a line of the owner's page."""
    return window_base(config, 0) + OWNER_OFFSET + line * LINE_BYTES
