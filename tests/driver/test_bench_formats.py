"""`nearkv bench formats`: names, values that a unit can have, and the steps that narrow rows take."""

import json

import pytest
from nearkv.cli import app
from typer.testing import CliRunner


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "formats", *arguments])


@pytest.mark.rtl
def test_small():
    """On the RTL of `small`: 16-bit rows a line per cycle, narrower ones a step for each of their parts."""
    wanted = ("bf16", "fp8", "q8_0", "int4", "mxfp4")
    done = run("--device", "rtl", "--json", *(text for name in wanted for text in ("--kv-format", name)))
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert {result["name"] for result in results} == {"formats.lines_per_cycle"}
    rates = {(r["config"]["dtype"], r["config"]["head_dim"]): r["value"] for r in results}
    assert set(rates) == {(name, dim) for name in wanted for dim in (128, 32)}
    least = {"bf16": 0.98, "fp8": 0.49, "q8_0": 0.49, "int4": 0.25, "mxfp4": 0.25}
    for name, rate in least.items():
        assert rate <= rates[name, 128] <= 1


def test_unknown_format():
    done = run("--device", "model", "--kv-format", "fp7")
    assert done.exit_code != 0
    assert "fp7" in str(done.exception)
