"""One tenant's command window: descriptors in, completion records out, one program of the port per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Status
from nearkv_hw.abi.descriptor import ATTEND, COMPLETION, COMPLETION_BYTES, DESCRIPTOR_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    COMPLETIONS_OFFSET,
    DESCRIPTORS_OFFSET,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    DOORBELL,
    DOORBELL_OFFSET,
    RING,
    RING_LINE,
    completion_address,
    completion_phase,
    register_address,
    window_base,
)
from nearkv_sim.columns import column
from nearkv_sim.port import DeviceTimeout, Fence, Operation, Poll, Port, Read, ReadResult, Write

from .codec import one
from .errors import ClosedError, DeviceTimeoutError, ProtocolError

_PHASE_BYTE = COMPLETION.offset("phase") // 8
_INDEX_MASK = (1 << DOORBELL["tail"].width) - 1
_TIMEOUT_CYCLES = 1_000_000
"""Cycles after which a batch is looked after; what it streams comes on top."""
_TIMEOUT_CYCLES_PER_LINE = 32


@dataclass(frozen=True)
class Completions:
    """What a batch came to.

    Members
    -------
    status, tag, detail, job_cycles, lines, passes : one number per descriptor, as in the completion record.
    cycles : device cycles from the doorbells to the last completions, as the host saw them; give or take the
        gap between two polls when the batch took longer than was expected of it.
    """

    status: npt.NDArray[np.uint8]
    tag: npt.NDArray[np.uint32]
    detail: npt.NDArray[np.uint64]
    job_cycles: npt.NDArray[np.uint32]
    lines: npt.NDArray[np.uint32]
    passes: npt.NDArray[np.uint16]
    cycles: int

    @property
    def failed(self) -> npt.NDArray[np.intp]:
        """Which descriptors did not end with OK."""
        return np.flatnonzero(self.status != Status.OK)


class CommandRing:
    """The descriptor ring of an aperture.

    Parameters
    ----------
    port : the device.
    config : what the device says of itself.
    aperture : whose window.

    Members
    -------
    posted : descriptors posted since reset, this and earlier sessions.
    """

    def __init__(self, port: Port, config: DeviceConfig, aperture: int) -> None:
        self._port = port
        self._config = config
        self._aperture = aperture
        window = window_base(config, aperture)
        self._descriptors = window + DESCRIPTORS_OFFSET
        self._completions = window + COMPLETIONS_OFFSET
        self._doorbell = one(window + DOORBELL_OFFSET)
        self._counters = one(register_address(config, aperture, DEVICE_COUNTERS_LINE))
        slices = range(CHANNEL_COUNTERS_LINE, CHANNEL_COUNTERS_LINE + config.slices)
        self._channels = np.array([register_address(config, aperture, line) for line in slices], np.uint64)
        (result,) = port.run([Read(one(register_address(config, aperture, RING_LINE)))])
        self.posted = RING.unpack(result.data[0].tobytes())["tail"]
        self._unfinished = False

    def settle(self) -> None:
        """Wait until all that was posted is complete, whoever posted it.

        Raises
        ------
        DeviceTimeoutError : when the device neither answers nor works on anything.
        """
        if not self.posted:
            return
        try:
            self._wait_on([self._poll(self.posted - 1, _TIMEOUT_CYCLES)])
        except DeviceTimeout as error:
            raise DeviceTimeoutError(
                f"what an earlier session of tenant {self._aperture} posted is not complete, and the device "
                f"does nothing any more ({error}); close the device and open it again"
            ) from error

    def run(
        self,
        descriptors: npt.NDArray[np.uint8],
        *,
        extensions: npt.NDArray[np.uint8] | None = None,
        before: Sequence[Operation] = (),
        after: Sequence[Operation] = (),
        streamed_lines: int = 0,
    ) -> tuple[Completions, list[ReadResult]]:
        """Post descriptors, more than the ring holds if need be, and wait for all of them.

        Parameters
        ----------
        descriptors : uint8 [n, 64], n at least 1; their tags are set here.
        extensions : the second lines of their slots, where they have any.
        before : operations that everything in the batch depends on.
        after : operations once all descriptors are complete.
        streamed_lines : an estimate of the lines that the batch streams, for the time it is given.

        Returns
        -------
        The completions, and the results of the `Read` operations in `after`.

        Raises
        ------
        DeviceTimeoutError : when the device neither answers nor works on anything else; the ring takes no
            more work then. Other tenants' work may take its time.
        ClosedError : when an earlier batch hung or was interrupted: nobody knows what of it is still to come.
        ProtocolError : when completion records are not those of the descriptors.
        """
        if self._unfinished:
            raise ClosedError(f"tenant {self._aperture}: an earlier batch never ended; open the device again")
        count, slots = len(descriptors), self._config.ring_slots
        indices = np.arange(self.posted, self.posted + count, dtype=np.uint64)
        column(ATTEND, "tag", descriptors)[:] = indices & np.uint64(_INDEX_MASK)
        timeout = _TIMEOUT_CYCLES + _TIMEOUT_CYCLES_PER_LINE * streamed_lines
        chunks = []
        self._unfinished = True
        try:
            for begin in range(0, count, slots):
                end = min(begin + slots, count)
                chunk, results = self._run_chunk(
                    indices[begin:end],
                    descriptors[begin:end],
                    None if extensions is None else extensions[begin:end],
                    before=before if begin == 0 else (),
                    after=after if end == count else (),
                    timeout=timeout,
                )
                chunks.append(chunk)
        except DeviceTimeout as error:
            raise DeviceTimeoutError(
                f"{count} descriptors of tenant {self._aperture} are not complete, and the device does "
                f"nothing any more ({error}); close the device and open it again"
            ) from error
        completions = self._completions_of(chunks, indices)
        self.posted += count
        self._unfinished = False
        return completions, results

    def _run_chunk(
        self,
        indices: npt.NDArray[np.uint64],
        descriptors: npt.NDArray[np.uint8],
        extensions: npt.NDArray[np.uint8] | None,
        *,
        before: Sequence[Operation],
        after: Sequence[Operation],
        timeout: int,
    ) -> tuple[_Chunk, list[ReadResult]]:
        """Post what the ring holds and wait for it: its cycles and records, and the results of `after`."""
        slot = indices % np.uint64(self._config.ring_slots)
        last = int(indices[-1])
        post = [
            *before,
            Write(self._descriptors + slot * np.uint64(DESCRIPTOR_BYTES), descriptors),
            *([] if extensions is None else [self._second_lines(slot, extensions)]),
            Fence(),
            Read(self._counters),
            Write(self._doorbell, self._doorbell_line(last + 1)),
        ]
        wait = [
            self._poll(last, timeout),
            Read(self._counters),
            Read(self._completions + slot * np.uint64(COMPLETION_BYTES)),
            *after,
        ]
        try:
            results = self._port.run([*post, *wait])
            results = results[sum(isinstance(operation, Read) for operation in before) :]
            rung = _cycles_of(results.pop(0))
        except DeviceTimeout:
            rung = _cycles_of(self._read_counters()[0]) - timeout
            results = self._wait_on(wait)
        done, records, *others = results
        return _Chunk(_cycles_of(done) - rung, records.data), others

    def _poll(self, index: int, timeout: int) -> Poll:
        """Wait for the completion record of a descriptor."""
        return Poll(
            completion_address(self._config, self._aperture, index),
            mask=1 << COMPLETION.offset("phase"),
            value=completion_phase(self._config, index) << COMPLETION.offset("phase"),
            timeout_cycles=timeout,
        )

    def _second_lines(self, slot: npt.NDArray[np.uint64], extensions: npt.NDArray[np.uint8]) -> Write:
        places = self._descriptors + slot * np.uint64(DESCRIPTOR_BYTES) + np.uint64(LINE_BYTES)
        return Write(places, extensions)

    def _wait_on(self, wait: Sequence[Operation]) -> list[ReadResult]:
        """Wait for a batch that is late, as long as the device makes progress on anybody's work."""
        seen = self._progress()
        while True:
            try:
                return self._port.run(wait)
            except DeviceTimeout:
                before, seen = seen, self._progress()
                if seen == before:
                    raise

    def _progress(self) -> tuple[int, ...]:
        """What moves as long as the device works: descriptors completed, lines taken by each unit."""
        device, channels = self._read_counters()
        jobs = int(column(DEVICE_COUNTERS, "jobs", device.data)[0])
        return jobs, *map(int, column(CHANNEL_COUNTERS, "unit_lines", channels.data))

    def _read_counters(self) -> list[ReadResult]:
        """The device's counters, and those of every memory slice."""
        return self._port.run([Read(self._counters), Read(self._channels)])

    def _doorbell_line(self, tail: int) -> npt.NDArray[np.uint8]:
        line = np.zeros((1, LINE_BYTES), np.uint8)
        column(DOORBELL, "tail", line)[:] = tail & _INDEX_MASK
        return line

    def _completions_of(self, chunks: list[_Chunk], indices: npt.NDArray[np.uint64]) -> Completions:
        records = np.concatenate([chunk.records for chunk in chunks])
        tags = column(COMPLETION, "tag", records)
        lap = indices // np.uint64(self._config.ring_slots) % np.uint64(2)
        stale = (records[:, _PHASE_BYTE] & 1) != 1 - lap
        if stale.any() or (tags != indices & np.uint64(_INDEX_MASK)).any():
            raise ProtocolError(
                f"tenant {self._aperture}: records {np.flatnonzero(stale).tolist()} of completions are old, "
                f"or the tags {tags.tolist()} are not those of descriptors {indices[0]} to {indices[-1]}"
            )
        return Completions(
            status=column(COMPLETION, "status", records),
            tag=tags,
            detail=column(COMPLETION, "detail", records),
            job_cycles=column(COMPLETION, "cycles", records),
            lines=column(COMPLETION, "lines", records),
            passes=column(COMPLETION, "passes", records),
            cycles=sum(chunk.cycles for chunk in chunks),
        )


@dataclass(frozen=True)
class _Chunk:
    """What a batch, or the part of it that fills the ring once, came to."""

    cycles: int
    records: npt.NDArray[np.uint8]


def _cycles_of(counters: ReadResult) -> int:
    return int(column(DEVICE_COUNTERS, "cycles", counters.data)[0])
