"""Configuration space and registers at request level: access rules, BARs, locks, reset, places."""

import numpy as np
import pytest
from nearkv_hw.abi import cpmu, hdm, pci
from nearkv_hw.abi import cxl_registers as cxl
from nearkv_hw.abi.cxl_registers import ComponentCapability, DeviceCapability, MediaStatus
from nearkv_hw.abi.pci import CONFIG_SPACE, DvsecId
from nearkv_hw.abi.registers import Access
from nearkv_hw.abi.window import LINK_STATE
from nearkv_sim import open_port
from nearkv_sim.cxl_io import CxlDevice
from nearkv_sim.cxl_io.link import LinkRegisters
from nearkv_sim.port import Read

DVSEC_AT = {name: at for name, at, _ in pci.EXTENDED}


def test_every_bit_keeps_its_access(setup):
    """All ones to every register, bit by bit: what may change does, nothing else."""
    device = setup.device
    device.reset()
    for register in CONFIG_SPACE:
        if register.name == "cxl.lock":
            continue
        before = device.read_config(register.at, register.size)
        device.write_config(register.at, (1 << register.width) - 1, register.size)
        after = device.read_config(register.at, register.size)
        writable = register.mask(Access.RW, Access.RWL)
        assert after & writable == writable, register.name
        cleared = register.mask(Access.RW1C)
        assert after & ~writable & ~cleared == before & ~writable & ~cleared, register.name
        device.write_config(register.at, 0, register.size)
        assert device.read_config(register.at, register.size) & writable == 0


@pytest.mark.parametrize(("offset", "size"), [(2, 4), (4096, 4), (0, 3), (-4, 4), (4094, 4)])
def test_an_access_is_checked(setup, offset, size):
    with pytest.raises(ValueError, match="an access to configuration space has 1, 2, 4 or 8 bytes"):
        setup.device.read_config(offset, size)
    with pytest.raises(ValueError, match="does not fit 2 bytes"):
        setup.device.write_config(4, 1 << 16, 2)


def test_bytes_and_words_are_the_same_registers(setup):
    device = setup.device
    word = device.read_config(0x08)
    assert [device.read_config(8 + i, 1) for i in range(4)] == list(word.to_bytes(4, "little"))
    device.write_config(0x3C, 0x5A, 1)
    assert device.read_config(0x3C) == 0x5A


@pytest.mark.parametrize(("number", "size"), [(0, 1 << 16), (2, 1 << 12), (4, 1 << 12)])
def test_a_bar_tells_its_size(setup, number, size):
    device, at = setup.device, 0x10 + 4 * number
    device.write_config(at, 0xFFFFFFFF)
    told = device.read_config(at)
    assert told & 0xF == 4, "memory, 64 bits"
    assert (~(told & ~0xF) & 0xFFFFFFFF) + 1 == size


def test_the_dvsec_locks(setup):
    device, at = setup.device, DVSEC_AT["cxl"]
    control, base, lock = at + 0x0C, at + 0x20, at + 0x14
    device.write_config(control, 1 << 2, 2)
    device.write_config(base, 5)
    device.write_config(lock, 1, 2)
    device.write_config(lock, 0, 2)
    assert device.read_config(lock, 2) == 1
    device.write_config(control, 0, 2)
    device.write_config(base, 7)
    assert (device.read_config(control, 2), device.read_config(base)) == (0b110, 5)
    assert device.hdm.translate(5 << 32) == 0
    device.reset()
    assert (device.read_config(control, 2), device.read_config(base), device.read_config(lock, 2)) == (
        2,
        0,
        0,
    )
    assert device.hdm.translate(5 << 32) is None


def test_dvsecs_carry_what_the_device_is(setup_of):
    for link, layer, speed, width, flits_68 in (
        ("x8_64", "off", 6, 8, 0),
        ("x16_32", "off", 5, 16, 1),
        ("x8_32", "flits_68", 5, 8, 1),
        ("x8_32", "flits_256", 5, 8, 0),
    ):
        device = setup_of(link=link, link_layer=layer, capacity_bytes=4 << 30).device
        link_capability = pci.EXPRESS["link_capability"].unpack(device.read_config(pci.EXPRESS_AT + 0x0C))
        assert (link_capability["speed"], link_capability["width"]) == (speed, width)
        flex_bus = pci.FLEX_BUS_DVSEC["status"].unpack(device.read_config(DVSEC_AT["flex_bus"] + 0x0E, 2))
        assert (flex_bus["io"], flex_bus["mem"], flex_bus["flits_68"]) == (1, 1, flits_68)
        assert device.read_config(DVSEC_AT["cxl"] + 0x18) == 1, "size, bits 63:32"
    assert {device.read_config(at + 8, 2) for name, at in DVSEC_AT.items() if name != "serial"} == set(
        DvsecId
    )


