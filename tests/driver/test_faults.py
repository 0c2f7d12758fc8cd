"""Faults: each ends in an error that says what it struck, all else works on, and neighbours stay apart."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, memory_image, same_bits, values
from nearkv.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceResetError,
    DeviceTimeoutError,
    LinkError,
    OutOfMemoryError,
)
from nearkv.faults import Faults, hostile_accesses, hostile_descriptors
from nearkv_hw.abi import LINE_BYTES, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.port import Access, Read, Write

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "fp16", "page_rows": 4}
Q = values(1, 4, 8, seed=3)
ROWS = context(20, 2, 8, 8, seed=1)
WANTED = expected(Q, [ROWS], scale=0.3)


def two_tenants(device):
    """A cache of each of two tenants, with the same rows."""
    found = []
    for tenant in (0, 1):
        kv = device.kv_cache(**SHAPE, tenant=tenant)
        found.append((kv, filled(kv, [ROWS])[0]))
    return found


def works(kv, handle, rows=ROWS):
    out = kv.attend([handle], layer=0, q=Q, scale=0.3)
    return same_bits(out, WANTED if rows is ROWS else expected(Q, [rows], scale=0.3))


def test_a_hang_strikes_one_tenant(model):
    """Its calls end, and take no more work until it is recovered; the other tenant's go on."""
    (kv, handle), (other, others) = two_tenants(model)
    faults = Faults(model)
    assert works(kv, handle)
    with faults.hang(0):
        with pytest.raises(DeviceTimeoutError, match="2 descriptors of tenant 0 are not complete"):
            kv.attend([handle], layer=0, q=Q)
        with pytest.raises(ClosedError, match=r"tenant 0: an earlier batch never ended; .* recover\(\)"):
            kv.attend([handle], layer=0, q=Q)
        assert works(other, others)
        with pytest.raises(DeviceTimeoutError, match="posted is not complete"):
            model.recover(0)
    (again,) = model.recover(0)
    assert kv.closed
    assert works(again, again.sequences[0])
    assert works(other, others)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_a_poisoned_page_strikes_the_calls_that_read_it(model, dtype):
    """The sequence, page and head are named; other sequences, and rows of other pages, work on."""
    kv = model.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype=dtype, page_rows=4)
    rows = context(20, 2, 32, 32, seed=1)
    handles = filled(kv, [rows, rows])
    q = values(2, 4, 32, seed=5)
    before = kv.attend(handles, layer=0, q=q)
    faults = Faults(model)
    faults.poison(kv, handles[1], layer=0, row=9, kv_head=1)
    with pytest.raises(DeviceError, match="sequence 1 of the batch, KV head 1") as raised:
        kv.attend(handles, layer=0, q=q)
    assert (raised.value.status, raised.value.sequence, raised.value.page) == (Status.POISON, 1, 2)
    assert same_bits(kv.attend(handles[:1], layer=0, q=q[:1]), before[:1])
    assert kv.attend(handles[1:], layer=0, q=q[1:], rows=(0, 8)).isfinite().all()
    kv.free(handles[1])
    (new,) = filled(kv, [rows])
    assert {int(p) for p in new._tables[0].addresses()}, "the page is used again, and whole"
    assert same_bits(kv.attend([new], layer=0, q=q[1:]), before[1:])


def append_for_ever(kv, handle, rows):
    while True:
        kv.append(handle, layer=0, k=rows[0], v=rows[1])


