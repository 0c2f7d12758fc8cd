"""One device: what the mailbox poisons is what CXL.mem reads, and what reads find is in the list."""

from dataclasses import replace

import numpy as np
import pytest
from nearkv_hw.abi import cxl_registers as cxl
from nearkv_hw.abi import pci, window
from nearkv_hw.abi.mailbox import (
    CLEAR_POISON,
    GENERAL_MEDIA,
    GET_POISON,
    POISON_ENTRY,
    POISON_LIST,
    POISON_LIST_LIMIT,
    EventLog,
    Opcode,
    PoisonSource,
    ReturnCode,
)
from nearkv_hw.abi.window import RING, RING_LINE
from nearkv_sim.port import Access, Read, Write
from rawhost import RawHost

CAPACITY = 2 << 30


@pytest.fixture
def owned(setup):
    """The setup, with extents 0 and 1 in the first tenant's hands."""
    RawHost(setup.port).claim(0, 2)
    return setup


def read(setup, address):
    (result,) = setup.port.run([Read(np.array([address], np.uint64))])
    return result.access[0], result.data[0].tobytes()


def write(setup, address, data, enables=None, poison=False):
    given = None if enables is None else np.array([enables], np.uint64)
    line = np.frombuffer(data, np.uint8).reshape(1, 64)
    setup.port.run([Write(np.array([address], np.uint64), line, given, poison)])


def listed(setup, address=0, lines=CAPACITY // 64):
    answer = setup.output(Opcode.GET_POISON, GET_POISON.pack_bytes(address=address, length=lines))
    head, found = POISON_LIST.unpack(answer[:32]), []
    for at in range(32, len(answer), 16):
        entry = POISON_ENTRY.unpack(answer[at : at + 16])
        assert entry["length"] == 1
        found.append((entry["address"] & ~63, PoisonSource(entry["address"] & 7)))
    assert head["count"] == len(found)
    return head["flags"], found


def inject(setup, address):
    return setup.code(Opcode.INJECT_POISON, address.to_bytes(8, "little"))


def test_injected_poison_is_read(owned):
    write(owned, 640, bytes(range(64)))
    assert inject(owned, 640) == ReturnCode.SUCCESS
    assert read(owned, 640)[0] == Access.POISON
    assert read(owned, 704)[0] == Access.DATA
    assert listed(owned) == (0, [(640, PoisonSource.INJECTED)])
    assert inject(owned, 640) == ReturnCode.SUCCESS
    assert len(owned.records()[1]) == 1, "the second time nothing happened"
    assert listed(owned, address=0, lines=10) == (0, [])
    assert listed(owned, address=640, lines=1)[1] == [(640, PoisonSource.INJECTED)]


def test_a_written_line_is_no_longer_poisoned(owned):
    inject(owned, 0)
    write(owned, 0, b"\7" * 64, enables=0xFF)
    assert read(owned, 0)[0] == Access.POISON, "the rest of it is still lost"
    write(owned, 0, b"\7" * 64)
    assert read(owned, 0) == (Access.DATA, b"\7" * 64)
    assert listed(owned) == (0, [])


def test_clear_poison_gives_the_line_new_data(owned):
    inject(owned, 64)
    data = bytes(reversed(range(64)))
    asked = CLEAR_POISON.pack_bytes(address=64, data=int.from_bytes(data, "little"))
    assert owned.code(Opcode.CLEAR_POISON, asked) == ReturnCode.SUCCESS
    assert read(owned, 64) == (Access.DATA, data)
    assert listed(owned) == (0, [])


def test_a_poisoned_write_is_listed_and_read(owned):
    """The host says that data is bad; it stays so until the line is written as a whole."""
    write(owned, 256, b"\1" * 64, poison=True)
    assert read(owned, 256)[0] == Access.POISON
    assert listed(owned) == (0, [(256, PoisonSource.EXTERNAL)])
    (record,) = owned.records(EventLog.INFORMATION)[1]
    assert GENERAL_MEDIA.unpack(record["data"])["transaction"] == 2
    ras = cxl.CACHE_MEM_OFFSET + cxl.COMPONENT_PLACES[cxl.ComponentCapability.RAS][1]
    assert owned.device.read(pci.COMPONENT_BAR, ras) == cxl.Uncorrectable.POISON
    owned.device.write(pci.COMPONENT_BAR, ras, cxl.Uncorrectable.POISON)
    assert owned.device.read(pci.COMPONENT_BAR, ras) == 0
    write(owned, 256, b"\2" * 64, enables=1)
    assert read(owned, 256)[0] == Access.POISON
    write(owned, 256, b"\3" * 64)
    assert read(owned, 256) == (Access.DATA, b"\3" * 64)
    assert listed(owned) == (0, [])
    write(owned, 3 << 20, b"\1" * 64, poison=True)
    assert listed(owned) == (0, []), "the tenant does not own it"


def test_poison_in_the_command_window(owned):
    """A poisoned doorbell is refused; poisoned descriptors are none."""
    host = RawHost(owned.port)
    errors = host.counters()["errors"]
    tail = host.register(RING_LINE, RING)["tail"]
    owned.port.run([replace(host.doorbell(tail + 1), poison=True)])
    assert host.counters()["errors"] == errors + 1
    assert host.register(RING_LINE, RING)["tail"] == tail
    slot = window.descriptor_address(owned.port.config, 0, tail)
    write(owned, slot, b"\5" * 64, poison=True)
    write(owned, slot + 64, b"\5" * 64, poison=True)
    assert read(owned, slot) == (Access.DATA, bytes(64))
    assert read(owned, slot + 64) == (Access.DATA, b"\xff" * 64)


def test_what_a_read_finds_is_listed_and_told(owned):
    owned.port.inject(128, [3, 60])
    assert listed(owned) == (0, []), "nobody knows of it yet"
    assert read(owned, 128)[0] == Access.POISON
    assert listed(owned) == (0, [(128, PoisonSource.INTERNAL)])
    assert len(owned.records(EventLog.FAILURE)[1]) == 1
    owned.port.inject(192, [5])
    assert read(owned, 192)[0] == Access.DATA
    assert listed(owned)[1] == [(128, PoisonSource.INTERNAL)], "what was put right is not lost"
    assert len(owned.records(EventLog.FAILURE)[1]) == 1


@pytest.mark.parametrize(
    ("address", "code"),
    [
        (1, ReturnCode.INVALID_INPUT),
        (CAPACITY, ReturnCode.INVALID_ADDRESS),
        (1 << 52, ReturnCode.INVALID_ADDRESS),
    ],
)
def test_addresses_are_checked(setup, address, code):
    assert inject(setup, address) == code
    assert setup.code(Opcode.CLEAR_POISON, CLEAR_POISON.pack_bytes(address=address)) == code
    assert setup.code(Opcode.GET_POISON, GET_POISON.pack_bytes(address=address, length=1)) == code


def test_a_range_ends_within_the_device(setup):
    asked = GET_POISON.pack_bytes(address=CAPACITY - 64, length=2)
    assert setup.code(Opcode.GET_POISON, asked) == ReturnCode.INVALID_ADDRESS


def test_the_list_is_long_and_has_a_limit(setup):
    addresses = [64 * n for n in range(POISON_LIST_LIMIT)]
    assert all(inject(setup, address) == ReturnCode.SUCCESS for address in addresses)
    assert inject(setup, 1 << 20) == ReturnCode.POISON_LIMIT
    assert inject(setup, 64) == ReturnCode.SUCCESS, "it is there already"
    found, flags = [], 1
    while flags & 1:
        flags, more = listed(setup)
        found += [address for address, _ in more]
    assert found == addresses
