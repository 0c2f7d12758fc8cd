"""Jobs with everything that a descriptor can ask for, on either kernel, against the reference: formats,
scales, codebooks, short and latent rows, softcap, ALiBi, query rows, windows, trees, ranges, selection."""

import pytest
from contract_cases import seed_of_run
from variant_jobs import Bench, random_job

JOBS = 60


@pytest.mark.parametrize("part", range(3))
def test_random_jobs(open_port, part):
    seed = seed_of_run()
    bench = Bench(open_port(capacity_bytes=512 << 20))
    for index in range(JOBS // 3):
        bench.check(random_job(f"{seed}/{part}/{index}"))


@pytest.mark.slow
def test_many_random_jobs(open_port):
    seed = seed_of_run()
    bench = Bench(open_port(capacity_bytes=512 << 20))
    for index in range(2000):
        bench.check(random_job(f"{seed}/slow/{index}"))
