"""Calls under way: results are those of the moment of the call, however late the device is."""

import random

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import TamperingPort, context, expected, filled, same_bits, values
from late_port import LatePort
from nearkv.device import Device
from nearkv.errors import (
    AccessError,
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceTimeoutError,
    OutOfMemoryError,
)
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.port import Access, DeviceTimeout, Poll, Read

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "fp16", "page_rows": 4}


KINDS = ["append", "append", "attend", "attend", "attend", "crop", "fork", "free", "wait"]


def late_device(seed=1, *, eager=0.0, **overrides):
    return Device(LatePort(configure("small", **overrides), seed, eager=eager))


def append(kv, handle, rows):
    kv.append(handle, layer=0, k=rows[0], v=rows[1])


def test_calls_under_way_return_what_was_there(device):
    """Appends, crops and the end of a sequence after the call; results are asked for in another order."""
    rows, more = context(21, 2, 8, 8, seed=1), context(8, 2, 8, 8, seed=3)
    q = values(1, 4, 8, seed=5)
    with device.kv_cache(**SHAPE) as kv:
        (handle,) = filled(kv, [rows])
        first = kv.attend_async([handle], layer=0, q=q, scale=0.3)
        event = kv.append_async(handle, layer=0, k=more[0], v=more[1])
        second = kv.attend_async([handle], layer=0, q=q, scale=0.3, return_lse=True)
        kv.crop(handle, 10)
        kv.append_async(handle, layer=0, k=more[0], v=more[1])
        third = kv.attend_async([handle], layer=0, q=q, scale=0.3)
        kv.free(handle)
        event.wait()
        joined = tuple(torch.cat(pair) for pair in zip(rows, more, strict=True))
        again = tuple(torch.cat([old[:10], new]) for old, new in zip(rows, more, strict=True))
        assert same_bits(third.result(), expected(q, [again], scale=0.3))
        out, _ = second.result()
        assert same_bits(out, expected(q, [joined], scale=0.3))
        assert first.done
        assert same_bits(first.result(), expected(q, [rows], scale=0.3))
        assert same_bits(first.result(), expected(q, [rows], scale=0.3))


