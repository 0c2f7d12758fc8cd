"""The device's configuration: one frozen dataclass, checked when it is made, carried by the device itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import IntEnum, IntFlag
from typing import Any

from .dram import PARTS, Dram, Refresh
from .lines import LINE_BYTES

FIXED_CLOCK_MHZ = 800
"""Device clock where no DRAM part lays one down."""

ABI_VERSION = 3
"""Version of descriptors, records and register lines; the driver refuses a device with another one."""

EXTENT_BYTES = 1 << 20
"""Memory is owned in extents of this size; consecutive extents lie in consecutive channels."""
EXTENT_SHIFT = 20
SCRUB_INTERVAL_CYCLES = 4
"""A slice of the memory writes zeros over extents that were given back, at most a line in so many cycles."""
SCRUB_PATIENCE_CYCLES = 64
"""Cycles that such a line waits for units and fabric; then it goes first."""

MAX_APERTURES = 8
LOGICAL_DEVICE_CHOICES = (1, 2, 4, 8)
LANE_CHOICES = (32, 64, 128)
CHANNEL_CHOICES = (1, 2, 4, 8, 16)
RANK_CHOICES = (1, 2, 4)
QUERY_CHOICES = (1, 2, 4, 8, 16)
FINISH_LANE_CHOICES = (2, 4, 8)
"""What a device may have of each."""


class Feature(IntFlag):
    """What a device has beyond bf16 and fp16 rows of at most 256 elements, one query row, one row range."""

    NARROW = 1 << 0
    """Elements of 8 and 4 bits, without scales along the row."""
    SCALES = 1 << 1
    """Scales along the row."""
    CODEBOOKS = 1 << 2
    """lut4."""
    SHORT_ROWS = 1 << 3
    """Rows at a pitch of 16 or 32 bytes, which share a line."""
    LATENT = 1 << 4
    """V in the K row."""
    LARGE_ROWS = 1 << 5
    """Rows of more than 256 elements, up to 1,023."""
    SOFTCAP = 1 << 6
    ALIBI = 1 << 7
    QUERY_ROWS = 1 << 8
    """Several query rows, causal, and windows with kept rows."""
    TREE = 1 << 9
    """Query rows that see each other as a mask says."""
    RANGES = 1 << 10
    """Row ranges of a job as a list."""
    SELECTION = 1 << 11
    """Page summaries, and the selection of pages by them."""
    OUTPUT_SCALE = 1 << 12
    """A float32 that multiplies results; without it the host does."""
    TREE_SELECTION = 1 << 13
    """Selection of pages in jobs with a tree."""

    @classmethod
    def all(cls) -> Feature:
        """All of them."""
        return cls((1 << len(cls)) - 1)


class Placement(IntEnum):
    """Where the attention units stand."""

    RANK = 0
    """In the module's buffer: one unit per rank, every rank streams its own rows."""
    PHY = 1
    """Beside the channel's PHY, with an ECC decoder of its own."""
    CONTROLLER = 2
    """A private port at the memory controller, after ECC."""
    FABRIC = 3
    """Behind the crossbar, which the units share with the host."""
    HOST = 4
    """Nowhere: the host reads every row over the link."""


class Link(IntEnum):
    """The CXL link that the endpoint's rate follows."""

    X8_32 = 0
    X16_32 = 1
    X8_64 = 2
    X16_64 = 3


