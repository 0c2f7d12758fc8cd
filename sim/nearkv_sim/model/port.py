"""The model device as a port: programs of host accesses against addresses, memory, windows and counters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Feature
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.owner import OWNER_BYTES, OWNER_OFFSET
from nearkv_hw.abi.window import WINDOW_BYTES

from ..cxl_io.hdm import NOWHERE, HdmDecoders
from ..decoders import decoders_of, every_address
from ..events import ALL, CAPACITY, EventKind
from ..port import Access, Addresses, DeviceTimeout, Fence, Lines, Poll, Program, Read, ReadResult, Write
from ..programs import check_injection, checked, ld_ids_of
from ..verilate import Report
from . import timing
from .counters import Counters
from .engine import FEATURES, Engine
from .kernels import choose
from .maintenance import ModelMaintenance
from .memory import Memory, enabled_bytes
from .window import CommandWindow

_COUNTS_KEPT = 1024
_EVERY_BYTE = np.ones((1, LINE_BYTES), np.bool_)


class ModelPort:
    """A device in software that behaves, program by program, as the hardware does.

    Work is done when the doorbell is rung, so a poll sees at once whatever it will ever see. Cycles are an
    estimate (`timing`).

    Parameters
    ----------
    config : what the device is made of.
    kernel, report : what computes its attention, and who hears of a build; see `kernels.choose`.
    features : what it has beyond plain jobs, of `FEATURES`; by default all of these.

    Members
    -------
    kernel : "native" or "torch".
    maintenance : what can be done to it below its tenants.

    Raises
    ------
    ValueError, ToolMissing, BuildError : as `kernels.choose` has them.
    """

    kind = "model"

    def __init__(
        self,
        config: DeviceConfig,
        *,
        kernel: str | None = None,
        report: Report | None = None,
        features: Feature | None = None,
    ) -> None:
        self.config = config
        self.features = FEATURES if features is None else features
        if self.features & ~FEATURES:
            raise ValueError(f"features={self.features!r}: the model has {FEATURES!r}")
        self.kernel, attend = choose(kernel, report)
        self._attend = attend
        self._link_lines = 0
        self._fence_cycles = timing.read_cycles(config)
        self._link_cycles = lru_cache(_COUNTS_KEPT)(partial(timing.link_cycles, config))
        self._counters = Counters(config)
        self._attend = attend
        self._engine: Engine | None = None
        self._restart()
        self.maintenance = ModelMaintenance(
            config.dram,
            lambda: self._open_engine().memory,
            self._counters,
            self._restart,
            decoders_of(config, HdmDecoders),
        )

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out a program; DeviceTimeout when a poll ends in vain, ValueError for a misaligned address.

        Accesses are carried out in the program's order.
        """
        engine = self._open_engine()
        results = []
        for operation in checked(program):
            if isinstance(operation, Write):
                self._write(engine, operation)
            elif isinstance(operation, Read):
                results.append(self._read(engine.memory, operation.addresses, operation.ld_ids))
            elif isinstance(operation, Fence):
                self._counters.device["cycles"] += self._fence_cycles
            else:
                self._poll(engine.memory, operation)
        return results

    @property
    def link_bytes(self) -> int:
        """Bytes of lines that crossed the link, both directions, polling included."""
        return self._link_lines * LINE_BYTES

    def inject(self, address: int, bits: Sequence[int]) -> None:
        """Invert bits of a line in the DRAM; see `Port.inject`."""
        check_injection(self.config, address, bits)
        self._open_engine().memory.flip(address >> LINE_SHIFT, bits)

    def start_wave(self, path: Path) -> NoReturn:
        """RuntimeError: software has no waves."""
        raise RuntimeError(
            f"the model device has no signals to record in {path}; open rtl or cocotb for a wave"
        )

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> NoReturn:
        """RuntimeError: there are no events to record."""
        raise RuntimeError("the model has no cycle in which something happens; record an rtl device")

    def recorded(self) -> NoReturn:
        """RuntimeError, for nothing was recorded."""
        raise RuntimeError("nothing is recorded: the model has no cycle in which something happens")

    def reset(self) -> None:
        """Start anew, as a device does: memory, owners, rings, counters and decoders are as on the first
        day."""
        self._counters.clear()
        if (decoders := self.maintenance.decoders) is not None:
            decoders.reset()
            decoders.dvsec = every_address(self.config)
        self._restart()

    def close(self) -> None:
        """End the device; its memory is lost. A second call does nothing."""
        self._engine = None

    def _restart(self) -> None:
        """New memory and new command windows; counters go on."""
        config = self.config
        self._engine = Engine(config, self._counters, self._attend, self.features)
        memory = self._engine.memory
        self._windows = [
            CommandWindow(config, a, self.features, self._counters, memory) for a in range(config.apertures)
        ]

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the device is closed; open another one")
        return self._engine

    def _write(self, engine: Engine, write: Write) -> None:
        data, enables = write.data, write.enables
        areas = self._areas(write.addresses, write.ld_ids)
        self._count_link("writes", len(data), areas)
        for area in areas:
            some = None if enables is None else enables[area.which]
            if not area.window:
                lines = area.offsets >> LINE_SHIFT
                engine.memory.write(lines, data[area.which], area.aperture, some, poison=write.poison)
            else:
                self._write_window(engine, area, data[area.which], some, poison=write.poison)

    def _write_window(
        self,
        engine: Engine,
        area: _Area,
        data: Lines,
        enables: npt.NDArray[np.uint64] | None,
        *,
        poison: bool,
    ) -> None:
        window = self._windows[area.aperture]
        if enables is None and not poison and window.post(area.offsets, data):
            return
        every = _EVERY_BYTE.repeat(len(data), axis=0) if enables is None else enabled_bytes(enables)
        for offset, line, enabled in zip(area.offsets.tolist(), data, every, strict=True):
            if window.write(offset, line, enabled, poison=poison):
                engine.serve(window)

    def _read(
        self, memory: Memory, addresses: Addresses, ld_ids: npt.NDArray[np.uint8] | None = None
    ) -> ReadResult:
        areas = self._areas(addresses, ld_ids)
        self._count_link("reads", len(addresses), areas)
        if len(areas) == 1 and len(areas[0].offsets) == len(addresses):
            return ReadResult(*self._read_area(memory, areas[0]))
        data = np.zeros((len(addresses), LINE_BYTES), dtype=np.uint8)
        access = np.full(len(addresses), Access.OUTSIDE, dtype=np.uint8)
        for area in areas:
            data[area.which], access[area.which] = self._read_area(memory, area)
        return ReadResult(data, access)

    def _read_area(self, memory: Memory, area: _Area) -> tuple[Lines, npt.NDArray[np.uint8]]:
        access = np.zeros(len(area.offsets), dtype=np.uint8)
        if area.window:
            return self._windows[area.aperture].read_lines(area.offsets), access
        lines = area.offsets >> LINE_SHIFT
        data, allowed = memory.read(lines, area.aperture)
        if not (memory.intact and allowed.all()):
            access[~allowed] = Access.OUTSIDE
            access[np.flatnonzero(allowed)[memory.poisoned(lines[allowed])]] = Access.POISON
        return data, access

    def _poll(self, memory: Memory, poll: Poll) -> None:
        """Wait; nothing but a scrub goes on while the host does."""
        device = self._counters.device
        until = device["cycles"] + poll.timeout_cycles
        address = np.array([poll.address], dtype=np.uint64)
        while True:
            result = self._read(memory, address)
            device["cycles"] += timing.POLL_CYCLES
            seen = int(result.data.view("<u8")[0, 0])
            if result.access[0] == Access.DATA and seen & poll.mask == poll.value:
                return
            if device["cycles"] >= memory.scrubbed_at or until < memory.scrubbed_at:
                break
            device["cycles"] = memory.scrubbed_at
        device["cycles"] = max(device["cycles"], until)
        raise DeviceTimeout(
            f"the line at {poll.address:#x} holds {seen:#x}, and masked with {poll.mask:#x} never equals "
            f"{poll.value:#x}: nothing is under way that could change it"
        )

    def _areas(self, addresses: Addresses, ld_ids: npt.NDArray[np.uint8] | None) -> list[_Area]:
        """Where messages lead, as decoders and logical devices have it."""
        decoders = self.maintenance.decoders
        if decoders is not None:
            addresses = decoders.translate_all(addresses)
        if self.config.logical_devices > 1:
            addresses = _of_logical_devices(addresses, ld_ids, self.config)
        return _areas(addresses, self.config)

    def _count_link(self, kind: str, count: int, areas: list[_Area]) -> None:
        device = self._counters.device
        self._link_lines += count
        device["cycles"] += self._link_cycles(**{kind: count})
        device[f"link_{kind}"] += count
        device[f"outside_{kind}"] += count - sum(len(area.offsets) for area in areas)


