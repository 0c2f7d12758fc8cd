"""The timing model against the RTL's figures, and on the model device."""

import nearkv
import pytest
from nearkv.estimate.measured import errors, measurements
from nearkv.workload import Workload

LIMITS = {"batch": 0.03, "batch, short jobs": 0.10, "single job": 0.10}


@pytest.mark.parametrize("calibration", [True, False])
def test_errors_against_the_rtl(calibration):
    found = errors(m for m in measurements() if m.calibration is calibration)
    assert set(found) == set(LIMITS)
    for kind, (_, _, largest) in found.items():
        assert largest <= LIMITS[kind], kind


def test_enough_workloads():
    checks = [m for m in measurements() if not m.calibration]
    assert len(checks) >= 12
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
