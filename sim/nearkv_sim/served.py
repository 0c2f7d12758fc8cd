"""A device in a process of its own that several hosts use at once, over a Unix socket with shared memory.

A host sends a whole program and gets its results, so that one that dies has sent it or not. An aperture
belongs to the first host that uses it, until that host is gone; what it left is there for the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from nearkv_hw.abi import DeviceConfig, configure
from nearkv_hw.abi.owner import OWNER_BYTES, OWNER_OFFSET
from nearkv_hw.abi.window import DOORBELL_OFFSET

from . import wire
from .events import ALL, CAPACITY, EventKind
from .maintenance import Maintenance
from .port import DeviceTimeout, LinkDown, Poll, Port, Program, Read, ReadResult, Write
from .programs import checked

SHARED_BYTES = 1 << 24
"""Of the memory that a host shares with the server; what does not fit travels through the socket."""
_BACKLOG = 64
_SERVER = -1
"""Stands for the server itself among hosts."""
_NO_SERVICE = "this server shares no prefixes: start it with nearkv serve --library TENANT"


class ApertureTakenError(PermissionError):
    """An aperture that another host of a served device uses."""


class NoServiceError(RuntimeError):
    """The server offers nothing besides the device."""


class Service(Protocol):
    """What a server offers its hosts besides the device. One call at a time, and no host's program during it.

    Members
    -------
    aperture : its own, which no host may use.
    """

    aperture: int

    def answer(
        self, host: int, request: dict[str, Any], arrays: list[wire.Array]
    ) -> tuple[dict[str, Any], list[wire.Array]]:
        """What a host's request comes to; its arrays are good until it returns. KeyError, TypeError or
        ValueError for what is no request."""

    def gone(self, host: int) -> None:
        """A host is gone, whatever it was doing."""


class Server:
    """Serves a device.

    Parameters
    ----------
    port : the device, which this closes in the end.
    path : of the socket, which must not be there yet.
    service : what it offers besides, if anything.

    Members
    -------
    hosts : how many are connected.

    Raises
    ------
    OSError : when there can be no socket.
    """

    def __init__(self, port: Port, path: Path, service: Service | None = None) -> None:
        self.path = Path(path)
        self._port = port
        self._service = service
        self._lock = threading.Lock()
        self._users: dict[int, int] = {} if service is None else {service.aperture: _SERVER}
        """Of each aperture in use, the host that has it."""
        self._connections: dict[int, socket.socket] = {}
        self._next = 0
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._socket.listen(_BACKLOG)

    @property
    def hosts(self) -> int:
        """How many are connected."""
        return len(self._connections)

    def serve(self) -> None:
        """Serve hosts until `close`, which another thread or a signal calls."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            number, self._next = self._next, self._next + 1
            self._connections[number] = connection
            threading.Thread(target=self._serve_one, args=(number, connection), daemon=True).start()

    def close(self) -> None:
        """End the service and the device; hosts lose their link."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closed = True
            self._port.close()

    def _serve_one(self, number: int, connection: socket.socket) -> None:
        descriptor = os.memfd_create("nearkv-host")
        try:
            os.ftruncate(descriptor, SHARED_BYTES)
            area = mmap.mmap(descriptor, SHARED_BYTES)
            socket.send_fds(connection, [b"1"], [descriptor])
            wire.send(connection, {"config": self._port.config.to_dict(), "kind": self._port.kind})
            while True:
                head, arrays = wire.receive(connection, area)
                answer, results = self._answer(number, head, arrays)
                wire.send(connection, answer, results, area)
        except (EOFError, OSError):
            pass
        finally:
            os.close(descriptor)
            connection.close()
            with self._lock:
                del self._connections[number]
                if self._service is not None and not self._closed:
                    self._service.gone(number)
                self._users = {a: user for a, user in self._users.items() if user != number}

    def _answer(
        self, number: int, head: dict[str, Any], arrays: list[wire.Array]
    ) -> tuple[dict[str, Any], list[wire.Array]]:
        """What a request comes to: an answer's head and arrays."""
        try:
            with self._lock:
                if head["op"] == "link_bytes":
                    return {"link_bytes": self._port.link_bytes}, []
                if head["op"] == "service":
                    if self._service is None:
                        return {"error": "service", "message": _NO_SERVICE}, []
                    return self._service.answer(number, head["request"], arrays)
                program = checked(wire.unpack_program(head["program"], arrays))
                self._take_apertures(number, program)
                results = self._port.run(program)
        except DeviceTimeout as error:
            return {"error": "timeout", "message": str(error)}, []
        except ApertureTakenError as error:
            return {"error": "taken", "message": str(error)}, []
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            return {"error": "value", "message": str(error)}, []
        return {}, [array for result in results for array in (result.data, result.access)]

    def _take_apertures(self, number: int, program: Program) -> None:
        """Have a host's apertures be its own; ApertureTakenError for another's. All may read registers."""
        config = self._port.config
        for operation in program:
            if isinstance(operation, Write | Read):
                addresses = operation.addresses
            elif isinstance(operation, Poll):
                addresses = np.array([operation.address], np.uint64)
            else:
                continue
            aperture, offset = np.divmod(addresses, np.uint64(config.aperture_bytes))
            if isinstance(operation, Read):
                registers = (offset >= config.capacity_bytes) & (
                    offset < config.capacity_bytes + DOORBELL_OFFSET
                )
                aperture, offset = aperture[~registers], offset[~registers]
            page = offset - np.uint64(config.capacity_bytes + OWNER_OFFSET)  # below zero it wraps
            if ((aperture == 0) & (page < OWNER_BYTES)).any():
                raise ApertureTakenError(
                    "the owner of a served device is who serves it: its hosts have no part in quotas and in "
                    "the log"
                )
            for one in np.unique(aperture[aperture < config.apertures]).tolist():
                if self._users.setdefault(one, number) != number:
                    user = "the server itself" if self._users[one] == _SERVER else "another host"
                    raise ApertureTakenError(
                        f"{user} uses tenant {one} of this device; use another of its "
                        f"{config.apertures} tenants, or wait until that host is gone"
                    )


