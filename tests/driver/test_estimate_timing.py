"""The timing model against the RTL's figures, and on the model device."""

import json
from dataclasses import replace
from types import SimpleNamespace

import nearkv
import pytest
from nearkv.bench import timing as bench
from nearkv.estimate import published, setup
from nearkv.estimate.measured import errors, measurements
from nearkv.estimate.published import comparisons
from nearkv.workload import Workload
from nearkv_hw.abi import configure
from nearkv_hw.abi.dram import PARTS, Dram

BATCH = 0.03
"""Largest error of batches."""
SHORT = 0.10
"""Of single jobs, and of batches of jobs of less than 128 rows."""


@pytest.mark.parametrize("calibration", [True, False])
def test_errors_against_the_rtl(calibration):
    found = errors(m for m in measurements() if m.calibration is calibration)
    assert {part for part, _, _ in found} == {dram.name.lower() for dram in PARTS}
    for (part, placement, kind), of_kind in found.items():
        assert of_kind.largest <= (BATCH if kind == "batch" else SHORT), (part, placement, kind)


def test_enough_workloads():
    checks = [m for m in measurements() if not m.calibration]
    assert len(checks) >= 30
    assert len(measurements()) >= 60
    fitted = [(m.config, m.workload) for m in measurements() if m.calibration]
    assert all((m.config, m.workload) not in fitted for m in checks)


def test_the_model_device_has_this_timing():
    small = [m for m in measurements() if m.config["dram"] == "ddr5_6400" and m.cycles < 20_000]
    for measurement in small[::4]:
        config = {k: v for k, v in measurement.config.items() if k != "name"}
        with nearkv.open("model", **config) as device:
            with Workload(**measurement.workload).fill(device) as filled:
                before = device.stats()
                filled.step()
                done = device.stats() - before
        # what the host sees is longer by a round trip; the last job's pages may not balance
        assert done.attention_cycles == pytest.approx(measurement.model_cycles, rel=0.06, abs=60)


def test_beside_published_figures():
    """A tenth; latencies of our device leave out PHY and link layer, and its lines under way follow.

    130 heads do not balance over 32 pseudo-channels of theirs; our pages do.
    """
    for one in comparisons():
        apart = one.unit in ("ns", "lines") or "130 heads" in one.what
        assert abs(one.difference) < (0.26 if apart else 0.12), one.what
        assert one.source


def test_latencies_beside_published_ones_by_hand():
    found = {one.what: one for one in comparisons()}
    # 15 cycles outside the frames, 3 frames to the activate and 6 to the read of two cycles each, 15 to the
    # line's end; at 800 MHz
    read = found["MemRd to MemData at the device, idle, a closed bank of DDR5-6400"]
    assert (read.theirs, read.ours) == (80, pytest.approx((15 + 18 + 15) / 0.8))
    # 154 ns are 1.18 local loads, as 245 of the FPGA are 1.88
    load = found["a load over CXL, at the host"]
    assert load.ours == pytest.approx(154 / 1.18 + 154) == pytest.approx(245 / 1.88 + 154, rel=0.001)
    assert load.theirs == 275
    # 50.7 GB/s times 80 ns are 4,056 bytes; ours 16 * 32 / 8 * 128/130 * 4/68 flit slots, 4.5 of them a line
    (under_way,) = (one for one in found.values() if one.unit == "lines")
    assert under_way.theirs == pytest.approx(4056 / 64)
    assert under_way.ours == pytest.approx(64 * 128 / 130 / 68 * 4 / 4.5 * 60)
    assert "from the host, 285 ns away, it takes 234" in under_way.note


def test_no_figure_stands_beside_itself(monkeypatch):
    """Published figures that are parameters change ours only where it stands beside another source."""

    def changed(before):
        return {new.what for old, new in zip(before, comparisons(), strict=True) if new.ours != old.ours}

    before, load = comparisons(), setup.CXL_LOAD_S
    for module in (published, setup):
        monkeypatch.setattr(module, "CXL_LOAD_S", replace(load, value=2 * load.value))
    monkeypatch.setattr(setup, "SWITCH_S", replace(setup.SWITCH_S, value=1e-6))
    assert changed(before) == {"a load over CXL, at the host"}
    assert [one.theirs for one in comparisons()] == [one.theirs for one in before]


def test_measuring_again(tmp_path):
    again = [bench.Again(m, m.cycles + 1, m.steps + 2) for m in measurements()[:2]]
    found = bench.results(again)
    assert [r["name"] for r in found] == ["timing.cycles", "timing.error"] * 2
    assert found[0]["value"] == again[0].cycles
    bench.write(tmp_path / "new.json", again)
    new = json.loads((tmp_path / "new.json").read_text())
    assert [entry["cycles"] for entry in new[:3]] == [
        again[0].cycles, again[1].cycles, measurements()[2].cycles,
    ]  # fmt: skip
    assert [entry["steps"] for entry in new[:3]] == [
        again[0].steps, again[1].steps, measurements()[2].steps,
    ]  # fmt: skip
    assert bench.devices([Dram.DDR5_4800]) == 1


def test_steps_begin_all_over_the_interval_between_refreshes(monkeypatch):
    """Even where a step and the rest after it take whole intervals, as of a device that repeats itself."""
    config = configure(dram="lpddr5x_8533")
    part = PARTS[config.dram]
    frames = part.frames(config.density_gbit, config.refresh)
    interval = frames.refresh_interval * part.subchannels
    now, begun = 0, []

    class Repeating:
        def __init__(self):
            self.config = config

        def stats(self):
            nonlocal now
            now += 18
            return SimpleNamespace(cycles=now)

    def step(*_):
        nonlocal now
        begun.append(now % interval)
        now = -(-now // interval) * interval
        return 1000 + len(begun)

    monkeypatch.setattr(bench, "rest", lambda device: None)
    monkeypatch.setattr(bench, "step_cycles", step)
    assert bench.mean_cycles(Repeating(), None, None, steps=8) == 1004.5
    assert begun == pytest.approx([step * interval / 8 for step in range(8)], abs=40)


@pytest.mark.rtl
def test_the_rtl_still_takes_what_it_took(rtl_device):
    for measurement in measurements():
        config = rtl_device.config.to_dict()
        if all(config[name] == value for name, value in measurement.config.items()) and (
            3_000 < measurement.cycles < 10_000
        ):
            work = Workload(**measurement.workload)
            with work.fill(rtl_device) as filled:
                filled.step()
                cycles = bench.mean_cycles(rtl_device, filled, work, steps=3)
            assert cycles == pytest.approx(measurement.cycles, rel=0.05)
