"""Element formats: how a code stands for sign, significand and exponent (docs/numerics.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Special(Enum):
    """What an element is when it is no number."""

    NAN = "nan"
    INFINITY = "infinity"


@dataclass(frozen=True)
class Decoded:
    """One element: (-1)^sign * significand * 2^exponent, or a special."""

    sign: int
    significand: int
    exponent: int
    special: Special | None = None


@dataclass(frozen=True)
class Format:
    """An element or scale format.

    Parameters
    ----------
    name : as users write it.
    code : its number in descriptors and cache records.
    bits : bits of a stored code.
    exponent_bits, fraction_bits : of a floating format; both 0 for an integer.
    exponent_bias : e = max(x, 1) - exponent_bias for a field x.
    infinities : whether the top exponent holds infinities and NaN as in IEEE 754.
    nan_codes : codes (sign cleared) that are NaN in a format without infinities.
    signed : whether the top bit is a sign.
    codebook : whether a code is the index of a number in a table, which each KV head has its own of.
    """

    name: str
    code: int
    bits: int
    exponent_bits: int = 0
    fraction_bits: int = 0
    exponent_bias: int = 0
    infinities: bool = False
    nan_codes: tuple[int, ...] = ()
    signed: bool = True
    codebook: bool = False

    @property
    def integer(self) -> bool:
        """Whether codes are two's complement integers."""
        return self.exponent_bits == 0 and not self.codebook

    @property
    def significand_bits(self) -> int:
        """The largest significand's bits."""
        return self.bits if self.integer else self.fraction_bits + 1

    def decode(self, code: int) -> Decoded:
        """Decode one code; ValueError when it does not fit the format or means nothing by itself."""
        if self.codebook:
            raise ValueError(f"a {self.name} code is an index into a table; decode the table's entry")
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"a {self.name} code has {self.bits} bits, got {code:#x}")
        if self.integer:
            value = code - (1 << self.bits) if code >> (self.bits - 1) else code
            return Decoded(int(value < 0), abs(value), 0)
        magnitude = code & ((1 << self.exponent_bits + self.fraction_bits) - 1)
        sign = code >> (self.bits - 1) if self.signed else 0
        field, fraction = magnitude >> self.fraction_bits, magnitude & ((1 << self.fraction_bits) - 1)
        if self.name == "e8m0":
            return Decoded(0, 0, 0, Special.NAN) if code == 255 else Decoded(0, 1, code - self.exponent_bias)
        if magnitude in self.nan_codes:
            return Decoded(sign, 0, 0, Special.NAN)
        if self.infinities and field == (1 << self.exponent_bits) - 1:
            return Decoded(sign, 0, 0, Special.NAN if fraction else Special.INFINITY)
        hidden = 1 << self.fraction_bits if field else 0
        return Decoded(sign, fraction + hidden, max(field, 1) - self.exponent_bias)


BF16 = Format("bf16", 0, 16, 8, 7, 134, infinities=True)
FP16 = Format("fp16", 1, 16, 5, 10, 25, infinities=True)
FP8_E4M3 = Format("fp8_e4m3", 2, 8, 4, 3, 10, nan_codes=(0x7F,))
FP8_E5M2 = Format("fp8_e5m2", 3, 8, 5, 2, 17, infinities=True)
FP4_E2M1 = Format("fp4_e2m1", 4, 4, 2, 1, 2)
INT8 = Format("int8", 5, 8)
INT4 = Format("int4", 6, 4)

ELEMENT_FORMATS: dict[str, Format] = {
    f.name: f for f in (BF16, FP16, FP8_E4M3, FP8_E5M2, FP4_E2M1, INT8, INT4)
}
"""Formats whose codes have a meaning by themselves."""
LUT4 = Format("lut4", 7, 4, codebook=True)
"""4 bits that choose one of 16 fp16 numbers of the KV head's own."""
LUT_ENTRIES = 1 << LUT4.bits
LUT_FORMAT = FP16
LUT_SCALES: tuple[str, ...] = ("e4m3", "e8m0")
"""Scale formats that go with `LUT4`: with them an element keeps to 18 bits, as every other does."""
ROW_FORMATS: dict[str, Format] = {**ELEMENT_FORMATS, LUT4.name: LUT4}
"""All formats that K and V may have."""
QUERY_FORMATS: dict[str, Format] = {f.name: f for f in (BF16, FP16)}

E8M0 = Format("e8m0", 3, 8, 8, 0, 127, signed=False)
SCALE_FORMATS: dict[str, Format] = {
    "bf16": BF16,
    "fp16": FP16,
    "e4m3": FP8_E4M3,
    "e8m0": E8M0,
}
"""Scale formats by the names that users write; `SCALE_CODES` numbers them."""
SCALE_CODES: dict[str, int] = {"bf16": 0, "fp16": 1, "e4m3": 2, "e8m0": 3}
SCALED_BITS = 8
"""Formats of at most this many bits may carry scales."""
SCALE_BLOCKS: tuple[int, ...] = (16, 32, 64, 128)
"""Elements that may share one scale; a whole row is the fifth choice."""


class OutputForm(IntEnum):
    """What a job writes as its result."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    PARTIAL = 3

    @property
    def lane_bytes(self) -> int:
        """Bytes of a finished lane."""
        if self is OutputForm.PARTIAL:
            raise ValueError("a partial has planes, not lanes of one width")
        return 4 if self is OutputForm.FP32 else 2
