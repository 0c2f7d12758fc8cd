"""The examples in the driver's docstrings."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "nearkv.cache",
        "nearkv.device",
        "nearkv.estimate.steps",
        "nearkv.estimate.sweep",
        "nearkv.estimate.systems",
        "nearkv.pages",
        "nearkv.serving",
        "nearkv.study.maps",
        "nearkv.study.near",
        "nearkv.study.tables",
    ],
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
