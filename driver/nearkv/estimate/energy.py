"""Energy by events: each figure with its source, and a band where sources differ.

DRAM figures of one access already hold the share of activates that their sources saw, but for LPDDR5X, whose
commands are published apart. A figure without a public source is marked "assumed"; whoever knows better
replaces it. Everything is joules; tables are in picojoules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS, Dram
from nearkv_hw.abi.lines import LINE_BITS
from nearkv_sim.model import timing

from nearkv.errors import ArgumentError

from .gpus import Gpu
from .value import NOTHING, Band, Value

_PROTEUS = "Proteus lpddr5x-8533.yaml"


@dataclass(frozen=True)
class DramEnergy:
    """Energy of a DRAM part by event.

    Parameters
    ----------
    activate : activate and precharge of a row, pJ.
    read, write : a line of 64 bytes, to and from the pins, pJ.
    refresh : an all-bank refresh of a sub-channel, pJ.
    background_w : of a sub-channel, always.
    """

    activate: Value
    read: Value
    write: Value
    refresh: Value
    background_w: Value


def _line(pj_per_bit: float, source: str, sure: str, low: float, high: float) -> Value:
    return Value(pj_per_bit * LINE_BITS, "pJ", source, sure, low=low * LINE_BITS, high=high * LINE_BITS)


_INCLUDED = Value(0.0, "pJ", "in the figure of an access")
_DDR5_ACCESS = (
    "6.0 pJ/bit: LLMServingSim, generic DIMM; 11.8: nebula, Micron IDD, uncalibrated. Middle: their mean"
)
_DDR5 = DramEnergy(
    activate=_INCLUDED,
    read=_line(8.9, _DDR5_ACCESS, "derived", 6.0, 11.8),
    write=_line(8.9, _DDR5_ACCESS, "derived", 6.0, 11.8),
    refresh=Value(0.0, "pJ", "in the background"),
    background_w=Value(
        0.64, "W", "nebula: 0.64 W a sub-channel; LLMServingSim: 2 W a 32 GB DIMM of four", low=0.64, high=1.0
    ),
)
_HBM_ACCESS = (
    "O'Connor, MICRO 2017: 3.97 pJ/bit with ECC; AttAcc's list of hops: 3.59; in the die: 2.5 (Proteus)"
)

DRAMS: Mapping[Dram, DramEnergy] = {
    Dram.DDR5_6400: _DDR5,
    Dram.DDR5_4800: _DDR5,
    Dram.LPDDR5X_8533: DramEnergy(
        activate=Value(900.0, "pJ", _PROTEUS, low=900.0, high=1800.0),
        read=Value(
            2300.0,
            "pJ",
            f"{_PROTEUS}: 450 of array and 700 of I/O per 32 bytes; M2NDP: 1,110 per 32 bytes",
            low=2220.0,
            high=2304.0,
        ),
        write=Value(2360.0, "pJ", f"{_PROTEUS}: 480 of array and 700 of I/O per 32 bytes"),
        refresh=Value(28_000.0, "pJ", _PROTEUS),
        background_w=Value(0.02, "W", "no public figure per channel", "assumed", low=0.01, high=0.05),
    ),
    Dram.HBM3_6400: DramEnergy(
        activate=_INCLUDED,
        read=_line(3.97, _HBM_ACCESS, "published", 3.59, 3.97),
        write=_line(3.97, _HBM_ACCESS, "published", 3.59, 3.97),
        refresh=Value(0.0, "pJ", "in the background"),
        background_w=Value(0.05, "W", "no public figure per channel", "assumed", low=0.02, high=0.1),
    ),
}

LINK_BIT = Value(
    8.0,
    "pJ",
    "a bit over the CXL link, both ends: 4.0 LLMServingSim, 4.4 CENT, 8 M2NDP, 11.4 PCIe 5 long-reach PHY "
    "(CICC 2020), 18.75 ceiling (Structera: 30 W at 200 GB/s)",
    low=4.0,
    high=18.75,
)
SWITCH_BIT = Value(8.0, "pJ", "a second link's ends, as LINK_BIT", "assumed", low=4.0, high=18.75)
MULTIPLY = Value(
    2.0,
    "pJ",
    "a multiplication and its sum: 18 pJ per 16 (Proteus); 3.5 to 4 pJ per operation with memories and "
    "interconnect (CXL-PNM engine by Proteus), two operations. Middle: between, memories are counted apart",
    "derived",
    low=1.125,
    high=8.0,
)
SRAM_BIT = Value(
    0.02,
    "pJ",
    "a bit of a memory of 32 words beside the multiplier; high: 8 KiB SRAM at 45 nm, 10 pJ per 64 bits "
    "(Horowitz, ISSCC 2014)",
    "assumed",
    low=0.005,
    high=0.156,
)
CROSSBAR_BIT = Value(0.15, "pJ", "a bit across the device", "assumed", low=0.05, high=0.3)
CONTROLLER_W = Value(
    20.0,
    "W",
    "a device's controller and link, idle or not: CXL-PNM 20 W; Structera 30 W with its link",
    low=10.0,
    high=30.0,
)
UNIT_LEAKAGE_W = Value(0.1, "W", "an attention unit at rest", "assumed", low=0.02, high=0.5)
PIN_SHARE = Value(
    1.0,
    "of an access",
    "what units in the module's buffer leave of it: I/O is 700 of 1,150 pJ (Proteus) and could be saved at "
    "most; nothing is published for a buffer, so the middle saves nothing",
    "assumed",
    low=0.39,
    high=1.0,
)
SUM_BITS = 160
"""Bits of a lane's sum in a unit: top, two limbs and a flag, as a partial has them."""

