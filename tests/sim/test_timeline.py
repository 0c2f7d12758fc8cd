"""From events to stages and to a timeline, on recordings made by hand."""

import numpy as np
import pytest
from nearkv_hw.abi import Status, configure
from nearkv_hw.abi.dram import PARTS, Dram
from nearkv_hw.timeline import EVENTS
from nearkv_sim.events import EVENT, EventKind, Recording
from nearkv_sim.trace import stages_of, timeline, write
from timeline_check import check_timeline, read_timeline

DDR5 = configure("small", dram="ddr5_6400")


def recording(events, lost=0, ended=1000):
    """A recording of (source, kind, cycle, a, b)."""
    names = tuple(dict.fromkeys(source for source, *_ in events))
    rows = [(cycle, names.index(source), kind, a, b) for source, kind, cycle, a, b in events]
    rows.sort(key=lambda row: row[0])
    return Recording(np.array(rows, EVENT), names, lost, 0, ended)


def stage(name, cycle, a=0, b=0, index=0):
    assert name in EVENTS
    return f"{name}.{index}", EventKind.STAGE, cycle, a, b


def job(index, at, *, aperture=1, passes=1, status=Status.OK, slot=0):
    """All events of a job that is fetched in cycle `at`, over two units, of which the second has no rows."""
    events = [
        stage("window.fetched", at, index, aperture),
        stage("walker.judged", at + 10),
        stage("completer.record", at + 200 * passes, index, passes << 16 | status << 8 | aperture),
    ]
    for n in range(passes):
        begin = at + 100 * n
        events += [
            stage("results.write", begin + 90, 7, (slot + n) % 4),
            stage("results.write", begin + 91, 8, (slot + n) % 4),
            stage("results.done", begin + 95, Status.OK, 64),
            stage("unit.page", begin + 15, 0, 16),
            stage("unit.asked", begin + 20, 5),
            stage("unit.first", begin + 40),
        ]
        for unit in range(2):
            events += [
                stage("unit.pass", begin + 12 + unit, 4, aperture, index=unit),
                stage("unit.page", begin + 16, 0, 0, index=unit),
                stage("unit.loaded", begin + 30, index=unit),
                stage("unit.ended", begin + 70 + unit, index=unit),
                stage("unit.drain", begin + 75, 0, index=unit),
                stage("unit.drain", begin + 85, 1, index=unit),
            ]
    return events


def test_stages_of_jobs():
    bell = [stage("window.doorbell", 5, 12, 1), stage("window.doorbell", 3, 1, 0)]
    found = stages_of(recording([*bell, *job(10, 9), *job(11, 20, passes=2, slot=1)]))
    assert found.incomplete == 0
    one, two = found.jobs
    assert (one.index, one.aperture, one.status, one.doorbell, one.fetched) == (10, 1, Status.OK, 5, 9)
    assert (one.judged, one.record, one.asked, one.ended) == (19, 209, 29, 80)
    assert [len(found_job.passes) for found_job in found.jobs] == [1, 2]
    assert [one_pass.written for one_pass in two.passes] == [110, 210]
    assert two.passes[1].units[0].first == 20 + 140
    assert two.passes[1].units[1].first is None
    assert two.passes[1].units[1].asked is None
    assert two.passes[1].lines == 64


def test_a_counter_of_descriptors_that_wraps():
    last = 0xFFFF_FFFF
    bell = [stage("window.doorbell", 1, last, 1), stage("window.doorbell", 2, 1, 1)]
    found = stages_of(recording([*bell, *job(last - 1, 10), *job(last, 400), *job(0, 800)], ended=2000))
    assert [found_job.doorbell for found_job in found.jobs] == [1, 2, 2]


def test_a_descriptor_without_a_pass():
    bell = stage("window.doorbell", 1, 2, 0)
    bad = [
        stage("window.fetched", 2, 0, 0),
        stage("walker.judged", 6),
        stage("completer.record", 8, 0, Status.BAD_TABLE << 8),
    ]
    found = stages_of(recording([bell, *bad, *job(1, 20, aperture=0)]))
    assert [(j.status, len(j.passes)) for j in found.jobs] == [(Status.BAD_TABLE, 0), (Status.OK, 1)]
    assert found.jobs[0].asked is None
    assert found.jobs[0].ended is None


def test_what_was_cut_off_is_incomplete():
    events = [stage("window.doorbell", 1, 2, 1), *job(0, 10), *job(1, 300)]
    for cut in range(len(events)):
        found = stages_of(recording([e for e in events if e[2] < 1000][:cut] or events[:1]))
        fetched = sum(e[0] == "window.fetched.0" for e in events[:cut])
        assert len(found.jobs) + found.incomplete == fetched
    assert len(stages_of(recording(events)).jobs) == 2


