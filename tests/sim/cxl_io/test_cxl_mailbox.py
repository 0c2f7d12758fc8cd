"""The mailbox: its registers, the codes that refuse commands, and what the device tells of itself."""

import pytest
from nearkv_hw.abi import cxl_registers as cxl
from nearkv_hw.abi import pci
from nearkv_hw.abi.cxl_registers import DEVICE_PLACES, MAILBOX, PAYLOAD_BYTES, DeviceCapability, MediaStatus
from nearkv_hw.abi.mailbox import (
    ALERTS,
    CEL_ENTRY,
    COMMAND_EFFECTS_LOG,
    EVENT_RECORD,
    EVENT_RECORDS,
    GET_LOG,
    HEALTH,
    IDENTIFY,
    LOG_ENTRY,
    PARTITION,
    SET_ALERTS,
    SET_PARTITION,
    SUPPORTED_LOGS,
    VOLATILE_ALERT,
    Effect,
    EventLog,
    Opcode,
    ReturnCode,
    uuid_number,
)
from nearkv_sim import open_port
from nearkv_sim.cxl_io import CxlDevice

MAILBOX_AT = DEVICE_PLACES[DeviceCapability.MAILBOX][0]


class Registers:
    """The mailbox as a host's driver uses it."""

    def __init__(self, device):
        self.device = device

    def read(self, name):
        register = MAILBOX[name]
        return register.unpack(self.device.read(pci.DEVICE_BAR, MAILBOX_AT + register.at, register.size))

    def write(self, name, **fields):
        register = MAILBOX[name]
        self.device.write(pci.DEVICE_BAR, MAILBOX_AT + register.at, register.pack(fields), register.size)

    def payload(self, size):
        return self.device.read(pci.DEVICE_BAR, MAILBOX_AT + 0x20, size)


def test_a_command_through_the_registers(setup):
    mailbox = Registers(setup.device)
    assert 1 << mailbox.read("capabilities")["payload_size"] == PAYLOAD_BYTES
    mailbox.write("command", opcode=Opcode.SET_TIMESTAMP, length=8)
    mailbox.write("payload_0", payload=123_000)
    mailbox.write("control", doorbell=1)
    assert mailbox.read("control")["doorbell"] == 0
    assert mailbox.read("status")["return_code"] == ReturnCode.SUCCESS
    assert setup.device.interrupts == []
    setup.now_s += 2
    mailbox.write("command", opcode=Opcode.GET_TIMESTAMP)
    mailbox.write("control", doorbell=1, interrupt=1)
    assert mailbox.read("command")["length"] == 8
    assert mailbox.payload(8) == 123_000 + 2 * 10**9
    assert setup.device.interrupts == [0]
    mailbox.write("command", opcode=0x0BAD)
    mailbox.write("control", doorbell=1)
    assert mailbox.read("status")["return_code"] == ReturnCode.UNSUPPORTED
    mailbox.write("command", opcode=Opcode.SET_TIMESTAMP, length=PAYLOAD_BYTES + 8)
    mailbox.write("control", doorbell=1)
    assert mailbox.read("status")["return_code"] == ReturnCode.PAYLOAD_LENGTH


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_payload_has_its_length(setup_of, opcode):
    setup = setup_of(dynamic_bytes=256 << 20)
    command = setup.device.mailbox.commands[opcode]
    assert setup.code(opcode, bytes(command.length + 1)) == ReturnCode.PAYLOAD_LENGTH
    if command.length:
        assert setup.code(opcode, bytes(command.length - 1)) == ReturnCode.PAYLOAD_LENGTH
    if command.entry:
        assert setup.code(opcode, bytes(command.length + command.entry)) != ReturnCode.SUCCESS


