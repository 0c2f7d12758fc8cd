"""Hand-written C++ compiles without a warning."""

import subprocess

import pytest
from nearkv_hw.verilog import to_verilog
from nearkv_sim.link import LinkSetup, link_design, link_header
from nearkv_sim.messages import cpp_header
from nearkv_sim.model.native import attention_header
from nearkv_sim.toolchain import find_verilator
from nearkv_sim.verilate import NATIVE
from toy_device import ToyDevice

WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror")


def verilated(folder, text, *options):
    """A folder with the Verilated headers of a design."""
    (folder / "design.v").write_text(text)
    verilator = find_verilator()
    command = [verilator.executable, "-cc", *options, "--prefix", "Vtop", "--top-module", "top"]
    command += ["-Wno-fatal", "-Wno-lint", "-Mdir", folder, folder / "design.v", NATIVE / "nearkv_store.sv"]
    subprocess.run(command, env=verilator.environment(), check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """Headers of a small device, and those that are made for hand-written C++."""
    folder = verilated(tmp_path_factory.mktemp("device"), to_verilog(ToyDevice(ports=2)).text, "--trace-fst")
    (folder / "messages.h").write_text(cpp_header(2))
    (folder / "attention_abi.h").write_text(attention_header())
    return folder


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """Headers of a link, and what its traffic is told."""
    folder = verilated(tmp_path_factory.mktemp("link"), link_design(LinkSetup(), lambda line: None).text)
    (folder / "link_abi.h").write_text(link_header(LinkSetup()))
    return folder


@pytest.mark.rtl
@pytest.mark.parametrize("trace", [0, 1])
@pytest.mark.parametrize("source", sorted(path.name for path in NATIVE.glob("*.cpp")))
def test_without_warnings(device, link, source, trace):
    model = link if source == "link.cpp" else device
    root = find_verilator().root / "include"
    includes = [f"-I{model}", f"-I{NATIVE}", "-isystem", root, "-isystem", root / "vltstd"]
    command = ["g++", "-std=gnu++20", "-fsyntax-only", *WARNINGS, *includes, f"-DVM_TRACE={trace}"]
    done = subprocess.run([*command, NATIVE / source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