def commands():
    """A sub-channel's life: two rows of two banks, reads, a write, a refresh, and a row that stays open."""
    source = "dram.1.0"
    return [
        (source, EventKind.ACTIVATE, 0, 2, 100),
        (source, EventKind.ACTIVATE, 8, 3, 100),
        *((source, EventKind.READ, 12 + 2 * n, 2 + n % 2, n // 2) for n in range(8)),
        (source, EventKind.WRITE, 60, 2, 9),
        (source, EventKind.PRECHARGE, 90, 2, 0),
        (source, EventKind.PRECHARGE_ALL, 100, 0, 0),
        (source, EventKind.REFRESH, 112, 0, 0),
        (source, EventKind.ACTIVATE, 400, 5, 7),
        *(("dram.1.1", EventKind.READ, 13 + 2 * n, 2 + n % 2, n // 2) for n in range(8)),
    ]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_timeline_of_everything(tmp_path, suffix):
    links = [
        (f"link.{name}.0", EventKind.LINK, cycle, 64 * cycle, cycle % 512)
        for cycle in (1, 2, 5)
        for name in ("m2s_req", "m2s_rwd", "s2m_ndr", "s2m_drs")
    ]
    events = [stage("window.doorbell", 1, 2, 1), *job(0, 10), *job(1, 60, passes=2, slot=1)]
    found = recording([*events, *commands(), *links], lost=3)
    path = tmp_path / f"t{suffix}"
    shown = timeline(found, DDR5)
    write(shown, path, DDR5)
    content = read_timeline(path)
    tracks = check_timeline(content)
    assert content["otherData"]["config"]["dram"] == "ddr5_6400"
    assert content["otherData"]["events_lost"] == 3
    assert content["otherData"]["jobs"] == 2
    assert content["otherData"]["slices"] == sum(map(len, tracks.values()))
    assert {group for group, _ in tracks} == {
        "jobs", "unit 0", "unit 1", "results", "link, port 0", "channel 1",
        "channel 1, sub-channel 0: open rows",
    }  # fmt: skip

    def spans(group, track):
        return [(e["args"]["cycle"], e["args"]["cycles"], e["name"]) for e in tracks[group, track]]

    delay = PARTS[Dram.DDR5_6400].frames(16, DDR5.refresh).read_cycles
    assert spans("channel 1", "lines read") == [(12 + delay, 16, "16 lines")]
    assert spans("channel 1", "lines written") == [(60, 1, "1 lines")]
    assert spans("channel 1", "sub-channel 0: ACT") == [(0, 2, "ACT"), (8, 2, "ACT"), (400, 2, "ACT")]
    assert spans("channel 1", "sub-channel 0: PRE") == [(90, 2, "PRE"), (100, 2, "PRE all")]
    column = tracks["channel 1", "sub-channel 0: RD, WR"]
    assert [e["name"] for e in column] == ["RD"] * 8 + ["WR"]
    assert column[1]["args"] == {"cycle": 14, "cycles": 2, "bank": 3, "row": 100, "column": 0}
    rows = "channel 1, sub-channel 0: open rows"
    assert spans(rows, "bank 2") == [(0, 90, "row 100")]
    assert spans(rows, "bank 3") == [(8, 92, "row 100")]
    assert tracks[rows, "bank 2"][0]["args"]["lines"] == 5
    assert spans(rows, "bank 5") == [(400, 600, "row 7")]
    jobs = [e for e in tracks["jobs", "jobs in flight, 1"] if e["name"].startswith("job")]
    assert jobs[0]["args"] | {"cycle": 0, "cycles": 0} == {
        "cycle": 0, "cycles": 0, "aperture": 1, "status": "OK", "doorbell": 1, "passes": 1, "lines": 64,
    }  # fmt: skip


def test_a_timeline_leaves_out_what_is_too_much():
    found = recording(commands())
    shown = timeline(found, DDR5, slices=10)
    left_out = shown.summary["commands_left_out"]
    assert left_out == len(commands()) - 10
    every = timeline(found, DDR5)
    assert every.summary["commands_left_out"] == 0
    assert shown.tracks.slices < every.tracks.slices


def test_time_follows_the_clock():
    bell = stage("window.doorbell", 1000, 1, 0)
    for clock, microseconds in ((800, 1.25), (1067, 0.937), (600, 1.666)):
        shown = timeline(recording([bell]), configure("small", dram="fixed", clock_mhz=clock))
        (mark,) = (e for e in shown.tracks.events() if e["ph"] == "i")
        assert mark["ts"] == pytest.approx(microseconds, abs=1e-9)


def test_a_device_that_did_nothing():
    nothing = Recording(np.zeros(0, EVENT), (), 0, 5, 5)
    shown = timeline(nothing, DDR5)
    assert shown.summary["cycles"] == 0
    assert not shown.stages.jobs
    assert all(event["ph"] == "M" for event in shown.tracks.events())
