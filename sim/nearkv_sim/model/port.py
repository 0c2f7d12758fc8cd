"""The model device as a port: programs of host accesses against addresses, memory, windows and counters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.window import WINDOW_BYTES

from ..events import ALL, CAPACITY, EventKind
from ..port import Access, Addresses, DeviceTimeout, Fence, Poll, Program, Read, ReadResult, Write
from ..programs import check_injection, checked
from ..verilate import Report
from . import timing
from .counters import Counters
from .engine import Engine
from .kernels import choose
from .memory import Mask, Memory, enabled_bytes
from .window import CommandWindow

_ALL_BYTES = np.uint64((1 << LINE_BYTES) - 1)


class ModelPort:
    """A device in software that behaves, program by program, as the hardware does.

    Work is done when the doorbell is rung, so a poll sees at once whatever it will ever see. Poison comes
    from `inject` alone: a program cannot write it. Cycles are an estimate (`timing`).

    Parameters
    ----------
    config : what the device is made of.
    kernel, report : what computes its attention, and who hears of a build; see `kernels.choose`.

    Members
    -------
    kernel : "native" or "torch".

    Raises
    ------
    ValueError, ToolMissing, BuildError : as `kernels.choose` has them.
    """

    kind = "model"

    def __init__(
        self, config: DeviceConfig, *, kernel: str | None = None, report: Report | None = None
    ) -> None:
        self.config = config
        self.kernel, attend = choose(kernel, report)
        self._link_lines = 0
        self._counters = Counters(config)
        self._engine: Engine | None = Engine(config, self._counters, attend)
        self._windows = [CommandWindow(config, a, self._counters) for a in range(config.apertures)]

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
                results.append(self._read(engine.memory, operation.addresses))
            elif isinstance(operation, Fence):
                self._counters.device["cycles"] += timing.read_cycles(self.config)
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

    def close(self) -> None:
        """End the device; its memory is lost. A second call does nothing."""
        self._engine = None

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the device is closed; open another one")
        return self._engine

    def _write(self, engine: Engine, write: Write) -> None:
        where = _Places(write.addresses, self.config)
        data, enables = write.data, write.enables
        self._count_link("writes", where)
        for tenant in where.tenants(where.memory):
            some = where.memory & (where.apertures == tenant)
            lines = where.offsets[some] >> LINE_SHIFT
            engine.memory.write(lines, data[some], tenant, None if enables is None else enables[some])
        for index in np.flatnonzero(where.window):
            window = self._windows[where.apertures[index]]
            enabled = enabled_bytes(np.array([_ALL_BYTES if enables is None else enables[index]]))[0]
            if window.write(int(where.offsets[index]) - self.config.capacity_bytes, data[index], enabled):
                engine.serve(window)

    def _read(self, memory: Memory, addresses: Addresses) -> ReadResult:
        where = _Places(addresses, self.config)
        self._count_link("reads", where)
        data = np.zeros((len(where.offsets), LINE_BYTES), dtype=np.uint8)
        access = np.full(len(where.offsets), Access.OUTSIDE, dtype=np.uint8)
        for tenant in where.tenants(where.memory):
            some = np.flatnonzero(where.memory & (where.apertures == tenant))
            lines = where.offsets[some] >> LINE_SHIFT
            data[some], allowed = memory.read(lines, tenant)
            access[some[allowed]] = Access.DATA
            access[some[allowed][memory.poisoned(lines[allowed])]] = Access.POISON
        for index in np.flatnonzero(where.window):
            window = self._windows[where.apertures[index]]
            line = window.read(int(where.offsets[index]) - self.config.capacity_bytes)
            data[index] = np.frombuffer(line, dtype=np.uint8)
            access[index] = Access.DATA
        return ReadResult(data, access)

    def _poll(self, memory: Memory, poll: Poll) -> None:
        result = self._read(memory, np.array([poll.address], dtype=np.uint64))
        self._counters.device["cycles"] += timing.POLL_CYCLES
        seen = int(result.data.view("<u8")[0, 0])
        if result.access[0] != Access.DATA or seen & poll.mask != poll.value:
            self._counters.device["cycles"] += poll.timeout_cycles
            raise DeviceTimeout(
                f"the line at {poll.address:#x} holds {seen:#x}, and masked with {poll.mask:#x} never equals "
                f"{poll.value:#x}: nothing is under way that could change it"
            )

    def _count_link(self, kind: str, where: _Places) -> None:
        device, count = self._counters.device, len(where.offsets)
        self._link_lines += count
        device["cycles"] += timing.link_cycles(self.config, **{kind: count})
        device[f"link_{kind}"] += count
        device[f"outside_{kind}"] += int(count - np.count_nonzero(where.memory | where.window))


class _Places:
    """Where host addresses lead.

    Members
    -------
    apertures, offsets : int64 [n].
    memory, window : bool [n]; what is neither lies outside.
    """

    apertures: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    memory: Mask
    window: Mask

    def __init__(self, addresses: Addresses, config: DeviceConfig) -> None:
        places = addresses.astype(np.int64)  # of at most 52 bits
        self.apertures, self.offsets = np.divmod(places, config.aperture_bytes)
        inside = self.apertures < config.apertures
        self.memory = inside & (self.offsets < config.capacity_bytes)
        self.window = inside & ~self.memory & (self.offsets < config.capacity_bytes + WINDOW_BYTES)

    def tenants(self, which: Mask) -> list[int]:
        """The apertures of some of the places."""
        apertures = self.apertures[which]
        if not len(apertures) or (apertures == apertures[0]).all():
            return [int(aperture) for aperture in apertures[:1]]
        return [int(aperture) for aperture in np.unique(apertures)]
