"""Checks of hand-written C++ and SystemVerilog: programs under the sanitizers, lint without warnings."""

import secrets
import subprocess

from nearkv_sim.toolchain import find_verilator
from nearkv_sim.verilate import NATIVE

WARNINGS = ("-std=gnu++20", "-Wall", "-Wextra", "-Wconversion", "-Werror")


def sanitized_program(folder, check, sources, *, sanitizers="address,undefined", options=()):
    """The program of the file `check` and native `sources`, built in `folder`, where headers may lie."""
    program = folder / "check"
    flags = ("-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *options)
    files = (check, *(NATIVE / name for name in sources))
    command = ["g++", *WARNINGS, *flags, f"-I{folder}", f"-I{NATIVE}", *files, "-o", program]
    subprocess.run(command, check=True)
    return program


def passes_with_a_random_seed(program):
    """Run a check that takes a seed; its words and the seed where it fails."""
    seed = secrets.randbits(32)
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"


def is_free_of_warnings(name):
    """Lint a native SystemVerilog file."""
    verilator = find_verilator()
    command = [verilator.executable, "--lint-only", "-Wall", NATIVE / name]
    done = subprocess.run(command, env=verilator.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
