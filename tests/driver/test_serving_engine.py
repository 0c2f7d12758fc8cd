"""The serving engine against closed forms, and laws that every run must keep."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from nearkv.errors import ArgumentError
from nearkv.estimate import Setup, device, estimate, of
from nearkv.estimate.layers import fetch_rate, link_rates
from nearkv.estimate.steps import (
    Prompt,
    Rows,
    Work,
    matrices,
    on_gpus,
    prompt_attention,
    seen,
    with_devices,
    with_memory,
    with_tiers,
)
from nearkv.estimate.systems import gpu_room
from nearkv.serving import Engine, Serving, Synthetic, machine, simulate, systems
from serving_cases import ALL, ROW_BYTES, SETUP, prompt_s, request, small, trace

# closed forms


@pytest.mark.parametrize("system", [name for name in ALL if name != "three tiers"])
@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-3.1-70b", 4), ("gemma-3-27b", 2), ("deepseek-v3", 24), ("gpt-oss-20b", 1)]
)
def test_one_request_alone_takes_what_estimate_says(model, gpus, system):
    setup = Setup(model=model, context=131072, batch=8, gpus=gpus, devices=2)
    found = simulate(setup, trace(request(prompt=5000, output=41)), system).outcomes[0]
    steps = [
        of(estimate(replace(setup, context=5000 + done, batch=1)), system).step_s for done in range(1, 41)
    ]
    assert found.token_s == pytest.approx(np.mean(steps), rel=1e-12)
    assert found.first_token_s == pytest.approx(prompt_s(setup, (0, 5000)), rel=1e-12)
    assert found.queued_s == 0
    assert found.finished_s == pytest.approx(found.first_token_s + 40 * found.token_s)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_full_batch_takes_what_estimate_says(micro_batches):
    setup = replace(SETUP, batch=16, micro_batches=micro_batches)
    result = simulate(
        setup, trace(*[request(prompt=500, output=20)] * 16), "gpu+controller", Serving(step_tokens=8192)
    )
    steps = [
        of(estimate(replace(setup, context=500 + done)), "gpu+controller").step_s for done in range(1, 20)
    ]
    assert [one.token_s for one in result.outcomes] == pytest.approx([np.mean(steps)] * 16, rel=1e-12)


def test_rows_that_spill_take_what_estimate_says():
    setup = replace(SETUP, context=1 << 20, devices=2)
    room = int(gpu_room(setup) / ROW_BYTES)
    # an eighth of a gigabyte more than the GPU has room for; growth goes to CXL memory
    prompt = room + 1000
    found = simulate(setup, trace(request(prompt=prompt, output=11)), "gpu+memory", Serving(spill=True))
    steps = [
        of(estimate(replace(setup, context=prompt + done, batch=1)), "gpu+memory").step_s
        for done in range(1, 11)
    ]
    assert found.outcomes[0].token_s == pytest.approx(np.mean(steps), rel=1e-3)
    refused = simulate(setup, trace(request(prompt=prompt, output=11)), "gpu+memory").outcomes[0].refused
    assert (
        refused == f"{prompt + 10} rows of KV have no room; {room} have; --spill lets them lie in CXL memory"
    )


def test_a_long_prompt_goes_in_chunks():
    found = simulate(SETUP, trace(request(prompt=20000)), "gpu", Serving(step_tokens=8192)).outcomes[0]
    chunks = [(0, 8192), (8192, 8192), (16384, 3616)]
    assert found.first_token_s == pytest.approx(sum(prompt_s(SETUP, chunk) for chunk in chunks))


def test_attention_over_prompts_by_hand():
    kind = SETUP.model.attention[0]
    pairs = sum(at + 1 for at in range(100, 400))
    assert seen(100, 300) == pairs
    assert seen(100, 300, window=150) == sum(min(at + 1, 150) for at in range(100, 400))
    work = 2 * pairs * 32 * 256 / (989e12 * 0.7)
    read = 400 * 4096 / (3350e9 * 0.85)
    assert work > read
    assert prompt_attention(SETUP, [(100, 300)]) == pytest.approx(kind.count * (5e-6 + work))


@given(before=some.integers(0, 40), tokens=some.integers(1, 40), window=some.integers(1, 30))
def test_what_a_window_sees(before, tokens, window):
    assert seen(before, tokens, window) == sum(min(at + 1, window) for at in range(before, before + tokens))


def test_steps_with_prompts_by_hand():
    setup = Setup(model="llama-3.1-8b", context=1, batch=1)
    whole = sum(matrices(setup, 4 + 1000).values())
    device, both = [Rows(device=40000)], [Rows(gpu=20000, device=20000)]
    alone = with_devices(setup, Work(batch=4, rows=device, near=4))
    near = alone.seconds - sum(matrices(setup, 4).values())
    hot = with_tiers(setup, Work(batch=4, rows=both, near=4)).parts["gpu attention"]
    for attention_s in (near / 2, near * 2):  # GPUs work on prompts while devices work
        prompt = Prompt(tokens=1000, attention_s=attention_s)
        work = Work(batch=4, rows=device, near=4, prompt=prompt)
        assert with_devices(setup, work).seconds == pytest.approx(whole + max(near, attention_s))
    long = Prompt(tokens=1000, attention_s=1.0)
    assert with_tiers(setup, Work(batch=4, rows=both, near=4, prompt=long)).seconds == pytest.approx(
        whole + hot + 1.0
    )
    on_gpu = on_gpus(setup, Work(batch=4, rows=[Rows(gpu=40000)], near=0)).parts["gpu attention"]
    assert on_gpus(
        setup, Work(batch=4, rows=[Rows(gpu=40000)], near=0, prompt=long)
    ).seconds == pytest.approx(whole + on_gpu + 1.0)
    # rows that prompts need and that lie on devices come meanwhile, unless they are too many
    for form, rows in ((with_devices, device), (with_tiers, both), (with_memory, device)):
        fetched = Prompt(tokens=1000, attention_s=1.0, fetched=3e12)
        step = form(setup, Work(batch=4, rows=rows, near=4, prompt=fetched))
        more = 40000 * ROW_BYTES if form is with_memory else 0
        assert step.seconds == pytest.approx((3e12 + more) / fetch_rate(setup))
        assert step.fetched == 3e12 + more


def test_requests_that_come_together_share_a_step():
    result = simulate(SETUP, trace(request(prompt=1000), request(prompt=2000)), "gpu")
    assert {one.first_token_s for one in result.outcomes} == {prompt_s(SETUP, (0, 1000), (0, 2000))}


def test_waiting_is_that_of_a_queue_with_one_server():
    """One at a time, equal prompts, one token: M/D/1, whose mean wait is rho D / (2 (1 - rho))."""
    setup = replace(SETUP, batch=1)
    served = prompt_s(setup, (0, 2000))
    load = 0.7
    asked = Synthetic(
        requests=40000, rate=load / served, prompt=2000, output=1, spread=0, prefixes=0, seed=3
    ).trace()
    result = simulate(setup, asked, "gpu")
    wait = np.mean([one.queued_s for one in result.outcomes])
    assert wait == pytest.approx(load * served / (2 * (1 - load)), rel=0.05)
    busy = (result.log["ended"] - result.log["began"])[result.log["prompt"] > 0].sum()
    assert busy == pytest.approx(40000 * served)
    # each begins when it has come and the one before is done
    came, end = np.array([one.arrival_s for one in asked.requests]), 0.0
    for at, one in zip(came, result.outcomes, strict=True):
        end = max(end, at) + served
        assert at + one.first_token_s == pytest.approx(end)


# laws


@some.composite
def cases(draw):
    """A system with little room, and requests that want it."""
    model = draw(some.sampled_from(["llama-3.1-8b", "gemma-3-12b", "mistral-7b-v0.1"]))
    setup = Setup(model=model, context=4000, batch=draw(some.sampled_from([1, 3, 16])), devices=2)
    serving = Serving(
        step_tokens=draw(some.sampled_from([64, 512, 8192])),
        host_bytes=draw(some.sampled_from([0, 1 << 28])),
        ssd_bytes=draw(some.sampled_from([0, 1 << 29])),
        spill=draw(some.booleans()),
    )
    system = draw(some.sampled_from(systems(setup)))
    whole = machine(setup, system, serving)
    rows = [draw(some.integers(300, 6000)) for _ in whole.homes]
    size = draw(some.sampled_from([16, 64, 512]))
    requests, at = [], 0.0
    for number in range(draw(some.integers(1, 25))):
        at += draw(some.sampled_from([0.0, 0.01, 1.0]))
        prompt, output = draw(some.integers(1, 2500)), draw(some.integers(1, 300))
        blocks = prompt // size
        shared = draw(some.integers(0, blocks))
        beginning = 1000 * draw(some.integers(0, 2))
        own = range(10**6 * (number + 1), 10**6 * (number + 1) + blocks - shared)
        requests.append(request(at, prompt, output, [*range(beginning, beginning + shared), *own]))
    homes = [replace(home, rows=room) for home, room in zip(whole.homes, rows, strict=True)]
    shrunk = replace(whole, homes=homes, staging_rows=min(whole.staging_rows, rows[0] // 2))
    return Engine(shrunk, trace(*requests, block_tokens=size), serving)


@settings(max_examples=150, deadline=None)
@given(engine=cases())
def test_nothing_is_lost(engine):
    asked, tiers = engine.trace.requests, engine.store.tiers
    result = engine.run()
    found = result.summary()
    assert [one.number for one in result.outcomes] == [*range(len(asked))]
    # every token that was asked for, and no other
    gaps = np.frombuffer(result.gaps).reshape(-1, 2)
    assert gaps[:, 1].sum() == sum(asked[one.number].output - 1 for one in result.answered)
    worked = result.log["prompt"].sum()
    wanted = sum(asked[one.number].prompt - sum(one.hits) + one.repeated for one in result.answered)
    assert worked == wanted or (found["preemptions"] and worked < wanted)
    # all room is given back, and what is kept is what is known
    assert [tier.used for tier in tiers] == [0] * len(tiers)
    assert sum(len(tier.kept) for tier in tiers) == len(engine.store.blocks)
    for at, tier in enumerate(tiers):
        assert (result.log[f"used{at}"] + result.log[f"kept{at}"] <= tier.rows).all()
    # no link carries more than it can
    log, machine = result.log, engine.machine
    if machine.device is not None:
        could = machine.homes[machine.device].rate * (log["ended"] - log["began"])
        assert (log["read"] <= could * (1 + 1e-9) + 1).all()
    # time goes on, and requests take some
    assert (np.diff(result.log["ended"]) >= 0).all()
    for one in result.outcomes:
        if one.refused:
            assert "no room" in one.refused
        else:
            assert 0 <= one.queued_s < one.first_token_s <= one.finished_s


@settings(max_examples=40, deadline=None)
@given(seed=some.integers(0, 1000), system=some.sampled_from(ALL))
def test_steps_in_one_go_are_the_same_steps(seed, system):
    """A request that is refused ends a run of steps, and changes nothing else."""
    asked = Synthetic(requests=20, rate=4, prompt=2000, output=150, seed=seed).trace()
    last = asked.requests[-1].arrival_s + 5
    random = np.random.default_rng(seed)
    too_long = [request(at, prompt=1 << 20) for at in random.uniform(0, last, 200)]
    mixed = sorted([*asked.requests, *too_long], key=lambda one: one.arrival_s)
    alone, disturbed = (
        simulate(SETUP, replace(asked, requests=requests), system) for requests in (asked.requests, mixed)
    )
    assert len(disturbed.log["ended"]) > len(alone.log["ended"])
    for ours, theirs in zip(alone.outcomes, disturbed.answered, strict=True):
        assert replace(theirs, number=0) == replace(ours, number=0)


@pytest.mark.parametrize("system", ALL)
def test_what_is_over_leaves_nothing_behind(system):
    """A request that comes when all others are through takes what it takes alone."""
    setup = replace(SETUP, batch=16)
    busy = Synthetic(requests=60, rate=200, prompt=600, output=300, prefixes=0, seed=4).trace().requests
    last = request(at=1e4, prompt=2300, output=200)
    rows = [1500, 3000][-len(machine(setup, system, Serving()).homes) :]
    serving = Serving(prefix_cache=False)
    alone, after = (
        Engine(
            small(system, *rows, setup=setup, serving=serving, below=[10**6] * (system == "gpu+memory")),
            trace(*requests),
            serving,
        )
        .run()
        .outcomes[-1]
        for requests in ([replace(last, arrival_s=0.0)], [*busy, last])
    )
    assert after.first_token_s == pytest.approx(alone.first_token_s)
    assert after.token_s == pytest.approx(alone.token_s)


def test_those_admitted_last_give_way():
    """Two sequences of 3 blocks and room for 4: the second gives way once, and is answered in full."""
    asked = trace(request(prompt=900, output=600), request(prompt=900, output=600))
    result = Engine(small("gpu", 2048), asked, Serving()).run()
    assert [one.preemptions for one in result.outcomes] == [0, 1]
    # what it had been answered, and its prompt, are worked on again
    assert result.outcomes[1].repeated == 900 + 1 + (2048 - 1800) // 2
    assert result.summary()["output_tokens"] == 1200


def test_only_what_was_worked_on_before_is_repeated():
    """Nine tokens of a step are left for the second prompt, which gives way in the middle, 49 steps on."""
    asked = trace(request(prompt=900, output=200), request(at=1e-3, prompt=1100))
    setup, serving = replace(SETUP, batch=2), Serving(step_tokens=10)
    result = Engine(small("gpu", 2048, setup=setup, serving=serving), asked, serving).run()
    assert [one.preemptions for one in result.outcomes] == [0, 1]
    grown = 2048 - 900 - 1100
    assert result.outcomes[1].repeated == result.log["prompt"].sum() - 900 - 1100
    assert 0 < result.outcomes[1].repeated <= 9 * grown + 10


def test_the_same_trace_gives_the_same_result():
    asked = Synthetic(requests=50, rate=5, seed=5).trace()
    first, second = (simulate(SETUP, asked, "three tiers") for _ in range(2))
    assert first.summary() == second.summary()
    assert first.rows() == second.rows()


@pytest.mark.parametrize("system", ALL)
def test_more_hardware_is_not_slower_for_one_request(system):
    asked = trace(request(prompt=30000, output=50))
    base = simulate(SETUP, asked, system).outcomes[0]
    for more in ({"devices": 4}, {"gpu": "h200"}, {"launch_s": 1e-6}, {"gpus": 2}):
        found = simulate(Setup(**{**vars(SETUP), **more}), asked, system).outcomes[0]
        assert found.first_token_s <= base.first_token_s
        assert found.token_s <= base.token_s * (1 + 1e-12)


@pytest.mark.parametrize("system", ["gpu", "gpu+controller"])
def test_a_faster_trace_waits_longer(system):
    asked = Synthetic(requests=200, rate=1, prompt=8000, seed=2).trace()
    slow, fast = (simulate(SETUP, asked.scaled(speedup=times), system).summary() for times in (1, 20))
    assert fast["time_to_first_token_s"]["median"] > slow["time_to_first_token_s"]["median"]
    assert fast["seconds"] < slow["seconds"]


# traffic


def test_rows_are_written_to_devices_once():
    result = simulate(SETUP, trace(request(prompt=3000, output=101)), "gpu+controller")
    queries = 100 * 32 * 64 * (32 * 4 + 8)  # a step's queries and descriptors in 32 layers
    assert result.link_written_bytes == pytest.approx(3100 * ROW_BYTES + queries)
    assert result.link_read_bytes == pytest.approx(queries)  # results and records are as long
    host = simulate(SETUP, trace(request(prompt=3000, output=101)), "gpu+host")
    assert host.link_read_bytes == pytest.approx(sum(range(3001, 3101)) * ROW_BYTES)
    assert simulate(SETUP, trace(request(prompt=3000, output=101)), "gpu").link_read_bytes == 0


def test_a_link_that_writes_slowly_holds_prompts_up():
    setup = replace(SETUP, devices=1, hosts=32)
    found = simulate(setup, trace(request(prompt=8000)), "gpu+controller").outcomes[0]
    assert found.first_token_s == pytest.approx(8000 * ROW_BYTES / link_rates(setup)[0])


# refusals


def test_refusals_are_counted_and_told():
    setup = replace(SETUP, context=5000)
    result = simulate(setup, trace(request(prompt=4990, output=11), request(prompt=100)), "gpu")
    assert result.summary()["refused"] == 1
    assert result.outcomes[0].refused == (
        "5001 tokens are more than the longest that is accepted (--max-context), 5000"
    )
    none = simulate(setup, trace(request(prompt=9000)), "gpu")
    assert (none.summary()["answered"], none.summary()["hit_share"]["all"]) == (0, 0)
    full = Engine(small("gpu+controller", 400), trace(request(prompt=400, output=2)), Serving()).run()
    assert full.outcomes[0].refused == "401 rows of KV have no room; 400 have"


def test_windows_take_their_room():
    setup = Setup(model="gemma-3-27b", context=131072, batch=8)
    whole = machine(setup, "gpu", Serving())
    assert whole.extra_rows(100) == -(-100 * 52 // 10)
    assert whole.extra_rows(50000) == -(-1024 * 52 // 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step_tokens": 0}, "step_tokens=0"),
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"ssd_bandwidth": 0}, r"ssd_bandwidth=0: must be above 0 bytes/s"),
    ],
)
def test_bad_serving(given, message):
    with pytest.raises(ArgumentError, match=message):
        Serving(**given)


def test_bad_questions():
    one = trace(request())
    with pytest.raises(ArgumentError, match=r"system='gpu\+x': there are gpu, gpu\+memory, gpu\+rank"):
        simulate(SETUP, one, "gpu+x")
    with pytest.raises(ArgumentError, match=r"weights of llama-3\.1-70b have no room; they take 2 GPUs"):
        simulate(Setup(model="llama-3.1-70b", context=1000), one, "gpu")
    with pytest.raises(
        ArgumentError, match="step_tokens=64: must be more than batch=64, or prompts never get"
    ):
        simulate(SETUP, one, "gpu", Serving(step_tokens=64))
    wide = Setup(model="llama-3.1-8b", context=1000, config=device(channels=16))
    assert "gpu+rank" not in systems(wide)
    assert (
        systems(Setup(model="llama-3.1-8b", context=1000, config=device(placement="host")))[-1] == "gpu+host"
    )
