"""The model device's C++ kernel under the sanitizers of addresses, undefined behaviour and threads."""

import secrets
import subprocess
from pathlib import Path

import pytest
from nearkv_sim.model.native import attention_header
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