def test_lengths_of_inputs_as_others_have_them(setup_of):
    """Those of `enum cxl_opcode` as QEMU checks them."""
    commands = setup_of(dynamic_bytes=256 << 20).device.mailbox.commands
    lengths = {
        0x0100: 1, 0x0102: 0, 0x0300: 0, 0x0301: 8, 0x0400: 0, 0x0401: 0x18, 0x4000: 0, 0x4100: 0, 0x4200: 0,
        0x4201: 0, 0x4202: 12, 0x4300: 16, 0x4301: 8, 0x4302: 72, 0x4400: 0, 0x4401: 0,
    }  # fmt: skip
    assert {opcode: commands[Opcode(opcode)].length for opcode in lengths} == lengths


def test_identity_and_partitions(setup_of):
    setup = setup_of(capacity_bytes=4 << 30, dynamic_bytes=1 << 30)
    identity = IDENTIFY.unpack(setup.output(Opcode.IDENTIFY))
    assert (identity["total"], identity["volatile"], identity["persistent"]) == (12, 12, 0)
    assert identity["alignment"] == 0
    assert (identity["poison_list"], identity["inject_limit"]) == (256, 256)
    assert PARTITION.unpack(setup.output(Opcode.GET_PARTITION))["active_volatile"] == 12
    assert setup.code(Opcode.SET_PARTITION, SET_PARTITION.pack_bytes(volatile=12)) == ReturnCode.SUCCESS
    assert setup.code(Opcode.SET_PARTITION, SET_PARTITION.pack_bytes(volatile=11)) == ReturnCode.INVALID_INPUT


def test_the_command_effects_log_lists_every_command(setup):
    logs = setup.output(Opcode.GET_SUPPORTED_LOGS)
    assert SUPPORTED_LOGS.unpack(logs[:8])["count"] == 1
    entry = LOG_ENTRY.unpack(logs[8:])
    assert entry["uuid"].to_bytes(16, "little").hex() == COMMAND_EFFECTS_LOG.replace("-", "")
    size, uuid = entry["size"], entry["uuid"]
    whole = setup.output(Opcode.GET_LOG, GET_LOG.pack_bytes(uuid=uuid, length=size))
    effects = {}
    for at in range(0, size, 4):
        told = CEL_ENTRY.unpack(whole[at : at + 4])
        effects[told["opcode"]] = told["effects"]
    assert set(effects) == set(setup.device.mailbox.commands)
    assert effects[Opcode.SANITIZE] == Effect.IMMEDIATE_DATA | Effect.SECURITY | Effect.BACKGROUND
    assert effects[Opcode.IDENTIFY] == 0
    assert setup.output(Opcode.GET_LOG, GET_LOG.pack_bytes(uuid=uuid, start=8, length=4)) == whole[8:12]
    for wrong, code in (
        ({"uuid": uuid + 1, "length": 4}, ReturnCode.INVALID_LOG),
        ({"uuid": uuid, "start": size, "length": 4}, ReturnCode.INVALID_INPUT),
    ):
        assert setup.code(Opcode.GET_LOG, GET_LOG.pack_bytes(wrong)) == code
    assert uuid_number(COMMAND_EFFECTS_LOG) == uuid


def test_a_device_has_the_commands_that_it_can_carry_out():
    port = open_port("model", dram="fixed")
    device = CxlDevice(port.config, port.maintenance)
    assert device.mailbox.execute(Opcode.INJECT_POISON, bytes(8))[0] == ReturnCode.UNSUPPORTED
    assert device.mailbox.execute(Opcode.GET_DYNAMIC_CONFIG, bytes(2))[0] == ReturnCode.UNSUPPORTED
    assert IDENTIFY.unpack(device.mailbox.execute(Opcode.IDENTIFY, b"")[1])["inject_limit"] == 0
    with pytest.raises(RuntimeError, match="dram=fixed keeps no check bits"):
        port.maintenance.poison(0)


