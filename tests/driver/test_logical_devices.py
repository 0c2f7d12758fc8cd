"""Several logical devices: each tenant has its own part of the memory, and messages their LD-ID."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.errors import OutOfMemoryError
from nearkv_hw.abi import pci
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.window import (
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    IDENTITY_LINE,
    MAGIC,
    OPTIONS,
    OPTIONS_LINE,
    register_address,
)
from nearkv_sim.port import Access, Poll, Read, Write

SETUP = {"apertures": 4, "logical_devices": 2}
"""Tenants 0 and 1 are of LD-ID 0, 2 and 3 of LD-ID 1."""


@pytest.fixture(params=["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def divided(request):
    with nearkv.open(request.param, **SETUP) as device:
        yield device


def read(device, address, ld_id=None):
    """How a line reads with an LD-ID, by default its own, and what it holds."""
    given = None if ld_id is None else np.array([ld_id], np.uint8)
    (result,) = device._port.run([Read(np.array([address], np.uint64), given)])
    return Access(result.access[0]), result.data[0].tobytes()


def counters(device):
    address = register_address(device.config, 0, DEVICE_COUNTERS_LINE)
    return DEVICE_COUNTERS.unpack(read(device, address)[1])


def test_tenants_of_both_attend_in_their_own_memory(divided):
    config = divided.config
    assert OPTIONS.unpack(read(divided, register_address(config, 3, OPTIONS_LINE))[1])["logical_devices"] == 1
    pages = {}
    for tenant in (2, 0, 3):
        contexts, q = [context(40, 1, 32, 32, seed=tenant)], values(1, 2, 32, seed=7 + tenant)
        kv = divided.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="fp16", tenant=tenant)
        (handle,) = filled(kv, contexts)
        out = kv.attend([handle], layer=0, q=q, scale=0.2)
        assert same_bits(out, expected(q, contexts, scale=0.2))
        pages[tenant] = int(kv._sequences.table(handle, 0).page_addresses(0, 1)[0, 0])
        assert pages[tenant] // EXTENT_BYTES in config.extents_of(tenant)
    base = 2 * config.aperture_bytes
    held = read(divided, base + pages[2])
    assert held[0] is Access.DATA

    # Its LD-ID, and the part of the memory that it counts.
    before = counters(divided)
    half = config.capacity_bytes // 2
    for address, ld_id in (
        (base + pages[2], 0),
        (base + pages[2], 3),
        (pages[0], 1),
        (pages[2], None),
        (base + pages[0], None),
        (base + half - 64, None),
        (half, None),
        (register_address(config, 2, IDENTITY_LINE), 0),
        (register_address(config, 1, IDENTITY_LINE), 1),
    ):
        assert read(divided, address, ld_id) == (Access.OUTSIDE, bytes(64)), (hex(address), ld_id)
    assert read(divided, base + half)[0] in (Access.DATA, Access.OUTSIDE)  # as it is owned
    line = np.array([base + pages[2]], np.uint64)
    noise = np.full((1, 64), 0xA5, np.uint8)
    divided._port.run([Write(line, noise, ld_ids=np.array([0], np.uint8))])
    assert read(divided, base + pages[2]) == held, "dropped, and answered"
    divided._port.run([Write(line, noise, ld_ids=np.array([1], np.uint8))])
    assert read(divided, base + pages[2]) == (Access.DATA, noise.tobytes())
    after = counters(divided)
    assert after["outside_reads"] - before["outside_reads"] == 9
    assert after["outside_writes"] - before["outside_writes"] == 1
    identity = register_address(config, 3, IDENTITY_LINE)
    divided._port.run([Poll(identity, (1 << 64) - 1, MAGIC)])


def test_a_tenant_has_its_logical_devices_memory():
    """Half a device, whichever half, and not an extent of the other."""
    with nearkv.open("model", **SETUP, capacity_bytes=64 << 20) as device:
        for tenant in (2, 0):
            kv = device.kv_cache(
                layers=1, kv_heads=16, head_dim=256, dtype="fp16", page_rows=64, tenant=tenant
            )
            rows = torch.zeros(1024, 16, 256, dtype=torch.float16)  # 16 MiB with V
            handle = kv.sequence()
            kv.append(handle, layer=0, k=rows, v=rows)
            with pytest.raises(OutOfMemoryError):
                kv.append(handle, layer=0, k=rows, v=rows)
            assert set(np.flatnonzero(device._port._engine.memory.owners == tenant)) <= set(
                device.config.extents_of(tenant)
            )


def test_enumeration_says_that_there_are_several():
    for several in (1, 2):
        with nearkv.open("model", apertures=4, logical_devices=several) as device:
            host = device.cxl()
            at = host.dvsecs[pci.DvsecId.DEVICE]
            assert host.config(pci.DEVICE_DVSEC, at, "capability")["mld"] == several - 1
            at = host.dvsecs[pci.DvsecId.FLEX_BUS_PORT]
            assert host.config(pci.FLEX_BUS_DVSEC, at, "status")["mld"] == several - 1
