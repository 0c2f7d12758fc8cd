"""Memory that is given back: nobody reads a byte of it again, and others have it once it is zero."""

from dataclasses import replace

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.errors import ClosedError, DeviceError, OutOfMemoryError, ProtocolError, UnknownHandleError
from nearkv.tenant import extent_descriptors
from nearkv_hw.abi import LINE_BYTES, Opcode, Status
from nearkv_hw.abi.config import EXTENT_BYTES, SCRUB_INTERVAL_CYCLES
from nearkv_sim.port import Access, Read

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 24, "dtype": "fp16", "page_rows": 4}
EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
ANYTHING = tuple(Status)


def extents_of(kv, handle):
    """The extents in which a sequence's pages lie."""
    return sorted({int(page) // EXTENT_BYTES for page in handle._tables[0].addresses()})


def lines_of(extent):
    return (extent * EXTENT_BYTES + LINE_BYTES * np.arange(EXTENT_LINES)).astype(np.uint64)


def read_as(tenant, addresses):
    """What a tenant reads at device addresses, whoever's they are."""
    (result,) = tenant.run([Read(tenant.hosts(addresses))])
    return result


def ends(tenant, opcode, extent, count=1):
    """How a claim or release of extents ends, and its detail."""
    completions = tenant._post_runs(opcode, [(extent, count)], may_be=ANYTHING)
    return Status(int(completions.of("status")[0])), int(completions.of("detail")[0])


def test_nobody_reads_a_byte_of_what_was_given_back(device):
    """Whole extents are read raw: by all tenants while they are scrubbed, and by who claims them then."""
    kv = device.kv_cache(**SHAPE, tenant=1)
    secret = torch.full((20, 2, 24), 123.0).half()
    (handle,) = filled(kv, [(secret, secret)])
    owner, other = device._tenant(1), device._tenant(0)
    extents, owned = extents_of(kv, handle), device.memory(1).owned_bytes
    pages = handle._tables[0].addresses()
    assert (
        read_as(owner, pages).data.view(np.uint16)[:, :24] == secret.view(torch.int16)[0, 0, 0].item()
    ).all()
    before = device.stats()
    kv.close()
    assert device.memory(1).owned_bytes <= owned - len(extents) * EXTENT_BYTES
    assert device.memory(1).free_bytes == 0
    assert device.stats().scrubbing_extents >= len(extents)
    for extent in extents:
        for tenant in (owner, other):
            result = read_as(tenant, lines_of(extent)[:: EXTENT_LINES // 64])
            assert (result.access == Access.OUTSIDE).all()
            assert not result.data.any()
            assert ends(tenant, Opcode.CLAIM_EXTENTS, extent) == (Status.EXTENT_BUSY, extent)
            assert ends(tenant, Opcode.RELEASE_EXTENTS, extent) == (Status.OK, 0)
    other.ring.wait_for_scrub()
    for extent in extents:
        assert (read_as(other, lines_of(extent)[:4]).access == Access.OUTSIDE).all()
        assert ends(other, Opcode.CLAIM_EXTENTS, extent) == (Status.OK, 0)
        result = read_as(other, lines_of(extent))
        assert (result.access == Access.DATA).all()
        assert not result.data.any()
        assert (read_as(owner, lines_of(extent)[:4]).access == Access.OUTSIDE).all()
        assert ends(other, Opcode.RELEASE_EXTENTS, extent) == (Status.OK, 1)
    did = device.stats() - before
    assert did.scrub_lines >= len(extents) * EXTENT_LINES
    assert did.cycles >= EXTENT_LINES * SCRUB_INTERVAL_CYCLES


def test_jobs_before_a_release_end_well_and_those_behind_it_are_refused(device):
    """All in one doorbell; a table that the device had on chip is refused, too."""
    kv = device.kv_cache(**SHAPE, tenant=1)
    rows = context(20, 2, 24, 24, seed=1)
    (handle,) = filled(kv, [rows])
    q = values(1, 4, 24, seed=3)
    wanted = expected(q, [rows], scale=0.3)
    assert same_bits(kv.attend([handle], layer=0, q=q, scale=0.3), wanted)
    tenant = device._tenant(1)
    posted = []
    run = tenant.ring.run

    def with_release(descriptors, **more):
        release = extent_descriptors(Opcode.RELEASE_EXTENTS, [(e, 1) for e in extents_of(kv, handle)])
        extensions = more.pop("extensions", None)
        both = np.concatenate([descriptors, release, descriptors])
        if extensions is not None:
            extensions = np.concatenate([extensions, np.zeros_like(release), extensions])
        completions, results = run(both, extensions=extensions, **more)
        posted.extend(completions.of("status").tolist())
        return replace(completions, records=completions.records[-len(descriptors) :]), results

    tenant.ring.run = with_release
    with pytest.raises(DeviceError):
        kv.attend([handle], layer=0, q=q, scale=0.3)
    del tenant.ring.run
    jobs = (len(posted) - len(extents_of(kv, handle))) // 2
    assert posted[:-jobs] == [Status.OK] * (len(posted) - jobs)
    assert set(posted[-jobs:]) == {Status.PAGE_DENIED}
    device.release(1)
    assert kv.closed


def test_a_tenant_that_goes_leaves_its_memory_to_others():
    """A device that one tenant has filled: another one waits for the scrub, and has it then."""
    with nearkv.open("model", capacity_bytes=8 << 20) as device:
        kv = device.kv_cache(**SHAPE)
        k, v = context(60_000, 2, 24, 24, seed=2)
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k[:20_000], v=v[:20_000])
        with pytest.raises(OutOfMemoryError):
            kv.append(handle, layer=0, k=k, v=v)
        with pytest.raises(OutOfMemoryError, match="other tenants own all 8 extents"):
            device.kv_cache(**SHAPE, tenant=1)
        device.release()
        assert kv.closed
        with pytest.raises(ClosedError):
            kv.append(handle, layer=0, k=k, v=v)
        assert device.stats().scrubbing_extents == 8
        other = device.kv_cache(**SHAPE, tenant=1)
        assert device.stats().scrub_lines == 8 * EXTENT_LINES
        rows = context(20, 2, 24, 24, seed=1)
        (handle,) = filled(other, [rows])
        assert same_bits(other.read(handle, layer=0)[0], rows[0])
        with pytest.raises(UnknownHandleError, match="tenant=2: the device has apertures 0 to 1"):
            device.release(2)


def test_caches_that_come_and_go_take_no_more_and_more_memory():
    """Extents that a cache gave back are claimed again when nothing else is left."""
    with nearkv.open("model", capacity_bytes=8 << 20) as device:
        rows = context(20, 2, 24, 24, seed=1)
        for _ in range(20):
            with device.kv_cache(**SHAPE) as kv:
                (handle,) = filled(kv, [rows])
                assert same_bits(kv.read(handle, layer=0)[0], rows[0])
            assert device.memory().free_bytes == 0
        assert device.stats().scrub_lines >= 20 * EXTENT_LINES


def test_a_tenant_is_found_again_with_extents_below_its_first():
    """They were a neighbour's when it came, and are its own since that one left."""
    with nearkv.open("model", capacity_bytes=8 << 20) as device:
        device.kv_cache(**SHAPE)
        kv = device.kv_cache(**SHAPE, tenant=1)
        rows = context(20, 2, 24, 24, seed=1)
        filled(kv, [rows])
        device.release(0)
        device.wait_for_scrub()
        for sessions in range(1, 4):
            (kv,) = device.recover(1)
            assert len(kv.sequences) == sessions
            assert same_bits(kv.read(kv.sequences[0], layer=0)[0], rows[0])
            filled(kv, [context(8_000, 2, 24, 24, seed=2)])
        tenant = device._tenant(1)
        below = min(tenant._owned) * EXTENT_BYTES
        assert below < tenant._root
        root = tenant.read(np.array([tenant._root], np.uint64))
        tenant.run([tenant.write(np.array([below], np.uint64), root)])
        with pytest.raises(ProtocolError, match="tenant 1: extents 0, 1 all begin with a root record"):
            device.recover(1)
