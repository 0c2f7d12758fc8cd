"""`nearkv serve-sim`: tables, files, and what it refuses."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from nearkv.cli import app
from nearkv.errors import ArgumentError
from nearkv.estimate import Setup
from nearkv.serving import Request, Serving, Synthetic, Trace, simulate
from nearkv.serving.report import overview, page, shown_s, write
from typer.testing import CliRunner

DATA = Path(__file__).parent / "data"
SETUP = Setup(model="llama-3.1-8b", context=131072, batch=64, devices=2)
MADE = Synthetic(requests=30, rate=3).trace()


def invoke(*arguments):
    return CliRunner().invoke(app, ["serve-sim", "--model", "llama-3.1-8b", *map(str, arguments)])


def results(trace=MADE, systems=("gpu", "gpu+controller"), serving=None):
    return [simulate(SETUP, trace, system, serving) for system in systems]


@pytest.mark.parametrize("name", ["requests_mooncake.jsonl", "requests_azure.csv"])
def test_traces_of_both_formats(name):
    answer = invoke(DATA / name, "--json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["trace"] == {"name": name, "requests": 5, "unused": []}
    assert [one["system"] for one in found["results"]] == [
        "gpu",
        "gpu+memory",
        "gpu+controller",
        "three tiers",
    ]
    shared = 512 + 1024 if name.endswith("jsonl") else 0
    for one in found["results"]:
        assert one["answered"] == 5
        assert one["output_tokens"] == 19
        assert one["hit_share"]["all"] == pytest.approx(shared / 5685)
        assert one["time_to_first_token_s"]["median"] > 0


def test_made_up_trace_says_its_seed():
    shown = invoke(
        "--requests", 20, "--seed", 17, "--system", "gpu", "--system", "gpu", "--system", "gpu+rank"
    )
    assert shown.exit_code == 0
    assert "seed 17" in shown.stdout
    assert shown.stdout.count("gpu+rank") == 2  # once a table
    assert "three tiers" not in shown.output


def test_all_systems():
    found = json.loads(invoke("--requests", 3, "--system", "all", "--json").stdout)
    assert len(found["results"]) == 8


def test_options_reach_the_engine():
    few = ("--requests", 20, "--system", "gpu", "--json")
    plain = json.loads(invoke(*few).stdout)["results"][0]
    assert json.loads(invoke(*few, "--no-prefix-cache").stdout)["results"][0]["hit_share"]["all"] == 0
    assert json.loads(invoke(*few, "--limit", 7).stdout)["results"][0]["requests"] == 7
    fast = json.loads(invoke(*few, "--speedup", 50).stdout)["results"][0]
    assert fast["seconds"] < plain["seconds"]
    host = json.loads(invoke(*few, "--host-cache", "1g", "--ssd-cache", "1g").stdout)["results"][0]
    assert set(host["hit_share"]) == {"gpu", "host", "ssd", "all"}
    short = json.loads(invoke(*few, "--max-context", "1k").stdout)["results"][0]
    assert short["refused"] == 20


def test_refusals_are_shown():
    shown = invoke("--requests", 20, "--max-context", "4k")
    assert shown.exit_code == 0
    told = " ".join(shown.output.split())
    assert "refused by gpu, gpu+memory, gpu+controller, three tiers: " in told
    assert "tokens are more than the longest that is accepted (--max-context), 4096" in told


def test_fields_without_a_meaning_are_shown(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,20,3\n")
    assert "fields of the trace that mean nothing here: NumImages" in invoke(path).output


def test_names_are_shown_as_they_are(tmp_path):
    """A file and a field whose names look like marks of the terminal's."""
    path = tmp_path / "[bold]x.csv"
    path.write_text("TIMESTAMP,[/red],ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,20,3\n")
    out = tmp_path / "[dim].csv"
    shown = invoke(path, "--out", out)
    assert shown.exit_code == 0
    for told in ("[bold]x.csv: 1 requests", "mean nothing here: [/red]", "[dim].csv"):
        assert told in shown.output.replace("\n", "")


@pytest.mark.parametrize(
    "arguments",
    [["--sort"], ["--format", "azure"], [DATA / "requests_azure.csv", "--seed", "1"], ["--config", "x"]],
)
def test_options_that_do_not_go_together(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "tpu"], "system='tpu': there are all, gpu, gpu\\+memory"),
        (["--out", "x.xls"], "its ending must be one of"),
        (["--max-batch", "many"], "max_batch='many': write a whole number"),
        (["--step-tokens", "1"], "step_tokens=1: must be more than batch=256"),
        (["--model", "llama-3.1-70b"], "they take 2 GPUs"),
    ],
)
def test_bad_values(arguments, message):
    found = invoke(*arguments)
    assert isinstance(found.exception, ArgumentError)
    with pytest.raises(ArgumentError, match=message):
        raise found.exception


def test_rows_of_requests(tmp_path):
    path = tmp_path / "x.csv"
    answer = invoke("--requests", 12, "--max-context", "6k", "--system", "gpu", "--out", path)
    assert answer.exit_code == 0
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == [*range(12)]
    assert {bool(row["refused"]) for row in rows} == {True, False}
    assert all(float(row["time_to_first_token_s"]) > 0 for row in rows if not row["refused"])


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    found = results()
    write(tmp_path / "x.parquet", found, Serving())
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert rows == [row for result in found for row in result.rows()]


def test_plots_and_page(tmp_path):
    pytest.importorskip("matplotlib")
    found = results(serving=Serving(host_bytes=1 << 30))
    write(tmp_path / "x.png", found, Serving())
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = page(found, Serving())
    assert "http" not in re.sub(
        r'"data:image/png;base64,[^"]*"', "", text
    )  # a picture's letters may spell it
    assert text.count("<img") == 2
    for told in ("gpu+controller", "TTFT median", "seed 0", "host_bytes", "in device, %"):
        assert told in text


def test_a_system_that_refuses_everything_hides_no_other():
    pytest.importorskip("matplotlib")
    trace = Trace(name="x", requests=[Request(arrival_s=0, prompt=600000, output=200)])
    setup = replace(SETUP, context=1 << 20)
    none, near = (simulate(setup, trace, system) for system in ("gpu", "gpu+controller"))
    assert none.summary()["refused"] == near.summary()["answered"] == 1
    assert shown_s([none, near]) == near.summary()["seconds"] > 10


def test_page_names_what_was_refused():
    pytest.importorskip("matplotlib")
    trace = Trace(name="x", requests=[Request(arrival_s=0, prompt=1 << 20, output=2)])
    text = page(results(trace), Serving())
    assert "Refused" in text
    assert "1048578 tokens are more than the longest" in text
    assert overview(results(trace))[:4] == b"\x89PNG"
