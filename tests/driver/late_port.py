"""A device that takes its time: jobs are done after the doorbell, at the latest when somebody waits."""

import random

import numpy as np
from nearkv_hw.abi.window import DOORBELL, DOORBELL_OFFSET, RING, RING_LINE, register_address
from nearkv_sim.columns import column
from nearkv_sim.model import ModelPort
from nearkv_sim.port import Poll, Program, Read, ReadResult, Write


class LatePort:
    """A model device whose doorbells are heard late.

    What a job reads is what memory holds then. Doorbells of a tenant are heard in their order; those of
    different tenants in any.

    Parameters
    ----------
    config : of the device.
    seed : of what is done when.
    eager : chance that a doorbell is heard before any other operation; 0 for not before somebody polls.

    Members
    -------
    late : doorbells that were not heard at once.
    programs : how many were run.
    """

    kind = "model"

    def __init__(self, config, seed: int, *, eager: float = 0.0) -> None:
        self._port = ModelPort(config)
        self.config = self._port.config
        self._random = random.Random(seed)
        self._eager = eager
        self._rung: dict[int, list[Write]] = {}
        self.late = 0
        self.programs = 0

    def run(self, program: Program) -> list[ReadResult]:
        self.programs += 1
        results = []
        for operation in program:
            self._hear_some()
            if isinstance(operation, Write):
                operation = self._without_doorbells(operation)
            elif isinstance(operation, Poll):
                self._hear(operation.address // self.config.aperture_bytes)
            answered = self._port.run([operation])
            if isinstance(operation, Read):
                self._tell_tails(operation, answered[0])
            results += answered
        return results

    def _tell_tails(self, read: Read, result: ReadResult) -> None:
        """The ring's state knows of a doorbell at once, whenever its descriptors are fetched."""
        for aperture, rung in self._rung.items():
            state = register_address(self.config, aperture, RING_LINE)
            for index in np.flatnonzero(read.addresses == np.uint64(state)) if rung else ():
                tail = DOORBELL.unpack(rung[-1].data[0].tobytes())["tail"]
                column(RING, "tail", result.data[index : index + 1])[:] = tail

    def _without_doorbells(self, write: Write) -> Write:
        offset = write.addresses % np.uint64(self.config.aperture_bytes)
        bells = offset == np.uint64(self.config.capacity_bytes + DOORBELL_OFFSET)
        for index in np.flatnonzero(bells):
            aperture = int(write.addresses[index]) // self.config.aperture_bytes
            self._rung.setdefault(aperture, []).append(
                Write(write.addresses[index : index + 1], write.data[index : index + 1])
            )
            self.late += 1
        enables = None if write.enables is None else write.enables[~bells]
        return Write(write.addresses[~bells], write.data[~bells], enables)

    def _hear_some(self) -> None:
        for aperture in list(self._rung):
            while self._rung[aperture] and self._random.random() < self._eager:
                self._port.run([self._rung[aperture].pop(0)])

    def _hear(self, aperture: int) -> None:
        rung, self._rung[aperture] = self._rung.get(aperture, []), []
        self._port.run(rung)

    @property
    def link_bytes(self) -> int:
        return self._port.link_bytes

    def inject(self, address, bits) -> None:
        self._port.inject(address, bits)

    def close(self) -> None:
        self._port.close()
