"""The driver with the model device keeps the contract: random caches (formats, scales, codebooks, latent
rows, dims, pages) and calls (softcap, ALiBi, windows, query rows, trees, masks, selections), bit by bit."""

import nearkv
import pytest
from contract_cases import seed_of_run
from driver_calls import random_call
from nearkv_hw.abi import Feature
from nearkv_sim.model.kernels import KERNELS

CASES, MANY_CASES = 60, 2000
LESS = Feature.all() & ~(Feature.QUERY_ROWS | Feature.RANGES | Feature.OUTPUT_SCALE | Feature.SHORT_ROWS)
"""What the host can make up for."""


def run(device, name: str, count: int) -> None:
    seed = seed_of_run()
    for index in range(count):
        random_call(f"{seed}/{name}/{index}").check(device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_calls(kernel):
    with nearkv.open("model", kernel=kernel) as device:
        run(device, "all", CASES // len(KERNELS))


def test_random_calls_with_help_of_the_host():
    with nearkv.open("model", features=LESS) as device:
        run(device, "less", CASES // 4)


def test_random_calls_on_the_host():
    with nearkv.open("model", placement="host") as device:
        run(device, "host", CASES // 4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_many_random_calls(kernel):
    with nearkv.open("model", kernel=kernel) as device:
        run(device, "many", MANY_CASES // len(KERNELS))
