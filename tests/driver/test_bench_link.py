"""`nearkv bench link` names its figures, and finds what flits carry."""

import pytest
from nearkv.bench import link
from nearkv_hw.abi.config import LinkLayer

PACKING = ("read.lines_per_flit", "write.lines_per_flit", "flits_per_s")


@pytest.mark.rtl
def test_what_flits_carry():
    results = list(link.measure(()))
    assert [r["name"] for r in results] == [f"link.{name}" for name in PACKING] * 3
    assert [r["config"]["link_layer"] for r in results] == ["flits_68"] * 6 + ["flits_256"] * 3
    assert [r["config"].get("multi_data") for r in results] == [True] * 3 + [False] * 3 + [None] * 3
    found = [r["value"] for r in results if r["name"] != "link.flits_per_s"]
    assert found == pytest.approx([8 / 9, 4 / 5, 4 / 5, 4 / 5, 27 / 8, 3], rel=0.01)


@pytest.mark.rtl
@pytest.mark.slow
@pytest.mark.parametrize("layer", LinkLayer)
def test_latencies(layer):
    """Cycles and nanoseconds agree, and stand beside the specification's targets."""
    results = [r for r in link.measure((layer,)) if r["name"].endswith("_latency_ns")]
    assert [r["name"] for r in results] == ["link.read_latency_ns", "link.write_latency_ns"]
    for result, target in zip(results, (80, 40), strict=True):
        config = result["config"]
        assert config["target_ns"] == target
        assert result["value"] == config["cycles"] * 1000 / config["clock_mhz"]
        assert config["cycles"] > config["wire_ns"] * config["clock_mhz"] / 1000
