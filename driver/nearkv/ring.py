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
from nearkv_sim.port import DeviceTimeout, Fence, Operation, Poll, Port, Read, ReadResult, Write

from .codec import column, one
from .errors import ClosedError, DeviceTimeoutError, ProtocolError

_PHASE_BYTE = COMPLETION.offset("phase") // 8
_INDEX_MASK = (1 << DOORBELL["tail"].width) - 1
_TIMEOUT_CYCLES = 1_000_000
"""Cycles that any batch is given; what it streams comes on top."""
_TIMEOUT_CYCLES_PER_LINE = 32


@dataclass(frozen=True)
class Completions:
    """What a batch came to.

    Members
    -------
    status, tag, detail, job_cycles, lines, passes : one number per descriptor, as in the completion record.
    cycles : device cycles from the doorbells to the last completions, as the host saw them.
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
        (result,) = port.run([Read(one(register_address(config, aperture, RING_LINE)))])
        self.posted = RING.unpack(result.data[0].tobytes())["tail"]
        self._unfinished = False

    def run(
        self,
        descriptors: npt.NDArray[np.uint8],
        *,
        before: Sequence[Operation] = (),
        after: Sequence[Operation] = (),
        streamed_lines: int = 0,
    ) -> tuple[Completions, list[ReadResult]]:
        """Post descriptors, more than the ring holds if need be, and wait for all of them.

        Parameters
        ----------
        descriptors : uint8 [n, 64], n at least 1; their tags are set here.
        before : operations that everything in the batch depends on.
        after : operations once all descriptors are complete.
        streamed_lines : an estimate of the lines that the batch streams, for the time it is given.

        Returns
        -------
        The completions, and the results of the `Read` operations in `after`.

        Raises
        ------
        DeviceTimeoutError : when the device does not answer; the ring takes no more work then.
        ClosedError : when an earlier batch hung or was interrupted: nobody knows what of it is still to come.
        ProtocolError : when completion records are not those of the descriptors.
        """
        if self._unfinished:
            raise ClosedError(f"tenant {self._aperture}: an earlier batch never ended; open the device again")
        count, slots = len(descriptors), self._config.ring_slots
        indices = np.arange(self.posted, self.posted + count, dtype=np.uint64)
        column(ATTEND, "tag", descriptors)[:] = indices & np.uint64(_INDEX_MASK)
        slot = indices % np.uint64(slots)
        sources = self._descriptors + slot * np.uint64(DESCRIPTOR_BYTES)
        records = self._completions + slot * np.uint64(COMPLETION_BYTES)
        timeout = _TIMEOUT_CYCLES + _TIMEOUT_CYCLES_PER_LINE * streamed_lines
        program: list[Operation] = list(before)
        for begin in range(0, count, slots):
            end = min(begin + slots, count)
            last = self.posted + end - 1
            program += [
                Write(sources[begin:end], descriptors[begin:end]),
                Fence(),
                Read(self._counters),
                Write(self._doorbell, self._doorbell_line(last + 1)),
                Poll(
                    completion_address(self._config, self._aperture, last),
                    mask=1 << COMPLETION.offset("phase"),
                    value=completion_phase(self._config, last) << COMPLETION.offset("phase"),
                    timeout_cycles=timeout,
                ),
                Read(self._counters),
                Read(records[begin:end]),
            ]
        program += after
        self._unfinished = True
        try:
            results = self._port.run(program)
        except DeviceTimeout as error:
            raise DeviceTimeoutError(
                f"{count} descriptors of tenant {self._aperture} were not complete after {timeout} cycles "
                f"({error}); close the device and open it again"
            ) from error
        earlier = sum(isinstance(operation, Read) for operation in before)
        own = results[earlier : earlier + 3 * -(-count // slots)]
        completions = self._completions_of(own, indices)
        self.posted += count
        self._unfinished = False
        return completions, results[earlier + len(own) :]

    def _doorbell_line(self, tail: int) -> npt.NDArray[np.uint8]:
        line = np.zeros((1, LINE_BYTES), np.uint8)
        column(DOORBELL, "tail", line)[:] = tail & _INDEX_MASK
        return line

    def _completions_of(self, results: list[ReadResult], indices: npt.NDArray[np.uint64]) -> Completions:
        """Completions from three reads per chunk: the counters before, the counters after, the records."""
        cycles = 0
        for before, after in zip(results[0::3], results[1::3], strict=True):
            cycles += int(column(DEVICE_COUNTERS, "cycles", after.data)[0])
            cycles -= int(column(DEVICE_COUNTERS, "cycles", before.data)[0])
        records = np.concatenate([result.data for result in results[2::3]])
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
            cycles=cycles,
        )
