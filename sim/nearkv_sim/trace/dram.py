"""The DRAM's commands on tracks: what each sub-channel's buses carry, which rows are open, what is read."""

from __future__ import annotations

import numpy as np
from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.dram import PARTS, FrameTimings

from ..events import Array, EventKind, Recording
from .tracks import Group, Tracks

_COLUMN = (EventKind.READ, EventKind.WRITE)
_CLOSING = (EventKind.PRECHARGE, EventKind.PRECHARGE_ALL)
_REFRESH = (EventKind.REFRESH, EventKind.REFRESH_SET)


def add_channels(tracks: Tracks, recording: Recording, config: DeviceConfig, limit: int) -> int:
    """Add a group for every channel and its sub-channels; returns how many commands are left out.

    Commands are shown up to one cycle, the same everywhere, so that at most `limit` of them are.
    """
    places = recording.indices("dram")
    if not places or config.dram not in PARTS:
        return 0
    part = PARTS[config.dram]
    timings = part.frames(config.density_gbit, config.refresh)
    sources = [recording.names.index(f"dram.{place}") for place in places]
    commands = recording.events[np.isin(recording.events["source"], sources)]
    left_out = max(0, len(commands) - limit)
    if left_out:
        commands = commands[commands["cycle"] < commands["cycle"][limit]]
    for channel in dict.fromkeys(place.split(".")[0] for place in places):
        own = [place for place in places if place.split(".")[0] == channel]
        group = tracks.group(f"channel {channel}")
        of_channel = {
            place: commands[commands["source"] == recording.names.index(f"dram.{place}")] for place in own
        }
        _add_data(group, list(of_channel.values()), timings)
        for place, of_it in of_channel.items():
            _add_buses(group, place.split(".")[1], of_it, part.subchannels, timings)
        for place, of_it in of_channel.items():
            _add_rows(tracks, place, of_it, part.banks, recording.ended)
    return left_out


def _add_data(group: Group, commands: list[Array], timings: FrameTimings) -> None:
    """Runs of lines without a gap between them: read, when their data comes; written, when it goes."""
    for kind, name, delay in (
        (EventKind.READ, "lines read", timings.read_cycles),
        (EventKind.WRITE, "lines written", 0),
    ):
        cycles = np.sort(np.concatenate([c["cycle"][c["kind"] == kind] for c in commands])).astype(np.int64)
        track = group.track(name)
        for run in np.split(cycles, np.flatnonzero(np.diff(cycles) > 1) + 1):
            if len(run):
                begin, end = int(run[0]) + delay, int(run[-1]) + delay + 1
                track.slice(begin, end, f"{len(run)} lines")


def _add_buses(group: Group, name: str, commands: Array, frame: int, timings: FrameTimings) -> None:
    """A sub-channel's commands; each takes a slot of its frame."""
    columns, activates, precharges, refreshes = (
        group.track(f"sub-channel {name}: {what}") for what in ("RD, WR", "ACT", "PRE", "REF")
    )
    names = {EventKind.READ: "RD", EventKind.WRITE: "WR", EventKind.PRECHARGE_ALL: "PRE all"}
    rows: dict[int, int] = {}
    refresh_times = commands["cycle"][np.isin(commands["kind"], _REFRESH)].tolist()
    next_refresh = iter(refresh_times[1:])
    for command in commands.tolist():
        cycle, _, kind, bank, value = command
        end = cycle + frame
        if kind in _COLUMN:
            columns.slice(cycle, end, names[kind], bank=bank, row=rows.get(bank), column=value)
        elif kind == EventKind.ACTIVATE:
            rows[bank] = value
            activates.slice(cycle, end, "ACT", bank=bank, row=value)
        elif kind == EventKind.PRECHARGE:
            precharges.slice(cycle, end, "PRE", bank=bank, row=rows.pop(bank, None))
        elif kind == EventKind.PRECHARGE_ALL:
            rows.clear()
            precharges.slice(cycle, end, "PRE all")
        elif kind in _REFRESH:
            end = min(cycle + frame * timings.refresh, next(next_refresh, cycle + frame * timings.refresh))
            which = {} if kind == EventKind.REFRESH else {"set": bank}
            refreshes.slice(cycle, end, "REF", **which)


def _add_rows(tracks: Tracks, place: str, commands: Array, banks: int, ended: int) -> None:
    """The rows that are open in each bank of a sub-channel."""
    channel, subchannel = place.split(".")
    group = tracks.group(f"channel {channel}, sub-channel {subchannel}: open rows")
    members = [group.track(f"bank {bank}") for bank in range(banks)]
    opened: dict[int, tuple[int, int]] = {}
    lines = [0] * banks

    def close(bank: int, cycle: int) -> None:
        if bank in opened:
            begin, row = opened.pop(bank)
            members[bank].slice(begin, cycle, f"row {row}", lines=lines[bank])
            lines[bank] = 0

    for cycle, _, kind, bank, value in commands.tolist():
        if kind == EventKind.ACTIVATE:
            opened[bank] = (cycle, value)
        elif kind in _COLUMN:
            lines[bank] += 1
        elif kind in _CLOSING:
            for closing in [bank] if kind == EventKind.PRECHARGE else list(opened):
                close(closing, cycle)
    for bank in list(opened):
        close(bank, ended)
