"""What tools print of a CXL device, after lspci and cxl list, and the dump that `lspci -F` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nearkv_hw.abi import hdm, pci
from nearkv_hw.abi.cxl_registers import MEMORY_STATUS, ComponentCapability, DeviceCapability, MediaStatus
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.mailbox import (
    CAPACITY_UNIT,
    CEL_ENTRY,
    GET_LOG,
    HEALTH,
    IDENTIFY,
    LOG_ENTRY,
    PARTITION,
    SUPPORTED_LOGS,
    Opcode,
)
from nearkv_hw.abi.pci import DvsecId, ExtendedId
from nearkv_hw.abi.registers import Block

from .host import CxlHost

ADDRESS = "00:00.0"
"""Where the function is shown: the first on its bus."""
_NAMES = {0x01: pci.POWER, 0x05: pci.MSI, 0x10: pci.EXPRESS}
_DVSECS = {
    DvsecId.DEVICE: pci.DEVICE_DVSEC,
    DvsecId.GPF_DEVICE: pci.GPF_DVSEC,
    DvsecId.FLEX_BUS_PORT: pci.FLEX_BUS_DVSEC,
    DvsecId.REGISTER_LOCATOR: pci.LOCATOR_DVSEC,
}
_HIDDEN = {"id", "next", "extended", "header", "dvsec_id"}


def dump(host: CxlHost) -> str:
    """The configuration space as `lspci -xxxx` prints it, and `lspci -F` reads it."""
    space = host.device.config_space()
    lines = [f"{ADDRESS} CXL: nearkv"]
    lines += [f"{at:02x}: {space[at : at + 16].hex(' ')}" for at in range(0, len(space), 16)]
    return "\n".join(lines) + "\n\n"


def function(host: CxlHost) -> dict[str, Any]:
    """The function's identity, BARs and capabilities, each capability's registers by name and field."""
    device = host.device
    capabilities = [
        {"at": at, "name": _NAMES[identifier].name, **_registers(host, _NAMES[identifier], at)}
        for identifier, at in host.capabilities.items()
    ]
    for identifier, at in host.extended:
        if identifier == ExtendedId.SERIAL_NUMBER:
            capabilities.append({"at": at, "name": pci.SERIAL.name, **_registers(host, pci.SERIAL, at)})
    for dvsec, at in host.dvsecs.items():
        block = _DVSECS[dvsec]
        capabilities.append(
            {"at": at, "name": block.name, "dvsec": int(dvsec), **_registers(host, block, at)}
        )
    return {
        "address": ADDRESS,
        "vendor": device.read_config(pci.HEADER["vendor_id"].at, 2),
        "device": device.read_config(pci.HEADER["device_id"].at, 2),
        "class": device.read_config(pci.HEADER["revision"].at) >> 8,
        "bars": [{"number": bar.number, "address": bar.address, "size": bar.size} for bar in host.bars],
        "capabilities": capabilities,
    }


def memory_device(host: CxlHost) -> dict[str, Any]:
    """What `cxl list` has of a memory device: sizes, serial number, health, decoders, poison."""
    identity = IDENTIFY.unpack(host.send(Opcode.IDENTIFY))
    partition = PARTITION.unpack(host.send(Opcode.GET_PARTITION))
    health = HEALTH.unpack(host.send(Opcode.GET_HEALTH))
    status = MEMORY_STATUS["status"].unpack(host.read(DeviceCapability.MEMORY_STATUS, 0, 8))
    serial_at = dict(host.extended)[ExtendedId.SERIAL_NUMBER]
    serial = host.device.read_config(serial_at + 8) << 32 | host.device.read_config(serial_at + 4)
    return {
        "memdev": "mem0",
        "ram_size": partition["active_volatile"] * CAPACITY_UNIT,
        "pmem_size": partition["active_persistent"] * CAPACITY_UNIT,
        "serial": f"{serial:#x}",
        "host": f"0000:{ADDRESS}",
        "firmware_version": identity["firmware"].to_bytes(16, "little").rstrip(b"\0").decode(),
        "poison_list_max": identity["poison_list"],
        "media": MediaStatus(status["media"]).name.lower(),
        "corrected_volatile_errors": health["corrected_volatile"],
        "commands": [f"{opcode:#06x}" for opcode in _commands(host)],
        "decoders": list(_decoders(host)),
        "counters": host.counters(),
        "poison": [
            {"offset": address, "length": LINE_BYTES, "source": source.name.lower()}
            for address, source in host.poison()
        ],
    }


def text(host: CxlHost) -> str:
    """Both for people: a bit that is set has a plus, one that is not a minus."""
    shown = function(host)
    lines = [
        f"{ADDRESS} CXL [{shown['class'] >> 8:04x}]: Device [{shown['vendor']:04x}:{shown['device']:04x}] "
        f"(prog-if {shown['class'] & 0xFF:02x})"
    ]
    for bar in shown["bars"]:
        size = f"{bar['size'] >> 10}K"
        lines.append(f"\tRegion {bar['number']}: Memory at {bar['address']:x} (64-bit) [size={size}]")
    for capability in shown["capabilities"]:
        dvsec = f" [DVSEC {capability['dvsec']:04x}]" if "dvsec" in capability else ""
        lines.append(f"\tCapabilities: [{capability['at']:x}] {capability['name']}{dvsec}")
        block = _block_of(capability)
        for name, fields in capability["registers"].items():
            register = block[name]
            told = [
                f"{field}{'+' if value else '-'}" if register[field].width == 1 else f"{field}={value:#x}"
                for field, value in fields.items()
            ]
            lines.append(f"\t\t{name}: {' '.join(told)}")
    return "\n".join(lines) + "\n\n" + json.dumps([memory_device(host)], indent=2)


def _block_of(capability: dict[str, Any]) -> Block:
    blocks = [*_NAMES.values(), *_DVSECS.values(), pci.SERIAL]
    return next(block for block in blocks if block.name == capability["name"])


def _registers(host: CxlHost, block: Block, at: int) -> dict[str, Any]:
    """A capability's registers: the fields that are not reserved."""
    return {
        "registers": {
            register.name: {
                name: value
                for name, value in host.config(block, at, register.name).items()
                if not name.startswith("reserved")
            }
            for register in block
            if register.name not in _HIDDEN and any(not field.reserved for field in register)
        }
    }


