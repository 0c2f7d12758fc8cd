"""Sweeps: axes, answers, files, and the command line."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from nearkv.cli import app
from nearkv.errors import ArgumentError
from nearkv.estimate import Setup, estimate
from nearkv.estimate import report as reports
from nearkv.estimate import sweep as sweeps
from nearkv.estimate.quantities import quantity
from nearkv.estimate.report import page, write
from nearkv.estimate.sweep import parse, question, run
from typer.testing import CliRunner

SETUP = Setup(model="llama-3.1-8b", context=4096)


def invoke(*arguments):
    return CliRunner().invoke(app, ["estimate", *arguments])


def test_axes():
    assert parse(["context=4k..32k batch=1,3", "gpu=h100"]) == {
        "context": [4096, 8192, 16384, 32768],
        "batch": [1, 3],
        "gpu": ["h100"],
    }
    assert parse(["dram=ddr5_4800", "channels=1..4"]) == {"dram": ["ddr5_4800"], "channels": [1, 2, 4]}
    assert parse(["unit_rate=0.25..1", "link_factor=1,1.5", "host_share=0"]) == {
        "unit_rate": [0.25, 0.5, 1.0],
        "link_factor": [1.0, 1.5],
        "host_share": [0.0],
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least one axis"),
        (["context"], r"'context' is no axis; write context=4k\.\.1m"),
        (["contexts=1"], "no axis 'contexts'; there are context, batch"),
        (["batch=1", "batch=2"], "axis batch is given twice"),
        (["batch=8..4"], r"batch=8\.\.4: goes from 1 or more to no less"),
        (["batch=1x"], "batch='1x': write a whole number"),
        (["unit_rate=fast"], r"unit_rate='fast': write a number, such as 0\.5"),
        (["link_factor=0..2"], r"link_factor=0\.\.2: goes from 1e-06 or more to no less"),
        (["link_factor=1..inf"], r"link_factor=1\.\.inf: goes from 1e-06 or more to no less"),
    ],
)
def test_bad_axes(texts, message):
    with pytest.raises(ArgumentError, match=message):
        parse(texts)


def test_quantities():
    assert [quantity(t) for t in ("7", "4K", "1m", " 2g")] == [7, 4096, 1 << 20, 2 << 30]
    with pytest.raises(ArgumentError, match=r"context='4\.5k': write a whole number, with k, m, g or t"):
        quantity("4.5k", "context")


def test_rows_are_the_answers_of_each_point():
    told = []
    rows = run(
        SETUP,
        parse(["context=4k,8k", "dram=ddr5_6400,hbm3_6400"]),
        report=lambda *done: told.append(done),
    )
    assert told[-1] == (4, 4)
    assert len(rows) == 4 * len(estimate(SETUP))
    one = estimate(question(SETUP, {"context": 8192, "dram": "hbm3_6400"}))
    last = [row for row in rows if row["context"] == 8192 and row["dram"] == "hbm3_6400"]
    assert [row["time_per_output_token_ms"] for row in last] == [answer.step_s * 1e3 for answer in one]
    assert all(not isinstance(value, dict) for row in rows for value in row.values())


def test_processes_give_the_same(monkeypatch):
    axes = parse(["context=4k..64k", "batch=1..2"])
    here = run(SETUP, axes)
    monkeypatch.setattr(sweeps, "_PARALLEL", 1)
    monkeypatch.setattr(sweeps, "_CHUNK", 5)
    assert run(SETUP, axes) == here


def test_a_bad_point_is_refused_first():
    with pytest.raises(ArgumentError, match="no model 'x'"):
        run(SETUP, {"model": ["llama-3.1-8b", "x"]})
    with pytest.raises(ValueError, match="channels=3: must be 1, 2, 4, 8 or 16"):
        run(SETUP, {"channels": [3]})


def test_csv(tmp_path):
    axes = parse(["context=4k..8k"])
    rows = run(SETUP, axes)
    write(tmp_path / "x.csv", SETUP, axes, rows)
    with (tmp_path / "x.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["system"] for row in read] == [row["system"] for row in rows]
    assert float(read[0]["tokens_per_s"]) == rows[0]["tokens_per_s"]


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    axes = parse(["context=4k..8k"])
    rows = run(SETUP, axes)
    write(tmp_path / "x.parquet", SETUP, axes, rows)
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == rows


def test_plots_and_page(tmp_path):
    pytest.importorskip("matplotlib")
    axes = parse(["context=4k..1m", "batch=1..64", "gpu=h100,h200"])
    rows = run(SETUP, axes)
    write(tmp_path / "x.png", SETUP, axes, rows)
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = page(SETUP, axes, rows)
    assert "http" not in re.sub(
        r'"data:image/png;base64,[^"]*"', "", text
    )  # a picture's letters may spell it
    assert text.count("<img") == 4
    assert text.count("<tr") > len(rows)


def test_titles_name_what_is_the_same_for_all():
    axes = parse(["context=4k", "gpus=1,2"])
    text = page(SETUP, axes, run(SETUP, axes))
    assert "<title>llama-3.1-8b: estimates over context, gpus</title>" in text
    assert "no limit" in text
    assert reports._same(SETUP, axes) == ["llama-3.1-8b", "1 device"]
    assert reports._same(replace(SETUP, devices=2), parse(["model=qwen3-8b"])) == ["1 x h100", "2 devices"]


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"its ending must be one of \.csv, \.parquet, \.png, \.html"):
        reports.check_outputs([Path("x.xls")])
    with pytest.raises(ArgumentError, match="there is no folder"):
        reports.check_outputs([tmp_path / "none" / "x.csv"])
    monkeypatch.setattr(reports, "_NEEDS", {".png": "no_such_module"})
    with pytest.raises(ArgumentError, match=r"needs no_such_module, .* pip install 'nearkv\[sweep\]'"):
        reports.check_outputs([tmp_path / "x.png"])


def test_a_dask_cluster_gives_the_same(monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(sweeps, "_CHUNK", 2)
    axes = parse(["context=4k..16k"])
    with distributed.LocalCluster(
        1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        assert run(SETUP, axes, dask=cluster.scheduler_address) == run(SETUP, axes)


def test_dask_that_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(ArgumentError, match="Dask is not installed"):
        run(SETUP, {"batch": [1]}, dask="tcp://nowhere:1")


def test_a_dask_cluster_that_does_not_answer(monkeypatch):
    distributed = pytest.importorskip("distributed")

    def refuse(address):
        raise OSError("timed out")

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(
        ArgumentError, match=r"no Dask scheduler answers at tcp://nowhere:1 \(timed out\); start"
    ):
        run(SETUP, {"batch": [1]}, dask="tcp://nowhere:1")


def test_command_line(tmp_path):
    result = invoke("--model", "llama-3.1-8b", "--context", "128k", "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["setup"]["context"] == 131072
    assert {a["system"] for a in found["answers"]} >= {"gpu", "gpu+memory", "gpu+controller", "three tiers"}
    assert found["model"]["layers"] == 32
    shown = invoke("--model", "llama-3.1-70b", "--context", "128k")
    assert shown.exit_code == 0
    assert "weights: they take 2 GPUs" in shown.output
    assert "64 GiB" in shown.output


def test_command_line_of_rates():
    asked = ("--model", "qwen3-8b", "--context", "64k", "--json")
    spent = {}
    for name, more in (
        ("base", []),
        ("slow units", ["--unit-rate", "0.5"]),
        ("fast link", ["--link-factor", "2"]),
    ):
        found = json.loads(invoke(*asked, *more).output)
        spent[name] = {a["system"]: a["parts_ms"] for a in found["answers"]}
    near, far = "gpu+controller", "gpu+host"
    assert spent["slow units"][near]["device issue"] > 1.5 * spent["base"][near]["device memory"]
    assert spent["slow units"][far] == spent["base"][far]
    assert spent["fast link"][far]["link"] == pytest.approx(spent["base"][far]["link"] / 2)
    rows = json.loads(invoke(*asked, "--sweep", "unit_rate=0.5,1").stdout)["rows"]
    times = [row["time_per_output_token_ms"] for row in rows if row["system"] == near]
    assert times[0] > times[1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--unit-rate", "unit_rate=0.0: must be 1e-6 to 1e6 lines per cycle"),
        ("--link-factor", "link_factor=0.0: must be 1e-6 to 1e6 times the data sheets' rates"),
    ],
)
def test_command_line_refuses_rates(option, message):
    assert message in str(invoke("--model", "qwen3-8b", option, "0").exception)
    assert invoke("--model", "qwen3-8b", option, "fast").exit_code == 2


def test_command_line_of_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 100,
            }
        )
    )
    result = invoke("--config", str(path), "--set", "dram=hbm3_6400", "--capacity", "32g", "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["setup"]["device_bytes"] == 32 << 30
    assert found["setup"]["config"]["dram"] == "hbm3_6400"


def test_command_line_sweeps(tmp_path):
    out = tmp_path / "x.csv"
    result = invoke("--model", "qwen3-8b", "--sweep", "context=4k..8k", "batch=1..2", "--out", str(out))
    assert result.exit_code == 0
    assert len(out.read_text().splitlines()) == 1 + 4 * len(estimate(SETUP))
    shown = invoke("--model", "qwen3-8b", "--sweep", "batch=1..2")
    assert shown.exit_code == 0
    assert "gpu+controller" in shown.output


def test_command_line_lists():
    assert "llama-3.1-405b" in invoke("--list").output
    found = json.loads(invoke("--list", "--json").output)
    assert {"models", "gpus", "kv_formats"} == set(found)


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "a", "--config", "b"], ["--model", "qwen3-8b", "--out", "x.csv"]]
)
def test_command_line_refuses(arguments):
    assert invoke(*arguments).exit_code == 2
