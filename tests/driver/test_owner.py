"""The device's owner: quotas that hold, and a log of what tenants tried."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, filled, same_bits
from nearkv.errors import ArgumentError, OutOfMemoryError, QuotaError, TenantTakenError, UnknownHandleError
from nearkv_hw.abi import LINE_BYTES, Opcode, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.memory import ENTRY
from nearkv_hw.abi.owner import OWNER_BYTES, QUOTAS_LINE, RECORDS, Violation, owner_address
from nearkv_hw.abi.window import DEVICE_COUNTERS, DEVICE_COUNTERS_LINE, register_address
from nearkv_hw.command.owner import OwnerPage
from nearkv_sim.port import Access, Fence, Read, Write

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 40, "dtype": "fp16", "page_rows": 4}
MIB = 1 << 20
LOG_CYCLES = RECORDS * OwnerPage.report_cycles


def read_log(device):
    """The log's new records, once it has had time for all that channels may have to report."""
    until = device.stats().cycles + LOG_CYCLES
    while device.stats().cycles < until:
        pass
    return device.owner.audit()


@pytest.fixture
def owner(device):
    """With the log read and no quotas, before and after."""
    read_log(device)
    yield device.owner
    for tenant in range(device.config.apertures):
        device.owner.set_quota(tenant, device.config.capacity_bytes)
        device.owner.set_weight(tenant, 1)


def test_a_quota_holds_and_is_said(device, owner):
    """A tenant gets as much as it may have, and what it had before; its neighbour is not concerned."""
    kv = device.kv_cache(**SHAPE, tenant=1)
    rows = context(20, 2, 40, 40, seed=1)
    (handle,) = filled(kv, [rows])
    held = owner.holdings()[1]
    assert held >= device.memory(1).owned_bytes
    assert owner.quotas() == [device.config.capacity_bytes] * 2
    owner.set_quota(1, held + 2 * MIB)
    big = context(16_000, 2, 40, 40, seed=2)
    with pytest.raises(
        QuotaError, match=rf"may own {(held >> 20) + 2} extents of 1 MiB and owns {(held >> 20) + 2}"
    ):
        kv.append(handle, layer=0, k=big[0], v=big[1])
    assert owner.holdings()[1] == owner.quotas()[1] == held + 2 * MIB
    assert kv.length(handle) == 20
    other = device.kv_cache(**SHAPE)
    (others,) = filled(other, [big])
    assert same_bits(other.read(others, layer=0)[0], big[0])
    other.close()

    owner.set_quota(1, 0)
    assert same_bits(kv.read(handle, layer=0)[0], rows[0])
    tenant = device._tenant(1)
    free = next(e for e in range(device.config.extents - 1, 0, -1))
    completions = tenant._post_runs(Opcode.CLAIM_EXTENTS, [(free, 1)], may_be=tuple(Status))
    assert (completions.of("status")[0], completions.of("detail")[0]) == (Status.OVER_QUOTA, 0)
    owner.set_quota(1, device.config.capacity_bytes)
    kv.append(handle, layer=0, k=big[0], v=big[1])
    assert kv.length(handle) == 16_020
    kv.close()


