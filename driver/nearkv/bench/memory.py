"""How much of its DRAM's rate attention takes, and how long the ways into and out of a batch are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median_low
from typing import Any

import numpy as np
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Placement
from nearkv_hw.abi.dram import PARTS, Dram, Place, address, ceiling
from nearkv_sim.events import ALL, EventKind, Recording
from nearkv_sim.trace import Job, stages_of

from nearkv.bench import Progress, Quiet
from nearkv.device import Device, open
from nearkv.errors import NearkvError
from nearkv.workload import Filled, Workload

from .figure import Figure
from .shares import shares

WIDE = {"queries": 8, "finish_lanes": 4}
"""What batches run on: 8 kept queries."""
NARROW = {"queries": 4, "finish_lanes": 2}
"""What single jobs run on: 4 kept queries."""
ATTACC = {188: 0.877, 130: 0.729}
"""Share of its peak that AttAcc's buffer-die placement reached, by heads: 871,721 and 725,887 cycles for
4,096 rows of 128 fp16 elements, 670.4 GB/s, tCK 0.769 ns (its public cycle results)."""
REST_CYCLES = 8192
"""In which an idle memory makes up for every refresh that it may owe."""
_LATENCY_STEPS = 5
_ATTACC_CHANNELS = 16
_ATTACC_ROWS = 4096
SHARES = (2, 8)
"""Sixteenths for the host in the case `shares`: less than it wants, and as much."""
_STAGES = frozenset({EventKind.STAGE})


Measurement = Callable[[Device, "Options"], Iterator[Figure]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Parameters
    ----------
    parts : DRAM parts.
    placements : of the units.
    channels : of the devices that run batches; single jobs have two.
    quick : a fraction of the rows: figures to look at, not to quote.
    cases : which of `CASES`; all if empty.
    """

    parts: Sequence[Dram] = tuple(PARTS)
    placements: Sequence[Placement] = (Placement.CONTROLLER,)
    channels: int = 2
    quick: bool = False
    cases: Sequence[str] = ()

    def scaled(self, rows: int) -> int:
        """Rows of a job: as many as given, or an eighth of that."""
        return max(16, rows // 8) if self.quick else rows

    def wants(self, case: str) -> bool:
        """Whether a case is measured."""
        return not self.cases or case in self.cases


@dataclass(frozen=True)
class Step:
    """Measurements of one device.

    Parameters
    ----------
    title : for people.
    overrides : of the configuration `small`.
    measurements : in their order.
    """

    title: str
    overrides: dict[str, Any]
    measurements: Sequence[Measurement]


CASES = ("batch", "heads", "job", "latency", "attacc", "shares", "placements")
"""What `Options.cases` may name; the traffic of a controller alone is `bench.controller`'s."""


def plan(options: Options) -> list[Step]:
    """The devices to build, in their order, and what is measured on each."""
    steps: list[Step] = []
    for part in options.parts:
        for placement in options.placements:
            if placement is Placement.HOST:
                continue  # has no unit whose rate could be measured
            place = {
                "dram": part,
                "placement": placement,
                "ranks": 2 if placement is Placement.RANK else 1,
            }
            title = f"{part.name.lower()} {placement.name.lower()}"
            wide = [
                *([batch] if options.wants("batch") else []),
                *([heads] if options.wants("heads") else []),
            ]
            if wide:
                steps.append(Step(title, {**place, **WIDE, "channels": options.channels}, wide))
            narrow = [
                *([single_jobs] if options.wants("job") else []),
                *([latency] if options.wants("latency") else []),
                *([attacc] if options.wants("attacc") and part is Dram.HBM3_6400 else []),
            ]
            if narrow:
                steps.append(Step(title, {**place, **NARROW, "channels": 2}, narrow))
    if options.wants("shares"):
        near = [placement for placement in options.placements if placement is not Placement.HOST]
        for part, placement, share in product(options.parts, near, SHARES):
            ranks = 2 if placement is Placement.RANK else 1
            title = f"{part.name.lower()} {placement.name.lower()} {share}/16 for the host"
            place = {"dram": part, "placement": placement, "ranks": ranks, "fabric_share": share}
            steps.append(Step(title, {**place, **NARROW, "channels": 2}, [with_host]))
    if options.wants("placements"):
        part = options.parts[0]
        for placement in Placement:
            ranks = 2 if placement is Placement.RANK else 1
            overrides = {"dram": part, "placement": placement, "ranks": ranks, **NARROW, "channels": 2}
            steps.append(Step(f"{part.name.lower()} {placement.name.lower()}", overrides, [side_by_side]))
    return steps


def measure(options: Options, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """Every result of `plan`, as `nearkv bench` prints it.

    Parameters
    ----------
    options : what to measure.
    progress : told of every step; a device that was never built takes a minute or two.
    """
    progress = progress or Quiet()
    for step in plan(options):
        progress.begin(step.title)
        with open("rtl", report=progress.tell, **step.overrides) as device:
            for measurement in step.measurements:
                progress.tell(f"{step.title}: {measurement.__name__.replace('_', ' ')}")
                for figure in measurement(device, options):
                    yield _result(figure, device.config)


def batch(device: Device, options: Options) -> Iterator[Figure]:
    """32 jobs of 4,096 rows, and 256 jobs of 256 rows, 8 query heads each."""
    for name, work in (
        ("batch", Workload(rows=options.scaled(4096), kv_heads=8, batch=4, group=8)),
        ("batch256", Workload(rows=256, kv_heads=8, batch=options.scaled(256) // 8, group=8)),
    ):
        yield from _rate(f"memory.{name}", device, work)


def heads(device: Device, options: Options) -> Iterator[Figure]:
    """Head counts that do not divide the channels."""
    for kv_heads in (1, 3, 7, 130):
        rows = options.scaled(4096 if kv_heads < 100 else 1024)
        yield from _rate("memory.heads", device, Workload(rows=rows, kv_heads=kv_heads, batch=1, group=8))


def single_jobs(device: Device, options: Options) -> Iterator[Figure]:
    """One job of 4,096 rows and one of 256, 4 query heads, on a device that was idle."""
    for rows in (4096, 256):
        work = Workload(rows=rows, kv_heads=1, batch=1, group=4)
        yield from _rate(f"memory.job{rows}", device, work, rested=True)


def latency(device: Device, options: Options) -> Iterator[Figure]:
    """From doorbell to the first K row's read, and from the last line to the completion record.

    An idle memory refreshes, too, and one doorbell in 13 meets that: the middle of a few steps is reported.
    """
    for group in (1, 4):
        work = Workload(rows=256, kv_heads=1, batch=1, group=group)
        firsts, completions = [], []
        with work.fill(device) as filled:
            for _ in range(_LATENCY_STEPS):
                recording = _warm(device, filled, ALL, rested=True)
                job = _jobs(recording, work)[0]
                firsts.append(_first_read(recording, job, device.config) - job.doorbell)
                assert job.ended is not None
                # The unit notices the end a cycle after the last line; a record can be read a cycle after its
                # write.
                completions.append(job.record + 1 - (job.ended - 1))
        about = {**work.to_dict(), "queries_in_job": group, "steps": _LATENCY_STEPS}
        if group == 1:
            each = {**about, "first_reads": firsts}
            yield Figure("memory.first_read_cycles", median_low(firsts), "cycles", each)
        yield Figure("memory.completion_cycles", median_low(completions), "cycles", about)


def attacc(device: Device, options: Options) -> Iterator[Figure]:
    """Buffer-die placement in an HBM3 stack, beside AttAcc's published figure.

    Two of the stack's sixteen device channels are simulated, with an eighth of the rows: each has the lines
    that it would have in the stack, because pages are striped.
    """
    share = _ATTACC_CHANNELS // device.config.channels
    for count, published in ATTACC.items():
        kv_heads = count // 4 if options.quick else count
        work = Workload(rows=_ATTACC_ROWS // share, kv_heads=kv_heads, batch=1, group=1, dtype="fp16")
        about = {
            "heads": count,
            "stack_channels": _ATTACC_CHANNELS,
            "stack_rows": _ATTACC_ROWS,
            "published_fraction_of_peak": published,
        }
        for figure in _rate(f"memory.attacc{count}", device, work):
            yield Figure(figure.name, figure.value, figure.unit, {**figure.config, **about})


def with_host(device: Device, options: Options) -> Iterator[Figure]:
    """Jobs of 4,096 rows, and beside them as many random reads of the host as the link carries."""
    yield from shares(device, rows=options.scaled(4096), reads=options.scaled(16384))


def side_by_side(device: Device, options: Options) -> Iterator[Figure]:
    """The same jobs with the units in every place and with none: cycles of a step, bytes over the link."""
    work = Workload(rows=options.scaled(2048), kv_heads=2, batch=2, group=4)
    with work.fill(device) as filled:
        filled.step()
        before = device.stats()
        filled.step()
        done = device.stats() - before
    yield Figure("memory.placement.cycles", done.cycles, "cycles", work.to_dict())
    yield Figure("memory.placement.link_bytes", done.link_bytes, "bytes", work.to_dict())


def rest(device: Device) -> None:
    """Let a device idle until its memory owes no refresh."""
    begun = device.stats().cycles
    while device.stats().cycles - begun < REST_CYCLES:
        pass


def _rate(name: str, device: Device, work: Workload, *, rested: bool = False) -> Iterator[Figure]:
    """A step's needed lines, each once, over what the memory's peak is from doorbell to last completion.

    A step of a device that has rested may owe refreshes; else the step before it has used that up.
    """
    with work.fill(device) as filled:
        recording = _warm(device, filled, _STAGES, rested=rested)
    jobs = _jobs(recording, work)
    cycles = max(job.record for job in jobs) - min(job.doorbell for job in jobs)
    config = device.config
    passes = max(len(job.passes) for job in jobs)
    about = {
        **work.to_dict(),
        "jobs": work.jobs,
        "lines": work.lines,
        "passes": passes,
        "cycles": cycles,
        "rested": rested,
    }
    share = work.lines / (cycles * config.slices)
    best = ceiling(PARTS[config.dram], config.density_gbit, config.refresh) if config.dram in PARTS else 1.0
    yield Figure(f"{name}.fraction_of_peak", share, "of a line per cycle and slice", about)
    yield Figure(
        f"{name}.fraction_of_ceiling", share / best, "of what refresh leaves", {**about, "ceiling": best}
    )


def step_cycles(device: Device, filled: Filled, work: Workload) -> int:
    """Cycles of a step, from its first doorbell to its last completion record."""
    with device.record(kinds=_STAGES) as recorded:
        filled.step()
    jobs = _jobs(recorded(), work)
    return max(job.record for job in jobs) - min(job.doorbell for job in jobs)


def _warm(device: Device, filled: Filled, kinds: frozenset[EventKind], *, rested: bool = False) -> Recording:
    """What a step does when one before it has brought tables and descriptors on chip."""
    filled.step()
    if rested:
        rest(device)
    with device.record(kinds=kinds) as recorded:
        filled.step()
    recording = recorded()
    if recording.lost:
        raise NearkvError(f"{recording.lost} events were lost; the figure would be wrong")
    return recording


def _jobs(recording: Recording, work: Workload) -> tuple[Job, ...]:
    """The jobs of a step, all of which must be there and have streamed what they had to."""
    jobs = stages_of(recording).jobs
    lines = sum(one.lines for job in jobs for one in job.passes)
    wanted = sum(len(job.passes) for job in jobs) * work.lines // work.jobs
    if len(jobs) != work.jobs or lines != wanted:
        raise NearkvError(f"{len(jobs)} jobs streamed {lines} lines, not {work.jobs} jobs {wanted}")
    return jobs


def _first_read(recording: Recording, job: Job, config: DeviceConfig) -> int:
    """The cycle of the first K row's read command, or of its request where the memory has no commands."""
    requests = [recording.of(f"unit.asked.{n}") for n in recording.indices("unit.asked")]
    firsts = []
    for n, asked in enumerate(requests):
        for request in asked[:1]:
            if config.dram not in PARTS:
                firsts.append(int(request["cycle"]))
                continue
            place = address(PARTS[config.dram], int(request["a"]))
            commands = recording.of(f"dram.{n}.{place.subchannel}")
            firsts.append(_read_of(commands, place, after=int(request["cycle"])))
    return min(firsts)


def _read_of(commands: np.ndarray[Any, Any], place: Place, *, after: int) -> int:
    """The cycle of the first read of a place; a row that was open before the recording may be any."""
    of_bank = commands[commands["a"] == place.bank]
    opened = place.row
    for kind, value, cycle in zip(of_bank["kind"], of_bank["b"], of_bank["cycle"], strict=True):
        if kind == EventKind.ACTIVATE:
            opened = int(value)
        elif kind == EventKind.READ and value == place.column and opened == place.row and cycle >= after:
            return int(cycle)
    raise NearkvError("the recording has no read of the first K row")


def _result(figure: Figure, config: DeviceConfig) -> dict[str, Any]:
    """A figure as `nearkv bench` prints it: with the device's part, placement and channels."""
    device = {"part" if name == "dram" else name: value for name, value in config.to_dict().items()}
    return {
        "name": figure.name,
        "value": figure.value,
        "unit": figure.unit,
        "config": {**device, **figure.config},
    }
