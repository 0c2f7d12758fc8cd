"""Hand-written C++ compiles without a warning."""

import subprocess

import pytest
from nearkv_hw.verilog import to_verilog
from nearkv_sim.messages import cpp_header
from nearkv_sim.model.native import attention_header
from nearkv_sim.toolchain import find_verilator
from nearkv_sim.verilate import NATIVE
from toy_device import ToyDevice

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the Verilated headers of a small device, and those that are made for hand-written C++."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "design.v").write_text(to_verilog(ToyDevice(ports=2)).text)
    (folder / "messages.h").write_text(cpp_header(2))
    (folder / "attention_abi.h").write_text(attention_header())
    verilator = find_verilator()
    command = [verilator.executable, "-cc", "--trace-fst", "--prefix", "Vtop", "--top-module", "top"]
    command += ["-Wno-fatal", "-Wno-lint", "-Mdir", folder, folder / "design.v", NATIVE / "nearkv_store.sv"]
    subprocess.run(command, env=verilator.environment(), check=True, capture_output=True)
    return folder


@pytest.mark.rtl
@pytest.mark.parametrize("trace", [0, 1])
@pytest.mark.parametrize("source", sorted(path.name for path in NATIVE.glob("*.cpp")))
def test_without_warnings(model, source, trace):
    root = find_verilator().root / "include"
    includes = [f"-I{model}", f"-I{NATIVE}", "-isystem", root, "-isystem", root / "vltstd"]
    command = ["g++", "-std=gnu++20", "-fsyntax-only", *WARNINGS, *includes, f"-DVM_TRACE={trace}"]
    done = subprocess.run([*command, NATIVE / source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
