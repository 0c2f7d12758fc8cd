"""Numbers of a device: its own counters, and what the host saw of attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from nearkv_hw.abi import LINE_BYTES, DeviceConfig
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    EXTENT_COUNTERS,
    EXTENT_COUNTERS_LINE,
    MEMORY_COUNTERS,
    MEMORY_COUNTERS_LINE,
    QUEUE_COUNTERS,
    QUEUE_COUNTERS_LINE,
    register_address,
)
from nearkv_sim.port import Port, Read

from .ring import Completions

if TYPE_CHECKING:
    from .estimate import Energy, Events


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
class MemoryStats:
    """Counters of the memory behind one slice, as `MEMORY_COUNTERS` and `QUEUE_COUNTERS` of
    `nearkv_hw.abi.window` declare them. A memory without DRAM rules has none but `blocked_cycles`, and the
    software model none but `corrected` and `uncorrectable`; the others are zero there.
    """

    row_hits: int
    row_misses: int
    row_conflicts: int
    refresh_cycles: int
    turnaround_cycles: int
    idle_cycles: int
    corrected: int
    uncorrectable: int
    read_levels: int
    write_levels: int
    read_level_max: int
    write_level_max: int
    blocked_cycles: int

    def __sub__(self, earlier: MemoryStats) -> MemoryStats:
        """What was counted in between; the most that ever waited stays what it is."""
        return MemoryStats(
            **{
                f.name: getattr(self, f.name) - (0 if f.name.endswith("_max") else getattr(earlier, f.name))
                for f in fields(self)
            }
        )


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
    scrub_lines : lines that zeros were written over, of extents that were given back.
    scrubbing_extents, free_extents : extents that were given back and are not zero yet, and those that nobody
        has; not what was counted, but how many there are, in the difference of two those of the later one.
    attention_cycles : device cycles of this session's attention calls: from doorbells to last completions,
        and where the host works a call out itself (placement "host", several query rows, gaps in `visible`)
        from its first read of a row to the last answer.
    attention_lines : K and V lines of these calls: those that units streamed, every pass counted, and those
        that the host read over the link.
    host_lines : of these, those that the host read.
    attention_jobs, attention_passes : their jobs, one per sequence and KV head, and how often these read
        their rows; the host reads them once.
    attention_products, attention_value_products : multiplications in the units for these calls, and of these
        those of a weight and an element of V. Calls that failed have none.
    saturated : elements of appended rows that were beyond what a cache's format has, and became its largest.
    channels : `ChannelStats` of every slice of the memory.
    memories : `MemoryStats` of every slice.
    config : of the device.
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
    scrub_lines: int
    scrubbing_extents: int
    free_extents: int
    attention_cycles: int
    attention_lines: int
    host_lines: int
    attention_jobs: int
    attention_passes: int
    attention_products: int
    attention_value_products: int
    saturated: int
    channels: tuple[ChannelStats, ...]
    memories: tuple[MemoryStats, ...]
    config: DeviceConfig

    @property
    def utilisation(self) -> float:
        """Lines per cycle and channel in attention, 0 to 1; 0 when there was none."""
        peak = self.attention_cycles * len(self.channels)
        return self.attention_lines / peak if peak else 0.0

    @property
    def events(self) -> Events:
        """What `nearkv.estimate.energy` counts.

        A line is read or written once, and crosses the crossbar once unless the unit at its slice took it:
        the counters of a device with placement "fabric" have its units' lines as the crossbar's, too.
        Multiplications are those of this session. Rows opened are counted by devices that keep rows; for a
        `model` device they are those that long runs of lines open.
        """
        from .estimate.energy import Events, bits_of_sums  # late: a device opens without estimates

        reads, writes = (
            sum(getattr(channel, name) for channel in self.channels)
            for name in ("fabric_reads", "fabric_writes")
        )
        written = writes + self.scrub_lines
        opened = sum(memory.row_misses + memory.row_conflicts for memory in self.memories)
        keeps_rows = opened or any(memory.row_hits for memory in self.memories)
        return Events(
            line_reads=self.dram_bytes / LINE_BYTES - written,
            line_writes=written,
            link_bytes=self.link_bytes,
            multiplies=self.attention_products,
            sum_bits=bits_of_sums(self.attention_value_products),
            crossbar_bytes=(reads + writes) * LINE_BYTES,
            activates=opened if keeps_rows else None,
        )

    @property
    def energy(self) -> Energy | None:
        """Joules of the device and its link, by part and as bands; None without DRAM (dram="fixed").

        Whatever power is always on counts for the device cycles.
        """
        from .estimate.energy import energy

        if self.config.dram not in PARTS:
            return None
        return energy(self.config, self.events, seconds=self.cycles / (self.config.clock_mhz * 1e6))

    def __sub__(self, earlier: Stats) -> Stats:
        numbers = {
            f.name: getattr(self, f.name) - (0 if f.name.endswith("_extents") else getattr(earlier, f.name))
            for f in fields(self)
            if f.name not in ("channels", "memories", "config")
        }
        channels = tuple(
            ChannelStats(
                **{f.name: getattr(new, f.name) - getattr(old, f.name) for f in fields(ChannelStats)}
            )
            for new, old in zip(self.channels, earlier.channels, strict=True)
        )
        memories = tuple(new - old for new, old in zip(self.memories, earlier.memories, strict=True))
        return Stats(**numbers, channels=channels, memories=memories, config=self.config)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, `utilisation` and `energy` (joules) included."""
        energy = self.energy
        return {
            **asdict(self),
            "channels": [asdict(c) for c in self.channels],
            "memories": [asdict(memory) for memory in self.memories],
            "config": self.config.to_dict(),
            "utilisation": self.utilisation,
            "energy_j": energy.to_dict() if energy else None,
        }


