"""Registers that behave as they are declared: what can be written, what a written one clears."""

from __future__ import annotations

from collections.abc import Callable

from nearkv_hw.abi.registers import Access, Block, Register

Read = Callable[[], int]
Written = Callable[[int, int], None]


class RegisterFile:
    """The bytes of a block of registers, at request level.

    Accesses have 1, 2, 4 or 8 bytes at multiples of their size. What no register declares reads as zero and
    takes no writes.

    Parameters
    ----------
    block : the registers.

    Raises
    ------
    ValueError : of an access, that it is misaligned or beyond the block.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self._bytes = bytearray(block.image())
        self._writable = bytearray(block.size)
        self._clearing = bytearray(block.size)
        self._sticky = bytearray(block.size)
        for register in block:
            place = slice(register.at, register.at + register.size)
            self._writable[place] = _bytes(register, Access.RW, Access.RWL)
            self._clearing[place] = _bytes(register, Access.RW1C)
            self._sticky[place] = _bytes(register, Access.RWO)
        self._reads: dict[str, Read] = {}
        self._written: dict[str, Written] = {}

    def reset(self) -> None:
        """Every register's value after reset."""
        self._bytes[:] = self.block.image()

    def on_read(self, register: str, value: Read) -> None:
        """A register whose value is found when it is read."""
        self._reads[self.block[register].name] = value

    def on_write(self, register: str, written: Written) -> None:
        """What happens after a register was written: called with its value before and after."""
        self._written[self.block[register].name] = written

    def __getitem__(self, name: str) -> int:
        register = self.block[name]
        if name in self._reads:
            self[name] = self._reads[name]()
        return int.from_bytes(self._bytes[register.at : register.at + register.size], "little")

    def __setitem__(self, name: str, value: int) -> None:
        register = self.block[name]
        self._bytes[register.at : register.at + register.size] = value.to_bytes(register.size, "little")

    def field(self, register: str, field: str) -> int:
        """A field's value."""
        return self.block[register].unpack(self[register])[field]

    def set(self, register: str, **fields: int) -> None:
        """Set fields of a register, as the device does; the others stay."""
        layout = self.block[register]
        self[register] = layout.pack({**layout.unpack(self[register]), **fields})

    def read(self, offset: int, size: int) -> int:
        """What a host reads."""
        self._check(offset, size)
        for register in self._touched(offset, size):
            if register.name in self._reads:
                self[register.name] = self._reads[register.name]()
        return int.from_bytes(self._bytes[offset : offset + size], "little")

    def write(self, offset: int, size: int, value: int) -> None:
        """What a host writes."""
        self._check(offset, size)
        if not 0 <= value < 1 << 8 * size:
            raise ValueError(f"{value:#x} does not fit {size} bytes")
        touched = self._touched(offset, size)
        before = {register.name: self[register.name] for register in touched}
        for i, byte in enumerate(value.to_bytes(size, "little"), offset):
            held = self._bytes[i] & ~self._writable[i] | byte & self._writable[i]
            self._bytes[i] = held & ~(byte & self._clearing[i]) | byte & self._sticky[i]
        for register in touched:
            if register.name in self._written:
                after = int.from_bytes(self._bytes[register.at : register.at + register.size], "little")
                self._written[register.name](before[register.name], after)

    def image(self) -> bytes:
        """The bytes that a host would read."""
        for name, value in self._reads.items():
            self[name] = value()
        return bytes(self._bytes)

    def _touched(self, offset: int, size: int) -> list[Register]:
        return [r for r in self.block if r.at < offset + size and offset < r.at + r.size]

    def _check(self, offset: int, size: int) -> None:
        if size not in (1, 2, 4, 8) or offset % size or not 0 <= offset <= self.block.size - size:
            raise ValueError(
                f"an access to {self.block.name} has 1, 2, 4 or 8 bytes at a multiple of its size below "
                f"{self.block.size:#x}, not {size} at {offset:#x}"
            )


def _bytes(register: Register, *kinds: Access) -> bytes:
    return register.mask(*kinds).to_bytes(register.size, "little")
