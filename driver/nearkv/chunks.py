"""Chunks of bytes in device memory, by key: what an engine's KV tier keeps there."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi.lines import LINE_BYTES, lines_of

from .arguments import whole_number
from .codec import span
from .errors import ArgumentError, ClosedError, OutOfMemoryError, ShapeError

if TYPE_CHECKING:
    from .device import Device

Bytes = npt.NDArray[np.uint8]


class ChunkMemory:
    """Chunks of one size in a tenant's device memory.

    Which chunk is where is known here alone: chunks end with this session. One thread at a time may use a
    device.

    Parameters
    ----------
    device : an open device.
    chunk_bytes : of each chunk.
    capacity_bytes : of all chunks at most, in whole lines each; the device's memory if not given.
    tenant : which of the device's apertures.

    Members
    -------
    chunk_bytes : see above.

    Examples
    --------
    >>> import nearkv, numpy
    >>> from nearkv.chunks import ChunkMemory
    >>> dev = nearkv.open("model")
    >>> chunks = ChunkMemory(dev, chunk_bytes=100)
    >>> chunks.store("a", numpy.arange(100, dtype=numpy.uint8))
    >>> found = numpy.zeros(100, numpy.uint8)
    >>> chunks.load("a", found)
    >>> int(found[99])
    99
    >>> dev.close()
    """

    def __init__(
        self, device: Device, *, chunk_bytes: int, capacity_bytes: int | None = None, tenant: int = 0
    ) -> None:
        self.chunk_bytes = whole_number("chunk_bytes", chunk_bytes, 1, device.config.capacity_bytes)
        self._lines = lines_of(chunk_bytes)
        least = self._lines * LINE_BYTES
        capacity = device.config.capacity_bytes if capacity_bytes is None else capacity_bytes
        self._room = whole_number("capacity_bytes", capacity, least, 1 << 62) // least
        self._tenant = device._tenant(tenant)
        self._at: dict[Hashable, int] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def store(self, key: Hashable, data: Bytes) -> None:
        """Keep a chunk, uint8 [chunk_bytes].

        Raises
        ------
        ArgumentError : for a key that is there.
        ShapeError : for data of another size.
        OutOfMemoryError : when there is no room; nothing is kept then.
        """
        self._check(data)
        if key in self._at:
            raise ArgumentError(f"chunk {key!r} is there already; drop it before another takes its key")
        if len(self._at) >= self._room:
            raise OutOfMemoryError(f"there is room for {self._room} chunks and all are there; drop one")
        address = self._tenant.arena.take(self.chunk_bytes)
        lines = np.zeros((self._lines, LINE_BYTES), np.uint8)
        lines.reshape(-1)[: self.chunk_bytes] = data
        try:
            self._tenant.run([self._tenant.write(span(address, self._lines), lines)])
        except BaseException:
            self._tenant.arena.give(address, self.chunk_bytes)
            raise
        self._at[key] = address

    def load(self, key: Hashable, into: Bytes) -> None:
        """Read a chunk into uint8 [chunk_bytes].

        Raises
        ------
        ArgumentError : for a key that is not there.
        ShapeError : for a place of another size.
        AccessError : when a line is poisoned: what it held is lost. Nothing is written into `into` then.
        """
        self._check(into)
        if key not in self._at:
            raise ArgumentError(f"there is no chunk {key!r}")
        lines = self._tenant.read(span(self._at[key], self._lines))
        into[:] = lines.reshape(-1)[: self.chunk_bytes]

    def drop(self, key: Hashable) -> None:
        """Forget a chunk; its memory is free. ArgumentError for a key that is not there."""
        if key not in self._at:
            raise ArgumentError(f"there is no chunk {key!r}")
        self._tenant.arena.give(self._at.pop(key), self.chunk_bytes)

    def close(self) -> None:
        """Forget all chunks. A second call does nothing."""
        for key in list(self._at):
            self.drop(key)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, data: Bytes) -> None:
        if self._closed:
            raise ClosedError("the chunk memory is closed")
        if data.shape != (self.chunk_bytes,) or data.dtype != np.uint8:
            raise ShapeError(f"a chunk is uint8 [{self.chunk_bytes}], not {data.dtype} {list(data.shape)}")
