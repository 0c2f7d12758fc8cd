"""Packed bit layouts: the one way in which the abi declares a record, a message or a register line.

A `Layout` is a list of named fields, least significant first. Software packs and unpacks with it; the RTL
builds its structs from it (`nearkv_hw.structs.layout_of`); documentation tables are generated from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One field of a layout.

    Parameters
    ----------
    name : identifier of the field; a name that starts with "reserved" must be zero.
    width : bits.
    doc : what it means, one sentence, with its unit.
    signed : two's complement if true.
    """

    name: str
    width: int
    doc: str = ""
    signed: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"field name must be an identifier, not {self.name!r}")
        if self.width < 1:
            raise ValueError(f"field {self.name} must have a positive width, not {self.width!r}")

    @property
    def reserved(self) -> bool:
        """Whether the field must be zero."""
        return self.name.startswith("reserved")

    def encode(self, value: int) -> int:
        """The field's bits for `value`; ValueError when it does not fit."""
        if value >= 0 and value.bit_length() <= self.width - self.signed:  # most are, and are their bits
            return value
        low, high = (
            (-(1 << self.width - 1), (1 << self.width - 1) - 1) if self.signed else (0, (1 << self.width) - 1)
        )
        if not low <= value <= high:
            raise ValueError(f"field {self.name} holds {low} to {high}, not {value}")
        return value & ((1 << self.width) - 1)

    def decode(self, bits: int) -> int:
        """The value of the field's bits."""
        bits &= (1 << self.width) - 1
        return bits - (1 << self.width) if self.signed and bits >> (self.width - 1) else bits


class Layout:
    """A packed record of `width` bits.

    Parameters
    ----------
    name : the record's name in documentation.
    width : bits in all; what the fields leave over becomes the last reserved field.
    fields : the fields, least significant first.

    Raises
    ------
    ValueError : when the fields are wider than the record or a name stands twice.
    """

    def __init__(self, name: str, width: int, *fields: Field) -> None:
        used = sum(field.width for field in fields)
        if used > width:
            raise ValueError(f"layout {name} has {width} bits, its fields take {used}")
        if used < width:
            fields = (*fields, Field("reserved_end", width - used))
        self.name = name
        self.width = width
        self.fields = fields
        self._offsets: dict[str, int] = {}
        offset = 0
        for field in fields:
            if field.name in self._offsets:
                raise ValueError(f"layout {name} has two fields named {field.name}")
            self._offsets[field.name] = offset
            offset += field.width
        self._fields = {field.name: field for field in fields}
        self._places = [(f.name, self._offsets[f.name], (1 << f.width) - 1, f.signed) for f in fields]
        self._reserved_mask = sum(((1 << f.width) - 1) << self._offsets[f.name] for f in fields if f.reserved)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return -(-self.width // 8)

    def offset(self, name: str) -> int:
        """The position of a field's lowest bit."""
        return self._offsets[name]

    def pack(self, values: Mapping[str, int] | None = None, /, **more: int) -> int:
        """The record as an integer, absent fields zero; ValueError for an unknown name or a large value."""
        record = 0
        for name, value in {**(values or {}), **more}.items():
            if name not in self._offsets:
                raise ValueError(
                    f"layout {self.name} has no field {name!r}; it has {', '.join(self._offsets)}"
                )
            record |= self._fields[name].encode(int(value)) << self._offsets[name]
        return record

    def pack_bytes(self, values: Mapping[str, int] | None = None, /, **more: int) -> bytes:
        """`pack`, as little-endian bytes; the width must be whole bytes."""
        return self.pack(values, **more).to_bytes(self.width // 8, "little")

    def unpack(self, record: int | bytes | bytearray | memoryview) -> dict[str, int]:
        """Every field's value."""
        if not isinstance(record, int):
            record = int.from_bytes(record, "little")
        return {
            name: self._fields[name].decode(record >> offset) if signed else record >> offset & mask
            for name, offset, mask, signed in self._places
        }

    def reserved_mask(self) -> int:
        """A mask of the bits that must be zero."""
        return self._reserved_mask