def test_the_log_has_who_tried_what(device, owner):
    """Host reads and writes, and a job's; each tenant, extent and kind once, until the owner has read it."""
    kv, mine = (device.kv_cache(**SHAPE, tenant=n) for n in (0, 1))
    rows = context(20, 2, 40, 40, seed=1)
    (handle,), (own,) = filled(kv, [rows]), filled(mine, [rows])
    extents = sorted({int(page) // EXTENT_BYTES for page in handle._tables[0].addresses()})
    assert read_log(device) == []
    hostile = device._tenant(1)
    places = np.array([extents[0] * EXTENT_BYTES + n * LINE_BYTES for n in (5, 3, 9)], np.uint64)
    lost, before = owner.lost, device.stats()
    for _ in range(2):
        hostile.run([Read(hostile.hosts(places[:1])), Read(hostile.hosts(places))])
        for n in (1, 2):
            hostile.run(
                [Write(hostile.hosts(places[n : n + 1]), np.ones((1, LINE_BYTES), np.uint8)), Fence()]
            )
    found = read_log(device)
    told = [(r.tenant, r.address, r.kind) for r in found]
    assert told == [(1, int(places[0]), Violation.READ), (1, int(places[1]), Violation.WRITE)]
    assert found[1].sequence == found[0].sequence + 1
    assert before.cycles <= found[0].cycle <= found[1].cycle <= device.stats().cycles
    assert (device.stats() - before).violations == 2 * (4 + 2)
    assert read_log(device) == []
    hostile.run([Read(hostile.hosts(places[:1]))])
    assert [(r.address, r.kind) for r in read_log(device)] == [(int(places[0]), Violation.READ)]

    # the page table of a good job names a page of the neighbour
    table = own._tables[0]
    (entries,) = hostile.run([Read(hostile.hosts(np.array([table.address + LINE_BYTES], np.uint64)))])
    line = entries.data.copy()
    stolen = line.view("<u8")
    stolen[0, 0] = ENTRY.pack(valid=1, line=int(handle._tables[0].addresses().ravel()[0]) // LINE_BYTES)
    hostile.run([Write(hostile.hosts(np.array([table.address + LINE_BYTES], np.uint64)), line)])
    with pytest.raises(nearkv.errors.DeviceError) as error:
        mine.attend([own], layer=0, q=torch.ones(1, 4, 40).half())
    assert error.value.status is Status.PAGE_DENIED
    hostile.run([Write(hostile.hosts(np.array([table.address + LINE_BYTES], np.uint64)), entries.data)])
    (record,) = read_log(device)
    first = int(handle._tables[0].addresses().ravel()[0])
    assert (record.tenant, record.kind) == (1, Violation.UNIT_READ)
    assert record.address // EXTENT_BYTES == first // EXTENT_BYTES
    assert owner.lost == lost
    kv.close()
    mine.close()


def test_a_full_log_keeps_the_first_and_counts_the_rest(device, owner):
    hostile = device._tenant(1)
    last = device.config.extents
    extents = range(last - RECORDS - 4, last)
    lost = owner.lost
    for extent in extents:
        hostile.run([Read(hostile.hosts(np.array([extent * EXTENT_BYTES], np.uint64)))])
    found = read_log(device)
    assert [r.address // EXTENT_BYTES for r in found] == [*extents[:RECORDS]]
    assert owner.lost - lost == 4


def test_the_page_is_the_owners(device):
    """Its lines are nowhere else, and what takes no writes keeps what it has."""
    config = device.config
    for aperture in range(1, config.apertures):
        places = np.array(
            [aperture * config.aperture_bytes + owner_address(config, line) for line in (0, 2, 16)], np.uint64
        )
        (result,) = device._port.run([Read(places)])
        assert (result.access == Access.OUTSIDE).all()
    beyond = np.array([owner_address(config, OWNER_BYTES // LINE_BYTES)], np.uint64)
    assert device._port.run([Read(beyond)])[0].access[0] == Access.OUTSIDE
    lines = np.array([owner_address(config, line) for line in range(OWNER_BYTES // LINE_BYTES)], np.uint64)
    (before,) = device._port.run([Read(lines)])
    errors = device.stats().errors
    rest = np.array([a for a in lines.tolist() if a not in lines[[QUOTAS_LINE, 2]]], np.uint64)
    device._port.run([Write(rest, np.full((len(rest), LINE_BYTES), 255, np.uint8))])
    device._port.run([Write(lines[2:3], np.full((1, LINE_BYTES), 255, np.uint8))])  # more than was recorded
    device._port.run([Write(lines[:1], np.zeros((1, LINE_BYTES), np.uint8), poison=True)])
    (after,) = device._port.run([Read(lines)])
    assert np.array_equal(before.data, after.data)
    register = np.array([register_address(config, 0, DEVICE_COUNTERS_LINE)], np.uint64)
    counted = DEVICE_COUNTERS.unpack(device._port.run([Read(register)])[0].data[0].tobytes())
    assert counted["errors"] == errors + 3  # with the weights, none of which is one


def test_weights_are_kept(device, owner):
    assert owner.weights() == [1, 1]
    owner.set_weight(1, 255)
    owner.set_weight(0, 2)
    assert owner.weights() == [2, 255]


def test_arguments_are_checked(model):
    with pytest.raises(UnknownHandleError, match="tenant=2: the device has tenants 0 to 1"):
        model.owner.set_quota(2, 0)
    with pytest.raises(ArgumentError, match="size_bytes=1000: must be a multiple of 1048576, an extent"):
        model.owner.set_quota(0, 1000)
    with pytest.raises(ArgumentError, match="size_bytes=-1: must be an integer from 0 to 2147483648"):
        model.owner.set_quota(0, -1)
    with pytest.raises(UnknownHandleError, match="tenant=-1: the device has tenants 0 to 1"):
        model.owner.set_weight(-1, 1)
    for weight in (0, 256):
        with pytest.raises(ArgumentError, match=f"weight={weight}: must be an integer from 1 to 255"):
            model.owner.set_weight(0, weight)


def test_a_tenant_without_a_quota_has_nothing(model):
    model.owner.set_quota(1, 0)
    with pytest.raises(QuotaError, match="tenant 1 has no extent; tenant 1 may own 0 extents"):
        model.kv_cache(**SHAPE, tenant=1)
    assert issubclass(QuotaError, OutOfMemoryError)
    model.owner.set_quota(1, 8 * MIB)
    assert model.kv_cache(**SHAPE, tenant=1).sequences == []


def test_hosts_of_a_served_device_are_not_its_owner(tmp_path):
    from threading import Thread

    from nearkv_hw.abi import configure
    from nearkv_sim.model import ModelPort
    from nearkv_sim.served import Server

    server = Server(ModelPort(configure("small")), tmp_path / "socket")
    Thread(target=server.serve, daemon=True).start()
    with nearkv.open(f"unix:{tmp_path / 'socket'}") as device:
        with pytest.raises(TenantTakenError, match="the owner of a served device is who serves it"):
            device.owner.audit()
        with pytest.raises(TenantTakenError, match="the owner of a served device is who serves it"):
            device.owner.set_quota(0, 0)
        assert device.kv_cache(**SHAPE).sequences == []
    server.close()


def test_quotas_outlive_an_erasure(model):
    """Memory and tenants are gone; what the owner said and has to read is not."""
    tenant = model.kv_cache(**SHAPE, tenant=1)._tenant
    model.owner.set_quota(1, 8 * MIB)
    tenant.run([Read(tenant.hosts(np.array([9 * EXTENT_BYTES], np.uint64)))])
    model._port.maintenance.erase()
    assert model.owner.quotas()[1] == 8 * MIB
    assert model.owner.holdings() == [0, 0]
    assert [record.address for record in model.owner.audit()] == [9 * EXTENT_BYTES]
