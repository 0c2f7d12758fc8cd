"""One tenant's command window: descriptors in, completion records out, one program of the port per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

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
    EXTENT_COUNTERS,
    EXTENT_COUNTERS_LINE,
    RING,
    RING_LINE,
    completion_phase,
    register_address,
    window_base,
)
from nearkv_sim.columns import column
from nearkv_sim.port import Addresses, DeviceTimeout, Fence, Lines, Operation, Poll, Read, ReadResult, Write

from .codec import one
from .errors import ClosedError, DeviceTimeoutError, ProtocolError
from .queued_port import Programs

_PHASE = COMPLETION.offset("phase")
_OK = int(Status.OK)
_TAIL = Struct(f"<{DOORBELL.offset('tail') // 8}xI")
_CYCLES = Struct(f"<{DEVICE_COUNTERS.offset('cycles') // 8}xQ")
"""Single fields of single lines, which take less without an array for each."""
_FENCE = Fence()
_INDEX_MASK = (1 << DOORBELL["tail"].width) - 1
_TIMEOUT_CYCLES = 1_000_000
"""Cycles after which a batch is looked after; what it streams comes on top."""
_TIMEOUT_CYCLES_PER_LINE = 32


@dataclass(frozen=True)
class Completions:
    """What a batch came to.

    Members
    -------
    records : the completion record of each descriptor, [n, 64].
    cycles : device cycles from the doorbells to the last completions, as the host saw them; give or take the
        gap between two polls when the batch took longer than was expected of it.
    """

    records: Lines
    cycles: int

    def __len__(self) -> int:
        return len(self.records)

    def of(self, name: str) -> npt.NDArray[Any]:
        """A field of the records, one number per descriptor."""
        return column(COMPLETION, name, self.records)

    def total(self, name: str) -> int:
        """The sum of a field."""
        # of the few records that most batches have, a list's sum takes a third of an array's
        total: int = sum(column(COMPLETION, name, self.records).tolist())
        return total

    @property
    def ok(self) -> bool:
        """Whether all descriptors ended with OK."""
        found: int = self.of("status").tolist().count(_OK)
        return found == len(self.records)

    @property
    def failed(self) -> npt.NDArray[np.intp]:
        """Which descriptors did not end with OK."""
        return np.flatnonzero(self.of("status") != _OK)


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
    completed : of these, those that this session knows to be complete; they complete in their order.
    on_complete : called when there are more of those.
    on_hang : called when the device does nothing any more; may raise what says why.
    """

    def __init__(self, port: Programs, config: DeviceConfig, aperture: int) -> None:
        self._port = port
        self._config = config
        self._aperture = aperture
        window = window_base(config, aperture)
        slots = np.arange(config.ring_slots, dtype=np.uint64)
        self._descriptors = window + DESCRIPTORS_OFFSET + slots * np.uint64(DESCRIPTOR_BYTES)
        self._completions = window + COMPLETIONS_OFFSET + slots * np.uint64(COMPLETION_BYTES)
        self._doorbell = one(window + DOORBELL_OFFSET)
        self._read_cycles = Read(one(register_address(config, aperture, DEVICE_COUNTERS_LINE)))
        slices = range(CHANNEL_COUNTERS_LINE, CHANNEL_COUNTERS_LINE + config.slices)
        self._channels = np.array([register_address(config, aperture, line) for line in slices], np.uint64)
        self._extents = one(register_address(config, aperture, EXTENT_COUNTERS_LINE))
        self._state = one(register_address(config, aperture, RING_LINE))
        (result,) = port.run([Read(self._state)])
        self.posted = RING.unpack(result.data[0].tobytes())["tail"]
        self.completed = self.posted
        self.on_complete: Callable[[], None] = lambda: None
        self.on_hang: Callable[[], None] = lambda: None
        self._outstanding: list[Ticket] = []
        self._last_done = 0
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
            last = self.posted - 1
            self._wait_on([self._poll(last, self._phases(last, 1)[0], _TIMEOUT_CYCLES)])
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
        after: Sequence[Read] = (),
        streamed_lines: int = 0,
    ) -> tuple[Completions, list[ReadResult]]:
        """Post descriptors, more than the ring holds if need be, and wait for all of them.

        Parameters
        ----------
        descriptors : uint8 [n, 64], n at least 1; their tags are set here.
        extensions : the second lines of their slots, where they have any.
        before : operations that everything in the batch depends on.
        after : reads once all descriptors are complete.
        streamed_lines : an estimate of the lines that the batch streams, for the time it is given.

        Returns
        -------
        The completions, and the results of `after`.

        Raises
        ------
        DeviceTimeoutError : when the device neither answers nor works on anything else; the ring takes no
            more work then. Other tenants' work may take its time.
        ClosedError : when an earlier batch hung or was interrupted: nobody knows what of it is still to come.
        ProtocolError : when completion records are not those of the descriptors.
        """
        ticket, post = self._prepare(descriptors, extensions, before, streamed_lines)
        return self._complete(ticket, post, after)

    def post(
        self,
        descriptors: npt.NDArray[np.uint8],
        *,
        extensions: npt.NDArray[np.uint8] | None = None,
        before: Sequence[Operation] = (),
        streamed_lines: int = 0,
    ) -> Ticket:
        """Post descriptors as `run` has them, and wait for those alone that the ring has no room for.

        Raises
        ------
        What `run` raises.
        """
        ticket, post = self._prepare(descriptors, extensions, before, streamed_lines)
        self._unfinished = True
        try:
            ticket.rung = _cycles_of(self._port.run(post)[-1])
        except DeviceTimeout as error:
            raise self._hung(ticket, error) from error
        self._unfinished = False
        self._outstanding.append(ticket)
        return ticket

    def wait(self, ticket: Ticket, after: Sequence[Read] = ()) -> tuple[Completions, list[ReadResult]]:
        """Wait for what was posted; the completions, and the results of `after`.

        Raises
        ------
        What `run` raises.
        """
        if ticket.completions is None:
            return self._complete(ticket, [], after)
        if self._unfinished:
            raise self._unusable()
        return ticket.completions, self._port.run(after) if after else []

    def is_complete(self, ticket: Ticket) -> bool:
        """Whether what was posted is complete, without waiting for it."""
        if ticket.completions is None and ticket.end > self.completed:
            (result,) = self._port.run([Read(self._state)])
            state = RING.unpack(result.data[0].tobytes())["completed"]
            self.completed += (state - self.completed) & _INDEX_MASK
            self.on_complete()
        return ticket.end <= self.completed

    def extent_counters(self) -> dict[str, int]:
        """The device's extents, as `nearkv_hw.abi.window.EXTENT_COUNTERS` declares them."""
        (result,) = self._port.run([Read(self._extents)])
        return EXTENT_COUNTERS.unpack(result.data[0].tobytes())

    def wait_for_scrub(self) -> None:
        """Wait until all extents of the device that were given back are free.

        Raises
        ------
        DeviceTimeoutError : when the device neither scrubs nor works on anything.
        """
        mask = (1 << EXTENT_COUNTERS["scrubbing"].width) - 1
        try:
            self._wait_on([Poll(int(self._extents[0]), mask, 0, _TIMEOUT_CYCLES)])
        except DeviceTimeout as error:
            raise DeviceTimeoutError(
                f"extents that were given back are not free, and the device does nothing any more ({error}); "
                "close the device and open it again"
            ) from error

    @property
    def outstanding(self) -> bool:
        """Whether anything was posted that nobody has seen completed."""
        return self.completed < self.posted

    def wait_through(self, end: int) -> None:
        """Wait for all descriptors before number `end`.

        Raises
        ------
        What `run` raises.
        """
        while self._outstanding and self._outstanding[0].end <= end:
            self._complete(self._outstanding[0], [], ())
        if self._outstanding and self._outstanding[0].first < end:
            self._complete(self._outstanding[0], [], ())

    def _prepare(
        self,
        descriptors: npt.NDArray[np.uint8],
        extensions: npt.NDArray[np.uint8] | None,
        before: Sequence[Operation],
        streamed_lines: int,
    ) -> tuple[Ticket, list[Operation]]:
        """The operations that post what the ring has room for; what comes before is complete then."""
        if self._unfinished:
            raise self._unusable()
        count, slots = len(descriptors), self._config.ring_slots
        timeout = _TIMEOUT_CYCLES + _TIMEOUT_CYCLES_PER_LINE * streamed_lines
        tags = column(ATTEND, "tag", descriptors)
        tags[:] = np.arange(self.posted, self.posted + count)  # of that their lowest bits
        parts: list[Completions] = []
        for begin in range(0, count, slots):
            end = min(begin + slots, count)
            if self._outstanding:
                self._make_room(end - begin)
            first = self.posted
            ticket = Ticket(
                first=first,
                end=first + end - begin,
                timeout=timeout,
                parts=parts,
                tags=tags[begin:end],
                phases=self._phases(first, end - begin),
            )
            post = self._posting(
                ticket,
                descriptors[begin:end],
                None if extensions is None else extensions[begin:end],
                before if begin == 0 else (),
            )
            if end < count:
                parts = [self._complete(ticket, post, ())[0]]  # with those before it
        return ticket, post

    def _make_room(self, count: int) -> None:
        """Read the records of tickets whose slots are needed."""
        while (
            self._outstanding and self.posted + count - self._outstanding[0].first > self._config.ring_slots
        ):
            self._complete(self._outstanding[0], [], ())

    def _posting(
        self,
        ticket: Ticket,
        descriptors: npt.NDArray[np.uint8],
        extensions: npt.NDArray[np.uint8] | None,
        before: Sequence[Operation],
    ) -> list[Operation]:
        self.posted = ticket.end
        places = self._of_ticket(ticket, self._descriptors)
        program = [*before, Write(places, descriptors)]
        if extensions is not None:
            program.append(Write(places + np.uint64(LINE_BYTES), extensions))
        line = np.zeros((1, LINE_BYTES), np.uint8)
        _TAIL.pack_into(line.data, 0, ticket.end & _INDEX_MASK)
        return [*program, _FENCE, self._read_cycles, Write(self._doorbell, line)]

    def _complete(
        self, ticket: Ticket, post: Sequence[Operation], after: Sequence[Read]
    ) -> tuple[Completions, list[ReadResult]]:
        """Post if need be, and wait: completions, and the results of `after`."""
        wait: list[Operation] = [
            self._poll(ticket.end - 1, ticket.phases[-1], ticket.timeout),
            self._read_cycles,
            Read(self._of_ticket(ticket, self._completions)),
            *after,
        ]
        self._unfinished = True
        try:
            results = self._port.run([*post, *wait])
            if post:
                results = results[-3 - len(after) :]
                ticket.rung = _cycles_of(results.pop(0))
        except DeviceTimeout:
            results = self._late(ticket, wait, posted_now=bool(post))
        self._unfinished = False
        done, records, *others = results
        self._note(ticket, _cycles_of(done), records.data, posted_before=not post)
        assert ticket.completions is not None
        return ticket.completions, others

    def _note(
        self, ticket: Ticket, done: int, records: npt.NDArray[np.uint8], *, posted_before: bool
    ) -> None:
        """Keep what a ticket came to."""
        self._check_records(ticket, records)
        cycles = done - max(ticket.rung, self._last_done)
        if posted_before:  # nobody looked when the last one was complete
            cycles = min(cycles, Completions(records, 0).total("cycles"))
        self._last_done = done
        ticket.completions = _joined([*ticket.parts, Completions(records, cycles)])
        self.completed = max(self.completed, ticket.end)
        if self._outstanding:
            self._outstanding = [one for one in self._outstanding if one is not ticket]
        self.on_complete()

    def _late(self, ticket: Ticket, wait: Sequence[Operation], *, posted_now: bool) -> list[ReadResult]:
        """The results of what waits for a ticket, after the time that it was given.

        Raises
        ------
        DeviceTimeoutError : when the device does nothing any more.
        """
        try:
            if posted_now:
                ticket.rung = _cycles_of(self._read_counters()[0]) - ticket.timeout
            return self._wait_on(wait)
        except DeviceTimeout as error:
            raise self._hung(ticket, error) from error

    def _hung(self, ticket: Ticket, error: DeviceTimeout) -> DeviceTimeoutError:
        """What is raised when a program did not end; the ring takes no more work then."""
        self.on_hang()
        return DeviceTimeoutError(
            f"{ticket.end - ticket.first} descriptors of tenant {self._aperture} are not complete, and "
            f"the device does nothing any more ({error}); close the device and open it again"
        )

    def _unusable(self) -> ClosedError:
        return ClosedError(
            f"tenant {self._aperture}: an earlier batch never ended; take over what is committed with "
            "recover(), or open the device again"
        )

    def _of_ticket(self, ticket: Ticket, of_slots: Addresses) -> Addresses:
        """Of addresses, one for each slot, those of a ticket's descriptors."""
        slots = len(of_slots)
        begin, count = ticket.first % slots, ticket.end - ticket.first
        own = of_slots[begin : begin + count]
        return own if len(own) == count else np.concatenate([own, of_slots[: count - len(own)]])

    def _phases(self, first: int, count: int) -> bytes:
        """The phase of the record of each of so many descriptors."""
        phase, slots = completion_phase(self._config, first), self._config.ring_slots
        own = min(count, slots - first % slots)  # then comes the ring's next lap
        return bytes((phase,)) * own + bytes((phase ^ 1,)) * (count - own)

    def _poll(self, index: int, phase: int, timeout: int) -> Poll:
        """Wait for the completion record of a descriptor."""
        address = int(self._completions[index % len(self._completions)])
        return Poll(address, 1 << _PHASE, phase << _PHASE, timeout)

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
        """What moves as long as the device works: descriptors completed, lines scrubbed, lines taken by each
        unit."""
        device, channels = self._read_counters()
        jobs = int(column(DEVICE_COUNTERS, "jobs", device.data)[0])
        scrubbed = self.extent_counters()["scrub_lines"]
        return jobs, scrubbed, *map(int, column(CHANNEL_COUNTERS, "unit_lines", channels.data))

    def _read_counters(self) -> list[ReadResult]:
        """The device's counters, and those of every memory slice."""
        return self._port.run([self._read_cycles, Read(self._channels)])

    def _check_records(self, ticket: Ticket, records: Lines) -> None:
        """ProtocolError when records are not those of a ticket's descriptors: each has its tag and phase."""
        phases, tags = records[:, _PHASE // 8], column(COMPLETION, "tag", records)
        if phases.tobytes() != ticket.phases or tags.tobytes() != ticket.tags.tobytes():
            self._unfinished = True
            stale = np.flatnonzero(phases != np.frombuffer(ticket.phases, np.uint8))
            raise ProtocolError(
                f"tenant {self._aperture}: records {stale.tolist()} of completions are old, "
                f"or the tags {tags.tolist()} are not those of descriptors {ticket.first} to {ticket.end - 1}"
            )


@dataclass(slots=True)
class Ticket:
    """Descriptors that were posted together.

    Members
    -------
    first, end : their numbers since reset.
    timeout : cycles that they are given.
    parts : what came before them in the same batch and is complete.
    tags : what they and their records carry of their numbers.
    phases : of their records.
    rung : the device's cycle when they were posted.
    completions : what all of the batch came to, once somebody waited for it.
    """

    first: int
    end: int
    timeout: int
    parts: list[Completions]
    tags: npt.NDArray[np.uint32]
    phases: bytes
    rung: int = 0
    completions: Completions | None = None


def _joined(parts: list[Completions]) -> Completions:
    """Completions of one batch."""
    if len(parts) == 1:
        return parts[0]
    return Completions(np.concatenate([part.records for part in parts]), sum(part.cycles for part in parts))


def _cycles_of(counters: ReadResult) -> int:
    cycles: int = _CYCLES.unpack_from(counters.data.data)[0]
    return cycles
