# amaranth: UnusedElaboratable=no
"""Kept Verilog: found again while nothing has changed, made anew when something has."""

import pytest
from nearkv_hw.common.queue import Queue
from nearkv_hw.verilog import to_verilog
from nearkv_sim.designs import design_of


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """What the reporter was told, with an empty cache."""
    monkeypatch.setenv("NEARKV_CACHE", str(tmp_path))
    return []


def test_kept_design_equals_the_made_one(steps):
    made = design_of(Queue, shape=8, depth=4, report=steps.append)
    kept = design_of(Queue, shape=8, depth=4, report=steps.append)
    assert steps == ["queue: Amaranth to Verilog"]
    assert kept == made == to_verilog(Queue(shape=8, depth=4))


def test_parameters_and_components_tell_designs_apart(steps):
    def deep(*, shape):
        return Queue(shape=shape, depth=9)

    designs = {
        design_of(Queue, shape=8, depth=4, report=steps.append).text,
        design_of(Queue, shape=8, depth=5, report=steps.append).text,
        design_of(Queue, shape=9, depth=4, report=steps.append).text,
        design_of(deep, shape=8, report=steps.append).text,
    }
    assert len(designs) == len(steps) == 4


def test_failed_conversion_leaves_nothing_behind(steps, tmp_path):
    with pytest.raises(ValueError, match="depth"):
        design_of(Queue, shape=8, depth=0)
    assert not list(tmp_path.rglob("*.json"))
