"""`nearkv bench model` names its figures, and measures what it says."""

import json

import pytest
import torch
from nearkv.bench import model
from nearkv.cli import app
from typer.testing import CliRunner

FIGURES = ("attend_ms", "sdpa_ms", "ratio_to_sdpa", "rows_per_s", "busy_cores")


def test_figures_of_the_command():
    result = CliRunner().invoke(app, ["bench", "model", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)["results"]
    assert [r["name"] for r in results] == [f"model.{name}" for name in FIGURES]
    assert all(r["value"] > 0 and r["config"]["rows"] == 8192 for r in results)


def test_rows_and_a_call_over_them_take_little_more_than_the_rows():
    found = {r["name"]: r for r in model.measure((65_536,), repeats=1)}
    figure = found["model.rows65536.memory_to_kv"]
    if figure["config"]["kernel"] != "native":
        pytest.skip("without the native kernel a call copies rows")
    assert 0.9 < figure["value"] < 1.1


def test_figures_of_other_lengths():
    threads = torch.get_num_threads()
    results = list(model.measure((100,), repeats=2))
    assert torch.get_num_threads() == threads
    found = {r["name"].removeprefix("model.rows100."): r["value"] for r in results}
    assert tuple(found) == FIGURES
    assert results[0]["config"]["kernel"] in ("native", "torch")
    assert round(found["rows_per_s"] * found["attend_ms"] / 1e3) == 100 * model.KV_HEADS
