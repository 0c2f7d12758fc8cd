"""Timelines of whole devices: every job has every stage, in order, and the file is as viewers want it."""

import json

import nearkv
import pytest
import torch
from nearkv.cli import app
from nearkv.errors import ArgumentError
from nearkv.workload import Workload
from nearkv_hw.abi import Status
from nearkv_sim.trace import stages_of
from timeline_check import check_timeline, read_timeline
from typer.testing import CliRunner


def in_order(*cycles):
    known = [cycle for cycle in cycles if cycle is not None]
    assert known == sorted(known), cycles


def check_stages(jobs, *, passes):
    """Every job went through every stage, in the order of the stages; jobs begin and end in one order."""
    assert [job.index for job in jobs] == list(range(jobs[0].index, jobs[0].index + len(jobs)))
    in_order(*(job.fetched for job in jobs))
    in_order(*(job.record for job in jobs))
    for job in jobs:
        assert job.status is Status.OK
        assert len(job.passes) == passes
        in_order(job.doorbell, job.fetched, job.judged, job.asked, job.ended, job.record)
        for one in job.passes:
            in_order(job.judged, one.sent)
            in_order(one.written, one.done, job.record)
            for unit in one.units:
                in_order(one.sent, unit.sent, unit.loaded, unit.first, unit.ended, unit.drain_ended, one.done)
                # denominators leave as soon as the last K line has been summed
                in_order(unit.loaded, unit.first, unit.drain_began, unit.drain_ended)
                in_order(unit.sent, unit.asked, unit.first)
                assert (unit.asked is None) == (unit.first is None)
        assert any(unit.first is not None for one in job.passes for unit in one.units)


@pytest.mark.rtl
@pytest.mark.parametrize(
    ("work", "passes"),
    [
        (Workload(rows=300, kv_heads=3, group=4, batch=3, head_dim=64), 1),
        (Workload(rows=1, kv_heads=1, group=9, batch=5, head_dim=32), 3),
        (Workload(rows=33, kv_heads=2, group=6, batch=2, head_dim=128, dtype="fp16"), 2),
    ],
)
def test_every_job_has_every_stage(rtl_device, work, passes):
    with work.fill(rtl_device) as filled:
        filled.step()
        with rtl_device.record() as recorded:
            filled.step()
    recording = recorded()
    found = stages_of(recording)
    assert found.incomplete == 0
    assert recording.lost == 0
    assert len(found.jobs) == work.jobs
    check_stages(found.jobs, passes=passes)
    assert sum(one.lines for job in found.jobs for one in job.passes) == passes * work.lines


@pytest.mark.rtl
def test_a_trace_has_what_happened_in_its_block(rtl_device, tmp_path):
    work = Workload(rows=64, kv_heads=2, group=2, batch=2, head_dim=64)
    path = tmp_path / "trace.json"
    with work.fill(rtl_device) as filled:
        before = filled.step()
        with rtl_device.trace(path) as summary:
            assert not summary
            assert torch.equal(filled.step(), before)
        filled.step()
    content = read_timeline(path)
    tracks = check_timeline(content)
    assert summary["jobs"] == work.jobs
    assert content["otherData"] == summary | {"config": rtl_device.config.to_dict()}
    shown = [event for (group, _), events in tracks.items() if group == "jobs" for event in events]
    assert sum(event["name"].startswith("job") for event in shown) == work.jobs
    for group in ("unit 0", "unit 1"):
        assert len(tracks[group, "partials"]) == work.jobs
    assert any(group.startswith("link") for group, _ in tracks)


@pytest.mark.rtl
def test_a_recording_that_is_full_says_so(rtl_device, tmp_path):
    work = Workload(rows=64, kv_heads=2, group=2, batch=4, head_dim=64)
    with work.fill(rtl_device) as filled, rtl_device.trace(tmp_path / "t.json.gz", events=200) as summary:
        filled.step()
    assert summary["events"] == 200
    assert summary["events_lost"] > 0
    assert summary["jobs"] + summary["descriptors_incomplete"] <= work.jobs
    check_timeline(read_timeline(tmp_path / "t.json.gz"))


def test_the_model_has_nothing_to_trace(model, tmp_path):
    with pytest.raises(RuntimeError, match="record an rtl device"), model.trace(tmp_path / "t.json"):
        pass
    with pytest.raises(OSError, match="nowhere"), model.trace(tmp_path / "nowhere" / "t.json"):
        pass


@pytest.mark.rtl
def test_the_command(tmp_path):
    path = tmp_path / "t.json"
    arguments = ["trace", str(path), "--rows", "40", "--batch", "2", "--head-dim", "32", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["jobs"] == printed["workload"]["batch"] * printed["workload"]["kv_heads"] == 4
    assert printed["bytes"] == path.stat().st_size
    check_timeline(read_timeline(path))


@pytest.mark.parametrize(
    ("given", "message"),
    [("channels", "write FIELD=VALUE"), ("=3", "write FIELD=VALUE")],
)
def test_fields_on_the_command_line(given, message, tmp_path):
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "t.json"), "--set", given])
    assert done.exit_code == 2
    assert message in done.output


def test_workloads():
    work = Workload(rows=100, kv_heads=3, batch=2, head_dim=100)
    assert work.jobs == 6
    assert work.lines == 2 * 6 * 100 * 4
    with nearkv.open("model") as device, work.fill(device) as filled:
        once = filled.step()
        assert once.shape == (2, 12, 100)
        before = device.stats()
        assert torch.equal(filled.step(), once)
        done = device.stats() - before
        assert done.attention_lines == work.lines
    with pytest.raises(ArgumentError, match="rows"):
        Workload(rows=0)
    with pytest.raises(ArgumentError, match="fp7"):
        Workload(dtype="fp7")


@pytest.mark.parametrize("dtype", ["fp8", "q4_0", "nvfp4"])
def test_workloads_of_narrow_formats(dtype):
    """A step streams as many lines as the workload says, scales and shared lines among them."""
    work = Workload(rows=100, kv_heads=2, batch=1, head_dim=48, dtype=dtype)
    with nearkv.open("model") as device, work.fill(device) as filled:
        before = device.stats()
        filled.step()
        assert (device.stats() - before).attention_lines == work.lines
