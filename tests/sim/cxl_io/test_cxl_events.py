"""Event logs: order, handles, clearing, overflow, and the interrupts that each log is given."""

import pytest
from nearkv_hw.abi import pci
from nearkv_hw.abi.cxl_registers import DEVICE_PLACES, STATUS, DeviceCapability
from nearkv_hw.abi.mailbox import (
    CLEAR_EVENTS,
    EVENT_INTERRUPTS,
    EVENT_LOG_LIMIT,
    GENERAL_MEDIA,
    GENERAL_MEDIA_EVENT,
    EventLog,
    InterruptMode,
    Opcode,
    ReturnCode,
    uuid_number,
)


def inject(setup, count, start=0):
    for n in range(start, start + count):
        setup.output(Opcode.INJECT_POISON, (64 * n).to_bytes(8, "little"))


def clear(setup, *handles, log=EventLog.INFORMATION, flags=0, count=None):
    head = CLEAR_EVENTS.pack_bytes(log=log, flags=flags, count=len(handles) if count is None else count)
    return setup.code(Opcode.CLEAR_EVENT_RECORDS, head + b"".join(h.to_bytes(2, "little") for h in handles))


def status(setup):
    at = DEVICE_PLACES[DeviceCapability.STATUS][0]
    return STATUS["events"].unpack(setup.device.read(pci.DEVICE_BAR, at, 8))


def test_a_record_says_what_happened_and_when(setup):
    setup.output(Opcode.SET_TIMESTAMP, (1000).to_bytes(8, "little"))
    setup.now_s += 1
    assert status(setup)["information"] == 0
    setup.output(Opcode.INJECT_POISON, (3 << 20).to_bytes(8, "little"))
    head, (record,) = setup.records()
    assert (head["count"], head["flags"]) == (1, 0)
    assert record["uuid"] == uuid_number(GENERAL_MEDIA_EVENT)
    assert (record["length"], record["timestamp"]) == (128, 1000 + 10**9)
    data = GENERAL_MEDIA.unpack(record["data"])
    assert (data["address"], data["transaction"], data["channel"]) == ((3 << 20) | 1, 4, 1)
    assert status(setup)["information"] == 1
    assert setup.records()[1] == [record], "reading leaves it there"
    assert clear(setup, record["handle"]) == ReturnCode.SUCCESS
    assert status(setup)["information"] == 0


def test_records_are_cleared_in_order(setup):
    inject(setup, 20)
    head, first = setup.records()
    assert (head["count"], head["flags"]) == (15, 2), "as many as a payload holds, and more"
    handles = [record["handle"] for record in first]
    assert handles == sorted(set(handles))
    assert clear(setup, handles[1]) == ReturnCode.INVALID_HANDLE
    assert clear(setup, *reversed(handles[:2])) == ReturnCode.INVALID_HANDLE
    assert clear(setup, 9999) == ReturnCode.INVALID_HANDLE
    assert clear(setup) == ReturnCode.INVALID_INPUT
    assert clear(setup, handles[0], count=2) == ReturnCode.PAYLOAD_LENGTH
    assert clear(setup, flags=1) == ReturnCode.INVALID_INPUT, "all at once only after an overflow"
    assert clear(setup, *handles, log=7) == ReturnCode.INVALID_INPUT
    assert clear(setup, *handles) == ReturnCode.SUCCESS
    head, rest = setup.records()
    assert (len(rest), head["flags"]) == (5, 0)


def test_a_full_log_counts_what_it_loses(setup):
    setup.output(Opcode.SET_TIMESTAMP, (1).to_bytes(8, "little"))
    inject(setup, EVENT_LOG_LIMIT + 1)
    setup.now_s += 1
    inject(setup, 2, start=EVENT_LOG_LIMIT + 1)
    head, _ = setup.records()
    assert head["flags"] == 3
    assert (head["overflow_count"], head["first_overflow"], head["last_overflow"]) == (3, 1, 1 + 10**9)
    assert clear(setup, flags=1) == ReturnCode.SUCCESS
    head, left = setup.records()
    assert (head["overflow_count"], head["flags"], left) == (0, 0, [])


@pytest.mark.parametrize("log", [5, 255])
def test_there_are_five_logs(setup, log):
    assert setup.code(Opcode.GET_EVENT_RECORDS, bytes([log])) == ReturnCode.INVALID_INPUT


def test_a_log_interrupts_as_it_is_told(setup):
    assert setup.output(Opcode.GET_EVENT_INTERRUPTS) == bytes(5)
    inject(setup, 1)
    assert setup.device.interrupts == []
    policy = EVENT_INTERRUPTS.pack_bytes(
        information=InterruptMode.MESSAGE | 5 << 4, warning=InterruptMode.FIRMWARE
    )
    setup.output(Opcode.SET_EVENT_INTERRUPTS, policy)
    assert setup.output(Opcode.GET_EVENT_INTERRUPTS) == policy
    inject(setup, 1, start=1)
    assert setup.device.interrupts == [5]
    setup.device.write_config(pci.MSI_AT + 2, 0, 2)
    inject(setup, 1, start=2)
    assert setup.device.interrupts == [5], "interrupts are off"
    assert setup.code(Opcode.SET_EVENT_INTERRUPTS, bytes([3, 0, 0, 0, 0])) == ReturnCode.INVALID_INPUT
