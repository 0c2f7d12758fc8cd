"""Which kernel computes the model device's attention, and what if the native one cannot be built."""

import shutil

import nearkv_sim
import pytest
from nearkv_hw.abi import configure
from nearkv_sim import compiled
from nearkv_sim.model import ModelPort, attention, kernels, native
from nearkv_sim.toolchain import ToolMissing
from nearkv_sim.verilate import BuildError


@pytest.fixture
def no_compiler(monkeypatch):
    which = shutil.which
    compilers = ("c++", "g++", "clang++")
    monkeypatch.setattr(shutil, "which", lambda name: None if name in compilers else which(name))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(kernels.KERNEL_VARIABLE, raising=False)


def chosen(name=None):
    return ModelPort(configure("small"), kernel=name).kernel


def test_native_unless_asked_otherwise(monkeypatch):
    assert chosen() == chosen("native") == "native"
    assert chosen("torch") == "torch"
    monkeypatch.setenv(kernels.KERNEL_VARIABLE, "torch")
    assert chosen() == "torch"
    assert chosen("native") == "native"
    assert kernels.choose(None)[1] is attention.attend


def test_an_unknown_kernel_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="kernel='cuda': the model's kernels are native, torch"):
        chosen("cuda")
    with pytest.raises(ValueError, match="kernel='torch': only the model device has kernels, not rtl"):
        nearkv_sim.open_port("rtl", kernel="torch")
    monkeypatch.setenv(kernels.KERNEL_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="NEARKV_KERNEL=cuda: the model's kernels are"):
        chosen()


@pytest.mark.usefixtures("no_compiler")
def test_torch_where_there_is_no_compiler():
    assert chosen() == "torch"
    with pytest.raises(ToolMissing, match=r"a C\+\+ compiler is missing; install it with: sudo apt-get"):
        chosen("native")


def test_a_compiler_that_fails_is_told(monkeypatch):
    def broken(report):
        raise BuildError("the end of its log")

    monkeypatch.setattr(native, "load_kernel", broken)
    with pytest.warns(UserWarning, match="computes in torch, which is slow: the end of its log"):
        assert chosen() == "torch"
    with pytest.raises(BuildError, match="the end of its log"):
        chosen("native")


def test_doctor_s_line(monkeypatch):
    assert kernels.survey().found == f"built by {compiled.find_compiler()} at first use"
    monkeypatch.setenv(kernels.KERNEL_VARIABLE, "torch")
    tool = kernels.survey()
    assert (tool.found, tool.install, tool.optional) == (None, "unset NEARKV_KERNEL", True)


@pytest.mark.usefixtures("no_compiler")
def test_doctor_s_line_without_a_compiler():
    tool = kernels.survey()
    assert (tool.found, tool.install, tool.optional) == (None, "sudo apt-get install -y g++", True)


def test_a_library_is_compiled_once_for_each_content(monkeypatch, tmp_path):
    monkeypatch.setenv("NEARKV_CACHE", str(tmp_path / "cache"))
    source, steps = tmp_path / "answer.cpp", []

    def library(number):
        source.write_text('#include "made.h"\nextern "C" int answer() { return kNumber; }\n')
        made = {"made.h": f"constexpr int kNumber = {number};\n"}
        return compiled.compiled_library(name="answer", sources=[source], generated=made, report=steps.append)

    assert library(1) == library(1) != library(2)
    assert steps == ["answer: compiling, once"] * 2
    with pytest.raises(BuildError, match=r"failed with status 1 on answer:(?s:.*)nonsense"):
        library("nonsense")
    assert library(2).exists()
    assert not list((tmp_path / "cache" / "compiled").glob("*.*[!k]")), "no working folder is left"
