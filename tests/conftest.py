"""Paths of test helpers, and a list of what each test file proves."""

import ast
import sys
from collections import Counter
from pathlib import Path

import torch

TESTS = Path(__file__).parent

torch.set_num_threads(1)  # tests run one to a core

for folder in ("support", "conformance"):
    sys.path.insert(0, str(TESTS / folder))


def pytest_addoption(parser):
    parser.addoption(
        "--proofs", action="store_true", help="list what each test file proves, with its outcome"
    )


def pytest_terminal_summary(terminalreporter, config):
    """With --proofs: every file that ran, how its tests ended, and its docstring."""
    if not config.getoption("--proofs"):
        return
    outcomes = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if getattr(report, "when", "call") == "call" or outcome != "passed":
                path = report.nodeid.partition("::")[0]
                outcomes.setdefault(path, Counter())[outcome] += 1
    terminalreporter.section("what was proved")
    for path, counts in sorted(outcomes.items()):
        terminalreporter.write_line(
            f"{path}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        )
        docstring = (
            ast.get_docstring(ast.parse((TESTS.parent / path).read_text())) or "(says nothing of itself)"
        )
        terminalreporter.write_line("    " + docstring.replace("\n", "\n    "))
