"""Registers as declared objects: fields with their access and reset values, in blocks that can be walked.

The RTL, the software model, the dump of the configuration space and the documentation come out of the same
declaration. A register is a `Layout`, so that `pack` and `unpack` work on its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from .bits import Field, Layout


class Access(StrEnum):
    """What software may do to a field."""

    RO = "RO"
    """Read only."""
    RW = "RW"
    """Read and write."""
    RW1C = "RW1C"
    """Read; a written one clears."""
    RWL = "RWL"
    """Read and write until its register is locked."""
    RWO = "RWO"
    """Read; a written one stays until reset."""


@dataclass(frozen=True)
class Bits(Field):
    """A field of a register.

    Parameters
    ----------
    access : what software may do to it.
    reset : its value after reset.
    """

    access: Access = Access.RO
    reset: int = 0


class Register(Layout):
    """A register: its place, and its fields from the least significant one on.

    Parameters
    ----------
    name : an identifier, the register's within its block.
    offset : bytes from the block's start; a multiple of the register's size.
    width : 8, 16, 32 or 64 bits.
    fields : `Bits`; what they leave over is reserved.
    doc : what it is, one sentence.

    Members
    -------
    reset : its value after reset.

    Raises
    ------
    ValueError : no such width, an offset that is no multiple of 4 or of a smaller register's size, or fields
        that do not fit.
    """

    def __init__(self, name: str, offset: int, width: int, *fields: Bits, doc: str = "") -> None:
        if width not in (8, 16, 32, 64):
            raise ValueError(f"register {name} must have 8, 16, 32 or 64 bits, not {width!r}")
        if offset < 0 or offset % min(width // 8, 4):
            raise ValueError(
                f"register {name} of {width} bits cannot stand at offset {offset!r}: "
                f"it must be a multiple of {min(width // 8, 4)}"
            )
        super().__init__(name, width, *fields)
        self.doc = doc
        self.at = offset
        self.reset = self.pack({f.name: f.reset for f in fields})

    def mask(self, *kinds: Access) -> int:
        """The bits of the fields with one of these kinds of access."""
        return sum(
            ((1 << f.width) - 1) << self.offset(f.name)
            for f in self.fields
            if isinstance(f, Bits) and f.access in kinds
        )

    def access(self, field: str) -> Access:
        """What software may do to a field; a reserved one reads as zero."""
        found = self[field]
        return found.access if isinstance(found, Bits) else Access.RO

    def moved(self, offset: int, name: str | None = None, /, **resets: int) -> Register:
        """The same register at another place, under another name or with other values after reset."""
        fields = []
        for field in self.fields:
            if isinstance(field, Bits):
                reset = resets.pop(field.name, field.reset)
                fields.append(Bits(field.name, field.width, field.doc, field.signed, field.access, reset))
        if resets:
            raise ValueError(f"register {self.name} has no field {', '.join(resets)}")
        return Register(name or self.name, offset, self.width, *fields, doc=self.doc)


class Block:
    """Registers that lie together.

    Parameters
    ----------
    name : of the block, in documentation.
    size : bytes that it takes; 0 for the end of its last register.
    registers : its registers, in any order.

    Raises
    ------
    ValueError : two registers of one name or place, or one beyond the end.
    """

    def __init__(self, name: str, size: int, *registers: Register) -> None:
        self.name = name
        self.registers = tuple(sorted(registers, key=lambda register: register.at))
        self.size = size or max(r.at + r.size for r in registers)
        self._names = {register.name: register for register in registers}
        end = 0
        for register in self.registers:
            if register.at < end:
                raise ValueError(f"block {name}: {register.name} at {register.at:#x} covers another register")
            end = register.at + register.size
        if end > self.size or len(self._names) < len(registers):
            raise ValueError(f"block {name} of {self.size} bytes: a name stands twice, or it ends at {end}")

    def __iter__(self) -> Iterator[Register]:
        return iter(self.registers)

    def __getitem__(self, name: str) -> Register:
        return self._names[name]

    def image(self, values: Mapping[str, int] | None = None) -> bytes:
        """The block's bytes after reset; of the registers in `values`, with these values."""
        given = dict(values or {})
        image = bytearray(self.size)
        for register in self.registers:
            value = given.pop(register.name, register.reset)
            image[register.at : register.at + register.size] = value.to_bytes(register.size, "little")
        if given:
            raise ValueError(f"block {self.name} has no register {', '.join(given)}")
        return bytes(image)
