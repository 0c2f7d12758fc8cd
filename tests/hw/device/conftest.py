"""Devices for the tests here: every test runs on the RTL, and on the model where it behaves the same."""

import os
import random
import secrets

import pytest
from nearkv_hw.abi import configure
from nearkv_hw.features import FEATURES


@pytest.fixture(params=["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def open_port(request):
    """A function that opens a port of `small`; what it opened is closed at the end."""
    opened = []

    def open_one():
        config = configure("small")
        if request.param == "model":
            from nearkv_sim.model import ModelPort

            opened.append(ModelPort(config, features=FEATURES))
        else:
            from nearkv_sim.rtl import RtlPort

            opened.append(RtlPort(config))
        return opened[-1]

    open_one.kind = request.param
    yield open_one
    for port in opened:
        port.close()


@pytest.fixture
def rng():
    """A random generator whose seed is printed; NEARKV_SEED repeats a run."""
    seed = int(os.environ.get("NEARKV_SEED", "0")) or secrets.randbits(31)
    print(f"NEARKV_SEED={seed}")
    return random.Random(seed)
