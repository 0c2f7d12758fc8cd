"""What the host does while a batch runs: accesses put between a doorbell and the wait for its completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nearkv_sim.port import Operation, Poll, Port, Program, Read, ReadResult


@contextmanager
def beside(port: Port, operations: Sequence[Operation]) -> Iterator[list[ReadResult]]:
    """Carry out operations with the first program inside the block: behind its doorbell, before it waits.

    A program that waits for nothing, as where there are no units, comes after them.

    Parameters
    ----------
    port : of the device.
    operations : what the host does while the batch runs.

    Returns
    -------
    A list that holds the results of their reads once the batch has been waited for.
    """
    results: list[ReadResult] = []
    run, reads = port.run, _reads(operations)

    def disturbed(program: Program) -> list[ReadResult]:
        port.run = run  # type: ignore[method-assign]
        waits = (at for at, operation in enumerate(program) if isinstance(operation, Poll))
        at = next(waits, 0)
        ahead = program[:at]
        found = run([*ahead, *operations, *program[at:]])
        first = _reads(ahead)
        results.extend(found[first : first + reads])
        return found[:first] + found[first + reads :]

    port.run = disturbed  # type: ignore[method-assign]
    try:
        yield results
    finally:
        port.run = run  # type: ignore[method-assign]


def _reads(operations: Sequence[Operation]) -> int:
    return sum(isinstance(operation, Read) for operation in operations)
