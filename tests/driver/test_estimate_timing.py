"""The timing model against the RTL's figures, and on the model device."""

import nearkv
import pytest
from nearkv.estimate.measured import errors, measurements
from nearkv.estimate.published import comparisons
from nearkv.workload import Workload

LIMITS = {  # of batches, by part; rows of HBM3 are so short that their order decides
    "ddr5_6400": 0.03,
    "ddr5_4800": 0.03,
    "lpddr5x_8533": 0.035,
    "hbm3_6400": 0.11,
}
SHORT = 0.10
"""Of single jobs, and of batches of jobs of less than 128 rows."""


@pytest.mark.parametrize("calibration", [True, False])
def test_errors_against_the_rtl(calibration):
    found = errors(m for m in measurements() if m.calibration is calibration)
    assert {part for part, _ in found} == set(LIMITS)
    for (part, kind), of_kind in found.items():
        assert of_kind.largest <= (LIMITS[part] if kind == "batch" else SHORT), (part, kind)


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
    for one in comparisons():
        assert abs(one.difference) < 0.12, one.what
        assert one.source
