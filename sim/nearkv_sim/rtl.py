"""The Verilated device in this process: programs go to a C++ host in one call, and Python waits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.dram import Place
from nearkv_hw.abi.lines import LINE_BYTES

from .build import device_design, device_library, progress
from .dram import flip_bits, inject
from .events import ALL, CAPACITY, EVENT, EventKind, Recording
from .host_abi import Kind, NativeOperation, Status
from .injections import Injections
from .port import DeviceTimeout, Fence, Operation, Poll, Program, Read, ReadResult, Write
from .programs import NO_DECODERS, check_shaking, checked, ld_id_of, with_ld_ids
from .verilate import Report

_SLICE_CYCLES = 20_000
"""How far the device runs before Python looks for a keyboard interrupt: a fraction of a second."""


class RtlPort:
    """A device simulated at its RTL, in this process; implements `Port`.

    Parameters
    ----------
    config : what to build; built at the first use, then found in the cache.
    trace : build with waveforms, for `start_wave`.
    idle, backpressure : probability of a cycle without a message and without ready on each stream; a way to
        shake the device. With backpressure the device's streams are checked, too.
    seed : of the shaking.
    report : told of build steps; by default the terminal.
    library : a built library to use instead of the configuration's.

    Members
    -------
    maintenance : what can be done to it below its tenants.

    Raises
    ------
    ValueError : a probability outside 0 to 0.99.
    BuildError, ToolMissing : the device could not be built.
    """

    kind = "rtl"

    def __init__(
        self,
        config: DeviceConfig,
        *,
        trace: bool = False,
        idle: float = 0.0,
        backpressure: float = 0.0,
        seed: int = 1,
        report: Report | None = None,
        library: Path | None = None,
    ):
        check_shaking(idle=idle, backpressure=backpressure)
        if library is None:
            with progress() as shown:
                tell = report or shown
                library = device_library(
                    device_design(config, tell), name=config.name, trace=trace, report=tell
                )
        self.config = config
        self._library = _load(library)
        self._lock = threading.Lock()
        self._began = 0
        scale = 1 << 32
        self._opening = int(idle * scale), int(backpressure * scale), seed & ((1 << 64) - 1)
        self._host: int | None = self._library.nearkv_open(*self._opening)
        self.maintenance = Injections(self, RtlPort._restart)

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out a program; see `Port.run`.

        Raises
        ------
        DeviceTimeout : a poll ended in vain, or the device left accesses without an answer.
        ValueError : an address misaligned or beyond 52 bits, or arrays that do not fit each other.
        RuntimeError : the device is closed, or broke the protocol.
        """
        results: list[ReadResult] = []
        # its arrays must live until the program has ended
        ready = [with_ld_ids(self.config, operation) for operation in checked(program)]
        operations = (NativeOperation * len(ready))(
            *(_native(self.config, operation, results) for operation in ready)
        )
        with self._lock:
            host = self._open_host()
            self._library.nearkv_start(host, operations, len(ready))
            status = Status.RUNNING
            while status == Status.RUNNING:
                status = self._library.nearkv_advance(host, _SLICE_CYCLES)
            if status != Status.DONE:
                message = self._library.nearkv_message(host).decode()
                raise (DeviceTimeout if status == Status.TIMEOUT else RuntimeError)(message)
        self.maintenance.observe(ready, results)
        return results

    @property
    def link_bytes(self) -> int:
        """Bytes of lines that crossed the link, both directions, polling included."""
        return int(self._library.nearkv_link_bytes(self._open_host()))

    @property
    def cycles(self) -> int:
        """Device cycles simulated so far."""
        return int(self._library.nearkv_cycles(self._open_host()))

    def inject(self, address: int, bits: Sequence[int]) -> None:
        """Invert bits of a line in the DRAM; see `Port.inject`."""
        with self._lock:
            inject(self._library, self._library.nearkv_events(self._open_host()), self.config, address, bits)

    def write_decoder(self, word: int, value: int) -> None:
        """Write a register of the HDM decoders; see `SimulatedPort.write_decoder`."""
        with self._lock:
            if self._library.nearkv_write_register(self._open_host(), word, value) != 0:
                raise RuntimeError(NO_DECODERS)

    def read_decoder(self, word: int) -> int:
        """A register of the HDM decoders; see `SimulatedPort.read_decoder`."""
        value = c_uint32()
        with self._lock:
            if self._library.nearkv_read_register(self._open_host(), word, byref(value)) != 0:
                raise RuntimeError(NO_DECODERS)
        return value.value

    def start_wave(self, path: Path) -> None:
        """Record an FST from here on; RuntimeError where the device was built without traces."""
        if self._library.nearkv_start_wave(self._open_host(), str(path).encode()) != 0:
            raise RuntimeError(
                f"cannot record waveforms to {path}: the device was built without them (trace=True builds "
                "it with them), or the file cannot be written"
            )

    def flip_bits(self, channel: int, place: Place, bits: Sequence[int]) -> None:
        """Invert bits of a line in the DRAM; see `nearkv_sim.dram.flip_bits`."""
        flip_bits(self._library, self._library.nearkv_events(self._open_host()), channel, place, bits)

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> None:
        """Record events from here on; see `Port.record`."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 event, not {capacity!r}")
        events = self._library.nearkv_events(self._open_host())
        self._library.nearkv_events_start(events, capacity, sum(1 << kind for kind in kinds))
        self._began = self.cycles

    def recorded(self) -> Recording:
        """End the recording; what was recorded, once: a second call finds it empty."""
        events = self._library.nearkv_events(self._open_host())
        self._library.nearkv_events_stop(events)
        lost = int(self._library.nearkv_events_lost(events))
        taken = np.zeros(self._library.nearkv_events_count(events), EVENT)
        self._library.nearkv_events_take(events, taken.ctypes.data)
        names: list[str] = []
        while (name := self._library.nearkv_events_name(events, len(names))) is not None:
            names.append(name.decode())
        return Recording(taken, tuple(names), lost, self._began, self.cycles)

    def close(self) -> None:
        """End the device; its memory is lost. A second call does nothing."""
        with self._lock:
            if self._host is not None:
                self._library.nearkv_close(self._host)
                self._host = None

    def _restart(self) -> None:
        """A new device of the same build."""
        with self._lock:
            self._library.nearkv_close(self._open_host())
            self._host = self._library.nearkv_open(*self._opening)

    def _open_host(self) -> int:
        if self._host is None:
            raise RuntimeError("the device is closed; open a new one")
        return self._host

    def __enter__(self) -> RtlPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_host", None) is not None:
            self.close()


def _native(config: DeviceConfig, operation: Operation, results: list[ReadResult]) -> NativeOperation:
    """The operation for C++; room for what it reads is added to `results`."""
    match operation:
        case Write(addresses, data, enables, poison, ld_ids):
            return NativeOperation(
                kind=Kind.WRITE,
                poison=poison,
                count=len(addresses),
                addresses=addresses.ctypes.data,
                data=data.ctypes.data,
                enables=None if enables is None else enables.ctypes.data,
                ld_ids=None if ld_ids is None else ld_ids.ctypes.data,
            )
        case Read(addresses, ld_ids):
            result = ReadResult(
                np.zeros((len(addresses), LINE_BYTES), np.uint8), np.zeros(len(addresses), np.uint8)
            )
            results.append(result)
            return NativeOperation(
                kind=Kind.READ,
                count=len(addresses),
                addresses=addresses.ctypes.data,
                data=result.data.ctypes.data,
                ld_ids=None if ld_ids is None else ld_ids.ctypes.data,
                access=result.access.ctypes.data,
            )
        case Poll(address, mask, value, timeout_cycles):
            return NativeOperation(
                kind=Kind.POLL,
                address=address,
                mask=mask,
                value=value,
                timeout_cycles=timeout_cycles,
                ld_id=ld_id_of(config, address),
            )
        case Fence():
            return NativeOperation(kind=Kind.FENCE)


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, result, *arguments in (
        ("nearkv_open", c_void_p, c_uint32, c_uint32, c_uint64),
        ("nearkv_start", None, c_void_p, POINTER(NativeOperation), c_uint64),
        ("nearkv_advance", c_int, c_void_p, c_uint64),
        ("nearkv_message", c_char_p, c_void_p),
        ("nearkv_cycles", c_uint64, c_void_p),
        ("nearkv_link_bytes", c_uint64, c_void_p),
        ("nearkv_start_wave", c_int, c_void_p, c_char_p),
        ("nearkv_write_register", c_int, c_void_p, c_uint32, c_uint32),
        ("nearkv_read_register", c_int, c_void_p, c_uint32, POINTER(c_uint32)),
        ("nearkv_close", None, c_void_p),
        ("nearkv_events", c_void_p, c_void_p),
        ("nearkv_events_start", None, c_void_p, c_uint64, c_uint32),
        ("nearkv_events_stop", None, c_void_p),
        ("nearkv_events_count", c_uint64, c_void_p),
        ("nearkv_events_lost", c_uint64, c_void_p),
        ("nearkv_events_take", None, c_void_p, c_void_p),
        ("nearkv_events_name", c_char_p, c_void_p, c_uint32),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