class ServedPort:
    """A served device as a port.

    Parameters
    ----------
    path : of the server's socket.

    Members
    -------
    config, kind : of the device.

    Raises
    ------
    OSError : nobody serves there.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
            self._area = mmap.mmap(descriptors[0], SHARED_BYTES)
            os.close(descriptors[0])
            head, _ = wire.receive(self._socket)
        except (OSError, EOFError, IndexError) as error:
            self._socket.close()
            raise ConnectionError(
                f"no device is served at {path} ({error}); start one with: nearkv serve {path}"
            ) from error
        self.config: DeviceConfig = configure("small", **head["config"])
        self.kind: str = head["kind"]

    def run(self, program: Program) -> list[ReadResult]:
        """See `Port.run`; LinkDown when the server is gone, ApertureTakenError for a tenant in use."""
        program = checked(program)
        entries, arrays = wire.pack_program(program)
        _, results = self._ask({"op": "run", "program": entries}, arrays)
        kept = [np.array(array) for array in results]
        return [ReadResult(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]

    @property
    def link_bytes(self) -> int:
        """See `Port.link_bytes`: of all hosts together."""
        head, _ = self._ask({"op": "link_bytes"})
        return int(head["link_bytes"])

    def ask(
        self, request: dict[str, Any], arrays: Sequence[wire.Array] = ()
    ) -> tuple[dict[str, Any], list[wire.Array]]:
        """What the server's service answers a request; the arrays are good until the next call.

        Raises
        ------
        NoServiceError : the server has none.
        LinkDown : the server is gone.
        ValueError : for what is no request.
        """
        return self._ask({"op": "service", "request": request}, arrays)

    @property
    def maintenance(self) -> Maintenance:
        """RuntimeError: what is done to a device below its tenants is done where it runs."""
        raise RuntimeError("hosts of a served device have no CXL.io of it; open one of your own")

    def inject(self, address: int, bits: Sequence[int]) -> NoReturn:
        """RuntimeError: hosts of a served device do it no harm."""
        raise RuntimeError(
            f"{address:#x}: a served device takes no faults from its hosts; open one of your own"
        )

    def start_wave(self, path: Path) -> NoReturn:
        """RuntimeError: there are no waves."""
        raise RuntimeError(f"a served device records no waves in {path}; open one of your own")

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> NoReturn:
        """RuntimeError: there are no events."""
        raise RuntimeError("a served device records no events; open one of your own")

    def recorded(self) -> NoReturn:
        """RuntimeError, for nothing was recorded."""
        raise RuntimeError("nothing is recorded: a served device records no events")

    def close(self) -> None:
        """Leave the device, which goes on. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(
        self, head: dict[str, Any], arrays: Sequence[wire.Array] = ()
    ) -> tuple[dict[str, Any], list[wire.Array]]:
        if self._socket is None:
            raise RuntimeError("the device is closed; open another one")
        try:
            with self._lock:
                wire.send(self._socket, head, arrays, self._area)
                answer, results = wire.receive(self._socket, self._area)
        except (OSError, EOFError) as error:
            raise LinkDown(f"the device's server is gone: {error}") from error
        if "error" in answer:
            kinds = {
                "timeout": DeviceTimeout,
                "taken": ApertureTakenError,
                "service": NoServiceError,
            }
            raise kinds.get(answer["error"], ValueError)(answer["message"])
        return answer, results
