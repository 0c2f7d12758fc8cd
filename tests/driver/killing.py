"""A host that dies in the middle of a program: what it had sent by then reached the device, in any order."""

import random
from dataclasses import replace

from nearkv_sim.port import Fence, Poll, Port, Program, Read, ReadResult, Write


class HostDied(Exception):
    """The process is gone; nothing it had under way goes on."""


class KillingPort:
    """A port whose host dies after so many written lines.

    Writes between two fences reach the device in any order: of the ones under way when the host dies a random
    choice did.

    Parameters
    ----------
    port : the device, which goes on.
    seed : of the choice.

    Members
    -------
    left : lines that the host still writes; None for a host that lives.
    written : lines that it wrote.
    """

    def __init__(self, port: Port, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self.config, self.kind = port.config, port.kind
        self.left: int | None = None
        self.written = 0

    def run(self, program: Program) -> list[ReadResult]:
        results = []
        for group in groups(program):
            lines = sum(len(one.addresses) for one in group if isinstance(one, Write))
            if self.left is not None and lines > self.left:
                self._die(group)
            results += self._port.run(group)
            self.written += lines
            if self.left is not None:
                self.left -= lines
        return results

    def _die(self, group: Program) -> None:
        writes = [one for one in group if isinstance(one, Write)]
        places = [(n, i) for n, one in enumerate(writes) for i in range(len(one.addresses))]
        for n, i in self._random.sample(places, self.left or 0):
            one, at = writes[n], slice(i, i + 1)
            enables = None if one.enables is None else one.enables[at]
            self._port.run([replace(one, addresses=one.addresses[at], data=one.data[at], enables=enables)])
        raise HostDied

    @property
    def link_bytes(self) -> int:
        return self._port.link_bytes

    def close(self) -> None:
        self._port.close()


def groups(program: Program) -> list[Program]:
    """Parts of a program, one after the other, whose accesses have no order among themselves."""
    parts: list[list] = [[]]
    for operation in program:
        parts[-1].append(operation)
        if isinstance(operation, Fence | Poll | Read):
            parts.append([])
    return [part for part in parts if part]
