"""Dynamic capacity: what is offered and accepted tenants can claim, what is given back is erased and gone."""

import pytest
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.mailbox import (
    CHANGED_EXTENT,
    DYNAMIC_CAPACITY,
    DYNAMIC_LIMITS,
    DYNAMIC_REGION,
    EXTENT,
    EXTENT_CHANGE,
    EXTENT_LIMIT,
    EXTENTS,
    GET_DYNAMIC_CONFIG,
    GET_EXTENTS,
    EventLog,
    ExtentEvent,
    Opcode,
    ReturnCode,
)
from nearkv_sim.port import Access
from rawhost import RawHost

MIB = 1 << 20
BASE = 1536 * MIB
FIRST = BASE // EXTENT_BYTES


@pytest.fixture
def setup(setup_of):
    """2 GiB of memory, the upper 512 MiB dynamic."""
    return setup_of(dynamic_bytes=512 * MIB)


def change(setup, opcode, *pieces, count=None):
    head = EXTENT_CHANGE.pack_bytes(count=len(pieces) if count is None else count)
    listed = b"".join(CHANGED_EXTENT.pack_bytes(start=BASE + s * MIB, length=n * MIB) for s, n in pieces)
    return setup.code(opcode, head + listed)


def add(setup, *pieces, **more):
    return change(setup, Opcode.ADD_DYNAMIC_RESPONSE, *pieces, **more)


def release(setup, *pieces, **more):
    return change(setup, Opcode.RELEASE_DYNAMIC, *pieces, **more)


def offer(setup, start, length):
    setup.device.dynamic.offer(BASE + start * MIB, length * MIB)


