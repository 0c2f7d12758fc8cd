"""Programs and results as bytes, for a device that runs in another process.

A message is a frame: its length in 8 bytes, then a JSON head with the arrays' types and shapes, a zero byte,
and the arrays one after the other. Everything is little-endian.
"""

from __future__ import annotations

import json
import mmap
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .port import Fence, Operation, Poll, Program, Read, ReadResult, Write

Array = npt.NDArray[Any]


def send(
    connection: socket.socket,
    head: dict[str, Any],
    arrays: Sequence[Array] = (),
    area: mmap.mmap | None = None,
) -> None:
    """Send a message; its arrays through memory that both sides share, if there is any and they fit."""
    described = {**head, "arrays": [[array.dtype.str, list(array.shape)] for array in arrays]}
    if area is not None and sum(array.nbytes for array in arrays) <= len(area):
        offset = 0
        for array in arrays:
            area[offset : offset + array.nbytes] = array.tobytes()
            offset += array.nbytes
        described["shared"] = True
        arrays = ()
    body = b"\0".join([json.dumps(described).encode(), b"".join(array.tobytes() for array in arrays)])
    connection.sendall(len(body).to_bytes(8, "little") + body)


def receive(connection: socket.socket, area: mmap.mmap | None = None) -> tuple[dict[str, Any], list[Array]]:
    """The next message; EOFError when the other side is gone. Arrays in shared memory are good until the next
    message."""
    body = _exactly(connection, int.from_bytes(_exactly(connection, 8), "little"))
    end = body.index(0)
    head = json.loads(bytes(body[:end]))
    arrays, offset = [], end + 1
    source: Any = body
    if head.pop("shared", False):
        source, offset = area, 0
    for dtype, shape in head.pop("arrays"):
        count = int(np.prod(shape, dtype=np.int64))
        array: Array = np.frombuffer(source, np.dtype(dtype), count, offset).reshape(shape)
        arrays.append(array)
        offset += array.nbytes
    return head, arrays


def pack_program(program: Program) -> tuple[list[dict[str, Any]], list[Array]]:
    """Head entries and arrays of a program."""
    entries: list[dict[str, Any]] = []
    arrays: list[Array] = []
    for operation in program:
        match operation:
            case Write():
                entries.append(
                    {
                        "kind": "write",
                        "enables": operation.enables is not None,
                        "poison": bool(operation.poison),
                        "ld_ids": operation.ld_ids is not None,
                    }
                )
                arrays += [np.asarray(operation.addresses, np.uint64), np.asarray(operation.data, np.uint8)]
                if operation.enables is not None:
                    arrays.append(np.asarray(operation.enables, np.uint64))
                if operation.ld_ids is not None:
                    arrays.append(np.asarray(operation.ld_ids, np.uint8))
            case Read():
                entries.append({"kind": "read", "ld_ids": operation.ld_ids is not None})
                arrays.append(np.asarray(operation.addresses, np.uint64))
                if operation.ld_ids is not None:
                    arrays.append(np.asarray(operation.ld_ids, np.uint8))
            case Poll():
                entries.append(
                    {
                        "kind": "poll",
                        "address": int(operation.address),
                        "mask": int(operation.mask),
                        "value": int(operation.value),
                        "timeout_cycles": int(operation.timeout_cycles),
                    }
                )
            case Fence():
                entries.append({"kind": "fence"})
    return entries, arrays


def unpack_program(entries: list[dict[str, Any]], arrays: list[Array]) -> list[Operation]:
    """The program that `pack_program` packed."""
    program: list[Operation] = []
    rest = iter(arrays)
    for entry in entries:
        match entry["kind"]:
            case "write":
                addresses, data = next(rest), next(rest)
                enables = next(rest) if entry["enables"] else None
                ld_ids = next(rest) if entry["ld_ids"] else None
                program.append(Write(addresses, data, enables, entry["poison"], ld_ids))
            case "read":
                addresses = next(rest)
                program.append(Read(addresses, next(rest) if entry["ld_ids"] else None))
            case "poll":
                program.append(Poll(entry["address"], entry["mask"], entry["value"], entry["timeout_cycles"]))
            case "fence":
                program.append(Fence())
    return program


def pack_results(results: Sequence[ReadResult]) -> list[Array]:
    """Arrays of a program's results."""
    return [array for result in results for array in (result.data, result.access)]


def unpack_results(arrays: list[Array]) -> list[ReadResult]:
    """The results that `pack_results` packed."""
    return [ReadResult(data, access) for data, access in zip(arrays[::2], arrays[1::2], strict=True)]


def _exactly(connection: socket.socket, count: int) -> bytearray:
    body = bytearray(count)
    view = memoryview(body)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError("the other side closed the connection")
        view = view[received:]
    return body
