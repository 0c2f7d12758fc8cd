"""The device as CXL.io shows it: configuration space, registers behind its BARs, and the mailbox.

At request level: a configuration or memory request is a call. Its state is the device's own, whichever way
that runs: commands act on it through `nearkv_sim.maintenance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nearkv_hw.abi import DeviceConfig, pci
from nearkv_hw.abi import cxl_registers as cxl
from nearkv_hw.abi.config import Link, LinkLayer
from nearkv_hw.abi.cxl_registers import ComponentCapability, DeviceCapability, MediaStatus
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.link import RATES
from nearkv_hw.abi.mailbox import CAPACITY_UNIT, Opcode, PoisonSource
from nearkv_hw.abi.registers import Access, Register

from ..maintenance import Ability, Maintenance
from .background import Background
from .clock import Clock, Timestamp
from .cpmu import Cpmu
from .dynamic import DynamicCapacity
from .events import Events
from .hdm import HdmDecoders
from .link import LinkRegisters
from .mailbox import Mailbox
from .memory_device import MemoryDevice
from .poison import PoisonList
from .registers import RegisterFile
from .security import Security

HDM_DECODERS = 4
"""HDM decoders of a device that has none between its link and its memory: registers alone."""
SERIAL_NUMBER = 0x6E65_61726B76_0001
_SPEEDS = {32 * 10**9: 5, 64 * 10**9: 6}


class CxlDevice:
    """A Type 3 device's CXL.io side.

    Parameters
    ----------
    config : what the device is made of; its memory must be a multiple of 256 MiB.
    maintenance : what commands do to it.
    dynamic_bytes : of its memory, from the top, what is dynamic capacity; a multiple of 256 MiB.
    clock : the time that passes for it, in seconds.

    Members
    -------
    hdm : its HDM decoders: those between its link and its memory, where it has them. They decode all its
        addresses, windows and apertures (`nearkv_hw.abi.window`), else its memory.
    mailbox : its mailbox.
    dynamic : its dynamic capacity, which a fabric manager offers.
    interrupts : the message signalled interrupts that it has sent, in order.

    Raises
    ------
    ValueError : memory of another size.
    RuntimeError : dynamic capacity of a device that cannot withhold memory.
    """

    def __init__(
        self,
        config: DeviceConfig,
        maintenance: Maintenance,
        *,
        dynamic_bytes: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        if config.capacity_bytes % CAPACITY_UNIT or dynamic_bytes > config.capacity_bytes:
            raise ValueError(
                f"CXL counts memory in {CAPACITY_UNIT} bytes: capacity_bytes={config.capacity_bytes} must be "
                f"a multiple of it, and dynamic_bytes={dynamic_bytes} no more"
            )
        self.config = config
        self.interrupts: list[int] = []
        self._corrected = 0
        self._poisoned_writes: set[int] = set()
        self._erased: list[Callable[[], None]] = []
        self._maintenance = maintenance
        self._space = RegisterFile(pci.CONFIG_SPACE)
        self._identify_link(config.link, config.link_layer)
        static_bytes = config.capacity_bytes - dynamic_bytes
        self.hdm = maintenance.decoders or HdmDecoders(HDM_DECODERS, config.capacity_bytes)
        timestamp = Timestamp(clock)
        self._events = Events(timestamp, self._interrupt)
        self._background = Background(clock, self._background_ended)
        self._poison = PoisonList(config, maintenance, self._events, timestamp)
        self._memory = MemoryDevice(
            config, static_bytes, maintenance, self._events, timestamp, lambda: self.mailbox.commands
        )
        self._security = Security(self._erase)
        self.dynamic = DynamicCapacity(static_bytes, dynamic_bytes, maintenance, self._events)
        commands = self._memory.commands() | self._events.commands() | self._poison.commands()
        commands |= self.dynamic.commands()
        if Ability.ERASE in maintenance.abilities:
            commands |= self._security.commands()
        self.mailbox = Mailbox(
            commands,
            self._background,
            poll=self.poll,
            media_disabled=lambda: self._background.running,
            interrupt=self._interrupt,
        )
        self._cpmu = Cpmu(maintenance.traffic)
        self._ras = RegisterFile(cxl.RAS)
        self._link = LinkRegisters(maintenance.link_state)
        self._status = RegisterFile(cxl.STATUS)
        self._status.on_read("events", self._event_status)
        self._memory_status = RegisterFile(cxl.MEMORY_STATUS)
        self._memory_status.on_read("status", self._memory_state)
        self._set_up()

    def read_config(self, offset: int, size: int = 4) -> int:
        """A configuration read; ValueError for one that is misaligned or beyond 4 KiB."""
        return self._space.read(offset, size)

    def write_config(self, offset: int, value: int, size: int = 4) -> None:
        """A configuration write."""
        before = self._space.image()
        self._space.write(offset, size, value)
        if pci.CONFIG_SPACE["cxl.lock"].unpack(before[_at("cxl.lock")])["lock"]:
            for register in pci.CONFIG_SPACE:
                kept = register.mask(Access.RWL)
                if kept:
                    old = int.from_bytes(before[register.at : register.at + register.size], "little")
                    self._space[register.name] = self._space[register.name] & ~kept | old & kept
        self._set_ranges()

    def config_space(self) -> bytes:
        """All 4,096 bytes of the configuration space."""
        return self._space.image()

    def read(self, bar: int, offset: int, size: int = 4) -> int:
        """A read of a register behind a BAR; ValueError where there are none."""
        found = self._registers(bar, offset)
        if found is None:
            return self._table(bar, offset, size)
        registers, at = found
        if registers in (self._ras, self._status, self._memory_status):
            self.poll()
        if registers is self._link.registers:
            self._link.follow()
        return registers.read(at, size)

    def write(self, bar: int, offset: int, value: int, size: int = 4) -> None:
        """A write of a register behind a BAR."""
        found = self._registers(bar, offset)
        if found is None:
            return
        registers, at = found
        if isinstance(registers, HdmDecoders):
            registers.write(at, value, size)
        else:
            registers.write(at, size, value)

    def on_erased(self, erased: Callable[[], None]) -> None:
        """What else is to happen when everything was erased."""
        self._erased.append(erased)

    def poll(self) -> None:
        """Bring logs, lists and a background operation up to date with the device."""
        self._background.poll()
        self._poison.poll()
        self._memory.poll()
        self._report_errors()

    def reset(self) -> None:
        """A conventional reset: registers as at first, a passphrase locks. Logs and memory stay."""
        self._space.reset()
        self._identify_link(self.config.link, self.config.link_layer)
        for registers in (self._ras, self._link.registers):
            registers.reset()
        self.hdm.reset()
        self._cpmu.reset()
        self.mailbox.reset()
        self._security.reset()
        self._memory.reset()
        self._set_up()

    def _report_errors(self) -> None:
        """Set the status of errors that have happened since the last time."""
        corrected = self._maintenance.corrected()
        written = {a for a, s in self._maintenance.poisoned().items() if s is PoisonSource.EXTERNAL}
        if corrected > self._corrected:
            self._raise("correctable_status", cxl.Correctable.MEM_ECC)
        if written - self._poisoned_writes:
            self._raise("uncorrectable_status", cxl.Uncorrectable.POISON)
        self._corrected, self._poisoned_writes = corrected, written

    def _raise(self, register: str, error: int) -> None:
        self._ras.set(register, status=self._ras.field(register, "status") | error)

    def _set_up(self) -> None:
        self._identify_logical_devices()
        units = self.hdm.capacity_bytes
        self._space["serial.low"] = SERIAL_NUMBER & 0xFFFFFFFF
        self._space["serial.high"] = SERIAL_NUMBER >> 32
        self._space["cxl.range1_size_high"] = units >> 32
        self._space.set(
            "cxl.range1_size_low", valid=1, active=1, size_31_28=units >> 28 & 0xF,
        )  # fmt: skip
        self._set_ranges()

    def _identify_logical_devices(self) -> None:
        """One function stands for all of them."""
        several = int(self.config.logical_devices > 1)
        self._space.set("cxl.capability", mld=several)
        for register in ("capability", "control", "status"):
            self._space.set(f"flex_bus.{register}", mld=several)

    def _identify_link(self, link: Link, layer: LinkLayer) -> None:
        rate = RATES[link]
        speed = _SPEEDS[int(rate.transfers_per_second.value)]
        self._space.set("express.link_capability", speed=speed, width=rate.wires)
        self._space.set("express.link_status", speed=speed, width=rate.wires)
        self._space.set("express.link_capability_2", speeds=(1 << speed) - 1)
        flits_68 = int(rate.flits.bytes.value == 68 and layer is not LinkLayer.FLITS_256)
        for register in ("capability", "control", "status"):
            self._space.set(f"flex_bus.{register}", flits_68=flits_68)

    def _set_ranges(self) -> None:
        """What the DVSEC lets through until the HDM decoders are enabled."""
        base = self._space["cxl.range1_base_high"] << 32 | self._space["cxl.range1_base_low"]
        enabled = self._space.field("cxl.control", "mem_enable")
        self.hdm.dvsec = [(base, self.hdm.capacity_bytes)] if enabled else []

    def _interrupt(self, message: int) -> None:
        if self._space.field("msi.control", "enable"):
            self.interrupts.append(message % (1 << self._space.field("msi.control", "enabled")))

    def _background_ended(self) -> None:
        self.mailbox.background_ended()

    def _erase(self, opcode: Opcode) -> None:
        """Everything is gone at once; the memory comes back when it would have been written over."""
        config = self.config
        bytes_per_s = config.slices * LINE_BYTES * config.clock_mhz * 1e6
        self._background.start(opcode, config.capacity_bytes / bytes_per_s)
        self._cpmu.across(self._maintenance.erase)
        for erased in self._erased:
            erased()

    def _event_status(self) -> int:
        return self._events.waiting()

    def _memory_state(self) -> int:
        media = MediaStatus.DISABLED if self._background.running else MediaStatus.READY
        return cxl.MEMORY_STATUS["status"].pack(media=media, mailbox_ready=1)

    def _registers(self, bar: int, offset: int) -> tuple[RegisterFile | HdmDecoders, int] | None:
        """The registers at an offset, and the offset in them."""
        places: list[tuple[int, int, RegisterFile | HdmDecoders]] = []
        if bar == pci.COMPONENT_BAR:
            size = pci.COMPONENT_BYTES
            for capability, registers in (
                (ComponentCapability.RAS, self._ras),
                (ComponentCapability.LINK, self._link.registers),
                (ComponentCapability.HDM, self.hdm),
            ):
                at = cxl.CACHE_MEM_OFFSET + cxl.COMPONENT_PLACES[capability][1]
                places.append((at, registers.block.size, registers))
        elif bar == pci.DEVICE_BAR:
            size = pci.DEVICE_BYTES
            for kind, registers in (
                (DeviceCapability.STATUS, self._status),
                (DeviceCapability.MEMORY_STATUS, self._memory_status),
                (DeviceCapability.MAILBOX, self.mailbox.registers),
            ):
                places.append((cxl.DEVICE_PLACES[kind][0], registers.block.size, registers))
        elif bar == pci.CPMU_BAR:
            size = pci.CPMU_BYTES
            places.append((0, size, self._cpmu.registers))
        else:
            bars = pci.COMPONENT_BAR, pci.DEVICE_BAR, pci.CPMU_BAR
            raise ValueError(f"bar must be one of {', '.join(map(str, bars))}, not {bar!r}")
        if not 0 <= offset < size:
            raise ValueError(f"offset must be below {size:#x}, not {offset:#x}")
        for at, length, registers in places:
            if at <= offset < at + length:
                return registers, offset - at
        return None

    def _table(self, bar: int, offset: int, size: int) -> int:
        """The tables that say where registers are; zero beyond them."""
        table, start = (
            (_COMPONENT_TABLE, cxl.CACHE_MEM_OFFSET) if bar == pci.COMPONENT_BAR else (_DEVICE_TABLE, 0)
        )
        at = offset - start
        return int.from_bytes(table[at : at + size], "little") if at >= 0 else 0


def _component_table() -> bytes:
    words = [cxl.COMPONENT_HEADER.reset]
    words += [
        cxl.COMPONENT_ENTRY.pack(id=capability, version=version, pointer=place)
        for capability, (version, place) in cxl.COMPONENT_PLACES.items()
    ]
    return b"".join(word.to_bytes(4, "little") for word in words)


def _device_table() -> bytes:
    table = cxl.DEVICE_ARRAY.pack(version=1, kind=1, count=len(cxl.DEVICE_PLACES)).to_bytes(16, "little")
    for capability, (offset, block) in cxl.DEVICE_PLACES.items():
        header = cxl.DEVICE_HEADER.pack(id=capability, version=1, offset=offset)
        table += header.to_bytes(8, "little") + block.size.to_bytes(8, "little")
    return table


_COMPONENT_TABLE = _component_table()
_DEVICE_TABLE = _device_table()


def _at(name: str) -> slice:
    register: Register = pci.CONFIG_SPACE[name]
    return slice(register.at, register.at + register.size)
