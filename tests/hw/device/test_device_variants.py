"""The RTL under random jobs of every variant: what it has gives the reference's bits, the rest is refused."""

from contextlib import closing

import pytest
from contract_cases import seed_of_run
from nearkv_hw.abi import Status, configure
from nearkv_hw.features import FEATURES
from nearkv_sim.cocotb.port import CocotbPort
from nearkv_sim.model import ModelPort
from nearkv_sim.rtl import RtlPort
from variant_jobs import Bench, random_job

pytestmark = pytest.mark.rtl

JOBS = 60


def run_jobs(count, name, open_rtl=RtlPort):
    """So many random jobs that the RTL has features for, and those it meets until then."""
    seed = seed_of_run()
    config = configure("small", capacity_bytes=512 << 20)
    with closing(open_rtl(config)) as rtl, closing(ModelPort(config, features=FEATURES)) as model:
        devices = [Bench(port, partly=True) for port in (model, rtl)]
        taken = index = 0
        while taken < count:
            job = random_job(f"{seed}/{name}/{index}")
            expected, status = (device.check(job) for device in devices)
            assert status == expected, f"seed {job.seed!r}: {status!r}, not {expected!r}"
            taken += status is Status.OK
            index += 1
    print(f"{taken} jobs of {index} had all that they need")


def test_random_jobs():
    run_jobs(JOBS, "few")


@pytest.mark.slow
def test_many_random_jobs():
    run_jobs(2000, "many")


@pytest.mark.slow
def test_random_jobs_under_cocotb():
    """The same in a simulator of its own, every stream shaken and checked."""
    run_jobs(JOBS, "cocotb", CocotbPort)
