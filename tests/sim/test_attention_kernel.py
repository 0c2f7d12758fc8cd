"""The model device's C++ kernel under sanitizers, and for processors with narrower registers."""

import platform
import secrets
import subprocess
from pathlib import Path

import pytest
from contract_cases import seed_of_run
from kernel_cases import batch, check_against_reference, new_memory
from nearkv_sim.model.native import attention_header, load_kernel
from nearkv_sim.verilate import NATIVE

CHECK = Path(__file__).with_name("attention_check.cpp")
WARNINGS = ("-std=gnu++20", "-Wall", "-Wextra", "-Wconversion", "-Werror")
SOURCES = ("attention.cpp", "attention_rows.cpp", "attention_partial.cpp")


@pytest.mark.rtl
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_random_memory_under_sanitizers(tmp_path, sanitizers):
    (tmp_path / "attention_abi.h").write_text(attention_header())
    program = tmp_path / "check"
    options = (
        "-O1",
        "-g",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        "-frounding-math",
        "-pthread",
    )
    sources = (CHECK, *(NATIVE / name for name in SOURCES))
    command = ["g++", *WARNINGS, *options, f"-I{tmp_path}", f"-I{NATIVE}", *sources, "-o", program]
    subprocess.run(command, check=True)
    seed = secrets.randbits(32)
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"


@pytest.mark.rtl
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of this one architecture")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_narrower_registers(level):
    kernel = load_kernel(options=[f"-march={level}"])
    memory, seed = new_memory(), seed_of_run()
    for index in range(100):
        given = batch(memory, f"{seed}/{index}", 10)
        check_against_reference(kernel(given.work, memory), given)
