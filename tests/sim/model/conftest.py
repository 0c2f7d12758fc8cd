"""The devices that the tests of this folder run on."""

import pytest
from nearkv_hw.abi import configure
from nearkv_sim.model import ModelPort


@pytest.fixture
def open_port():
    """Opens devices of preset `small`, with keyword overrides; closes them after the test."""
    ports = []

    def open_one(**overrides):
        ports.append(ModelPort(configure("small", **overrides)))
        return ports[-1]

    yield open_one
    for port in ports:
        port.close()