def extents(setup, first=0, count=100):
    answer = setup.output(Opcode.GET_DYNAMIC_EXTENTS, GET_EXTENTS.pack_bytes(first=first, count=count))
    head = EXTENTS.unpack(answer[:16])
    found = [EXTENT.unpack(answer[at : at + 40]) for at in range(16, len(answer), 40)]
    assert len(found) == head["count"]
    return head, [((e["start"] - BASE) // MIB, e["length"] // MIB) for e in found]


def test_the_region_is_told(setup):
    answer = setup.output(Opcode.GET_DYNAMIC_CONFIG, GET_DYNAMIC_CONFIG.pack_bytes(count=8))
    assert answer[:2] == bytes([1, 1])
    region = DYNAMIC_REGION.unpack(answer[8:48])
    assert (region["base"], region["decode_length"], region["length"]) == (BASE, 2, 512 * MIB)
    assert region["block"] == EXTENT_BYTES
    limits = DYNAMIC_LIMITS.unpack(answer[48:])
    assert (limits["extents"], limits["extents_available"]) == (EXTENT_LIMIT, EXTENT_LIMIT)
    asked = GET_DYNAMIC_CONFIG.pack_bytes(count=1, first=1)
    assert setup.code(Opcode.GET_DYNAMIC_CONFIG, asked) == ReturnCode.INVALID_INPUT


def test_a_pool_grows_and_shrinks(setup):
    host = RawHost(setup.port)
    assert host.claim(FIRST, 1)["status"] != 0, "nothing of it is there yet"
    assert host.claim(0, 1)["status"] == 0, "the rest of the memory is"
    offer(setup, 0, 4)
    _, (record,) = setup.records(EventLog.DYNAMIC_CAPACITY)
    told = DYNAMIC_CAPACITY.unpack(record["data"])
    offered = EXTENT.unpack(told["extent"])
    assert (told["kind"], offered["start"], offered["length"]) == (ExtentEvent.ADD, BASE, 4 * MIB)
    assert host.claim(FIRST, 1)["status"] != 0, "it was offered, not accepted"
    assert add(setup, (0, 3)) == ReturnCode.SUCCESS
    assert extents(setup) == ({"count": 1, "total": 1, "generation": 1, "reserved_end": 0}, [(0, 3)])
    assert host.claim(FIRST, 3)["status"] == 0
    assert host.claim(FIRST + 3, 1)["status"] != 0, "that was not accepted"
    host.write_bytes(BASE, b"\5" * 64)
    assert host.read(BASE, 64) == b"\5" * 64
    setup.device.dynamic.ask_back(BASE, MIB)
    assert host.read(BASE, 64) == b"\5" * 64, "to ask is not to take"
    assert release(setup, (0, 1)) == ReturnCode.SUCCESS
    assert host.access(BASE).access[0] == Access.OUTSIDE
    assert host.access(BASE + MIB).access[0] == Access.DATA
    assert extents(setup)[1] == [(1, 2)]
    offer(setup, 0, 1)
    assert add(setup, (0, 1)) == ReturnCode.SUCCESS
    other = RawHost(setup.port, aperture=1)
    assert other.claim(FIRST, 1)["status"] == 0
    assert other.read(BASE, 64) == bytes(64), "what was given back was erased"


def test_the_middle_of_an_extent_can_go(setup):
    offer(setup, 0, 10)
    add(setup, (0, 10))
    assert release(setup, (3, 2), (8, 1)) == ReturnCode.SUCCESS
    assert sorted(extents(setup)[1]) == [(0, 3), (5, 3), (9, 1)]
    head, one = extents(setup, first=1, count=1)
    assert (head["count"], head["total"], len(one)) == (1, 3, 1)
    asked = GET_EXTENTS.pack_bytes(first=4, count=1)
    assert setup.code(Opcode.GET_DYNAMIC_EXTENTS, asked) == ReturnCode.INVALID_INPUT


def test_a_manager_can_take(setup):
    offer(setup, 0, 4)
    add(setup, (0, 4))
    host = RawHost(setup.port)
    host.claim(FIRST, 4)
    setup.device.dynamic.ask_back(BASE, 2 * MIB, forced=True)
    assert host.access(BASE).access[0] == Access.OUTSIDE
    kinds = [DYNAMIC_CAPACITY.unpack(r["data"])["kind"] for r in setup.records(EventLog.DYNAMIC_CAPACITY)[1]]
    assert kinds == [ExtentEvent.ADD, ExtentEvent.FORCED_RELEASE]
    assert extents(setup)[1] == [(2, 2)]
    with pytest.raises(ValueError, match="the host has no 0x200000 bytes at"):
        setup.device.dynamic.ask_back(BASE, 2 * MIB)


def test_what_was_declined_can_be_offered_again(setup):
    offer(setup, 0, 4)
    assert add(setup) == ReturnCode.SUCCESS
    assert extents(setup)[0]["total"] == 0
    offer(setup, 0, 4)
    assert add(setup, (0, 4)) == ReturnCode.SUCCESS


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([(4, 4)], ReturnCode.INVALID_ADDRESS),
        ([(600, 1)], ReturnCode.INVALID_ADDRESS),
        ([(0, 0)], ReturnCode.EXTENT_LIST),
        ([(0, 2), (1, 1)], ReturnCode.EXTENT_LIST),
        ([(0.5, 1)], ReturnCode.EXTENT_LIST),
    ],
)
def test_a_wrong_list_changes_nothing(setup, pieces, code):
    offer(setup, 0, 4)
    pieces = [(start, length) for start, length in pieces]
    head = EXTENT_CHANGE.pack_bytes(count=len(pieces))
    listed = b"".join(
        CHANGED_EXTENT.pack_bytes(start=BASE + int(start * MIB), length=length * MIB)
        for start, length in pieces
    )
    assert setup.code(Opcode.ADD_DYNAMIC_RESPONSE, head + listed) == code
    assert extents(setup)[0]["total"] == 0
    assert add(setup, (0, 4)) == ReturnCode.SUCCESS
    assert add(setup, (0, 1)) == ReturnCode.INVALID_ADDRESS, "nothing is offered"
    assert release(setup) == ReturnCode.INVALID_INPUT
    assert release(setup, (4, 1)) == ReturnCode.INVALID_ADDRESS
    assert release(setup, (0, 1), count=2) == ReturnCode.PAYLOAD_LENGTH


def test_offers_are_checked(setup):
    offer(setup, 0, 4)
    for start, length in ((3, 2), (511, 2), (0, 0)):
        with pytest.raises(ValueError, match="an extent must be whole blocks of 1048576 bytes"):
            offer(setup, start, length)


def test_an_extent_too_many(setup):
    for n in range(EXTENT_LIMIT + 1):
        offer(setup, 2 * n, 1)
    for n in range(EXTENT_LIMIT):
        assert add(setup, (2 * n, 1)) == ReturnCode.SUCCESS
    assert add(setup, (2 * EXTENT_LIMIT, 1)) == ReturnCode.EXHAUSTED


def test_an_erased_device_keeps_its_capacity_apart(setup):
    offer(setup, 0, 4)
    add(setup, (0, 4))
    setup.output(Opcode.SANITIZE)
    host = RawHost(setup.port)
    assert host.claim(FIRST, 4)["status"] == 0
    assert host.claim(FIRST + 4, 1)["status"] != 0


def test_sizes_are_checked(setup_of):
    with pytest.raises(ValueError, match="dynamic_bytes must be a multiple of 268435456"):
        setup_of(dynamic_bytes=MIB)
    with pytest.raises(ValueError, match="and dynamic_bytes=4294967296 no more"):
        setup_of(dynamic_bytes=4 << 30)