@pytest.mark.parametrize("eager", [0.0, 0.02, 0.3])
def test_any_completion_order(eager):
    """F1, F3, F15: hundreds of calls in four streams of two tenants, on devices that are late at random."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    device = late_device(seed, eager=eager, capacity_bytes=32 * EXTENT_BYTES)
    caches = [device.kv_cache(**SHAPE, tenant=t, summaries=bool(t)) for t in (0, 1)]
    streams = [device.stream(depth=chance.randrange(1, 6)) for _ in range(4)]
    rows = {kv: {} for kv in caches}
    under_way = []
    for step in range(600):
        kv, stream = chance.choice(caches), chance.choice(streams)
        known = rows[kv]
        kind = chance.choice(KINDS)
        if not known or (len(known) < 3 and kind == "fork"):
            handle = kv.sequence()
            known[handle] = (torch.zeros(0, 2, 8).half(),) * 2
        handle = chance.choice(list(known))
        if kind == "append":
            new = context(chance.choice([1, 1, 3, 30]), 2, 8, 8, seed=seed + 2 * step)
            known[handle] = tuple(torch.cat(pair) for pair in zip(known[handle], new, strict=True))
            kv.append_async(handle, layer=0, k=new[0], v=new[1], stream=stream)
        elif kind == "attend":
            batch = [chance.choice(list(known)) for _ in range(chance.randrange(1, 4))]
            q = values(len(batch), 4, 8, seed=seed + step)
            wanted = expected(q, [known[one] for one in batch], scale=0.3)
            pending = kv.attend_async(batch, layer=0, q=q, scale=0.3, stream=stream)
            under_way.append((pending, wanted))
        elif kind == "crop":
            kept = chance.randrange(len(known[handle][0]) + 1)
            known[handle] = tuple(part[:kept] for part in known[handle])
            kv.crop(handle, kept)
        elif kind == "fork" and len(known) < 8:
            known[kv.fork(handle)] = known[handle]
        elif kind == "free":
            kv.free(handle)
            del known[handle]
        elif kind == "wait" and under_way:
            pending, wanted = under_way.pop(chance.randrange(len(under_way)))
            assert same_bits(pending.result(), wanted)
    device.synchronize()
    for pending, wanted in under_way:
        assert pending.done
        assert same_bits(pending.result(), wanted)
    for kv in caches:
        for handle, held in rows[kv].items():
            assert same_bits(kv.read(handle, layer=0)[0], held[0])
            kv.free(handle)
        assert kv._pages.used == 0
        assert not kv._tenant._retired
    assert device._port.late > 150


def test_several_jobs_are_in_flight_and_appends_overlap_them():
    """Four calls are posted before any is waited for, with rows of other sequences written in between."""
    device = late_device()
    with device.kv_cache(**SHAPE) as kv:
        handles = filled(kv, [context(9, 2, 8, 8, seed=s) for s in range(4)])
        q = values(1, 4, 8, seed=5)
        kv.attend_async(handles[:1], layer=0, q=q).wait()  # takes the extents that lanes need
        k, v = context(1, 2, 8, 8, seed=9)
        pending = []
        for handle, other in zip(handles, handles[1:] + handles[:1], strict=True):
            pending.append(kv.attend_async([handle], layer=0, q=q))
            kv.append_async(other, layer=0, k=k, v=v)
        assert not any(one.done for one in pending)
        assert kv._tenant.stream.under_way == 4
        assert kv._tenant.ring.posted - kv._tenant.ring.completed == 8
        pending[3].wait()
        assert all(one.done for one in pending)


def test_appends_travel_with_the_next_program():
    device = late_device()
    with device.kv_cache(**SHAPE) as kv:
        (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
        k, v = context(1, 2, 8, 8, seed=3)
        before = device._port.programs
        events = [kv.append_async(handle, layer=0, k=k, v=v) for _ in range(20)]
        assert device._port.programs == before
        assert kv.length(handle) == 29
        events[0].wait()
        assert events[-1].done
        assert device._port.programs == before + 1
        many = context(1000, 2, 8, 8, seed=3)
        for _ in range(5):
            kv.append_async(handle, layer=0, k=many[0], v=many[1])
        assert device._port.programs > before + 1, "there is a bound to what waits"
        assert kv.read(handle, layer=0)[0].shape[0] == 5029


def test_a_stream_has_a_depth():
    device = late_device()
    stream = device.stream(depth=2)
    with device.kv_cache(**SHAPE) as kv:
        (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
        q = values(1, 4, 8, seed=5)
        pending = [kv.attend_async([handle], layer=0, q=q, stream=stream) for _ in range(5)]
        assert stream.under_way == 2
        assert [one.waited_for for one in pending] == [True, True, True, False, False]
        stream.synchronize()
        assert stream.under_way == 0
    with pytest.raises(ArgumentError, match="depth=0: must be an integer from 1"):
        device.stream(depth=0)


def test_one_stream_waits_for_another():
    """Of another tenant, whose jobs have no order with this one's."""
    device = late_device()
    one, other = device.stream(), device.stream()
    caches = [device.kv_cache(**SHAPE, tenant=t) for t in (0, 1)]
    handles = [filled(kv, [context(9, 2, 8, 8, seed=1)])[0] for kv in caches]
    q = values(1, 4, 8, seed=5)
    first = caches[0].attend_async([handles[0]], layer=0, q=q, stream=one)
    unrelated = caches[1].attend_async([handles[1]], layer=0, q=q, stream=other)
    assert not first.done
    other.wait(one.record())
    other.wait(other.record())
    caches[1].attend_async([handles[1]], layer=0, q=q, stream=other)
    assert first.done
    assert unrelated.done


def test_more_jobs_than_the_ring_holds():
    """A batch larger than the ring, and many calls that nobody waits for."""
    device = late_device(ring_slots=16)
    stream = device.stream(depth=1000)
    with device.kv_cache(**SHAPE) as kv:
        contexts = [context(5 + s, 2, 8, 8, seed=s) for s in range(20)]
        handles = filled(kv, contexts)
        q = values(20, 4, 8, seed=5)
        calls = [kv.attend_async(handles, layer=0, q=q, scale=0.3, stream=stream)]
        calls += [kv.attend_async(handles[:3], layer=0, q=q[:3], scale=0.3, stream=stream) for _ in range(9)]
        wanted = expected(q, contexts, scale=0.3)
        for call in reversed(calls):
            out = call.result()
            assert same_bits(out, wanted[: len(out)])


def test_memory_that_jobs_read_is_not_given_out():
    """A full device: pages of a freed sequence are used again once the call that reads them is done."""
    device = late_device(capacity_bytes=2 * EXTENT_BYTES)
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=256, dtype="fp16", page_rows=32)
    rows = context(32 * 20, 1, 256, 256, seed=1)
    (handle,) = filled(kv, [rows])
    q = values(1, 1, 256, seed=3)
    pending = kv.attend_async([handle], layer=0, q=q, scale=0.1)
    kv.free(handle)
    used = kv._pages.used
    (other,) = filled(kv, [context(32 * 20, 1, 256, 256, seed=5)])
    assert used == 20
    assert pending.done, "there was no other memory than the freed sequence's"
    assert same_bits(pending.result(), expected(q, [rows], scale=0.1))
    with pytest.raises(OutOfMemoryError):
        append(kv, other, context(32 * 20, 1, 256, 256, seed=5))


