"""What must never change a bit: order of rows, page size, split, batch, number of channels."""

from collections.abc import Iterator
from itertools import pairwise

import nearkv
import pytest
import torch
from driver_cases import Context, context, filled, same_bits, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nearkv.device import Device

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
FEW = settings(EXAMPLES, max_examples=5)


@pytest.fixture(scope="module")
def channels() -> Iterator[dict[int, Device]]:
    """Model devices of one and of two channels."""
    with nearkv.open("model", channels=1) as one, nearkv.open("model") as two:
        yield {1: one, 2: two}


@st.composite
def calls(draw, rows=80):
    """A call, its seed among what a failure prints: (context, queries, options of attend)."""
    seed = draw(st.integers(0, 1 << 30), label="seed")
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 4, 7, 8]))
    head_dim, value_dim = draw(st.integers(1, 96)), draw(st.integers(1, 96))
    k, v = context(draw(st.integers(0, rows)), kv_heads, head_dim, value_dim, seed=seed, dtype=dtype)
    k = k * draw(st.sampled_from([1, 2.0**-20, 64]))
    q = values(1, kv_heads * group, head_dim, seed=seed + 2, dtype=dtype)
    return (k, v), q, {"scale": draw(st.floats(-4, 4))}


def attend(device: Device, rows: Context, q: torch.Tensor, *, page_rows: int = 16, **options):
    """Result and log-sum-exp of one sequence in a cache of its own."""
    k, v = rows
    shape = {"kv_heads": k.shape[1], "head_dim": k.shape[2], "value_dim": v.shape[2], "dtype": k.dtype}
    with device.kv_cache(layers=1, page_rows=page_rows, **shape) as kv:
        return kv.attend(filled(kv, [rows]), layer=0, q=q, return_lse=True, **options)


def equal(first, second) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def in_all_ways(devices: list[Device], call, data) -> None:
    """Hold one call against itself: permuted, in other pages, split and merged, among others, elsewhere."""
    (k, v), q, options = call
    plain = attend(devices[0], (k, v), q, **options)
    order = torch.tensor(data.draw(st.permutations(range(len(k)))), dtype=torch.int64)
    for device in devices:
        assert equal(attend(device, (k[order], v[order]), q, **options), plain), "permuted"
        for page_rows in (8, 16, 64):
            assert equal(attend(device, (k, v), q, page_rows=page_rows, **options), plain), f"{page_rows=}"
    cuts = data.draw(st.lists(st.integers(0, len(k)), min_size=1, max_size=3).map(sorted))
    mates = [context(n, k.shape[1], k.shape[2], v.shape[2], seed=n, dtype=k.dtype) for n in (1, 40)]
    shape = {"kv_heads": k.shape[1], "head_dim": k.shape[2], "value_dim": v.shape[2], "dtype": k.dtype}
    with devices[-1].kv_cache(layers=1, **shape) as kv:
        handles = filled(kv, [mates[0], (k, v), mates[1]])
        parts = [
            kv.attend(handles[1:2], layer=0, q=q, rows=part, partial=True, **options)
            for part in pairwise([0, *cuts, len(k)])
        ]
        merged = parts[0]
        for part in parts[1:]:
            merged = nearkv.merge(part, merged)
        assert equal((nearkv.finish(merged), nearkv.log_sum_exp(merged)), plain), "split and merged"
        batch = kv.attend(handles, layer=0, q=q.expand(3, -1, -1), return_lse=True, **options)
        assert equal((batch[0][1:2], batch[1][1:2]), plain), "among others"
    reference = nearkv.reference.decode_attention(q, k[None], v[None], return_lse=True, **options)
    assert equal(plain, reference), "reference"


@EXAMPLES
@given(call=calls(), data=st.data())
def test_order_free_on_the_model(channels, call, data):
    in_all_ways([channels[1], channels[2]], call, data)


@pytest.mark.rtl
@FEW
@given(call=calls(rows=40), data=st.data())
def test_order_free_on_the_rtl(channels, rtl_device, call, data):
    in_all_ways([channels[1], rtl_device], call, data)


@pytest.mark.rtl
@pytest.mark.slow
@FEW
@given(call=calls(rows=40), data=st.data())
def test_one_channel_of_rtl_equals_two(rtl_device, call, data):
    """Builds a second device, of one channel."""
    with nearkv.open("rtl", channels=1) as single:
        in_all_ways([single, rtl_device], call, data)
