"""The driver as a CXL host: what it finds, what lspci finds in the dump, and one state behind all of it."""

import json
import re
import shutil
import subprocess

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.cli import app
from nearkv.cxl import MailboxError, listing
from nearkv.cxl.host import BAR_BASE, MEMORY_BASE
from nearkv.errors import ArgumentError, ClosedError, DeviceError, OutOfMemoryError, ProtocolError
from nearkv_hw.abi import hdm, pci
from nearkv_hw.abi.cxl_registers import LINK, ComponentCapability, DeviceCapability
from nearkv_hw.abi.mailbox import CHANGED_EXTENT, EXTENT_CHANGE, IDENTIFY, Opcode, PoisonSource, ReturnCode
from nearkv_hw.abi.pci import DvsecId
from nearkv_hw.abi.window import (
    HOST_LINK_LAYER_COUNTERS_LINE,
    IDENTITY_LINE,
    LINK_LAYER_COUNTERS,
    LINK_LAYER_COUNTERS_LINE,
    OPTIONS,
    OPTIONS_LINE,
    register_address,
)
from nearkv_sim.port import Access, Fence, Read, Write
from typer.testing import CliRunner

GIB = 1 << 30


def poison(device, address):
    device.cxl().send(Opcode.INJECT_POISON, address.to_bytes(8, "little"))


