"""The device's configuration: one frozen dataclass, checked when it is made, carried by the device itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

from .lines import LINE_BYTES

ABI_VERSION = 1
"""Version of descriptors, records and register lines; the driver refuses a device with another one."""

EXTENT_BYTES = 1 << 20
"""Memory is owned in extents of this size; consecutive extents lie in consecutive channels."""
EXTENT_SHIFT = 20

CHANNEL_CHOICES = (1, 2, 4, 8, 16)
QUERY_CHOICES = (1, 2, 4, 8, 16)
FINISH_LANE_CHOICES = (2, 4, 8)
"""What a device may have of each."""


class Dram(IntEnum):
    """What stands behind a memory channel."""

    FIXED = 0
    """A line per cycle after a fixed latency; no DRAM rules."""


class Placement(IntEnum):
    """Where the attention units stand."""

    CONTROLLER = 2
    """A private port at the memory controller, after ECC."""


class Link(IntEnum):
    """The CXL link that the endpoint's rate follows."""

    X8_32 = 0
    X16_32 = 1
    X8_64 = 2
    X16_64 = 3


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What a device is made of.

    Parameters
    ----------
    name : preset's name, for people.
    channels : device channels, each with one attention unit; a power of two from 1 to 16.
    lanes : 16-bit elements that a unit takes per cycle; 32 makes one line per cycle.
    queries : query heads that a unit keeps per pass: 1, 2, 4, 8 or 16.
    finish_lanes : lanes that are merged and finished per cycle: 2, 4 or 8.
    capacity_bytes : device memory; a power of two, a whole number of extents in every channel.
    apertures : tenants that the device tells apart, 1 to 8.
    ring_slots : descriptors that a command window holds; a power of two from 4 to 256.
    dram : what stands behind a channel.
    memory_latency_cycles : read latency of `Dram.FIXED`, 2 to 200.
    placement : where the units stand.
    link : the CXL link.
    clock_mhz : device clock, from which cycles become time.

    Raises
    ------
    ValueError : naming the field, what was given and what is allowed.
    """

    name: str = "small"
    channels: int = 2
    lanes: int = 32
    queries: int = 4
    finish_lanes: int = 2
    capacity_bytes: int = 2 << 30
    apertures: int = 2
    ring_slots: int = 256
    dram: Dram = Dram.FIXED
    memory_latency_cycles: int = 40
    placement: Placement = Placement.CONTROLLER
    link: Link = Link.X8_64
    clock_mhz: int = 800

    def __post_init__(self) -> None:
        def check(name: str, allowed: bool, text: str) -> None:
            if not allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: {text}")

        for field in fields(self):
            if field.name not in ("name", "dram", "placement", "link"):
                value = getattr(self, field.name)
                check(
                    field.name, isinstance(value, int) and not isinstance(value, bool), "must be an integer"
                )
        for name, kind in (("dram", Dram), ("placement", Placement), ("link", Link)):
            value = getattr(self, name)
            if isinstance(value, str):
                choices = {member.name.lower(): member for member in kind}
                check(name, value in choices, f"must be one of {', '.join(choices)}")
                object.__setattr__(self, name, choices[value])
            else:
                check(name, value in list(kind), f"must be one of {', '.join(m.name.lower() for m in kind)}")
        check("channels", self.channels in CHANNEL_CHOICES, "must be 1, 2, 4, 8 or 16")
        check("lanes", self.lanes == 32, "must be 32: a unit takes a whole line per cycle")
        check("queries", self.queries in QUERY_CHOICES, "must be 1, 2, 4, 8 or 16")
        check("finish_lanes", self.finish_lanes in FINISH_LANE_CHOICES, "must be 2, 4 or 8")
        check("apertures", 1 <= self.apertures <= 8, "must be 1 to 8")
        check(
            "ring_slots",
            _is_power_of_two(self.ring_slots) and 4 <= self.ring_slots <= 256,
            "must be a power of two from 4 to 256",
        )
        check(
            "capacity_bytes",
            _is_power_of_two(self.capacity_bytes)
            and self.channels * EXTENT_BYTES <= self.capacity_bytes <= 1 << 40,
            f"must be a power of two from {self.channels} extents of {EXTENT_BYTES} bytes to 1 TiB",
        )
        check("memory_latency_cycles", 2 <= self.memory_latency_cycles <= 200, "must be 2 to 200")
        check("clock_mhz", 1 <= self.clock_mhz <= 10_000, "must be 1 to 10,000")

    @property
    def extents(self) -> int:
        """Extents of the whole device."""
        return self.capacity_bytes // EXTENT_BYTES

    @property
    def channel_extents(self) -> int:
        """Extents of one channel."""
        return self.extents // self.channels

    @property
    def channel_lines(self) -> int:
        """Lines of one channel."""
        return self.capacity_bytes // self.channels // LINE_BYTES

    @property
    def aperture_bytes(self) -> int:
        """Host address range of one aperture: the lower half is memory, the upper half holds the window."""
        return 2 * self.capacity_bytes

    def channel_of(self, address: int) -> int:
        """The channel that holds a device address."""
        return address // EXTENT_BYTES % self.channels

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values, names of enumerations in lower case."""
        return {
            f.name: value.name.lower() if isinstance(value := getattr(self, f.name), IntEnum) else value
            for f in fields(self)
        }


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


PRESETS: dict[str, DeviceConfig] = {
    "small": DeviceConfig(),
    "card": DeviceConfig(
        name="card", channels=4, queries=8, finish_lanes=4, capacity_bytes=16 << 30, link=Link.X16_64
    ),
}


def configure(preset: str = "small", **overrides: Any) -> DeviceConfig:
    """A preset with some fields replaced; ValueError for an unknown name or a value out of range."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    known = [f.name for f in fields(DeviceConfig)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"unknown configuration field {name!r}; there are {', '.join(known)}")
    return replace(PRESETS[preset], **overrides)