def test_errors_come_with_the_result():
    """A call that fails says so when its result is asked for, each time; others go on."""
    failing = False

    def poison(program, results):
        if failing and any(isinstance(one, Poll) for one in program):
            results[-1].access[:] = Access.POISON
        return results

    device = Device(TamperingPort(poison))
    kv = device.kv_cache(**SHAPE)
    (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
    q = values(1, 4, 8, seed=5)
    good, bad = (kv.attend_async([handle], layer=0, q=q) for _ in range(2))
    good.wait()
    failing = True
    bad.wait()
    failing = False
    for _ in range(2):
        with pytest.raises(AccessError, match="is poisoned"):
            bad.result()
    assert same_bits(good.result(), kv.attend([handle], layer=0, q=q))


def test_a_job_that_fails(model):
    kv = model.kv_cache(**SHAPE)
    (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
    q = values(1, 4, 8, seed=5)
    page = int(handle._tables[0].page_addresses(1, 2)[0, 0])
    model._port.inject(page, [0, 1])
    pending = kv.attend_async([handle], layer=0, q=q)
    with pytest.raises(DeviceError, match="POISON, in the table, the queries or page 1"):
        pending.result()
    assert kv.attend([handle], layer=0, q=q, rows=(0, 4)).isfinite().all()


def test_a_device_that_hangs_takes_no_more_work():
    hanging = False

    def hang(program, results):
        if hanging and any(isinstance(one, Poll) for one in program):
            raise DeviceTimeout("nothing moves")
        return results

    device = Device(TamperingPort(hang))
    kv = device.kv_cache(**SHAPE)
    (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
    q = values(1, 4, 8, seed=5)
    pending = kv.attend_async([handle], layer=0, q=q)
    hanging = True
    with pytest.raises(DeviceTimeoutError, match="2 descriptors of tenant 0 are not complete"):
        pending.result()
    with pytest.raises(ClosedError, match="an earlier batch never ended"):
        kv.attend_async([handle], layer=0, q=q)


def test_a_device_that_is_closed_ends_calls():
    device = late_device()
    kv = device.kv_cache(**SHAPE)
    (handle,) = filled(kv, [context(9, 2, 8, 8, seed=1)])
    stream = device.stream()
    q = values(1, 4, 8, seed=5)
    pending = [kv.attend_async([handle], layer=0, q=q, stream=one) for one in (stream, None)]
    device.close()
    for one in pending:
        assert one.done
        with pytest.raises(ClosedError, match="closed while the call was under way"):
            one.result()


def test_what_the_host_works_out_is_there_at_once():
    with nearkv.open("model", placement="host") as device:
        kv = device.kv_cache(**SHAPE)
        rows = context(9, 2, 8, 8, seed=1)
        (handle,) = filled(kv, [rows])
        q = values(1, 4, 8, seed=5)
        pending = kv.attend_async([handle], layer=0, q=q, scale=0.3)
        assert pending.done
        assert same_bits(pending.result(), expected(q, [rows], scale=0.3))


def test_f7_lanes_are_nobody_elses():
    """Three layers' calls under way have three sets of areas, and a fourth gets one that is free again."""
    device = late_device()
    kv = device.kv_cache(**SHAPE | {"layers": 3})
    handle = kv.sequence()
    rows = [context(9, 2, 8, 8, seed=s) for s in range(3)]
    for layer, (k, v) in enumerate(rows):
        kv.append(handle, layer=layer, k=k, v=v)
    q = values(3, 1, 4, 8, seed=5)
    calls = [kv.attend_async([handle], layer=n, q=q[n], scale=0.3) for n in range(3)]
    for n, call in enumerate(calls):
        assert same_bits(call.result(), expected(q[n], [rows[n]], scale=0.3))
    kv.attend_async([handle], layer=0, q=q[0]).wait()
    assert kv._tenant._lanes_made == 3
    assert sorted(kv._tenant._lanes) == [1, 2, 3]


def test_overlapping_calls_cost_their_cycles_once(model):
    """Cycles of calls under way together add up to what passed, not to more."""
    kv = model.kv_cache(**SHAPE)
    handles = filled(kv, [context(400, 2, 8, 8, seed=s) for s in range(4)])
    q = values(1, 4, 8, seed=5)
    kv.attend(handles[:1], layer=0, q=q)
    before = model.stats()
    for call in [kv.attend_async([handle], layer=0, q=q) for handle in handles]:
        call.wait()
    done = model.stats() - before
    assert 0 < done.attention_cycles <= done.cycles
    assert done.attention_jobs == 8
    (one,) = model._port.run([Read(np.array([0], np.uint64))])
    assert one.access[0] == Access.DATA
