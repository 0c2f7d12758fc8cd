"""How long things take on the model device: a stated estimate, not yet calibrated against the RTL.

A job costs a start, the lines of its busiest channel once per pass (a unit takes one line per cycle), and the
drain of its last pass. Jobs that follow each other overlap their starts and drains with their neighbours'
lines, so a batch costs one start, all its lines, and one drain. Host accesses cost what they take of the link
or of the memory, a fence the memory's latency.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import lcm

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Link
from nearkv_hw.abi.link import RATES

START_CYCLES = 60
"""From the doorbell to the first K read, memory latency not included."""
PIPELINE_CYCLES = 60
"""From a pass's last line to its first partial beat."""


def link_cycles(config: DeviceConfig, *, reads: int = 0, writes: int = 0) -> int:
    """Cycles in which host accesses of one kind pass, many at a time."""
    read, write, unit = _cycles_on_link(config.link, config.clock_mhz)
    on_link = -(-(reads * read + writes * write) // unit)
    return max(on_link, -(-(reads + writes) // config.slices))


@cache
def _cycles_on_link(link: Link, clock_mhz: int) -> tuple[int, int, int]:
    """Of a read and of a write, and the number that both are to be divided by."""
    rate = RATES[link]
    read, write = (
        Fraction(slots * clock_mhz * 10**6 / rate.slots_per_second)
        for slots in (rate.flits.drs.value, rate.flits.rwd.value)
    )
    unit = lcm(read.denominator, write.denominator)
    return int(read * unit), int(write * unit), unit


def start_cycles(config: DeviceConfig) -> int:
    """Cycles from a descriptor's fetch to its first K line."""
    return START_CYCLES + config.memory_latency_cycles


def drain_cycles(config: DeviceConfig, queries: int, value_dim: int, result_lines: int) -> int:
    """Cycles from a pass's last line to its results in memory, for `queries` query heads."""
    return PIPELINE_CYCLES + partial_beats(config, queries, value_dim) + result_lines


def partial_beats(config: DeviceConfig, queries: int, value_dim: int) -> int:
    """Beats that one channel's unit drains for a pass: denominators, lanes, end."""
    return queries + queries * -(-value_dim // config.finish_lanes) + 1


def passes_of(config: DeviceConfig, group: int) -> list[int]:
    """The query heads of each pass of a job."""
    return [min(config.queries, group - first) for first in range(0, group, config.queries)]
