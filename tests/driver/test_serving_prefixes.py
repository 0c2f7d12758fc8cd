"""Prefixes in tiers of memory: who finds what where, what makes room, and how long loads take."""

from dataclasses import replace

import numpy as np
import pytest
from nearkv.estimate.layers import fetch_rate
from nearkv.serving import Engine, Serving, simulate
from serving_cases import ALL, ROW_BYTES, SETUP, SIZE, prompt_s, request, small, trace


@pytest.mark.parametrize("system", ALL)
def test_share_of_a_known_prefix(system):
    """Twenty requests one after the other share 3 of 4 blocks: all but the first find these."""
    asked = [request(at=10.0 * number, prompt=2100, blocks=[0, 1, 2, 100 + number]) for number in range(20)]
    found = simulate(SETUP, trace(*asked), system).summary()
    assert found["hit_share"]["all"] == pytest.approx(19 * 3 * SIZE / (20 * 2100))
    assert (
        simulate(SETUP, trace(*asked), system, Serving(prefix_cache=False)).summary()["hit_share"]["all"] == 0
    )


def test_one_token_is_always_worked_on():
    asked = [request(at=10.0 * number, prompt=1024, blocks=[0, 1]) for number in range(2)]
    assert simulate(SETUP, trace(*asked), "gpu").outcomes[1].hits == (512,)


def test_a_prefix_that_is_not_worked_out_yet_is_not_found():
    result = simulate(
        SETUP, trace(request(prompt=1100, blocks=[0, 1]), request(prompt=1100, blocks=[0, 1])), "gpu"
    )
    assert [one.hits for one in result.outcomes] == [(0,), (0,)]


def test_what_a_found_prefix_saves():
    asked = trace(request(prompt=8000, blocks=range(15)), request(at=100, prompt=8000, blocks=range(15)))
    rest, before = 8000 - 15 * SIZE, 15 * SIZE
    on_gpu = simulate(SETUP, asked, "gpu").outcomes[1]
    assert on_gpu.first_token_s == pytest.approx(prompt_s(SETUP, (before, rest)))
    # on devices they are attended in place, but prompts need them on the GPU: they are loaded once, before
    near = simulate(SETUP, asked, "gpu+controller").outcomes[1]
    loaded = before * ROW_BYTES / fetch_rate(SETUP)
    assert near.hits == (before,)
    assert near.first_token_s == pytest.approx(loaded + prompt_s(SETUP, (before, rest)))


def test_least_recently_used_goes_first_and_comes_back_from_below():
    """GPU memory for 5 blocks, host memory for 2, and A, B, C of 2 blocks each: A goes down when C comes."""
    serving = Serving(host_bytes=1 << 30)
    asked = [
        request(at=10.0 * number, prompt=1030, blocks=[10 * which, 10 * which + 1])
        for number, which in enumerate((1, 2, 3, 1, 2))
    ]
    engine = Engine(small("gpu", 5 * SIZE, serving=serving, below=[2 * SIZE]), trace(*asked), serving)
    result = engine.run()
    # A is pushed out by C, but for a block's worth; then A comes back from both, and pushes out B
    assert [sum(one.hits) for one in result.outcomes] == [0, 0, 0, 1024, 1024]
    assert result.outcomes[3].hits[1] > 0
    assert result.loaded[1] == pytest.approx(sum(one.hits[1] for one in result.outcomes) * ROW_BYTES)
    rate = engine.machine.below[0].rate
    back = result.outcomes[3]
    assert back.first_token_s == pytest.approx(
        back.hits[1] * ROW_BYTES / rate + prompt_s(SETUP, (1024, 6)), rel=1e-6
    )


def test_the_end_of_a_prompt_is_pushed_out_first():
    """Room for one block less than a prompt's two and what comes after: its first block stays."""
    asked = [
        request(prompt=1030, blocks=[0, 1]),
        request(at=10, prompt=1200),
        request(at=20, prompt=1030, blocks=[0, 1]),
    ]
    result = Engine(small("gpu", 2148), trace(*asked), Serving()).run()
    assert result.outcomes[2].hits == (SIZE,)


def test_who_finds_what_is_on_its_way_waits_for_it():
    first = request(prompt=60000, blocks=range(117))
    asked = trace(first, request(at=50, prompt=60000), *[replace(first, arrival_s=100.0)] * 2)
    serving = Serving(ssd_bytes=1 << 40, ssd_bandwidth=1e9)
    result = Engine(small("gpu", 62000, serving=serving, below=[1 << 20]), asked, serving).run()
    loaded = result.loaded[1]
    assert loaded == pytest.approx(sum(result.outcomes[2].hits[1:]) * ROW_BYTES)
    assert all(one.first_token_s > loaded / 1e9 for one in result.outcomes[2:])


