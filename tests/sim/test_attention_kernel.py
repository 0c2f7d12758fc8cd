"""The model device's C++ kernel under sanitizers, and for processors with narrower registers."""

import platform
from pathlib import Path

import pytest
from contract_cases import seed_of_run
from kernel_cases import batch, check_against_reference, new_memory
from native_checks import passes_with_a_random_seed, sanitized_program
from nearkv_hw.abi import configure
from nearkv_sim.model import ModelPort
from nearkv_sim.model.native import SOURCES, attention_header, load_kernel
from variant_jobs import Bench, random_job

CHECKS = [("attention_check.cpp", "address,undefined"), ("attention_check.cpp", "thread")]
CHECKS += [(f"attention_{what}_check.cpp", "address,undefined") for what in ("walk", "memory")]


@pytest.mark.rtl
@pytest.mark.parametrize(("check", "sanitizers"), CHECKS)
def test_programs_under_sanitizers(tmp_path, check, sanitizers):
    (tmp_path / "attention_abi.h").write_text(attention_header())
    options = ("-frounding-math", "-pthread")
    program = sanitized_program(
        tmp_path, Path(__file__).with_name(check), SOURCES, sanitizers=sanitizers, options=options
    )
    passes_with_a_random_seed(program)


@pytest.mark.rtl
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of this one architecture")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_narrower_registers(level, monkeypatch):
    kernel = load_kernel(options=[f"-march={level}"])
    monkeypatch.setattr("nearkv_sim.model.port.choose", lambda name, report: ("native", kernel))
    bench = Bench(ModelPort(configure("small")))
    memory, seed = new_memory(), seed_of_run()
    for index in range(100):
        bench.check(random_job(f"{seed}/{level}/{index}"))
    for index in range(100):
        given = batch(memory, f"{seed}/{index}", 10, split=index % 4 == 0)
        check_against_reference(kernel(given.work, memory), given)
