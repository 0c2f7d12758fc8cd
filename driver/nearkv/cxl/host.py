"""A host's side of CXL.io: it finds the device's capabilities as any host does, and sends commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearkv_hw.abi import cxl_registers as cxl
from nearkv_hw.abi import hdm, pci
from nearkv_hw.abi.cpmu import COUNTERS, CPMU
from nearkv_hw.abi.cxl_registers import (
    MAILBOX,
    PAYLOAD_BYTES,
    PAYLOAD_OFFSET,
    ComponentCapability,
    DeviceCapability,
)
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.mailbox import GET_POISON, POISON_ENTRY, POISON_LIST, Opcode, PoisonSource, ReturnCode
from nearkv_hw.abi.pci import BlockId, DvsecId, ExtendedId
from nearkv_hw.abi.registers import Block
from nearkv_sim.cxl_io import CxlDevice

from ..errors import NearkvError, ProtocolError, VersionError

BAR_BASE = 0xFE00_0000_0000
"""Host addresses from here on are given to BARs."""
MEMORY_BASE = 0x10_0000_0000
"""Host address that the device's memory is given by its first HDM decoder. Where decoders stand between link
and memory it is 0, from which the driver's addresses count."""
_CLASS = 0x050210
_EXTENDED_START = 0x100
_ALL_ONES = 0xFFFFFFFF
_SOURCE_BITS = 7


class MailboxError(NearkvError, RuntimeError):
    """A mailbox command that did not succeed.

    Members
    -------
    code : its return code.
    """

    def __init__(self, opcode: int, code: ReturnCode) -> None:
        super().__init__(f"mailbox command {opcode:#06x} ended with {code.name} ({code:#x})")
        self.code = code


@dataclass(frozen=True)
class Bar:
    """A base address register.

    Parameters
    ----------
    number : its own; a 64-bit one takes the next, too.
    address : host address that it was given.
    size : bytes.
    """

    number: int
    address: int
    size: int


