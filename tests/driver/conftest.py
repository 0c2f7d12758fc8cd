"""Devices for the driver's tests. The tests of a file share an RTL device, as a start takes its time; files
do not share it, so that what a test meets does not depend on which ran before."""

from collections.abc import Iterator

import nearkv
import pytest
from nearkv.device import Device
from nearkv_hw.abi import Feature


@pytest.fixture(scope="module")
def rtl_device() -> Iterator[Device]:
    with nearkv.open("rtl") as device:
        yield device


@pytest.fixture(params=["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A `small` device of either kind; caches are to be closed by the test that makes them."""
    if request.param == "rtl":
        yield request.getfixturevalue("rtl_device")
    else:
        with nearkv.open("model") as model:
            yield model


@pytest.fixture
def model() -> Iterator[Device]:
    with nearkv.open("model") as device:
        yield device


@pytest.fixture
def plain_model() -> Iterator[Device]:
    """A model device that has nothing beyond plain jobs."""
    with nearkv.open("model", features=Feature(0)) as device:
        yield device
