"""A recording as a timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Times are microseconds since the recording began, whole nanoseconds of them: viewers know nothing finer. What
is exact is the cycle, an argument of every slice.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearkv_hw.abi import DeviceConfig

from ..events import Recording
from .dram import add_channels
from .stages import Job, Stages, stages_of
from .tracks import Tracks

SLICES = 1_000_000
"""Slices of DRAM commands that a timeline has at most, unless told otherwise: about 150 MB of text."""
_LINK = {
    "m2s_req": "reads (M2S Req)",
    "m2s_rwd": "writes (M2S RwD)",
    "s2m_ndr": "completions (S2M NDR)",
    "s2m_drs": "data (S2M DRS)",
}


@dataclass
class Timeline:
    """What a viewer gets.

    Members
    -------
    tracks : everything that is shown.
    stages : the jobs.
    summary : what was recorded and what is left out, as plain values.
    """

    tracks: Tracks
    stages: Stages
    summary: dict[str, Any] = field(default_factory=dict)


def timeline(recording: Recording, config: DeviceConfig, *, slices: int = SLICES) -> Timeline:
    """The timeline of a recording.

    Parameters
    ----------
    recording : of a device that was idle when it began.
    config : the device's.
    slices : DRAM commands to show at most; later ones are left out and counted.
    """
    tracks = Tracks(recording.began, config.clock_mhz)
    stages = stages_of(recording)
    _add_jobs(tracks, stages, recording)
    _add_units(tracks, stages)
    _add_results(tracks, stages, recording)
    _add_link(tracks, recording)
    left_out = add_channels(tracks, recording, config, slices)
    summary = {
        "cycles": recording.ended - recording.began,
        "clock_mhz": config.clock_mhz,
        "events": len(recording.events),
        "events_lost": recording.lost,
        "jobs": sum(bool(job.passes) for job in stages.jobs),
        "descriptors_incomplete": stages.incomplete,
        "slices": tracks.slices,
        "commands_left_out": left_out,
    }
    return Timeline(tracks, stages, summary)


def write(shown: Timeline, path: Path, config: DeviceConfig) -> None:
    """Write a timeline as JSON, compressed where the name ends in .gz; OSError where that is not possible."""
    path = Path(path)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit": "ns",\n')
        file.write(f'"otherData": {json.dumps({**shown.summary, "config": config.to_dict()})},\n')
        file.write('"traceEvents": [\n')
        for n, event in enumerate(shown.tracks.events()):
            file.write(",\n" if n else "")
            file.write(json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _add_jobs(tracks: Tracks, stages: Stages, recording: Recording) -> None:
    group = tracks.group("jobs")
    doorbells = group.track("doorbells")
    for bell in recording.of("window.doorbell.0"):
        doorbells.mark(int(bell["cycle"]), "doorbell", posted=int(bell["a"]), aperture=int(bell["b"]))
    lanes = group.lanes("jobs in flight")
    for job in stages.jobs:
        lane = lanes.at(job.fetched, job.record)
        lane.slice(
            job.fetched,
            job.record,
            f"job {job.index}" if job.passes else f"descriptor {job.index}",
            aperture=job.aperture,
            status=job.status.name,
            doorbell=job.doorbell,
            passes=len(job.passes),
            lines=sum(one.lines for one in job.passes),
        )
        for name, begin, end in _steps(job):
            lane.slice(begin, end, name)


def _steps(job: Job) -> Iterator[tuple[str, int, int]]:
    """A job's steps, one after the other."""
    marks = [
        ("check", job.judged),
        ("wait", job.asked),
        ("stream", job.ended),
        ("drain", max((u.drain_ended for p in job.passes for u in p.units), default=None)),
        ("write", job.record),
    ]
    begin = job.fetched
    for name, end in marks:
        if end is not None and end >= begin:
            yield name, begin, end
            begin = end


def _add_units(tracks: Tracks, stages: Stages) -> None:
    passes = [(job, one) for job in stages.jobs for one in job.passes]
    for n in range(len(passes[0][1].units) if passes else 0):
        group = tracks.group(f"unit {n}")
        queries, rows, drain = group.track("queries"), group.lanes("rows"), group.track("partials")
        loaded = 0
        for job, one in passes:
            unit, name = one.units[n], f"job {job.index}"
            queries.slice(max(loaded, unit.sent), unit.loaded, name, queries=one.queries)
            if unit.first is not None:
                rows.at(unit.first, unit.ended).slice(unit.first, unit.ended, name, asked=unit.asked)
            drain.slice(unit.drain_began, unit.drain_ended + 1, name)
            loaded = unit.loaded


def _add_results(tracks: Tracks, stages: Stages, recording: Recording) -> None:
    group = tracks.group("results")
    lanes = group.lanes("passes being written")
    for job in stages.jobs:
        for one in job.passes:
            if one.written is not None:
                lanes.at(one.written, one.done).slice(one.written, one.done, f"job {job.index}")
    lines = group.track("lines written")
    for line in recording.of("results.write.0"):
        cycle = int(line["cycle"])
        lines.slice(cycle, cycle + 1, "line", line=int(line["a"]))


def _add_link(tracks: Tracks, recording: Recording) -> None:
    for port in recording.indices("link.m2s_req"):
        group = tracks.group(f"link, port {port}")
        for stream, title in _LINK.items():
            track = group.track(title)
            for message in recording.of(f"link.{stream}.{port}"):
                cycle = int(message["cycle"])
                address, tag = hex(int(message["a"])), int(message["b"])
                track.slice(cycle, cycle + 1, "message", address=address, tag=tag)
