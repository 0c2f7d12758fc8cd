"""Estimates of whole systems: cases worked by hand, what must grow with what, and refusals."""

from dataclasses import replace

import pytest
from nearkv.errors import ArgumentError
from nearkv.estimate import GPUS, Setup, Value, device, estimate, gpu, kv_format, of
from nearkv.estimate.layers import fetch_rate, gpu_seconds, link_rates, on_devices
from nearkv.estimate.steps import matrices
from nearkv.estimate.systems import gpu_room
from nearkv_hw.abi import configure
from nearkv_sim.model import timing

CARD = device()
ALL = ["gpu", "gpu+memory", "gpu+rank", "gpu+phy", "gpu+controller", "gpu+fabric", "gpu+host", "three tiers"]


def setup(**given):
    return Setup(**{"model": "llama-3.1-70b", "context": 131072, "gpus": 2, **given})


def ms(found):
    return found.step_s * 1e3


def test_all_systems():
    assert [a.system for a in estimate(setup())] == ALL
    # 16 channels leave no room for ranks; without units there are no tiers
    wide = configure("card", channels=16)
    assert "gpu+rank" not in [a.system for a in estimate(setup(config=wide))]
    assert estimate(setup(config=device(placement="host")))[-1].system == "gpu+host"


def test_gpu_by_hand():
    one = setup()
    model, h100 = one.model, one.gpu
    rate = 2 * 3350e9 * 0.85
    assert matrices(one, 1)["weights"] == pytest.approx(2 * (model.parameters - model.embedding) / rate)
    attention = gpu_seconds(one, model.attention[0], 131072, 1)
    assert attention == pytest.approx(5e-6 + 4096 * 131072 / rate)
    # per layer two reductions of 5 microseconds and 16 KiB at half and half
    assert matrices(one, 1)["gpu interconnect"] == pytest.approx(160 * (5e-6 + 8192 * 2 / 450e9))
    assert gpu_room(one) == pytest.approx(2 * (81559 << 20) * 0.9 - model.weight_bytes)
    found = of(estimate(one), "gpu")
    assert found.step_s == pytest.approx(sum(matrices(one, 1).values()) + 80 * attention)
    assert h100.memory_bytes.value == 81559 << 20


def test_memory_without_compute_by_hand():
    # 40 GiB less what the GPUs hold, at 4 * 51.2 GB/s of DRAM or the 63 GB/s of two GPUs, or the link's 108.3
    one = setup()
    found = of(estimate(one), "gpu+memory")
    fetched = 40 * 2**30 - gpu_room(one)
    assert fetch_rate(one) == pytest.approx(108.3e9, rel=0.001)
    assert found.step_s == pytest.approx(fetched / fetch_rate(one))
    assert found.bound == "link"
    assert found.link_bytes == pytest.approx(fetched)
    assert found.split.gpu + found.split.device == pytest.approx(1)


def test_device_by_hand():
    one = setup()
    found = of(estimate(one), "gpu+controller")
    work = timing.uniform(
        CARD, jobs=8, rows=131072, group=8, value_dim=128, row_lines=8, query_lines=4, result_lines=5
    )
    device = 80 * timing.call(CARD, work) / 800e6
    # 64 query heads of 4 lines and 8 descriptors out; 64 results of 4 lines (bf16) and 8 records in
    out, back = 64 * (64 * 4 + 8), 64 * (64 * 4 + 8)
    writes, reads = link_rates(one)
    assert found.link_bytes == 80 * (out + back)
    assert found.parts["device memory"] == pytest.approx(device)
    assert found.parts["link"] == pytest.approx(80 * (out / writes + back / reads))
    assert found.parts["round trips"] == pytest.approx(80 * (5e-6 + 3.5 * 284.5e-9), rel=1e-5)
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    # 42.9 GB at 204.8 GB/s, of which refresh and rows leave nine tenths: 233 ms
    assert device == pytest.approx(0.233, rel=0.02)