class _Area(NamedTuple):
    """Accesses that lead to the same place: the memory as one aperture sees it, or its window.

    Members
    -------
    aperture, window : the aperture, and whether it is its window.
    which : which of the accesses.
    offsets : theirs in the aperture, or in the window.
    """

    aperture: int
    window: bool
    which: slice | npt.NDArray[np.intp]
    offsets: npt.NDArray[np.int64]


_EVERY = slice(None)
_END_BYTES = OWNER_OFFSET + OWNER_BYTES
"""The owner's page follows the window of aperture 0."""


def _of_logical_devices(
    addresses: Addresses, ld_ids: npt.NDArray[np.uint8] | None, config: DeviceConfig
) -> Addresses:
    """The addresses, but `NOWHERE` of messages with another LD-ID than their aperture's, or to memory that is
    not this logical device's."""
    own = ld_ids_of(config, addresses)
    given = own if ld_ids is None else ld_ids
    part = np.uint64(config.capacity_bytes // config.logical_devices)
    offsets = addresses % np.uint64(config.aperture_bytes)
    of_another = (offsets < config.capacity_bytes) & (offsets // part != given)
    return np.where((own != given) | of_another, NOWHERE, addresses)


def _areas(addresses: Addresses, config: DeviceConfig) -> list[_Area]:
    """Where host addresses lead; those that are in no area lie outside. Memory comes before windows."""
    if not len(addresses):
        return []
    capacity = config.capacity_bytes
    aperture = int(addresses[0]) // config.aperture_bytes
    if aperture < config.apertures:  # most programs access one place at a time
        # an offset below zero wraps, and is beyond everything
        offsets = addresses - np.uint64(aperture * config.aperture_bytes)
        if np.maximum.reduce(offsets) < capacity:
            return [_Area(aperture, False, _EVERY, offsets.view(np.int64))]
        offsets -= np.uint64(capacity)
        if np.maximum.reduce(offsets) < (WINDOW_BYTES if aperture else _END_BYTES):
            return [_Area(aperture, True, _EVERY, offsets.view(np.int64))]
    places = addresses.astype(np.int64)  # of at most 52 bits
    apertures, within = np.divmod(places, config.aperture_bytes)
    inside = apertures < config.apertures
    memory = inside & (within < capacity)
    end = np.where(apertures == 0, _END_BYTES, WINDOW_BYTES)
    window = inside & ~memory & (within < capacity + end)
    found = []
    for aperture in np.unique(apertures[memory]).tolist():
        some = np.flatnonzero(memory & (apertures == aperture))
        found.append(_Area(aperture, False, some, within[some]))
    for one in np.flatnonzero(window):  # in their order, whichever the aperture
        found.append(_Area(int(apertures[one]), True, np.array([one]), within[one : one + 1] - capacity))
    return found