def test_steps_and_loads_share_the_link():
    """Rows that are fetched for every token, and two loads of as many rows: half of the link each."""
    again = request(at=3.0, prompt=40000, blocks=range(78))
    asked = trace(request(prompt=40000, output=60, blocks=range(78)), again, again)
    result = simulate(SETUP, asked, "gpu+host")
    gaps = np.frombuffer(result.gaps).reshape(-1, 2)[:, 0]
    alone = 40000 * ROW_BYTES / fetch_rate(SETUP)
    shared = gaps[gaps > 1.9 * alone]
    assert shared == pytest.approx([2 * alone] * len(shared), rel=2e-3)
    assert len(shared) == 2  # each load takes as long as one step


def test_rows_that_gpu_memory_does_not_hold_are_fetched_for_every_chunk():
    chunks = [(at, 1000) for at in range(0, 20000, 1000)]
    serving = Serving(step_tokens=1000)
    setup = replace(SETUP, batch=8)
    asked = trace(request(prompt=20000))
    plain = small("gpu+controller", 30000, setup=setup, serving=serving)
    staged = Engine(replace(plain, staging_rows=4500), asked, serving).run()
    assert staged.link_read_bytes == pytest.approx(
        sum(max(0, before - 4500) for before, _ in chunks) * ROW_BYTES
    )
    # two homes: three whole blocks on the GPU, the rest on devices or in CXL memory
    for system in ("three tiers", "gpu+memory"):
        spill = replace(serving, spill=True)
        tiers = Engine(small(system, 2000, 30000, setup=setup, serving=spill), asked, spill).run()
        assert tiers.link_read_bytes == pytest.approx(
            sum(max(0, before - 3 * SIZE) for before, _ in chunks) * ROW_BYTES
        )
        assert tiers.link_written_bytes == pytest.approx((20000 - 3 * SIZE) * ROW_BYTES)


@pytest.mark.parametrize("at", [706790.313251521, 1e9])
def test_loads_come_however_late_it_is(at):
    """A week into a trace the last bytes of a load take less time than the clock can tell."""
    again = request(prompt=60000, blocks=range(117))
    asked = trace(again, request(at=at - 50, prompt=60000), replace(again, arrival_s=at))
    setup, serving = replace(SETUP, gpus=8), Serving(host_bytes=1 << 40)
    engine = Engine(small("gpu", 62000, setup=setup, serving=serving, below=[1 << 20]), asked, serving)
    last = engine.run().outcomes[2]
    assert last.hits == (3 * SIZE, 114 * SIZE)
    loaded = 114 * SIZE * ROW_BYTES / engine.machine.below[0].rate
    assert last.first_token_s == pytest.approx(
        loaded + prompt_s(setup, (117 * SIZE, 60000 - 117 * SIZE)), abs=1e-6
    )


def test_a_slow_drive_is_slow():
    asked = [request(prompt=60000, blocks=range(117)), request(at=50, prompt=60000, blocks=range(200, 317))]
    asked.append(request(at=100, prompt=60000, blocks=range(117)))
    serving = Serving(ssd_bytes=1 << 40, ssd_bandwidth=1e9)
    engine = Engine(small("gpu", 62000, serving=serving, below=[1 << 20]), trace(*asked), serving)
    last = engine.run().outcomes[2]
    assert last.hits == (3 * SIZE, 114 * SIZE)  # 2,000 rows were free: the first three blocks have stayed
    assert last.first_token_s == pytest.approx(
        114 * SIZE * ROW_BYTES / 1e9 + prompt_s(SETUP, (117 * SIZE, 60000 - 117 * SIZE))
    )


def test_memory_keeps_prefixes_that_devices_hand_back():
    """The same trace finds as much in CXL memory as on devices, and reads each row once."""
    asked = trace(
        *[
            request(at=9.0 * n, prompt=40000, blocks=range(1000 * (n % 3), 1000 * (n % 3) + 78))
            for n in range(9)
        ]
    )
    memory = simulate(SETUP, asked, "gpu+memory").summary()
    near = simulate(SETUP, asked, "gpu+controller").summary()
    assert (
        memory["hit_share"]["all"] == near["hit_share"]["all"] == pytest.approx(6 * 78 * SIZE / (9 * 40000))
    )
    assert near["loaded_bytes"]["device"] == pytest.approx(6 * 78 * SIZE * ROW_BYTES)