class CxlHost:
    """A host that has found the device in its configuration space.

    Parameters
    ----------
    device : what answers configuration and memory requests.

    Members
    -------
    device : the same, for a fabric manager and for tests.
    bars : its BARs, with the addresses that the host gave them.
    capabilities, extended, dvsecs : where they are, by their IDs.

    Raises
    ------
    VersionError : the function is no CXL memory device.
    """

    def __init__(self, device: CxlDevice) -> None:
        self.device = device
        found = device.read_config(pci.HEADER["revision"].at) >> 8
        if found != _CLASS:
            raise VersionError(f"class code {found:#08x} is no CXL memory device's, {_CLASS:#08x}")
        self.bars = list(self._place_bars())
        self.capabilities = dict(self._walk())
        self.extended = list(self._walk_extended())
        self.dvsecs = dict(self._find_dvsecs())
        self._blocks = dict(self._locate())
        self._component = dict(self._component_capabilities())
        self._memory_device = dict(self._device_capabilities())
        self._enable()

    def place(self, capability: ComponentCapability | DeviceCapability) -> tuple[int, int]:
        """BAR and offset of a capability's registers; ProtocolError where the device has none."""
        found = self._component if isinstance(capability, ComponentCapability) else self._memory_device
        if capability not in found:
            raise ProtocolError(f"the device has no {capability.name} capability")
        return found[capability]

    def read(self, capability: ComponentCapability | DeviceCapability, offset: int, size: int = 4) -> int:
        """A register of a capability."""
        bar, at = self.place(capability)
        return self.device.read(bar, at + offset, size)

    def write(
        self, capability: ComponentCapability | DeviceCapability, offset: int, value: int, size: int = 4
    ) -> None:
        """Write a register of a capability."""
        bar, at = self.place(capability)
        self.device.write(bar, at + offset, value, size)

    def send(self, opcode: Opcode | int, payload: bytes = b"") -> bytes:
        """Carry out a mailbox command.

        Parameters
        ----------
        opcode : the command.
        payload : its input, at most 2 KiB.

        Returns
        -------
        Its output; empty for one that goes on in the background.

        Raises
        ------
        MailboxError : it did not succeed.
        ValueError : a larger payload.
        """
        if len(payload) > PAYLOAD_BYTES:
            raise ValueError(f"a payload has at most {PAYLOAD_BYTES} bytes, not {len(payload)}")
        mailbox = DeviceCapability.MAILBOX
        for at in range(0, len(payload), 8):
            word = int.from_bytes(payload[at : at + 8].ljust(8, b"\0"), "little")
            self.write(mailbox, PAYLOAD_OFFSET + at, word, 8)
        command = MAILBOX["command"].pack(opcode=opcode, length=len(payload))
        self.write(mailbox, MAILBOX["command"].at, command, 8)
        control = MAILBOX["control"]
        asked = control.unpack(self.read(mailbox, control.at)) | {"doorbell": 1}
        self.write(mailbox, control.at, control.pack(asked))
        status = MAILBOX["status"].unpack(self.read(mailbox, MAILBOX["status"].at, 8))
        code = ReturnCode(status["return_code"])
        if code is ReturnCode.BACKGROUND_STARTED:
            return b""
        if code is not ReturnCode.SUCCESS:
            raise MailboxError(opcode, code)
        length = MAILBOX["command"].unpack(self.read(mailbox, MAILBOX["command"].at, 8))["length"]
        words = [self.read(mailbox, PAYLOAD_OFFSET + at, 8) for at in range(0, length, 8)]
        return b"".join(word.to_bytes(8, "little") for word in words)[:length]

    def poison(self) -> list[tuple[int, PoisonSource]]:
        """The poison list: device addresses of lines, and where their poison comes from."""
        asked = GET_POISON.pack_bytes(length=self.device.config.capacity_bytes // LINE_BYTES)
        found, more = [], True
        while more:
            answer = self.send(Opcode.GET_POISON, asked)
            head = POISON_LIST.unpack(answer[: POISON_LIST.size])
            for at in range(POISON_LIST.size, len(answer), POISON_ENTRY.size):
                place = POISON_ENTRY.unpack(answer[at : at + POISON_ENTRY.size])["address"]
                found.append((place & ~(LINE_BYTES - 1), PoisonSource(place & _SOURCE_BITS)))
            more = bool(head["flags"] & 1)
        return found

    def counters(self) -> dict[str, int]:
        """What the performance monitoring unit counts; all counters run from enumeration on."""
        bar, start = self._blocks[BlockId.CPMU]
        return {
            counter.name: self.device.read(bar, start + CPMU[f"counter_{n}"].at, 8)
            for n, counter in enumerate(COUNTERS)
        }

    def background(self) -> dict[str, int]:
        """The background operation that runs, or ran last: opcode, percentage and return_code."""
        at = MAILBOX["background"].at
        return MAILBOX["background"].unpack(self.read(DeviceCapability.MAILBOX, at, 8))

    def config(self, block: Block, at: int, register: str) -> dict[str, int]:
        """The fields of a register of a capability in the configuration space."""
        found = block[register]
        return found.unpack(self.device.read_config(at + found.at, found.size))

    def _place_bars(self) -> Iterator[Bar]:
        """Size the BARs and give them addresses, each at a multiple of its size."""
        following = BAR_BASE
        for number in range(0, 6, 2):
            at = 0x10 + 4 * number
            self.device.write_config(at, _ALL_ONES)
            answered = self.device.read_config(at) & ~0xF
            if answered:
                size = (~answered & _ALL_ONES) + 1
                address = -(-following // size) * size
                self.device.write_config(at, address & _ALL_ONES)
                self.device.write_config(at + 4, address >> 32)
                yield Bar(number, address, size)
                following = address + size

    def _walk(self) -> Iterator[tuple[int, int]]:
        at = self.device.read_config(pci.HEADER["capabilities"].at, 1)
        while at:
            yield self.device.read_config(at, 1), at
            at = self.device.read_config(at + 1, 1)

    def _walk_extended(self) -> Iterator[tuple[int, int]]:
        at = _EXTENDED_START
        while at:
            header = pci.SERIAL["extended"].unpack(self.device.read_config(at))
            yield header["id"], at
            at = header["next"]

    def _find_dvsecs(self) -> Iterator[tuple[DvsecId, int]]:
        for identifier, at in self.extended:
            if identifier == ExtendedId.DVSEC:
                vendor = self.config(pci.DEVICE_DVSEC, at, "header")["vendor"]
                if vendor == pci.CXL_VENDOR_ID:
                    yield DvsecId(self.device.read_config(at + 8, 2)), at

    def _locate(self) -> Iterator[tuple[BlockId, tuple[int, int]]]:
        """The register blocks that the locator names."""
        at = self.dvsecs[DvsecId.REGISTER_LOCATOR]
        length = self.config(pci.LOCATOR_DVSEC, at, "header")["length"]
        layout = pci.LOCATOR_DVSEC["block0_low"]
        for entry in range(0x0C, length, 8):
            low = layout.unpack(self.device.read_config(at + entry))
            high = self.device.read_config(at + entry + 4)
            yield BlockId(low["block"]), (low["bar"], high << 32 | low["offset_31_16"] << 16)

    def _component_capabilities(self) -> Iterator[tuple[int, tuple[int, int]]]:
        bar, start = self._blocks[BlockId.COMPONENT]
        start += cxl.CACHE_MEM_OFFSET
        count = cxl.COMPONENT_HEADER.unpack(self.device.read(bar, start))["count"]
        for entry in range(1, count + 1):
            found = cxl.COMPONENT_ENTRY.unpack(self.device.read(bar, start + 4 * entry))
            yield ComponentCapability(found["id"]), (bar, start + found["pointer"])

    def _device_capabilities(self) -> Iterator[tuple[int, tuple[int, int]]]:
        bar, start = self._blocks[BlockId.DEVICE]
        count = cxl.DEVICE_ARRAY.unpack(self.device.read(bar, start, 8))["count"]
        for entry in range(1, count + 1):
            found = cxl.DEVICE_HEADER.unpack(self.device.read(bar, start + 16 * entry, 8))
            yield DeviceCapability(found["id"]), (bar, start + found["offset"])

    def _enable(self) -> None:
        """Switch on memory requests, interrupts and CXL.mem, and give the memory host addresses."""
        command = pci.HEADER["command"]
        self.device.write_config(command.at, command.pack(memory=1, master=1, no_intx=1), 2)
        msi = self.capabilities[pci.MSI["id"].reset]
        control = pci.MSI["control"].unpack(self.device.read_config(msi + 2, 2))
        asked = control | {"enable": 1, "enabled": control["capable"]}
        self.device.write_config(msi + 2, pci.MSI["control"].pack(asked), 2)
        dvsec = self.dvsecs[DvsecId.DEVICE]
        control_register = pci.DEVICE_DVSEC["control"]
        enabled = control_register.pack(io_enable=1, mem_enable=1)
        self.device.write_config(dvsec + control_register.at, enabled, 2)
        bar, start = self._blocks[BlockId.CPMU]
        for n in range(len(COUNTERS)):
            register = CPMU[f"configuration_{n}"]
            self.device.write(bar, start + register.at, register.pack(enable=1), 8)
        size = (
            self.device.read_config(dvsec + pci.DEVICE_DVSEC["range1_size_high"].at) << 32
            | self.config(pci.DEVICE_DVSEC, dvsec, "range1_size_low")["size_31_28"] << 28
        )
        self.decode(0, 0 if self.device.config.hdm_decoders else MEMORY_BASE, size)
        self.write(ComponentCapability.HDM, hdm.GLOBAL_CONTROL.at, hdm.GLOBAL_CONTROL.pack(enable=1))

    def decode(
        self, decoder: int, base: int, size: int, *, skip: int = 0, ways: int = 0, granularity: int = 0
    ) -> None:
        """Program an HDM decoder and commit it.

        Parameters
        ----------
        decoder : which one.
        base, size, skip : bytes, multiples of 256 MiB; `nearkv_hw.abi.hdm` has the rules.
        ways, granularity : as encoded.

        Raises
        ------
        ProtocolError : the device refused the commit.
        """
        start = hdm.FIRST_DECODER + decoder * hdm.DECODER_STRIDE
        for name, value in (("base", base), ("size", size), ("skip", skip)):
            for half, part in (("low", value & _ALL_ONES), ("high", value >> 32)):
                self.write(ComponentCapability.HDM, start + hdm.DECODER[f"{name}_{half}"].at, part)
        control = hdm.CONTROL.pack(ways=ways, granularity=granularity, commit=1)
        self.write(ComponentCapability.HDM, start + hdm.CONTROL.at, control)
        told = self.decoder(decoder)["control"]
        if not told["committed"]:
            raise ProtocolError(
                f"HDM decoder {decoder} was not committed for {size:#x} bytes at {base:#x}, skip {skip:#x}, "
                f"ways {ways}, granularity {granularity}"
            )

    def decoder(self, decoder: int) -> dict[str, dict[str, int]]:
        """What an HDM decoder holds: each register's fields."""
        start = hdm.FIRST_DECODER + decoder * hdm.DECODER_STRIDE
        return {
            register.name: register.unpack(self.read(ComponentCapability.HDM, start + register.at))
            for register in hdm.DECODER
        }
