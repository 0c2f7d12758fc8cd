"""The examples in the driver's docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[2] / "driver"
MODULES = [
    ".".join(path.relative_to(DRIVER).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(DRIVER.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
