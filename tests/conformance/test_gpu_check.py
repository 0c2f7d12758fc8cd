"""The GPU check itself, where there is no GPU: it says so, its self-test passes, and it can fail."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"


def run(*arguments, code=None):
    command = [sys.executable, *(("-c", code) if code else (str(SCRIPT),)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the check runs")
def test_it_says_that_it_did_not_run():
    done = run()
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["gpu-check did NOT run: no CUDA device"]


def test_self_test_runs_everything():
    done = run("--device", "cpu", "--cases", "24", "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("gpu-check SELF-TEST: CPU against CPU")
    assert lines[1].endswith("seed 5")
    assert "vectors: 60 of 60 equal" in lines
    assert "random cases: 24 of 24 equal" in lines
    assert lines[-1].startswith("gpu-check SELF-TEST passed")


def test_it_needs_nothing_but_numpy_and_torch():
    code = f"""
import runpy, sys
sys.argv = ["gpu_check.py", "--device", "cpu", "--cases", "1"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
except SystemExit as done:
    assert done.code == 0
ours = {{name.partition(".")[0] for name in sys.modules}}
print("extra:", sorted(ours & {{"typer", "rich", "amaranth", "cocotb", "platformdirs", "nearkv_sim"}}))
"""
    done = run(code=code)
    assert done.stdout.splitlines()[-1] == "extra: []", done.stdout + done.stderr


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    return gpu_check


def test_a_wrong_bit_of_an_operation_fails(script, monkeypatch, capsys):
    import gpu_operations

    def wrong(x):
        wrong.calls += 1
        return x.shift + wrong.calls

    wrong.calls = 0
    monkeypatch.setattr(gpu_operations, "operations", lambda: [gpu_operations.Operation("c", "wrong", wrong)])
    assert script.main(["--device", "cpu", "--cases", "0"]) == 1
    output = capsys.readouterr().out
    assert "UNEQUAL: operation wrong" in output
    assert "gpu-check SELF-TEST FAILED: 1 differences; repeat with --seed" in output


def test_a_wrong_bit_of_a_case_fails(script, monkeypatch, capsys):
    import contract_cases
    import nearkv.reference.binned as binned

    honest, calls = contract_cases.Case.partial, []

    def partial(case):
        """Every second partial has one limb off by one."""
        result = honest(case)
        calls.append(case)
        if len(calls) % 2 == 0:
            high = result.denominator.high + 1
            state = binned.State(result.denominator.top, high, result.denominator.low)
            return type(result)(state, result.numerators, result.query_nan, result.lane_flags)
        return result

    monkeypatch.setattr(contract_cases.Case, "partial", partial)
    assert list(script.check_random_cases("cpu", 1, 3))
    assert "UNEQUAL: random case" in capsys.readouterr().out
    assert list(script.check_vectors("cpu"))
    assert "UNEQUAL: vector" in capsys.readouterr().out
