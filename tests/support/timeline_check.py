"""Checks of a timeline as a viewer reads it: names, nesting, order."""

import gzip
import json
from collections import defaultdict


def read_timeline(path):
    """The file's object, which must be a JSON object in the Trace Event Format."""
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)


def check_timeline(shown):
    """Every track has a name and a group with one, and its slices are nested or apart, in time and in cycles.

    Returns the slices by (group's name, track's name).
    """
    names = {"process_name": {}, "thread_name": {}}
    slices = defaultdict(list)
    for event in shown["traceEvents"]:
        assert event["ph"] in "MXi", event
        if event["name"] in names:
            key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            assert key not in names[event["name"]], f"{event} names a track again"
            names[event["name"]][key] = event["args"]["name"]
        elif event["ph"] != "M":
            slices[event["pid"], event["tid"]].append(event)
    tracks = {}
    for (group, track), events in slices.items():
        name = names["process_name"][group], names["thread_name"][group, track]
        assert name not in tracks, f"two tracks are called {name}"
        tracks[name] = events
        for start, length in (("ts", "dur"), ("cycle", "cycles")):
            _check_nesting(name, [_place(event, start, length) for event in events])
    return tracks


def _place(event, start, length):
    of_it = event if start in event else event["args"]
    begin = of_it[start]
    return round(begin * 1000), round((begin + of_it.get(length, 0)) * 1000)


def _check_nesting(name, places):
    """Slices as a file has them: by their beginning, outer ones first."""
    open_ends = []
    last = None
    for begin, end in places:
        assert end >= begin >= 0, f"{name}: a slice from {begin} to {end}"
        assert last is None or begin >= last, f"{name}: {begin} comes after {last}"
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{name}: [{begin}, {end}) leaves its slice early"
        open_ends.append(end)
        last = begin