def test_micro_batches_overlap():
    one, two = (of(estimate(setup(batch=8, devices=4, micro_batches=m)), "gpu+controller") for m in (1, 2))
    assert two.step_s < one.step_s
    assert two.step_s >= max(two.parts["device memory"], two.parts["weights"])
    assert two.parts["weights"] == pytest.approx(2 * one.parts["weights"])


def test_three_tiers_by_hand():
    one = setup(devices=1, capacity_bytes=16 << 30)
    found = of(estimate(one), "three tiers")
    whole = 40 * 2**30
    assert found.fits
    assert found.split.gpu == pytest.approx(gpu_room(one) / whole)
    assert found.split.device == pytest.approx(16 / 40)
    assert found.split.gpu + found.split.device + found.split.host == pytest.approx(1)
    cold = found.split.host * whole
    assert found.step_s >= cold / (2 * 63e9)


def test_three_tiers_take_the_best_share():
    for context in (4096, 131072, 1 << 20):
        answers = estimate(Setup(model="llama-3.1-8b", context=context, devices=4))
        best = min(of(answers, name).step_s for name in ("gpu", "gpu+controller") if of(answers, name).fits)
        assert of(answers, "three tiers").step_s <= 1.001 * best


def test_what_does_not_fit():
    answers = estimate(setup(gpus=1))
    assert {a.why_not for a in answers} == {"weights: they take 2 GPUs"}
    assert {a.max_batch for a in answers} == {0}
    small = estimate(setup(capacity_bytes=10 << 30))
    assert of(small, "gpu+controller").why_not == "KV rows: 75 % have no room"
    assert of(small, "gpu+controller").max_batch == 0
    assert of(small, "three tiers").fits


@pytest.mark.parametrize("system", ALL)
def test_more_work_is_not_quicker(system):
    base = of(estimate(setup()), system)
    for more in ({"context": 262144}, {"batch": 2}, {"model": "llama-3.1-405b"}):
        assert of(estimate(setup(**more)), system).step_s > base.step_s


@pytest.mark.parametrize("system", ALL[1:])
def test_more_hardware_is_not_slower(system):
    base = of(estimate(setup(batch=8)), system)
    for more in ({"gpus": 4}, {"devices": 2}, {"kv_format": "fp8_e4m3"}, {"launch_s": 1e-6}):
        assert of(estimate(setup(batch=8, **more)), system).step_s <= base.step_s


@pytest.mark.parametrize("system", ["gpu+memory", "gpu+controller", "gpu+host"])
def test_contention_costs(system):
    base = of(estimate(setup()), system)
    shared = of(estimate(setup(hosts=2, devices=1)), system)
    assert shared.step_s > 1.2 * base.step_s
    if system == "gpu+controller":
        assert of(estimate(setup(switch=True)), system).step_s == pytest.approx(
            base.step_s + 80 * 3.5 * 140e-9
        )
        assert of(estimate(setup(host_share=0.3)), system).step_s > base.step_s


def test_placements_order():
    found = {a.system: a.step_s for a in estimate(setup())}
    assert found["gpu+rank"] < found["gpu+controller"] == found["gpu+phy"] <= found["gpu+fabric"]
    assert found["gpu+fabric"] < found["gpu+host"]


def test_windows_take_what_they_keep():
    gemma = Setup(model="gemma-3-27b", context=131072)
    layer = gemma.model.attention[0]
    assert layer.window == 1024
    assert on_devices(gemma, layer, layer.rows(131072), 1, partial=False).lines == 16 * 1024 * 8
    twice = of(estimate(replace(gemma, context=262144)), "gpu+controller")
    assert twice.link_bytes == of(estimate(gemma), "gpu+controller").link_bytes


def test_rows_are_shared_out_when_jobs_are_few():
    kind = setup().model.attention[0]
    one = on_devices(setup(devices=8), kind, 131072, 1, partial=False)
    two = on_devices(setup(devices=16), kind, 131072, 1, partial=False)
    assert two.seconds == pytest.approx(one.seconds / 2, rel=0.01)
    assert two.in_bytes > 4 * one.in_bytes  # partials


