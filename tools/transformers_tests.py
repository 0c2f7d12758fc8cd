#!/usr/bin/env python3
"""transformers' own generation tests, with attention and caches on the `model` device.

Runs the tests that GenerationTesterMixin gives each model twice, as they are (eager attention) and with every
`generate` on a device, and says which of those that pass as they are pass on the device, too.

    git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers checkout
    pip install parameterized httpx
    python tools/transformers_tests.py checkout llama mistral

The checkout is to be of the version that is installed; its tests run in a process and a folder of their own.
Exits with 1 when fewer than 90 % pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ENOUGH = 0.9
_RESULTS, _WHERE = "NEARKV_RESULTS", "NEARKV_WHERE"
_TOOLS = str(Path(__file__).resolve().parent)

Outcomes = Mapping[str, tuple[str, str]]
"""By test: "passed", "failed" or "skipped", and the last line of what it said."""


def main(arguments: list[str] | None = None) -> int:
    """Run both and compare; the exit status."""
    parser = argparse.ArgumentParser(description="transformers' generation tests with KV on a device")
    parser.add_argument("checkout", type=Path, help="a checkout of transformers, of the installed version")
    parser.add_argument("models", nargs="+", help="folders of tests/models: llama, mistral, ...")
    parser.add_argument("--select", default="", help="pytest's -k, to run some of them")
    options = parser.parse_args(arguments)
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in options.models]
    missing = [name for name in files if not (options.checkout / name).is_file()]
    if missing:
        parser.error(
            f"{options.checkout} has no {missing[0]}: name a checkout of transformers and its models"
        )
    eager = outcomes(options.checkout, files, "eager", options.select)
    device = outcomes(options.checkout, files, "device", options.select)
    lines, enough = compared(eager, device)
    print("\n".join(lines))
    return 0 if enough else 1


def outcomes(checkout: Path, files: list[str], where: str, select: str) -> Outcomes:
    """What the generation tests in some files come to, run "eager" or on the "device"."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        paths = [_TOOLS, str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "HF_HUB_OFFLINE": "1",
            _RESULTS: str(results),
            _WHERE: where,
        }
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-W", "ignore"]
        command += ["-p", "no:cacheprovider", "-p", "transformers_tests", *files]
        command += ["-k", select] if select else []
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        found: Outcomes = json.loads(results.read_text())
        return found


def compared(eager: Outcomes, device: Outcomes) -> tuple[list[str], bool]:
    """A report, and whether enough of what passes as it is passes on the device."""
    passing = [name for name, (outcome, _) in eager.items() if outcome == "passed"]
    if not passing:
        return ["no test passes as it is: is the checkout of the installed version?"], False
    also = [name for name in passing if device.get(name, ("", ""))[0] == "passed"]
    lines = [
        f"{len(also)} of {len(passing)} tests that pass with eager attention pass on the device "
        f"({len(also) / len(passing):.1%})"
    ]
    lines += [
        f"  {name}: {': '.join(device.get(name, ('not run', '')))}" for name in passing if name not in also
    ]
    return lines, len(also) >= ENOUGH * len(passing)


# What follows is the plugin that pytest loads in the process of the tests.

_found: dict[str, tuple[str, str]] = {}


def pytest_configure(config: object) -> None:
    """Have `generate` put its model on a device first."""
    if os.environ.get(_WHERE) == "device":
        _generate_on_device()


def pytest_collection_modifyitems(config: object, items: list) -> None:
    """Keep what GenerationTesterMixin has."""
    from tests.generation.test_utils import GenerationTesterMixin

    items[:] = [item for item in items if hasattr(GenerationTesterMixin, item.originalname or "")]


def pytest_runtest_logreport(report: object) -> None:
    """Note how a test ended: by its call, or by what kept it from being called."""
    if report.when == "call" or report.outcome != "passed":
        said = str(report.longrepr).strip().splitlines() if report.failed else [""]
        reasons = [line[2:].strip() for line in said if line.startswith("E ")]
        _found[report.nodeid] = (report.outcome, (reasons or said)[0])


def pytest_sessionfinish(session: object) -> None:
    """Write the outcomes down."""
    if _RESULTS in os.environ:
        Path(os.environ[_RESULTS]).write_text(json.dumps(_found))


def _generate_on_device() -> None:
    import weakref

    import nearkv
    from nearkv import hf
    from transformers import GenerationMixin

    device = nearkv.open("model")
    known: weakref.WeakSet = weakref.WeakSet()
    generate = GenerationMixin.generate

    def on_device(self: object, *args: object, **kwargs: object) -> object:
        if self not in known:
            cache = hf.attach(self, device)
            weakref.finalize(self, cache.store.cache.close)
            known.add(self)
        return generate(self, *args, **kwargs)

    GenerationMixin.generate = on_device


if __name__ == "__main__":
    sys.exit(main())