def lspci(path, *options):
    """What pciutils reads in a dump."""
    command = [
        shutil.which("lspci") or pytest.skip("lspci is not installed (pciutils)"),
        "-F",
        path,
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_host_finds_the_device(model):
    host = model.cxl()
    assert model.cxl() is host
    assert set(host.dvsecs) == set(DvsecId)
    assert [(bar.number, bar.size) for bar in host.bars] == [(0, 1 << 16), (2, 1 << 12), (4, 1 << 12)]
    assert all(bar.address % bar.size == 0 and bar.address >= BAR_BASE for bar in host.bars)
    assert host.place(ComponentCapability.HDM)[0] == pci.COMPONENT_BAR
    assert host.place(DeviceCapability.MAILBOX)[0] == pci.DEVICE_BAR
    assert IDENTIFY.unpack(host.send(Opcode.IDENTIFY))["total"] == 8
    assert host.device.hdm.translate(MEMORY_BASE + 4096) == 4096
    with pytest.raises(
        MailboxError, match=r"mailbox command 0x0200 ended with UNSUPPORTED \(0x3\)"
    ) as caught:
        host.send(0x0200)
    assert caught.value.code is ReturnCode.UNSUPPORTED
    with pytest.raises(ValueError, match="a payload has at most 2048 bytes, not 2049"):
        host.send(Opcode.IDENTIFY, bytes(2049))
    with pytest.raises(ProtocolError, match="HDM decoder 1 was not committed for 0x10000000 bytes at 0x0"):
        host.decode(1, 0, 256 << 20)


def test_lspci_decodes_the_dump(model, tmp_path):
    """Debian's pciutils: identity, link, every DVSEC, and the range that the memory has."""
    path = tmp_path / "dump.txt"
    path.write_text(listing.dump(model.cxl()))
    told = lspci(path, "-vvv")
    assert "CXL: Device 1234:6e6b (rev 01) (prog-if 10 [CXL Memory Device (CXL 2.x)])" in told
    assert "Region 0: Memory at fe0000000000 (64-bit, non-prefetchable)" in told
    assert "LnkSta:\tSpeed 64GT/s, Width x8" in told
    assert "Device Serial Number 6e-65-61-72-6b-76-00-01" in told
    for identifier, revision, length in ((0, 3, 60), (5, 0, 16), (7, 2, 32), (8, 0, 36)):
        assert f"Vendor=1e98 ID=000{identifier} Rev={revision} Len={length}: CXL" in told
    assert "CXLCap:\tCache- IO+ Mem+ Mem HW Init+ HDMCount 1" in told
    assert "CXLCtl:\tCache- IO+ Mem+" in told
    assert "Range1: 0000000000000000-000000007fffffff" in told
    assert "Valid+ Active+" in told
    assert "BIR: bar0, ID: component registers, offset: 0000000000000000" in told
    assert "BIR: bar2, ID: CXL device registers, offset: 0000000000000000" in told
    assert "<chain" not in told
    assert "???" not in told


def test_lspci_gives_the_dump_back(model, tmp_path):
    path = tmp_path / "dump.txt"
    path.write_text(listing.dump(model.cxl()))
    rows = re.findall(r"^([0-9a-f]{2,3}): ((?:[0-9a-f]{2} ?){16})$", lspci(path, "-xxxx"), re.MULTILINE)
    assert len(rows) == 256
    assert bytes.fromhex("".join(row for _, row in rows)) == model.cxl().device.config_space()


def test_inspect(tmp_path):
    run = CliRunner().invoke
    told = run(app, ["inspect", "model:card", "--json"])
    assert told.exit_code == 0
    found = json.loads(told.output)
    assert (found["pci"]["vendor"], found["pci"]["class"]) == (0x1234, 0x050210)
    device = found["memdev"]
    assert (device["ram_size"], device["pmem_size"], device["media"]) == (16 * GIB, 0, "ready")
    assert "0x4400" in device["commands"]
    (decoder,) = device["decoders"]
    assert (decoder["resource"], decoder["size"], decoder["interleave_ways"]) == (MEMORY_BASE, 16 * GIB, 1)
    shown = run(app, ["inspect", "--set", "link=x16_32"])
    assert shown.exit_code == 0
    assert "00:00.0 CXL [0502]: Device [1234:6e6b] (prog-if 10)" in shown.output
    assert "DVSEC for CXL devices [DVSEC 0000]" in shown.output
    assert "link_status: speed=0x5 width=0x10" in shown.output
    assert "status: cache- io+ mem+ flits_68+" in shown.output
    path = tmp_path / "dump.txt"
    assert run(app, ["inspect", "--dump", str(path)]).exit_code == 0
    assert path.read_text().startswith("00:00.0 CXL: nearkv\n00: 34 12 6b 6e")


@pytest.fixture(params=["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def cached(request):
    """A device of its own, and a cache with a sequence in it whose attention is known."""
    contexts = [context(40, 1, 32, 32, seed=5)]
    q = values(1, 2, 32, seed=6)
    with nearkv.open(request.param) as device:
        kv = device.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="fp16")
        (handle,) = filled(kv, contexts)

        def attend():
            return kv.attend([handle], layer=0, q=q, scale=0.2)

        yield device, kv, handle, attend, expected(q, contexts, scale=0.2)


def test_a_job_over_an_injected_line_names_its_page(cached):
    """Poison from the mailbox is what an attention unit meets; the job ends, and says where."""
    device, kv, handle, attend, wanted = cached
    assert same_bits(attend(), wanted)
    page = int(kv._sequences.table(handle, 0).page_addresses(0, 3)[0, 2])
    poison(device, page)
    with pytest.raises(DeviceError, match="page 2") as caught:
        attend()
    assert caught.value.page == 2
    assert device.cxl().poison() == [(page, PoisonSource.INJECTED)]


def test_a_poisoned_write_is_what_a_job_meets(cached):
    """A line of V that the host wrote as bad is listed, read as poison and ends a job; until written anew."""
    device, kv, handle, attend, wanted = cached
    page = int(kv._sequences.table(handle, 0).page_addresses(0, 2)[0, 1]) + kv._layout.v_offset(0)
    address = np.array([page], np.uint64)
    (held,) = device._port.run([Read(address)])
    device._port.run([Write(address, held.data, poison=True)])
    assert device.cxl().poison() == [(page, PoisonSource.EXTERNAL)]
    (again,) = device._port.run([Read(address)])
    assert again.access[0] == Access.POISON
    with pytest.raises(DeviceError, match="page 1"):
        attend()
    device._port.run([Write(address, held.data)])
    assert device.cxl().poison() == []
    assert same_bits(attend(), wanted)


def test_the_cpmu_counts_what_the_link_carries(cached):
    """Messages of a program, each once; asking for the counters adds none."""
    device, kv, handle, _, _ = cached
    host = device.cxl()
    page = int(kv._sequences.table(handle, 0).page_addresses(0, 1)[0, 0])
    addresses = page + 64 * np.arange(7, dtype=np.uint64)
    before = host.counters()
    assert {**host.counters(), "clock_ticks": 0} == {**before, "clock_ticks": 0}
    device._port.run([Read(addresses), Fence(), Write(addresses[:5], np.zeros((5, 64), np.uint8))])
    after = host.counters()
    assert after["m2s_req"] - before["m2s_req"] == 7
    assert after["m2s_rwd"] - before["m2s_rwd"] == 5
    assert after["clock_ticks"] > before["clock_ticks"]


@pytest.mark.rtl
def test_the_rtl_device_has_what_it_can_carry_out(rtl_device):
    host = rtl_device.cxl()
    for opcode in (Opcode.CLEAR_POISON, Opcode.GET_DYNAMIC_CONFIG):
        with pytest.raises(MailboxError, match="UNSUPPORTED"):
            host.send(opcode, bytes(72 if opcode is Opcode.CLEAR_POISON else 2))
    memory_device = listing.memory_device(host)
    assert memory_device["commands"][-1] == f"{Opcode.PASSPHRASE_ERASE:#06x}"
    with nearkv.open("rtl") as device, pytest.raises(RuntimeError, match="can withhold memory: open a model"):
        device.cxl(dynamic_bytes=256 << 20)


def test_sanitize_ends_caches_and_what_they_held(cached):
    device, kv, _, attend, wanted = cached
    assert same_bits(attend(), wanted)
    before = device.cxl().counters()
    device.cxl().send(Opcode.SANITIZE)
    assert {**device.cxl().counters(), "clock_ticks": 0} == {**before, "clock_ticks": 0}
    assert kv.closed
    with pytest.raises(ClosedError):
        attend()
    new = device.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="fp16")
    contexts = [context(40, 1, 32, 32, seed=8)]
    q = values(1, 2, 32, seed=9)
    out = new.attend(filled(new, contexts), layer=0, q=q, scale=0.2)
    assert same_bits(out, expected(q, contexts, scale=0.2))
    new.close()


def test_a_pool_grows_with_what_is_accepted():
    """Half of the memory is dynamic: a cache that found no room has it once that was offered and accepted."""
    half = GIB // 4
    with nearkv.open("model", capacity_bytes=2 * half) as device:
        host = device.cxl(dynamic_bytes=half)
        assert IDENTIFY.unpack(host.send(Opcode.IDENTIFY))["total"] == 1
        assert device.cxl(dynamic_bytes=half) is host
        with pytest.raises(ArgumentError, match="dynamic_bytes=1: the host found the device with 268435456"):
            device.cxl(dynamic_bytes=1)
        kv = device.kv_cache(layers=1, kv_heads=16, head_dim=256, dtype="fp16", page_rows=64)
        handle = kv.sequence()
        rows = torch.zeros(half // (16 * 256 * 2 * 2) + 1024, 16, 256, dtype=torch.float16)
        with pytest.raises(OutOfMemoryError):
            kv.append(handle, layer=0, k=rows, v=rows)
        host.device.dynamic.offer(half, 128 << 20)
        asked = EXTENT_CHANGE.pack_bytes(count=1) + CHANGED_EXTENT.pack_bytes(start=half, length=128 << 20)
        host.send(Opcode.ADD_DYNAMIC_RESPONSE, asked)
        kv.append(handle, layer=0, k=rows, v=rows)
        kv.close()
        host.send(Opcode.RELEASE_DYNAMIC, asked)
        again = device.kv_cache(layers=1, kv_heads=16, head_dim=256, dtype="fp16", page_rows=64)
        with pytest.raises(OutOfMemoryError):
            again.append(again.sequence(), layer=0, k=rows, v=rows)


def relocated(device, base):
    """Give all of the device's addresses to a host at `base`."""
    host = device.cxl()
    hdm_at = ComponentCapability.HDM
    host.write(hdm_at, hdm.FIRST_DECODER + hdm.CONTROL.at, 0)  # taken back
    host.decode(0, base, device.config.address_bytes)


@pytest.fixture(params=["model", pytest.param("rtl", marks=pytest.mark.rtl)])
def decoded(request):
    """A device with HDM decoders between its link and its memory."""
    with nearkv.open(request.param, hdm_decoders=4) as device:
        yield device


def test_decoders_between_link_and_memory(decoded):
    """Attention before and after enumeration; then addresses lead where decoders say, and nowhere else."""
    device, contexts, q = decoded, [context(40, 1, 32, 32, seed=5)], values(1, 2, 32, seed=6)
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="fp16")
    (handle,) = filled(kv, contexts)

    def attend():
        return kv.attend([handle], layer=0, q=q, scale=0.2)

    def read(address):
        (result,) = device._port.run([Read(np.array([address], np.uint64))])
        return Access(result.access[0]), result.data[0].tobytes()

    options = register_address(device.config, 0, OPTIONS_LINE)
    assert OPTIONS.unpack(read(options)[1])["hdm_decoders"] == 4
    wanted = expected(q, contexts, scale=0.2)
    assert same_bits(attend(), wanted)
    host = device.cxl()
    assert host.decoder(0)["control"]["committed"]
    assert host.read(ComponentCapability.HDM, 0) == hdm.capability_of(4)
    assert same_bits(attend(), wanted)
    page = int(kv._sequences.table(handle, 0).page_addresses(0, 1)[0, 0])
    held = read(page)
    assert held[0] is Access.DATA

    base = 3 << 40
    outside = device.stats().outside_reads
    before = host.counters()
    relocated(device, base)
    assert read(page) == (Access.OUTSIDE, bytes(64)), "no decoder has it"
    assert read(base + page) == held
    assert host.counters()["m2s_req"] == before["m2s_req"] + 2, "two reads, wherever they led"
    dropped = np.array([page], np.uint64)
    device._port.run([Write(dropped, np.full((1, 64), 0xEE, np.uint8))])
    assert read(base + page) == held, "the write was dropped, and answered"
    device._port.run([Write(dropped + np.uint64(base), np.full((1, 64), 0xEE, np.uint8), poison=True)])
    assert host.poison() == [(page, PoisonSource.EXTERNAL)], "a device address"
    device._port.run([Write(dropped + np.uint64(base), np.frombuffer(held[1], np.uint8)[None])])
    assert host.poison() == []

    relocated(device, 0)
    assert device.stats().outside_reads == outside + 1
    assert same_bits(attend(), wanted)
    host.device.reset()
    assert read(page)[0] is Access.OUTSIDE, "CXL.mem is off after a reset"


def test_an_erased_device_decodes_as_before(decoded):
    host = decoded.cxl()
    base = 3 << 40
    relocated(decoded, base)
    host.send(Opcode.SANITIZE)
    assert host.decoder(0)["base_high"]["bits_51_32"] == base >> 32
    identity = register_address(decoded.config, 0, IDENTITY_LINE)
    (result,) = decoded._port.run([Read(np.array([identity, base + identity], np.uint64))])
    assert result.access.tolist() == [Access.OUTSIDE, Access.DATA]


@pytest.mark.rtl
@pytest.mark.parametrize(("layer", "lines_per_flit"), [("flits_68", 8 / 9), ("flits_256", 27 / 8)])
def test_link_registers_show_the_running_link(layer, lines_per_flit):
    """Counters of both ends, and the capability of CXL.io, of a link without errors."""
    from nearkv_hw.link.unpacker import PLACES
    from nearkv_hw.link.unpacker256 import PLACES_256

    places_of = PLACES if layer == "flits_68" else PLACES_256
    version, wrap = (2, 128) if layer == "flits_68" else (0, 0)  # longer flits have no INIT.Param

    # Without units, which this is not about, it is built in a fraction of the time.
    setup = {"channels": 1, "dram": "fixed", "placement": "host", "link": "x8_32", "link_layer": layer}
    with nearkv.open("rtl", **setup) as device:

        def counters(line):
            address = np.array([register_address(device.config, 0, line)], np.uint64)
            (result,) = device._port.run([Read(address)])
            return LINK_LAYER_COUNTERS.unpack(result.data[0].tobytes())

        host = device.cxl()
        before = [counters(line) for line in (LINK_LAYER_COUNTERS_LINE, HOST_LINK_LAYER_COUNTERS_LINE)]
        identity = register_address(device.config, 0, IDENTITY_LINE)
        device._port.run([Read(np.full(800, identity, np.uint64))])
        after = [counters(line) for line in (LINK_LAYER_COUNTERS_LINE, HOST_LINK_LAYER_COUNTERS_LINE)]
        for end in range(2):
            grown = {name: after[end][name] - before[end][name] for name in after[end]}
            for name in ("replayed", "crc_errors", "retries", "retrainings"):
                assert after[end][name] == 0, name
            assert all(grown[name] > 100 for name in ("sent", "accepted"))
        device_sent, host_sent = (after[end]["sent"] - before[end]["sent"] for end in range(2))
        assert device_sent > host_sent, "lines come back, two flits and more for each pair of requests"
        assert device_sent >= 800 / lines_per_flit

        link = ComponentCapability.LINK
        capability = LINK["capability"].unpack(host.read(link, LINK["capability"].at, 8))
        assert capability["version_received"] == version
        assert capability["wrap"] == capability["wrap_received"] == wrap
        assert (capability["retries_received"], capability["free_received"]) == (0, 0)
        control = LINK["control"].unpack(host.read(link, LINK["control"].at, 8))
        assert control["init_state"] == 3
        places = LINK["rx_credit_control"].unpack(host.read(link, LINK["rx_credit_control"].at, 8))
        assert (places["mem_message"], places["mem_data"]) == (places_of["req"], places_of["rwd"])
        credits = LINK["tx_credit_status"].unpack(host.read(link, LINK["tx_credit_status"].at, 8))
        assert 0 < credits["mem_message"] <= places_of["ndr"]
        assert 0 < credits["mem_data"] <= places_of["drs"]


def test_a_closed_device_has_no_host(model):
    model.close()
    with pytest.raises(ClosedError):
        model.cxl()
