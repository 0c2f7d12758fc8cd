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
    rates = {(r["name"], r["config"]["dtype"], r["config"]["head_dim"]): r["value"] for r in results}
    names = ("formats.lines_per_cycle", "formats.job_lines_per_cycle")
    assert set(rates) == {(name, dtype, dim) for name in names for dtype in wanted for dim in (128, 32)}
    least = {"bf16": 0.98, "fp8": 0.49, "q8_0": 0.49, "int4": 0.25, "mxfp4": 0.25}
    for dtype, rate in least.items():
        while_it_goes_on, of_a_job = (rates[name, dtype, 128] for name in names)
        assert rate <= of_a_job <= 1
        assert while_it_goes_on == pytest.approx(of_a_job, abs=0.02)


def test_unknown_format():
    done = run("--device", "model", "--kv-format", "fp7")
    assert done.exit_code != 0
    assert "fp7" in str(done.exception)
