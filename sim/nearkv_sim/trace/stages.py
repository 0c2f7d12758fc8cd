"""In which cycle every stage of every job came.

Descriptors are fetched, judged and completed in one order, and passes go through every unit and the results
side in one order: the n-th event of a source belongs to the n-th descriptor or pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from nearkv_hw.abi import Status

from ..events import Array, Recording

_INDEX_MASK = 0xFFFF_FFFF


@dataclass(frozen=True)
class UnitPass:
    """A pass in one unit; all values are cycles.

    Members
    -------
    sent : the walker handed it to the unit.
    loaded : its queries are there.
    asked, first : its first K line was asked for, and taken; None where it has no line in this unit.
    ended : its last line was taken.
    drain_began, drain_ended : its first and its last beat of partial results left.
    """

    sent: int
    loaded: int
    asked: int | None
    first: int | None
    ended: int
    drain_began: int
    drain_ended: int


@dataclass(frozen=True)
class Pass:
    """A pass; all values but the last three are cycles.

    Members
    -------
    sent : the first unit has it.
    written : its first line of results was written; None where it wrote none.
    done : its results are in memory.
    queries : query heads.
    lines : K and V lines.
    units : what each unit did.
    """

    sent: int
    written: int | None
    done: int
    queries: int
    lines: int
    units: tuple[UnitPass, ...]


@dataclass(frozen=True)
class Job:
    """A descriptor and what became of it; all values but the first three and the last are cycles.

    Members
    -------
    index : descriptors of its ring before it.
    aperture : whose it is.
    status : how it ended.
    doorbell : it was posted.
    fetched : the window took it from the ring.
    judged : the walker had checked it and its table's header.
    record : its completion record was written.
    passes : its passes; none for a descriptor that is no good attention job.
    """

    index: int
    aperture: int
    status: Status
    doorbell: int
    fetched: int
    judged: int
    record: int
    passes: tuple[Pass, ...]

    @property
    def asked(self) -> int | None:
        """The cycle in which a unit first asked for a K line of it; None where no unit did."""
        cycles = [unit.asked for one in self.passes for unit in one.units if unit.asked is not None]
        return min(cycles, default=None)

    @property
    def ended(self) -> int | None:
        """The cycle in which a unit took the last line of it; None where it has no pass."""
        return max((unit.ended for one in self.passes for unit in one.units), default=None)


@dataclass(frozen=True)
class Stages:
    """The jobs of a recording, in the order of their descriptors.

    Members
    -------
    jobs : those of which every stage was recorded.
    incomplete : descriptors that were fetched and are not among them.
    """

    jobs: tuple[Job, ...]
    incomplete: int


def stages_of(recording: Recording) -> Stages:
    """The jobs that began and ended while a device was recorded, which has to be idle when that begins."""
    passes = _passes(recording)
    fetched = recording.of("window.fetched.0")
    judged, records = recording.of("walker.judged.0"), recording.of("completer.record.0")
    doorbells = recording.of("window.doorbell.0")
    jobs: list[Job] = []
    first_pass = 0
    for n, (taken, checked, done) in enumerate(zip(fetched, judged, records, strict=False)):
        count = int(done["b"]) >> 16
        doorbell = _doorbell(doorbells, int(taken["b"]), int(taken["a"]))
        if doorbell is None or first_pass + count > len(passes):
            return Stages(tuple(jobs), len(fetched) - n)
        jobs.append(
            Job(
                index=int(taken["a"]),
                aperture=int(taken["b"]),
                status=Status(int(done["b"]) >> 8 & 0xFF),
                doorbell=doorbell,
                fetched=int(taken["cycle"]),
                judged=int(checked["cycle"]),
                record=int(done["cycle"]),
                passes=tuple(passes[first_pass : first_pass + count]),
            )
        )
        first_pass += count
    return Stages(tuple(jobs), len(fetched) - len(jobs))


def _doorbell(doorbells: Array, aperture: int, index: int) -> int | None:
    """The cycle of the doorbell that first posted a descriptor."""
    posted = doorbells["a"].astype(np.int64) - index - 1 & _INDEX_MASK
    of_it = doorbells[(doorbells["b"] == aperture) & (posted < _INDEX_MASK // 2)]
    return int(of_it["cycle"][0]) if len(of_it) else None


def _passes(recording: Recording) -> list[Pass]:
    """The passes that are over."""
    done, queries = recording.of("results.done.0"), recording.of("unit.pass.0")["a"]
    units = [_unit_passes(recording, index) for index in recording.indices("unit.ended")]
    written = _first_writes(recording.of("results.write.0"), done)
    count = min([len(done), len(written), *map(len, units)]) if units else 0
    return [
        Pass(
            sent=min(unit[n].sent for unit in units),
            written=written[n],
            done=int(done["cycle"][n]),
            queries=int(queries[n]),
            lines=int(done["b"][n]),
            units=tuple(unit[n] for unit in units),
        )
        for n in range(count)
    ]


def _unit_passes(recording: Recording, index: str) -> list[UnitPass]:
    """What one unit did of every pass that it has drained."""
    pages = recording.of(f"unit.page.{index}")
    sent, loaded, ended = (
        recording.of(f"unit.{stage}.{index}")["cycle"] for stage in ("pass", "loaded", "ended")
    )
    asked, first = (
        iter(recording.of(f"unit.{stage}.{index}")["cycle"].tolist()) for stage in ("asked", "first")
    )
    beats = recording.of(f"unit.drain.{index}")
    began, over = beats["cycle"][beats["a"] == 0], beats["cycle"][beats["a"] == 1]
    # A pass without a page in this unit has no line to ask for.
    ends = np.flatnonzero(pages["b"] == 0)
    empty = np.diff(ends, prepend=-1) == 1
    return [
        UnitPass(
            sent=int(sent[n]),
            loaded=int(loaded[n]),
            asked=None if empty[n] else next(asked, None),
            first=None if empty[n] else next(first, None),
            ended=int(ended[n]),
            drain_began=int(began[n]),
            drain_ended=int(over[n]),
        )
        for n in range(min(map(len, (empty, sent, loaded, ended, began, over))))
    ]


def _first_writes(writes: Array, done: Array) -> Sequence[int | None]:
    """The cycle of every pass's first write; the writes of a pass have one id, the next pass's another."""
    turns = np.flatnonzero(np.diff(writes["b"].astype(np.int64), prepend=-1))
    cycles = iter(writes["cycle"][turns].tolist())
    wrote = np.isin(done["a"], (Status.OK, Status.RESULT_DENIED))
    return [next(cycles, None) if some else None for some in wrote]