GPU_BUSY = Value(
    0.7, "of board power", "decode is bound by memory and draws less than the limit", "assumed", 0.5, 1.0
)
GPU_IDLE = Value(0.15, "of board power", "while it waits", "assumed", 0.1, 0.3)

FORM_FACTORS: dict[str, Value] = {
    "e3s": Value(25.0, "W", "SNIA SFF-TA-1008: E3.S"),
    "e3s-2t": Value(40.0, "W", "SNIA SFF-TA-1008: E3.S 2T"),
    "e3l-2t": Value(70.0, "W", "SNIA SFF-TA-1008: E3.L 2T"),
    "cem": Value(75.0, "W", "PCI Express CEM: a card without power connector"),
    "cem-8pin": Value(225.0, "W", "PCI Express CEM: a card with one 8-pin connector"),
}
"""What a card may dissipate, by form."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """What happened; counts of all devices together.

    Parameters
    ----------
    line_reads, line_writes : of DRAM.
    link_bytes : over the links, both directions.
    multiplies : of the attention units.
    sum_bits : read and written of the units' sums.
    crossbar_bytes : across the devices.
    activates : rows opened; as many as long runs of lines open if not given.
    """

    line_reads: float = 0.0
    line_writes: float = 0.0
    link_bytes: float = 0.0
    multiplies: float = 0.0
    sum_bits: float = 0.0
    crossbar_bytes: float = 0.0
    activates: float | None = None


PART_TITLES = {
    "dram": "DRAM",
    "link": "link",
    "arithmetic": "units",
    "on_chip": "crossbar",
    "static": "always on",
}
"""The parts of `Energy`, and what they are for people."""


@dataclass(frozen=True)
class Energy:
    """Joules by what took them.

    Parameters
    ----------
    parts : by the names of `PART_TITLES`.
    """

    parts: dict[str, Band] = field(default_factory=dict)

    @property
    def total(self) -> Band:
        """All parts."""
        return sum(self.parts.values(), NOTHING)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Bands of the parts and of the total."""
        return {name: band.to_dict() for name, band in {**self.parts, "total": self.total}.items()}


def energy(
    config: DeviceConfig, events: Events, *, seconds: float, devices: int = 1, switch: bool = False
) -> Energy:
    """What the devices take.

    Parameters
    ----------
    config : of each device.
    events : of all of them.
    seconds : for which they are on.
    devices : how many.
    switch : whether a CXL switch is on the way.

    Raises
    ------
    ArgumentError : the memory has no figures.
    """
    if config.dram not in DRAMS:
        raise ArgumentError(f"dram={config.dram.name.lower()} has no energy; take a DRAM part")
    figures, part = DRAMS[config.dram], PARTS[config.dram]
    pico = 1e-12
    subchannels = devices * config.slices * part.subchannels
    refreshes = seconds / float(part.ns("REFI") * 10**-9) * subchannels if seconds else 0.0
    opened = events.activates
    if opened is None:
        opened = (events.line_reads + events.line_writes) * 2 * part.subchannels / timing.pair_lines(part)
    dram = (
        figures.activate.band * (opened * pico)
        + figures.read.band * (events.line_reads * pico)
        + figures.write.band * (events.line_writes * pico)
        + figures.refresh.band * (refreshes * pico)
    )
    if config.placement is Placement.RANK:
        dram = Band(dram.low * PIN_SHARE.band.low, dram.mid, dram.high)
    link = LINK_BIT.band * (events.link_bytes * 8 * pico)
    if switch:
        link += SWITCH_BIT.band * (events.link_bytes * 8 * pico)
    return Energy(
        {
            "dram": dram,
            "link": link,
            "arithmetic": MULTIPLY.band * (events.multiplies * pico)
            + SRAM_BIT.band * (events.sum_bits * pico),
            "on_chip": CROSSBAR_BIT.band * (events.crossbar_bytes * 8 * pico),
            "static": figures.background_w.band * (subchannels * seconds)
            + CONTROLLER_W.band * (devices * seconds)
            + UNIT_LEAKAGE_W.band * (devices * config.units * seconds),
        }
    )


def bits_of_sums(value_products: float) -> float:
    """Bits of sums that units read and write for so many products of a weight and an element of V."""
    return 2 * value_products * SUM_BITS


def gpu_energy(gpu: Gpu, *, count: int, busy_s: float, total_s: float) -> Band:
    """Joules of GPUs that work for `busy_s` of `total_s`."""
    watts = count * gpu.power_w.value
    return GPU_BUSY.band * (watts * busy_s) + GPU_IDLE.band * (watts * max(0.0, total_s - busy_s))


def throttle(power_w: Band, limit: Value) -> Band:
    """How much longer the same work takes when a card may not dissipate what it would.

    Parameters
    ----------
    power_w : of a card without a limit.
    limit : of its form.

    Returns
    -------
    Factors of at least 1. Slower work needs less power in proportion, which ignores what is always on.
    """
    return Band(*(max(1.0, watts / limit.value) for watts in (power_w.low, power_w.mid, power_w.high)))
