"""SmolLM2-135M-Instruct decodes with its KV on the device: text and bits are those of the reference."""

import json

import nearkv
import pytest
from nearkv import hf
from nearkv.cli import app
from nearkv.hf.run import run
from nearkv.quantise import PRESETS
from typer.testing import CliRunner

PROMPT = "Name three colours."
NARROW = [name for name, preset in PRESETS.items() if preset.k.form.bits < 16]


@pytest.fixture(scope="module")
def loaded():
    return hf.load()


@pytest.fixture(scope="module")
def by_reference(loaded):
    return run(loaded, PROMPT, device=None, max_new_tokens=4)


@pytest.mark.parametrize("spec", ["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def test_text_and_bits_are_the_references(loaded, by_reference, spec):
    with nearkv.open(spec) as device:
        report = run(loaded, PROMPT, device=device, max_new_tokens=4)
    assert report.tokens == by_reference.tokens
    assert report.calls == report.calls_checked == report.calls_equal == 3 * 30
    assert report.kv_bytes > report.link_bytes > 0
    assert report.lines > 0


@pytest.mark.parametrize(
    "kv_format",
    [name if name in ("fp8", "q4_0") else pytest.param(name, marks=pytest.mark.slow) for name in NARROW],
)
def test_every_call_is_equal_in_any_format(loaded, kv_format):
    with nearkv.open("model") as device:
        report = run(loaded, PROMPT, device=device, kv_format=kv_format, max_new_tokens=3)
        assert device.stats().host_lines == 0
    assert report.kv_format == kv_format
    assert report.calls == report.calls_checked == report.calls_equal == 3 * 30  # the prompt's too


@pytest.mark.slow
@pytest.mark.rtl
def test_cocotb_gives_the_same_tokens_and_bits(loaded, by_reference):
    with nearkv.open("cocotb") as device:
        report = run(loaded, PROMPT, device=device, max_new_tokens=2)
    assert report.tokens == by_reference.tokens[:2]
    assert report.calls == report.calls_equal == 30


def test_the_command_reports_what_it_did(tmp_path):
    command = ["run", "--device", "model", "--max-new-tokens", "2", "--prompt", PROMPT, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    expected = {
        "text", "tokens_per_s", "tokens_per_s_checked", "calls", "calls_equal", "device_cycles", "lines",
        "link_bytes", "kv_bytes", "energy_j", "channels", "memories",
    }  # fmt: skip
    assert expected <= set(report)
    assert report["calls"] == report["calls_equal"] == 30
    parts = dict(report["energy_j"])
    total = parts.pop("total")
    assert 0 < total["low"] < total["mid"] < total["high"]
    assert total["mid"] == pytest.approx(sum(part["mid"] for part in parts.values()))
    assert sum(channel["unit_lines"] for channel in report["channels"]) == report["lines"]
    assert len(report["memories"]) == len(report["channels"]) == 2


def test_the_command_prints_counters(loaded, monkeypatch):
    monkeypatch.setattr(hf, "load", lambda folder: loaded)
    command = [
        "run",
        "--device",
        "model",
        "--max-new-tokens",
        "2",
        "--prompt",
        PROMPT,
        "--counters",
        "--no-check",
    ]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "unit_lines" in result.stdout
    assert "0 in every slice:" in result.stdout


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(hf.ModelNotFound, match=r"holds no model: there is no config\.json"):
        hf.load(tmp_path)
