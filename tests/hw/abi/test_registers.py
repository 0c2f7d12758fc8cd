"""Declared registers: what they refuse, what their masks say, and that the declared blocks are sound."""

import pytest
from nearkv_hw.abi import cpmu, cxl_registers, hdm, mailbox, pci
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.registers import Access, Bits, Block, Register

BLOCKS = [
    value
    for module in (cpmu, cxl_registers, hdm, pci)
    for value in vars(module).values()
    if isinstance(value, Block)
] + [hdm.registers(32)]


def test_a_register_is_checked():
    with pytest.raises(ValueError, match="register r must have 8, 16, 32 or 64 bits, not 24"):
        Register("r", 0, 24)
    with pytest.raises(ValueError, match="register r of 16 bits cannot stand at offset 3"):
        Register("r", 3, 16)
    with pytest.raises(ValueError, match="its fields take 40"):
        Register("r", 0, 32, Bits("a", 40))
    with pytest.raises(ValueError, match="register r has no field b"):
        Register("r", 0, 32, Bits("a", 4)).moved(4, b=1)


def test_a_block_is_checked():
    a, b = Register("a", 0, 32), Register("b", 2, 16)
    with pytest.raises(ValueError, match="b at 0x2 covers another register"):
        Block("block", 8, a, b)
    with pytest.raises(ValueError, match="a name stands twice, or it ends at 8"):
        Block("block", 4, a, a.moved(4, "c"))
    with pytest.raises(ValueError, match="a name stands twice"):
        Block("block", 8, a, a.moved(4))
    with pytest.raises(ValueError, match="block block has no register z"):
        Block("block", 8, a).image({"z": 1})


def test_masks_and_images_follow_the_fields():
    register = Register(
        "r",
        4,
        16,
        Bits("a", 4, access=Access.RW, reset=5),
        Bits("b", 4, access=Access.RW1C),
        Bits("c", 1, reset=1),
    )
    assert register.mask(Access.RW) == 0xF
    assert register.mask(Access.RW, Access.RW1C) == 0xFF
    assert register.reset == 0x105
    assert Block("block", 8, register).image() == bytes([0, 0, 0, 0, 5, 1, 0, 0])
    assert Block("block", 8, register).image({"r": 0xABC})[4:6] == bytes([0xBC, 0x0A])
    assert register.moved(6, "s", a=1).reset == 0x101
    assert (register.access("b"), register.access("reserved_end")) == (Access.RW1C, Access.RO)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_declared_blocks_keep_what_registers_hold(block):
    image = block.image()
    assert len(image) == block.size
    for register in block:
        held = int.from_bytes(image[register.at : register.at + register.size], "little")
        assert held == register.reset
        assert not register.reset & register.reserved_mask()


def test_lengths_that_the_specification_gives():
    """Sizes of DVSECs, of the RAS capability and of payloads."""
    assert [len(b.image()) for b in (pci.DEVICE_DVSEC, pci.GPF_DVSEC, pci.FLEX_BUS_DVSEC)] == [
        0x3C,
        0x10,
        0x20,
    ]
    assert pci.LOCATOR_DVSEC.size == 0x24
    assert cxl_registers.RAS.size == 0x58
    sizes = {
        "IDENTIFY": 0x45, "GET_LOG": 0x18, "GET_POISON": 16, "CLEAR_POISON": 72, "SET_ALERTS": 12,
        "HEALTH": 0x12, "ALERTS": 0x10, "EVENT_RECORD": 0x80, "EVENT_RECORDS": 0x20, "POISON_ENTRY": 16,
        "EXTENT": 40, "DYNAMIC_REGION": 40, "SET_PASSPHRASE": 0x60, "PASSPHRASE": 0x40,
    }  # fmt: skip
    assert {name: getattr(mailbox, name).size for name in sizes} == sizes
    offsets = {
        "total": 0x10, "volatile": 0x18, "persistent": 0x20, "alignment": 0x28, "information_log": 0x30,
        "fatal_log": 0x36, "label_bytes": 0x38, "poison_list": 0x3C, "inject_limit": 0x3F,
        "poison_capabilities": 0x41, "telemetry": 0x42, "dynamic_log": 0x43,
    }  # fmt: skip
    assert {name: mailbox.IDENTIFY.offset(name) // 8 for name in offsets} == offsets
    assert all(isinstance(getattr(mailbox, name), Layout) for name in sizes)


def test_the_configuration_space_is_one_chain():
    """Standard capabilities follow each other to the end, and so do the extended ones."""
    image = pci.CONFIG_SPACE.image()
    at, found = image[0x34], []
    while at:
        found.append((image[at], at))
        at = image[at + 1]
    assert found == [(1, pci.POWER_AT), (5, pci.MSI_AT), (0x10, pci.EXPRESS_AT)]
    at, found = 0x100, []
    while at:
        header = pci.SERIAL["extended"].unpack(image[at : at + 4])
        found.append((header["id"], at))
        at = header["next"]
    assert [at for _, at in found] == [at for _, at, _ in pci.EXTENDED]
    assert image[8:12] == bytes([1, 0x10, 0x02, 0x05])
