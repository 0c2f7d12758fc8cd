"""A tenant that keeps no rules: it reads nothing and changes nothing outside its own memory."""

import secrets

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import filled, same_bits, values
from nearkv.faults import Faults, hostile_accesses, hostile_descriptors
from nearkv.tenant import extent_descriptors
from nearkv_hw.abi import LINE_BYTES, Opcode
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.port import Access, Read

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 8, "dtype": "fp16", "page_rows": 4}
SECRET = torch.full((20, 2, 8), 123.0).half()
SECRET_BITS = SECRET.view(torch.int16).numpy().ravel()[0]
Q = values(1, 4, 8, seed=3)
VICTIM, HOSTILE = 0, 1


@pytest.fixture(
    params=[
        ("model", 10_000),
        pytest.param(("rtl", 500), marks=pytest.mark.rtl),
        pytest.param(("rtl", 10_000), marks=[pytest.mark.rtl, pytest.mark.slow]),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def setting(request):
    """A device of its own, and how much is tried on it."""
    kind, count = request.param
    with nearkv.open(kind) as device:
        yield device, count


def image(device, tenant):
    """Every byte of the extents that a tenant owns, and the numbers of these."""
    base = tenant * device.config.aperture_bytes
    firsts = np.arange(device.config.extents, dtype=np.uint64) * np.uint64(EXTENT_BYTES)
    (found,) = device._port.run([Read(firsts[:16] + np.uint64(base))])
    own = firsts[:16][found.access == Access.DATA]
    lines = (own[:, None] + LINE_BYTES * np.arange(EXTENT_BYTES // LINE_BYTES, dtype=np.uint64)).ravel()
    (result,) = device._port.run([Read(lines + np.uint64(base))])
    assert (result.access != Access.OUTSIDE).all()
    return result.data, (own // EXTENT_BYTES).astype(int).tolist()


def test_hostile_descriptors_and_accesses_reach_nothing(setting):
    """Random and crafted, while the neighbour's memory is its own and once it has given it back."""
    device, count = setting
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    kv = device.kv_cache(**SHAPE, tenant=VICTIM)
    (handle,) = filled(kv, [(SECRET, SECRET)])
    wanted = kv.attend([handle], layer=0, q=Q)
    own = device.kv_cache(**SHAPE, tenant=HOSTILE)
    (mine,) = filled(own, [(torch.zeros(20, 2, 8).half(),) * 2])
    own.attend([mine], layer=0, q=Q)
    table = handle._tables[0]
    pages = [int(page) for page in table.addresses().ravel()]
    targets = [table.address, kv._sequences._record, *pages, 0]
    before, extents = image(device, VICTIM)
    owner = device.owner
    holdings, quotas, counted = owner.holdings(), owner.quotas(), device.stats()
    owner.audit()

    faults = Faults(device)
    tables = [t.address for t in mine._tables]
    many = count // 2
    faults.hostile(HOSTILE, *hostile_descriptors(device.config, seed, many, targets=targets, own=tables))
    tried = hostile_accesses(device.config, seed, count - many, tenant=HOSTILE, targets=targets)
    results = device._port.run(tried)
    for operation, result in zip((o for o in tried if isinstance(o, Read)), results, strict=True):
        assert not (result.data.view(np.uint16) == SECRET_BITS).any(), hex(int(operation.addresses[0]))
    assert {record.tenant for record in owner.audit()} == {HOSTILE}
    did = device.stats() - counted
    assert did.errors > many // 10
    assert did.violations > count // 100
    after, still = image(device, VICTIM)
    assert still == extents
    assert np.array_equal(before, after)
    assert owner.holdings()[VICTIM] == holdings[VICTIM]
    assert owner.quotas() == quotas
    assert same_bits(kv.attend([handle], layer=0, q=Q), wanted)
    found, _ = image(device, HOSTILE)
    assert not (found.view(np.uint16) == SECRET_BITS).any()

    # now the neighbour goes, and the other one wants what it had, while and after it is scrubbed
    victim = device._tenant(VICTIM)
    kv.close()
    device.release(VICTIM)
    faults.hostile(HOSTILE, *hostile_descriptors(device.config, seed + 1, 40, targets=targets, own=tables))
    tried = hostile_accesses(device.config, seed + 1, 100, tenant=HOSTILE, targets=targets)
    for result in device._port.run(tried):
        assert not (result.data.view(np.uint16) == SECRET_BITS).any()
    victim.ring.wait_for_scrub()
    _, had = image(device, HOSTILE)
    claims = extent_descriptors(Opcode.CLAIM_EXTENTS, [(extent, 1) for extent in extents])
    faults.hostile(HOSTILE, claims, np.zeros_like(claims))
    found, now = image(device, HOSTILE)
    assert set(extents) <= set(now), "it has all of them"
    assert not (found.view(np.uint16) == SECRET_BITS).any()
    taken = found.reshape(len(now), -1)[[extent not in had for extent in now]]
    assert not taken.any()