def test_health_and_its_warning(setup):
    """Corrected errors are the device's own; reaching the threshold is told once."""

    def corrected():
        return HEALTH.unpack(setup.output(Opcode.GET_HEALTH))

    assert (corrected()["corrected_volatile"], corrected()["additional"]) == (0, 0)
    asked = SET_ALERTS.pack_bytes(valid=VOLATILE_ALERT, enable=VOLATILE_ALERT, volatile_warning=2)
    assert setup.code(Opcode.SET_ALERTS, asked) == ReturnCode.SUCCESS
    assert setup.code(Opcode.SET_ALERTS, SET_ALERTS.pack_bytes(valid=1)) == ReturnCode.INVALID_INPUT
    alerts = ALERTS.unpack(setup.output(Opcode.GET_ALERTS))
    assert (alerts["valid"], alerts["programmable"], alerts["volatile_warning"]) == (8, 8, 2)
    setup.port.maintenance.corrected = lambda: 2
    assert corrected()["corrected_volatile"] == 2
    assert corrected()["additional"] == 1 << 4
    told = setup.output(Opcode.GET_EVENT_RECORDS, bytes([EventLog.WARNING]))
    assert EVENT_RECORDS.unpack(told[:32])["count"] == 1
    assert EVENT_RECORD.unpack(told[32:])["uuid"] != 0
    ras = cxl.CACHE_MEM_OFFSET + cxl.COMPONENT_PLACES[cxl.ComponentCapability.RAS][1]
    assert setup.device.read(pci.COMPONENT_BAR, ras + 0x0C) == cxl.Correctable.MEM_ECC


def test_a_shutdown_that_was_not_clean_is_counted(setup):
    assert setup.output(Opcode.GET_SHUTDOWN) == b"\0"
    assert setup.code(Opcode.SET_SHUTDOWN, b"\2") == ReturnCode.INVALID_INPUT
    setup.output(Opcode.SET_SHUTDOWN, b"\1")
    assert setup.output(Opcode.GET_SHUTDOWN) == b"\1"
    setup.device.reset()
    assert HEALTH.unpack(setup.output(Opcode.GET_HEALTH))["dirty_shutdowns"] == 1
    setup.device.reset()
    assert HEALTH.unpack(setup.output(Opcode.GET_HEALTH))["dirty_shutdowns"] == 1


def test_a_background_operation_shows_its_progress(setup):
    """2 GiB at two lines of 64 bytes per cycle of 800 MHz take 21 ms."""
    device, mailbox = setup.device, Registers(setup.device)
    mailbox.write("command", opcode=Opcode.SANITIZE)
    mailbox.write("control", doorbell=1, background_interrupt=1)
    status = mailbox.read("status")
    assert (status["return_code"], status["background"]) == (ReturnCode.BACKGROUND_STARTED, 1)
    duration_s = (2 << 30) / (2 * 64 * 800e6)
    setup.now_s += duration_s / 2
    told = mailbox.read("background")
    assert told["opcode"] == Opcode.SANITIZE
    assert told["percentage"] in (49, 50)
    place = DEVICE_PLACES[DeviceCapability.MEMORY_STATUS][0]
    media = lambda: cxl.MEMORY_STATUS["status"].unpack(device.read(pci.DEVICE_BAR, place, 8))["media"]  # noqa: E731
    assert media() == MediaStatus.DISABLED
    assert setup.code(Opcode.SECURE_ERASE) == ReturnCode.BUSY
    for opcode, command in device.mailbox.commands.items():
        if command.media and Effect.BACKGROUND not in command.effects:
            assert setup.code(opcode, bytes(command.length)) == ReturnCode.MEDIA_DISABLED, opcode
    assert setup.code(Opcode.IDENTIFY) == ReturnCode.SUCCESS
    assert device.interrupts == []
    setup.now_s += duration_s / 2 + 1e-6
    told = mailbox.read("background")
    assert (told["percentage"], told["return_code"]) == (100, ReturnCode.SUCCESS)
    assert mailbox.read("status")["background"] == 0
    assert media() == MediaStatus.READY
    assert device.interrupts == [0]