def test_registers_are_where_the_tables_say(setup):
    device = setup.device
    head = cxl.COMPONENT_HEADER.unpack(device.read(0, cxl.CACHE_MEM_OFFSET))
    assert (head["id"], head["count"]) == (1, 3)
    places = {}
    for n in range(head["count"]):
        entry = cxl.COMPONENT_ENTRY.unpack(device.read(0, cxl.CACHE_MEM_OFFSET + 4 + 4 * n))
        places[entry["id"]] = cxl.CACHE_MEM_OFFSET + entry["pointer"]
    assert set(places) == set(ComponentCapability)
    assert device.read(0, places[ComponentCapability.HDM]) == hdm.capability_of(4)
    mask = cxl.RAS["uncorrectable_mask"]
    assert device.read(0, places[ComponentCapability.RAS] + mask.at) == mask.reset
    assert device.read(0, places[ComponentCapability.LINK], 8) & 0xF == 2
    array = cxl.DEVICE_ARRAY.unpack(device.read(2, 0, 8))
    assert (array["id"], array["kind"], array["count"]) == (0, 1, 3)
    found = {}
    for n in range(array["count"]):
        header = cxl.DEVICE_HEADER.unpack(device.read(2, 0x10 + 16 * n, 8))
        found[header["id"]] = header["offset"], device.read(2, 0x18 + 16 * n)
    assert found == {k: (at, block.size) for k, (at, block) in cxl.DEVICE_PLACES.items()}
    status = cxl.MEMORY_STATUS["status"].unpack(device.read(2, found[DeviceCapability.MEMORY_STATUS][0], 8))
    assert (status["media"], status["mailbox_ready"]) == (MediaStatus.READY, 1)
    assert device.read(0, 0x5000) == 0
    with pytest.raises(ValueError, match="bar must be one of 0, 2, 4, not 1"):
        device.read(1, 0)
    with pytest.raises(ValueError, match="offset must be below 0x1000"):
        device.read(2, 0x1000)


def test_the_link_capability_follows_the_link_layer():
    """Where none runs, as after reset; else what it says now, and after a reset again."""
    state = None
    registers = LinkRegisters(lambda: state)
    registers.follow()
    assert registers.registers.image() == cxl.LINK.image()
    state = {field.name: n + 1 for n, field in enumerate(LINK_STATE) if not field.reserved} | {"opened": 1}
    registers.follow()
    found = registers.registers

    def fields(register):
        return cxl.LINK[register].unpack(found.read(cxl.LINK[register].at, 8))

    capability = fields("capability")
    assert capability["version"] == 2
    for name in ("version_received", "wrap", "wrap_received", "retries_received", "free_received"):
        assert capability[name] == state[name]
    for name in ("reinits_received", "write_pointer_received", "sequence_received"):
        assert capability[name] == state[name]
    assert (fields("control")["init_state"], fields("control")["buffer_consumed"]) == (3, state["kept"])
    for register, kind in (
        ("rx_credit_control", "rx"),
        ("rx_credit_status", "owed"),
        ("tx_credit_status", "tx"),
    ):
        credits = fields(register)
        assert (credits["mem_message"], credits["mem_data"]) == (
            state[f"{kind}_message"],
            state[f"{kind}_data"],
        )
        assert credits["cache_req"] == credits["cache_rsp"] == credits["cache_data"] == 0
    found.reset()
    state["opened"] = 0
    registers.follow()
    assert fields("control")["init_state"] == 0
    assert fields("tx_credit_status")["mem_data"] == state["tx_data"]


def test_a_device_too_small_for_cxl_says_so():
    port = open_port("model", capacity_bytes=64 << 20)
    with pytest.raises(ValueError, match="CXL counts memory in 268435456 bytes: capacity_bytes=67108864"):
        CxlDevice(port.config, port.maintenance)


def test_cpmu_counters_run_stand_still_and_are_written(setup):
    device, reads, at = setup.device, np.zeros(3, np.uint64), 1
    assert cpmu.COUNTERS[at].name == "m2s_req"

    def write(name, value):
        device.write(pci.CPMU_BAR, cpmu.CPMU[name].at, value, 8)

    def count():
        return device.read(pci.CPMU_BAR, cpmu.CPMU[f"counter_{at}"].at, 8)

    def read_lines():
        setup.port.run([Read(reads)])

    read_lines()
    assert count() == 0, "it is not enabled"
    enable = cpmu.CPMU[f"configuration_{at}"].pack(enable=1)
    write(f"configuration_{at}", enable)
    read_lines()
    assert count() == 3
    write(f"counter_{at}", 100)
    assert count() == 3, "it runs"
    write("freeze", 1 << at)
    read_lines()
    assert count() == 3
    write(f"counter_{at}", 100)
    write("freeze", 0)
    read_lines()
    assert count() == 103
    told = cpmu.CPMU[f"configuration_{at}"].unpack(device.read(pci.CPMU_BAR, 0x200 + 8 * at, 8))
    event = cpmu.CPMU[f"event_{told['event']}"].unpack(
        device.read(pci.CPMU_BAR, 0x100 + 8 * told["event"], 8)
    )
    assert (told["kind"], told["events"], event["group"], event["vendor"]) == (1, 0b110, 0x20, 0x1E98)
    device.reset()
    assert count() == 0
