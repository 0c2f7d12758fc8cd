"""The devices that the tests of this folder run on."""

import pytest
from nearkv_hw.abi import configure
from nearkv_sim.model import ModelPort
from nearkv_sim.model.kernels import KERNELS


@pytest.fixture(params=KERNELS)
def open_port(request):
    """Opens devices of preset `small` on either kernel, with keyword overrides; closes them in the end."""
    ports = []

    def open_one(features=None, **overrides):
        config = configure("small", **overrides)
        ports.append(ModelPort(config, kernel=request.param, features=features))
        return ports[-1]

    yield open_one
    for port in ports:
        port.close()