def test_latent_attention_is_bound_by_the_units():
    found = of(estimate(Setup(model="deepseek-v3", context=131072, gpu="h200", gpus=8)), "gpu+controller")
    assert found.bound == "device issue"


def test_energy_bands():
    for answer in estimate(setup()):
        band = answer.energy_per_token
        assert 0 < band.low <= band.mid <= band.high
        plain = answer.to_dict()
        assert plain["energy_per_token_j"] == band.to_dict()
        assert plain["time_per_output_token_ms"] == ms(answer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama-9"}, "no model 'llama-9' in the table"),
        ({"gpu": "v99"}, "gpu='v99': there are a100, h100"),
        ({"kv_format": "fp3"}, "kv_format='fp3': there are bf16"),
        ({"context": 0}, r"context=0: must be an integer from 1 to"),
        ({"context": 1.5}, r"context=1\.5: must be an integer"),
        ({"batch": 2, "micro_batches": 3}, "micro_batches=3: must be an integer from 1 to 2"),
        ({"devices": 0}, "devices=0: must be an integer from 1 to 1024"),
        ({"host_share": 2}, "host_share=2: must be 0 to 1"),
        ({"launch_s": -1}, "launch_s=-1: must be 0 to 1 second"),
        ({"form": "m.2"}, r"form='m\.2': there are e3s"),
        ({"config": configure(dram="fixed")}, "dram=fixed is no part; there are ddr5_6400"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ArgumentError, match=message):
        setup(**given)


def test_no_such_system():
    with pytest.raises(ArgumentError, match="no system 'tpu'; there are gpu, gpu"):
        of(estimate(setup()), "tpu")


def test_gpus_have_sources():
    for one in GPUS.values():
        for name in ("memory_bytes", "bandwidth", "attention_efficiency", "flops", "host_link", "power_w"):
            value = getattr(one, name)
            assert isinstance(value, Value)
            assert value.source
            assert value.value > 0
        assert 0.5 < one.attention_efficiency.value < 1
    assert gpu("h100").to_dict()["bandwidth"] == 3350e9
    sheets = {
        "a100": 80,
        "h100": 80,
        "h200": 141,
        "b200": 180,
        "l40s": 48,
        "rtx-4090": 24,
        "rtx-pro-6000": 96,
    }
    for name, gigabytes in {**sheets, "mi300x": 192}.items():
        # ECC of GDDR6 takes a sixteenth
        assert gigabytes * 15 / 16 - 0.1 < gpu(name).memory_bytes.value / 2**30 <= gigabytes
    assert kv_format("bf16").bits == 16


def test_a_device_has_what_its_parts_hold():
    assert device().capacity_bytes == 64 << 30
    assert device(dram="hbm3_6400").capacity_bytes == 4 << 30
    assert device(capacity_bytes=1 << 30).capacity_bytes == 1 << 30
    assert Setup(model="qwen3-8b", context=1, config=device("card", channels=16)).device_bytes == 256 << 30


def test_units_and_links_of_another_rate():
    one = setup()
    base, half, double = (
        on_devices(replace(one, unit_rate=rate), one.model.attention[0], 131072, 1, partial=False)
        for rate in (1, 0.5, 2)
    )
    # 8 jobs of 131,072 rows of 8 lines over 4 channels, two cycles a line
    assert half.seconds == pytest.approx(2 * 8 * 131072 * 8 / 4 / 800e6, rel=0.001)
    assert (base.bound, half.bound) == ("memory", "issue")
    assert double.seconds == base.seconds
    assert link_rates(replace(one, link_factor=0.5)) == tuple(rate / 2 for rate in link_rates(one))
    # a link that is quicker than the DRAM behind it waits for it
    assert fetch_rate(replace(one, link_factor=100)) == pytest.approx(204.8e9 * 0.917, rel=0.001)


@pytest.mark.parametrize("name", ["unit_rate", "link_factor"])
def test_rates_have_limits(name):
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"{name}=.*must be 1e-6 to 1e6"):
            setup(**{name: value})