def _commands(host: CxlHost) -> list[int]:
    """The opcodes of the command effects log."""
    logs = host.send(Opcode.GET_SUPPORTED_LOGS)
    entry = LOG_ENTRY.unpack(logs[SUPPORTED_LOGS.size :][: LOG_ENTRY.size])
    log = host.send(Opcode.GET_LOG, GET_LOG.pack_bytes(uuid=entry["uuid"], length=entry["size"]))
    return [
        CEL_ENTRY.unpack(log[at : at + CEL_ENTRY.size])["opcode"] for at in range(0, len(log), CEL_ENTRY.size)
    ]


def _decoders(host: CxlHost) -> Iterator[dict[str, Any]]:
    code = hdm.CAPABILITY.unpack(host.read(ComponentCapability.HDM, hdm.CAPABILITY.at))["decoder_count"]
    count = next(count for count, encoded in hdm.COUNT_CODES.items() if encoded == code)
    for n in range(count):
        held = host.decoder(n)
        control = held["control"]
        if control["committed"]:
            yield {
                "decoder": f"decoder0.{n}",
                "resource": held["base_high"]["bits_51_32"] << 32 | held["base_low"]["bits_31_28"] << 28,
                "size": held["size_high"]["bits_51_32"] << 32 | held["size_low"]["bits_31_28"] << 28,
                "interleave_ways": hdm.WAYS[control["ways"]],
                "interleave_granularity": 256 << control["granularity"],
                "locked": bool(control["lock_on_commit"]),
            }