@pytest.mark.parametrize("lines", [0, 1, 5, 11, 200])
def test_a_lost_link_leaves_what_was_committed(model, lines):
    """Wherever it goes down: calls say so until the host recovers, and then rows are there or not, whole."""
    (kv, handle), (other, _) = two_tenants(model)
    more = context(6, 2, 8, 8, seed=7)
    faults = Faults(model)
    faults.lose_link(lines)
    with pytest.raises(LinkError, match="may have arrived in part"):
        append_for_ever(kv, handle, more)
    with pytest.raises(LinkError, match=r"call recover\(\) of the device"):
        kv.read(handle, layer=0)
    with pytest.raises(LinkError):
        other.sequence()
    faults.restore_link()
    (again,) = model.recover(0)
    k = again.read(again.sequences[0], layer=0)[0]
    added = len(k) - 20
    assert added % 6 == 0
    assert same_bits(k, torch.cat([ROWS[0], *[more[0]] * (added // 6)]))
    (others,) = model.recover(1)
    assert works(others, others.sequences[0])


def test_a_reset_is_noticed_and_takes_everything(model):
    """By a call, and by a read; after that each tenant starts anew."""
    (kv, handle), (other, others) = two_tenants(model)
    faults = Faults(model)
    faults.reset()
    with pytest.raises(DeviceResetError, match="tenant 0 does not own its root record"):
        kv.attend([handle], layer=0, q=Q)
    with pytest.raises(DeviceResetError, match="tenant 1 does not own its root record"):
        other.read(others, layer=0)
    for tenant in (0, 1):
        assert model.recover(tenant) == []
        kv = model.kv_cache(**SHAPE, tenant=tenant)
        assert works(kv, filled(kv, [ROWS])[0])


def test_full_memory_strikes_what_needs_more(model):
    (kv, handle), (other, others) = two_tenants(model)
    faults = Faults(model)
    big = context(100_000, 2, 8, 8, seed=5)
    with faults.full_memory(0):
        with pytest.raises(OutOfMemoryError):
            kv.append(handle, layer=0, k=big[0], v=big[1])
        assert works(kv, handle)
        other.append(others, layer=0, k=big[0], v=big[1])
    kv.append(handle, layer=0, k=big[0], v=big[1])
    assert kv.length(handle) == other.length(others) == 100_020


def test_accesses_past_the_aperture_reach_nothing(model):
    """Reads and writes of a neighbour's lines through one's own aperture."""
    (kv, handle), (other, others) = two_tenants(model)
    lines = np.array([*map(int, handle._tables[0].addresses()), handle._tables[0].address], np.uint64)
    through = other._tenant.hosts(lines)
    before, counted = memory_image(model, 0), model.stats().violations
    model._port.run([Write(through, np.full((len(lines), LINE_BYTES), 255, np.uint8))])
    (result,) = model._port.run([Read(through)])
    assert (result.access == Access.OUTSIDE).all()
    assert not result.data.any()
    assert model.stats().violations - counted == 2 * len(lines)
    assert np.array_equal(memory_image(model, 0), before)
    assert works(kv, handle)
    assert works(other, others)


def test_faults_that_there_are_not(model):
    kv = model.kv_cache(**SHAPE)
    (handle,) = filled(kv, [ROWS])
    faults = Faults(model)
    with pytest.raises(ArgumentError, match="row=20: must be an integer from 0 to 19"):
        faults.poison(kv, handle, layer=0, row=20)
    kv.release(handle, 8)
    with pytest.raises(ArgumentError, match="row=3: it was released"):
        faults.poison(kv, handle, layer=0, row=3)
    with pytest.raises(ArgumentError, match="need addresses to aim at"):
        hostile_descriptors(model.config, 1, 5, targets=[], own=[0])
    with pytest.raises(ArgumentError, match="need addresses to aim at"):
        hostile_accesses(model.config, 1, 5, tenant=1, targets=[])


def test_an_rtl_device_hangs_and_recovers(device):
    """On both kinds of device; a tenant of its own, so that other tests' are left alone."""
    kv = device.kv_cache(**SHAPE, tenant=1)
    (handle,) = filled(kv, [ROWS])
    faults = Faults(device)
    with faults.hang(1), pytest.raises(DeviceTimeoutError):
        kv.attend([handle], layer=0, q=Q)
    found = device.recover(1)
    mine = next(c for c in found if c.head_dim == 8 and c.page_rows == 4 and len(c.sequences) == 1)
    assert works(mine, mine.sequences[0])
    for cache in found:
        cache.close()
    device._port = device._port._port


def test_memory_below_an_extent_is_named(model):
    """The address of a row is a line of its page."""
    kv = model.kv_cache(**SHAPE)
    (handle,) = filled(kv, [ROWS])
    address = kv.address_of(handle, layer=0, row=7, kv_head=1)
    page = int(handle._tables[0].page_addresses(1, 2)[1, 0])
    assert address == page + 3 * 16 // LINE_BYTES * LINE_BYTES
    assert address // EXTENT_BYTES == page // EXTENT_BYTES
    assert nearkv.faults.Faults is Faults