@dataclass
class AttentionTotals:
    """What completion records, reads of rows by the host and quantising came to so far."""

    cycles: int = 0
    lines: int = 0
    host_lines: int = 0
    jobs: int = 0
    passes: int = 0
    products: int = 0
    value_products: int = 0
    saturated: int = 0

    def add(self, completions: Completions) -> None:
        """Count a batch."""
        self.cycles += completions.cycles
        self.lines += completions.total("lines")
        self.jobs += len(completions)
        self.passes += completions.total("passes")

    def add_products(self, scores: int, head_dim: int, value_dim: int) -> None:
        """Count the units' multiplications for so many scores, a row's with a query each."""
        self.products += scores * (head_dim + value_dim)
        self.value_products += scores * value_dim

    def add_fetched(self, *, cycles: int, lines: int, jobs: int) -> None:
        """Count a batch whose rows the host read."""
        self.cycles += cycles
        self.lines += lines
        self.host_lines += lines
        self.jobs += jobs
        self.passes += jobs


def read_stats(port: Port, config: DeviceConfig, totals: AttentionTotals) -> Stats:
    """Read the counters through the first aperture."""
    firsts = (CHANNEL_COUNTERS_LINE, MEMORY_COUNTERS_LINE, QUEUE_COUNTERS_LINE)
    of_device = (DEVICE_COUNTERS_LINE, EXTENT_COUNTERS_LINE)
    lines = [*of_device, *(first + s for first in firsts for s in range(config.slices))]
    link_bytes = port.link_bytes
    (result,) = port.run([Read(np.array([register_address(config, 0, line) for line in lines], np.uint64))])
    device = DEVICE_COUNTERS.unpack(result.data[0].tobytes())
    extents = EXTENT_COUNTERS.unpack(result.data[1].tobytes())
    of_slices = result.data[len(of_device) :].reshape(len(firsts), config.slices, LINE_BYTES)
    channels, memories, queues = (
        [layout.unpack(line.tobytes()) for line in of_them]
        for layout, of_them in zip(
            (CHANNEL_COUNTERS, MEMORY_COUNTERS, QUEUE_COUNTERS), of_slices, strict=True
        )
    )
    lines_taken = sum(channel["unit_lines"] for channel in channels)
    fabric_lines = sum(channel["fabric_reads"] + channel["fabric_writes"] for channel in channels)
    own_lines = 0 if config.placement is Placement.FABRIC else lines_taken
    return Stats(
        cycles=device["cycles"],
        jobs=device["jobs"],
        errors=device["errors"],
        lines=lines_taken,
        dram_bytes=(own_lines + fabric_lines + extents["scrub_lines"]) * LINE_BYTES,
        link_bytes=link_bytes,
        link_reads=device["link_reads"],
        link_writes=device["link_writes"],
        outside_reads=device["outside_reads"],
        outside_writes=device["outside_writes"],
        violations=device["violations"],
        scrub_lines=extents["scrub_lines"],
        scrubbing_extents=extents["scrubbing"],
        free_extents=extents["free"],
        attention_cycles=totals.cycles,
        attention_lines=totals.lines,
        host_lines=totals.host_lines,
        attention_jobs=totals.jobs,
        attention_passes=totals.passes,
        attention_products=totals.products,
        attention_value_products=totals.value_products,
        saturated=totals.saturated,
        channels=tuple(_picked(ChannelStats, channel) for channel in channels),
        memories=tuple(
            _picked(MemoryStats, memory | queue) for memory, queue in zip(memories, queues, strict=True)
        ),
        config=config,
    )


Counted = TypeVar("Counted", ChannelStats, MemoryStats)


def _picked(kind: type[Counted], counters: dict[str, int]) -> Counted:
    """The counters that a kind of statistics has."""
    return kind(**{f.name: counters[f.name] for f in fields(kind)})
