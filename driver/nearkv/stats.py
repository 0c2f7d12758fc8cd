"""Numbers of a device: its own counters, and what the host saw of attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from nearkv_hw.abi import LINE_BYTES, DeviceConfig
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    register_address,
)
from nearkv_sim.port import Port, Read

from .ring import Completions


@dataclass(frozen=True)
class ChannelStats:
    """Counters of one channel, as `nearkv_hw.abi.window.CHANNEL_COUNTERS` declares them."""

    unit_lines: int
    unit_busy: int
    unit_no_data: int
    unit_wait: int
    fabric_reads: int
    fabric_writes: int
    conflicts: int
    partial_beats: int


@dataclass(frozen=True)
class Stats:
    """What a device did since its reset; the difference of two is what it did in between.

    Members
    -------
    cycles : device cycles.
    jobs : descriptors completed.
    errors : those with a status other than OK, and refused doorbells.
    lines : K and V lines that the attention units took.
    dram_bytes : bytes that the memory channels read and wrote.
    link_bytes : bytes of lines that crossed the link, both directions.
    link_reads, link_writes : messages that read and wrote a line.
    outside_reads, outside_writes, violations : accesses that met no memory, or memory of another tenant.
    attention_cycles : device cycles from doorbells to last completions, of this session's attention calls.
    attention_lines : K and V lines of these calls, every pass counted.
    attention_jobs, attention_passes : their jobs, and how often these read their rows.
    channels : `ChannelStats` of every channel.
    """

    cycles: int
    jobs: int
    errors: int
    lines: int
    dram_bytes: int
    link_bytes: int
    link_reads: int
    link_writes: int
    outside_reads: int
    outside_writes: int
    violations: int
    attention_cycles: int
    attention_lines: int
    attention_jobs: int
    attention_passes: int
    channels: tuple[ChannelStats, ...]

    @property
    def utilisation(self) -> float:
        """Lines per cycle and channel in attention, 0 to 1; 0 when there was none."""
        peak = self.attention_cycles * len(self.channels)
        return self.attention_lines / peak if peak else 0.0

    def __sub__(self, earlier: Stats) -> Stats:
        numbers = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in fields(self)
            if f.name != "channels"
        }
        channels = tuple(
            ChannelStats(
                **{f.name: getattr(new, f.name) - getattr(old, f.name) for f in fields(ChannelStats)}
            )
            for new, old in zip(self.channels, earlier.channels, strict=True)
        )
        return Stats(**numbers, channels=channels)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, `utilisation` included."""
        return {
            **asdict(self),
            "channels": [asdict(c) for c in self.channels],
            "utilisation": self.utilisation,
        }


@dataclass
class AttentionTotals:
    """What completion records told so far."""

    cycles: int = 0
    lines: int = 0
    jobs: int = 0
    passes: int = 0

    def add(self, completions: Completions) -> None:
        """Count a batch."""
        self.cycles += completions.cycles
        self.lines += int(completions.lines.sum(dtype=np.int64))
        self.jobs += len(completions.status)
        self.passes += int(completions.passes.sum(dtype=np.int64))


def read_stats(port: Port, config: DeviceConfig, totals: AttentionTotals) -> Stats:
    """Read the counters through the first aperture."""
    lines = [DEVICE_COUNTERS_LINE, *(CHANNEL_COUNTERS_LINE + c for c in range(config.channels))]
    link_bytes = port.link_bytes
    (result,) = port.run([Read(np.array([register_address(config, 0, line) for line in lines], np.uint64))])
    device = DEVICE_COUNTERS.unpack(result.data[0].tobytes())
    channels = tuple(
        ChannelStats(**{f.name: counters[f.name] for f in fields(ChannelStats)})
        for counters in (CHANNEL_COUNTERS.unpack(line.tobytes()) for line in result.data[1:])
    )
    lines_taken = sum(channel.unit_lines for channel in channels)
    fabric_lines = sum(channel.fabric_reads + channel.fabric_writes for channel in channels)
    return Stats(
        cycles=device["cycles"],
        jobs=device["jobs"],
        errors=device["errors"],
        lines=lines_taken,
        dram_bytes=(lines_taken + fabric_lines) * LINE_BYTES,
        link_bytes=link_bytes,
        link_reads=device["link_reads"],
        link_writes=device["link_writes"],
        outside_reads=device["outside_reads"],
        outside_writes=device["outside_writes"],
        violations=device["violations"],
        attention_cycles=totals.cycles,
        attention_lines=totals.lines,
        attention_jobs=totals.jobs,
        attention_passes=totals.passes,
        channels=channels,
    )