class LinkLayer(IntEnum):
    """What is between the host's messages and the endpoint."""

    OFF = 0
    """Nothing: the endpoint takes messages at the rate of the link."""
    FLITS_68 = 1
    """A link layer at each end and 68-byte flits on the wire between them."""
    FLITS_256 = 2
    """The same with 256-byte flits, standard layout."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What a device is made of.

    Parameters
    ----------
    name : preset's name, for people.
    channels : device channels, each with one attention unit; a power of two from 1 to 16.
    lanes : elements that a unit takes per cycle: 32, 64 or 128. A line has 32 of 16 bits, 64 of 8 bits or 128
        of 4.
    queries : query heads that a unit keeps per pass: 1, 2, 4, 8 or 16.
    finish_lanes : lanes that are merged and finished per cycle: 2, 4 or 8.
    capacity_bytes : device memory; a power of two, a whole number of extents in every channel.
    apertures : tenants that the device tells apart, 1 to 8.
    ring_slots : descriptors that a command window holds; a power of two from 4 to 256.
    dram : what stands behind a channel.
    density_gbit : density of the DRAM's dies, one of the part's; 0 for `Dram.FIXED`.
    refresh : how the DRAM is refreshed.
    memory_latency_cycles : read latency of `Dram.FIXED`, 2 to 200.
    fabric_share : sixteenths of a channel's lines that host, walker and writer get at least when they and
        the unit both want more; the unit gets at least the rest. 1 to 15.
    placement : where the units stand.
    ranks : ranks of a channel, each with a unit of its own: 2 or 4 for `Placement.RANK`, else 1.
    link : the CXL link.
    link_layer : whether messages travel in flits. `FLITS_68` needs a link at 32 GT/s that carries at most a
        flit per device cycle, `FLITS_256` one that carries at most a quarter of a flit.
    logical_devices : logical devices, each with an LD-ID, as many of the apertures and as much of the memory
        as the others: 1, 2, 4 or 8, so that each has 1, 2, 4 or 8 apertures; 1 with `hdm_decoders`.
    hdm_decoders : HDM decoders between link and everything behind: 0 for none, or one of
        `abi.hdm.COUNT_CODES`; the memory has at least 256 MiB then.
    clock_mhz : device clock, from which cycles become time; with DRAM the part's.

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
    dram: Dram = Dram.DDR5_6400
    density_gbit: int = PARTS[Dram.DDR5_6400].default_density
    refresh: Refresh = Refresh.ALL_BANK
    memory_latency_cycles: int = 40
    fabric_share: int = 8
    placement: Placement = Placement.CONTROLLER
    ranks: int = 1
    link: Link = Link.X8_64
    link_layer: LinkLayer = LinkLayer.OFF
    logical_devices: int = 1
    hdm_decoders: int = 0
    clock_mhz: int = FIXED_CLOCK_MHZ

    def __post_init__(self) -> None:
        def check(name: str, allowed: bool, text: str) -> None:
            if not allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: {text}")

        for field in fields(self):
            if field.name not in ("name", *_ENUMERATIONS):
                value = getattr(self, field.name)
                check(
                    field.name, isinstance(value, int) and not isinstance(value, bool), "must be an integer"
                )
        for name, kind in _ENUMERATIONS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                choices = {member.name.lower(): member for member in kind}
                check(name, value in choices, f"must be one of {', '.join(choices)}")
                object.__setattr__(self, name, choices[value])
            else:
                check(name, value in list(kind), f"must be one of {', '.join(m.name.lower() for m in kind)}")
        check("channels", self.channels in CHANNEL_CHOICES, "must be 1, 2, 4, 8 or 16")
        check("lanes", self.lanes in LANE_CHOICES, "must be 32, 64 or 128")
        check("queries", self.queries in QUERY_CHOICES, "must be 1, 2, 4, 8 or 16")
        check("finish_lanes", self.finish_lanes in FINISH_LANE_CHOICES, "must be 2, 4 or 8")
        check("apertures", 1 <= self.apertures <= MAX_APERTURES, f"must be 1 to {MAX_APERTURES}")
        check(
            "ring_slots",
            _is_power_of_two(self.ring_slots) and 4 <= self.ring_slots <= 256,
            "must be a power of two from 4 to 256",
        )
        check(
            "capacity_bytes",
            _is_power_of_two(self.capacity_bytes)
            and self.slices * EXTENT_BYTES <= self.capacity_bytes <= 1 << 40,
            f"must be a power of two from {self.slices} extents of {EXTENT_BYTES} bytes to 1 TiB",
        )
        check("memory_latency_cycles", 2 <= self.memory_latency_cycles <= 200, "must be 2 to 200")
        check("clock_mhz", 1 <= self.clock_mhz <= 10_000, "must be 1 to 10,000")
        check("fabric_share", 1 <= self.fabric_share <= 15, "must be 1 to 15 sixteenths")
        self._check_link(check)
        self._check_logical_devices(check)
        self._check_decoders(check)
        near = self.placement is Placement.RANK
        check(
            "ranks",
            self.ranks in RANK_CHOICES and (self.ranks > 1) == near,
            "must be 2 or 4 with placement=rank, and 1 with every other",
        )
        check(
            "channels",
            self.slices <= max(CHANNEL_CHOICES),
            f"with ranks={self.ranks} must be at most {max(CHANNEL_CHOICES) // self.ranks}",
        )
        self._check_part(check)

    def _check_link(self, check: Callable[[str, bool, str], None]) -> None:
        """What the wire and the clock lay down for a link layer."""
        from .flits256 import BEATS
        from .link import FLITS_68, RATES, flits_per_cycle

        flits = flits_per_cycle(self.link, self.clock_mhz, self.link_layer)
        if self.link_layer is LinkLayer.FLITS_68:
            check(
                "link_layer",
                RATES[self.link].flits is FLITS_68 and flits <= 1,
                "must be off where the link is not at 32 GT/s or carries more than a flit per device cycle; "
                "link=x8_32 does at every clock from 464 MHz on",
            )
        if self.link_layer is LinkLayer.FLITS_256:
            check(
                "link_layer",
                BEATS * flits <= 1,
                "must be off where the link carries more than a quarter of a flit per device cycle; "
                "link=x8_32 carries less at every clock from 493 MHz on, x8_64 from 1,000 MHz on",
            )

    def _check_logical_devices(self, check: Callable[[str, bool, str], None]) -> None:
        """What can be divided."""
        count = self.logical_devices
        check("logical_devices", count in LOGICAL_DEVICE_CHOICES, "must be 1, 2, 4 or 8")
        each, rest = divmod(self.apertures, count)
        check(
            "apertures",
            count == 1 or (rest == 0 and _is_power_of_two(each)),
            f"must be {count} times a power of two with logical_devices={count}",
        )
        check(
            "capacity_bytes",
            self.capacity_bytes >= count * self.slices * EXTENT_BYTES,
            f"with logical_devices={count} must be at least {count} times {self.slices} extents",
        )

    def _check_decoders(self, check: Callable[[str, bool, str], None]) -> None:
        """What can be decoded."""
        from .hdm import COUNT_CODES, UNIT_SHIFT

        check(
            "hdm_decoders",
            self.hdm_decoders in (0, *COUNT_CODES),
            f"must be 0 or one of {', '.join(map(str, COUNT_CODES))}",
        )
        check(
            "hdm_decoders",
            not self.hdm_decoders or self.logical_devices == 1,
            "must be 0 with several logical devices, each of which would need its own",
        )
        check(
            "capacity_bytes",
            not self.hdm_decoders or self.capacity_bytes >> UNIT_SHIFT > 0,
            f"must be at least {1 << UNIT_SHIFT}, what decoders count in, with hdm_decoders",
        )

    def _check_part(self, check: Callable[[str, bool, str], None]) -> None:
        """What the DRAM part lays down."""
        if self.dram is Dram.FIXED:
            check("density_gbit", self.density_gbit == 0, "must be 0 with dram=fixed")
            check("refresh", self.refresh is Refresh.ALL_BANK, "must be all_bank with dram=fixed")
            return
        part = PARTS[self.dram]
        check(
            "density_gbit",
            self.density_gbit in part.densities,
            f"must be one of {', '.join(map(str, part.densities))} with dram={self.dram.name.lower()}",
        )
        check("clock_mhz", self.clock_mhz == part.clock_mhz, f"must be the part's {part.clock_mhz}")
        lines = part.channel_lines(self.density_gbit)
        check(
            "capacity_bytes",
            self.slice_lines <= lines,
            f"must be at most {lines * LINE_BYTES * self.slices}, what {self.slices} slices of it hold",
        )

    @property
    def slices(self) -> int:
        """Parts of the memory that are apart: one per channel, or per rank where units stand at ranks.

        Slice s is rank s // channels of channel s % channels. Each has its own owners, and its own unit
        where units stand beside the memory.
        """
        return self.channels * self.ranks

    @property
    def weight_pipes(self) -> int:
        """Score and weight pipes of a unit, so many that a row of 128 elements does not wait for them."""
        return max(self.queries // (2 if self.lanes == max(LANE_CHOICES) else 4), 1)

    @property
    def rows_abreast(self) -> int:
        """Rows of a line that a unit takes in one step, at most: four where each has a block of lanes."""
        return 4 if self.lanes == max(LANE_CHOICES) else 1

    @property
    def units(self) -> int:
        """Attention units."""
        return 0 if self.placement is Placement.HOST else self.slices

    @property
    def extents(self) -> int:
        """Extents of the whole device."""
        return self.capacity_bytes // EXTENT_BYTES

    @property
    def slice_extents(self) -> int:
        """Extents of one slice."""
        return self.extents // self.slices

    @property
    def slice_lines(self) -> int:
        """Lines of one slice."""
        return self.capacity_bytes // self.slices // LINE_BYTES

    @property
    def aperture_bytes(self) -> int:
        """Host address range of one aperture: the lower half is memory, the upper half holds the window."""
        return 2 * self.capacity_bytes

    @property
    def address_bytes(self) -> int:
        """Addresses of the device as messages name them: those of all apertures, one behind the other."""
        return self.apertures * self.aperture_bytes

    @property
    def logical_apertures(self) -> int:
        """Apertures of each logical device: the first ones are those of LD-ID 0."""
        return self.apertures // self.logical_devices

    @property
    def logical_extents(self) -> int:
        """Extents of each logical device, the first ones those of LD-ID 0."""
        return self.extents // self.logical_devices

    def extents_of(self, aperture: int) -> range:
        """The extents that a tenant can have: those of its logical device."""
        first = aperture // self.logical_apertures * self.logical_extents
        return range(first, first + self.logical_extents)

    def slice_of(self, address: int) -> int:
        """The slice that holds a device address."""
        return address // EXTENT_BYTES % self.slices

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values, names of enumerations in lower case."""
        return {
            f.name: value.name.lower() if isinstance(value := getattr(self, f.name), IntEnum) else value
            for f in fields(self)
        }


_ENUMERATIONS: dict[str, type[IntEnum]] = {
    "dram": Dram,
    "refresh": Refresh,
    "placement": Placement,
    "link": Link,
    "link_layer": LinkLayer,
}


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


PRESETS: dict[str, DeviceConfig] = {
    "small": DeviceConfig(),
    "card": DeviceConfig(
        name="card",
        channels=4,
        lanes=128,
        queries=8,
        finish_lanes=4,
        capacity_bytes=16 << 30,
        link=Link.X16_64,
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
    return replace(PRESETS[preset], **_of_part(overrides), **overrides)


def _of_part(overrides: dict[str, Any]) -> dict[str, Any]:
    """What the choice of a DRAM part lays down and the overrides leave open."""
    choices = {member.name.lower(): member for member in Dram}
    dram = overrides.get("dram")
    dram = choices.get(dram) if isinstance(dram, str) else dram
    if not isinstance(dram, Dram):
        return {}
    part = PARTS.get(dram)
    laid_down = {
        "clock_mhz": part.clock_mhz if part else FIXED_CLOCK_MHZ,
        "density_gbit": part.default_density if part else 0,
    }
    return {name: value for name, value in laid_down.items() if name not in overrides}
