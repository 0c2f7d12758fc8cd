"""The device under cocotb, seen from the driver's process."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.verilog import VerilogDesign

from .. import wire
from ..build import device_design, progress
from ..cache import cache_folder
from ..events import ALL, CAPACITY, EventKind
from ..injections import Injections
from ..port import DeviceTimeout, Program, ReadResult
from ..programs import NO_DECODERS, check_injection, check_shaking, checked, with_ld_ids
from ..toolchain import need_trace_headers
from ..verilate import Report
from .runner import build_program, simulator_environment

_LOG_TAIL_LINES = 40
_CLOSE_S = 20


class CocotbPort:
    """A device in a simulator of its own, driven by cocotb; implements `Port`.

    Parameters
    ----------
    config : what to build; built at the first use, then found in the cache.
    trace : record waveforms from the start; `start_wave` says where they go.
    seed : of tags, idle and backpressure; by default a new one, which errors name.
    idle, backpressure : probability of a cycle without a message and without ready on every stream.
    report : told of build steps; by default the terminal.
    design : Verilog to use instead of the configuration's.

    Members
    -------
    maintenance : what can be done to it below its tenants.

    Raises
    ------
    ValueError : a probability outside 0 to 0.99.
    BuildError, ToolMissing : the device could not be built.
    """

    kind = "cocotb"

    def __init__(
        self,
        config: DeviceConfig,
        *,
        trace: bool = False,
        seed: int | None = None,
        idle: float = 0.2,
        backpressure: float = 0.2,
        report: Report | None = None,
        design: VerilogDesign | None = None,
    ):
        check_shaking(idle=idle, backpressure=backpressure)
        if trace:
            need_trace_headers()
        with progress() as shown:
            tell = report or shown
            design = design or device_design(config, tell)
            program = build_program(design, name=config.name, waves=trace, report=tell)
        self.config = config
        self.seed = secrets.randbits(31) if seed is None else seed
        self._trace = trace
        self._wave: Path | None = None
        self._link_bytes = 0
        self._cycles = 0
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="cocotb-device-", dir=cache_folder("runs")))
        ours, theirs = socket.socketpair()
        environment = simulator_environment(design, f"{__package__}.host", None, self.seed)
        environment |= {
            "NEARKV_CONFIG": json.dumps(config.to_dict()),
            "NEARKV_SOCKET": str(theirs.fileno()),
            "NEARKV_IDLE": str(idle),
            "NEARKV_BACKPRESSURE": str(backpressure),
            "COCOTB_RESULTS_FILE": str(self._folder / "results.xml"),
        }
        with theirs, (self._folder / "simulation.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(program), *(["--trace", "--trace-file", "waves.fst"] if trace else [])],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._connection: socket.socket | None = ours
        self.maintenance = Injections(self)

    def run(self, program: Program) -> list[ReadResult]:
        """Carry out a program; see `Port.run`.

        Raises
        ------
        DeviceTimeout : a poll ended in vain.
        ValueError : an address misaligned or beyond 52 bits, or arrays that do not fit each other.
        RuntimeError : the device is closed, broke the protocol, or its simulator ended; with the log's end.
        """
        ready = [with_ld_ids(self.config, operation) for operation in checked(program)]
        entries, arrays = wire.pack_program(ready)
        reply, results = self._ask({"program": entries}, arrays)
        self._link_bytes, self._cycles = reply["link_bytes"], reply["cycles"]
        if "timeout" in reply:
            raise DeviceTimeout(f"{reply['timeout']} (seed {self.seed})")
        found = wire.unpack_results(results)
        self.maintenance.observe(ready, found)
        return found

    @property
    def link_bytes(self) -> int:
        """Bytes of lines that crossed the link, both directions, polling included."""
        return self._link_bytes

    @property
    def cycles(self) -> int:
        """Device cycles simulated so far."""
        return self._cycles

    def inject(self, address: int, bits: Sequence[int]) -> None:
        """Invert bits of a line in the DRAM; see `Port.inject`."""
        check_injection(self.config, address, bits)
        self._ask({"inject": {"address": int(address), "bits": [int(bit) for bit in bits]}})

    def write_decoder(self, word: int, value: int) -> None:
        """Write a register of the HDM decoders; see `SimulatedPort.write_decoder`."""
        self._register(word=int(word), value=int(value))

    def read_decoder(self, word: int) -> int:
        """A register of the HDM decoders; see `SimulatedPort.read_decoder`."""
        return self._register(word=int(word), value=None)

    def _register(self, **access: int | None) -> int:
        reply, _ = self._ask({"register": access})
        if reply["value"] is None:
            raise RuntimeError(NO_DECODERS)
        return int(reply["value"])

    def _ask(
        self, request: dict[str, Any], arrays: Sequence[wire.Array] = ()
    ) -> tuple[dict[str, Any], list[wire.Array]]:
        """What the simulator answers to a request."""
        with self._lock:
            connection = self._open_connection()
            try:
                wire.send(connection, request, arrays)
                return wire.receive(connection)
            except (EOFError, OSError) as error:
                raise RuntimeError(self._obituary()) from error
            except BaseException:
                self._end()  # interrupted between request and reply: the two would no longer match
                raise

    def start_wave(self, path: Path) -> None:
        """Leave the waveforms in `path` when the device is closed; they begin where the device began."""
        if not self._trace:
            raise RuntimeError("the device was built without waveforms; open it with trace=True")
        self._wave = Path(path).absolute()

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> NoReturn:
        """RuntimeError: there are no events to record."""
        raise RuntimeError("the cocotb device keeps waveforms, not events; record an rtl device")

    def recorded(self) -> NoReturn:
        """RuntimeError, for nothing was recorded."""
        raise RuntimeError("nothing is recorded: the cocotb device keeps waveforms, not events")

    def close(self) -> None:
        """End the device; its memory is lost. A second call does nothing."""
        with self._lock:
            if self._connection is not None:
                self._end()
                if self._process.returncode == 0:
                    shutil.rmtree(self._folder)

    def _end(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._wave is not None:
            shutil.move(self._folder / "waves.fst", self._wave)

    def _open_connection(self) -> socket.socket:
        if self._connection is None:
            raise RuntimeError("the device is closed; open a new one")
        return self._connection

    def _obituary(self) -> str:
        """Why the simulator ended, after it has."""
        self._end()
        log = self._folder / "simulation.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        tail = "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])
        status = self._process.returncode
        return f"the simulator ended (status {status}, seed {self.seed}); the end of {log}:\n{tail}"

    def __enter__(self) -> CocotbPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()
