"""HDM decoders: registers, interleaving, and the rules of a commit (CXL 3.1 specification, section 8.2.4.20).

A decoder gives a range of host addresses to the device's memory. Of an interleaved range the device has every
so many-th chunk: chunk c of `granularity` bytes is its own when c mod ways is its position in the set, and is
then the (c div ways)-th of its memory that belongs to the decoder.
"""

from __future__ import annotations

from enum import IntEnum

from .registers import Access, Bits, Block, Register

ADDRESS_BITS = 52
"""Bits of a host address."""
UNIT_SHIFT = 28
"""Bases, sizes and skips are multiples of 2^UNIT_SHIFT bytes."""
UNIT_BITS = ADDRESS_BITS - UNIT_SHIFT
"""Bits of a base, size or skip, counted in these units."""
GRANULARITY_SHIFT = 8
"""The smallest granularity, log2 of bytes; encoding n stands for 2^n times as much."""
MAX_GRANULARITY = 6
"""The largest encoding of the granularity: 16 KiB."""

WAYS: dict[int, int] = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 8: 3, 9: 6, 10: 12}
"""Interleave ways by their encoding; the other encodings stand for nothing."""
THREE_WAYS = 8
"""From this encoding on the ways are three times a power of two."""

COUNT_CODES: dict[int, int] = {1: 0} | {2 * n: n for n in range(1, 9)} | {20: 9, 24: 10, 28: 11, 32: 12}
"""How the capability register has the number of decoders."""

DECODER_STRIDE = 0x20
"""Bytes from a decoder's registers to the next one's."""
FIRST_DECODER = 0x10
"""Where decoder 0's begin."""

CAPABILITY = Register(
    "capability", 0x00, 32,
    Bits("decoder_count", 4, "`COUNT_CODES`"),
    Bits("target_count", 4, "targets of a decoder; 0 in a device"),
    Bits("interleave_11_8", 1, "interleaves on address bits 11:8", reset=1),
    Bits("interleave_14_12", 1, "interleaves on address bits 14:12", reset=1),
    Bits("poison_on_decode_error", 1, "can answer what no decoder has with poison"),
    Bits("ways_3_6_12", 1, "can interleave 3, 6 and 12 ways", reset=1),
    Bits("ways_16", 1, "can interleave 16 ways", reset=1),
    Bits("uio", 1, "can decode unordered I/O"),
    Bits("reserved_14", 2),
    Bits("uio_count", 4, "decoders that can decode unordered I/O"),
    Bits("mem_data_nxm", 1, "answers what no decoder has with MemData-NXM", reset=1),
    Bits("coherency_models", 2, "0 unknown, 1 HDM-D, 2 HDM-H, 3 both", reset=2),
    doc="what the decoders can do",
)  # fmt: skip
GLOBAL_CONTROL = Register(
    "global_control", 0x04, 32,
    Bits("poison_on_error", 1, "answer what no decoder has with poison"),
    Bits("enable", 1, "the decoders decode; before, the DVSEC ranges do", access=Access.RW),
    doc="of all decoders",
)  # fmt: skip


def _halves(name: str, offset: int, doc: str) -> tuple[Register, Register]:
    low = Register(
        f"{name}_low", offset, 32,
        Bits("reserved", UNIT_SHIFT), Bits("bits_31_28", 32 - UNIT_SHIFT, access=Access.RWL), doc=doc,
    )  # fmt: skip
    high = Register(
        f"{name}_high", offset + 4, 32, Bits("bits_51_32", ADDRESS_BITS - 32, access=Access.RWL), doc=doc
    )
    return low, high


CONTROL = Register(
    "control", 0x10, 32,
    Bits("granularity", 4, "chunks have 256 * 2^n bytes, n to 6", access=Access.RWL),
    Bits("ways", 4, "`WAYS`", access=Access.RWL),
    Bits("lock_on_commit", 1, "once committed, nothing changes until reset", access=Access.RWL),
    Bits("commit", 1, "a one commits the decoder, a zero takes it back", access=Access.RWL),
    Bits("committed", 1, "the decoder decodes"),
    Bits("error", 1, "the commit was refused"),
    Bits("host_only", 1, "1: host-only coherent memory, all that the device has", reset=1),
    Bits("back_invalidate", 1, "back-invalidate snoops; none here"),
    Bits("uio", 1, "unordered I/O; none here"),
    Bits("reserved_15", 1),
    Bits("uio_granularity", 4),
    Bits("uio_ways", 4),
    Bits("position", 4, "the device's place in the interleave set", access=Access.RWL),
    doc="interleaving, and what holds of it",
)  # fmt: skip

DECODER = Block(
    "HDM decoder", DECODER_STRIDE,
    *_halves("base", 0x00, "first host address, in 256 MiB"),
    *_halves("size", 0x08, "bytes of host addresses, in 256 MiB"),
    CONTROL,
    *_halves("skip", 0x14, "device memory before the decoder's own that is left out, in 256 MiB"),
)  # fmt: skip
"""The registers of a decoder, from `FIRST_DECODER` + `DECODER_STRIDE` * n on."""


class Word(IntEnum):
    """The 32-bit registers of a decoder, in their order."""

    BASE_LOW = 0
    BASE_HIGH = 1
    SIZE_LOW = 2
    SIZE_HIGH = 3
    CONTROL = 4
    SKIP_LOW = 5
    SKIP_HIGH = 6


DVSEC_RANGES = 2
"""Ranges of the CXL device's DVSEC, which decode until the decoders are enabled."""
WORD_BITS = 9
"""Bits of a register's offset / 4 at the register port of a device."""
RESET_WORD = 0x1F0
"""At the register port of a device, by offset / 4 and behind the capability: a write is its reset."""
RANGE_WORD = 0x1F8
"""There, too: the ranges of the DVSEC, of each its base and its size in units; one of size 0 decodes nothing.
Until something is written the first one is all of the device, at host address 0."""


def capability_of(decoders: int) -> int:
    """The capability register's value; ValueError for a number of decoders that it cannot say."""
    if decoders not in COUNT_CODES:
        raise ValueError(f"decoders must be one of {', '.join(map(str, COUNT_CODES))}, not {decoders!r}")
    return CAPABILITY.reset | CAPABILITY.pack(decoder_count=COUNT_CODES[decoders])


def registers(decoders: int) -> Block:
    """All registers of so many decoders; a decoder's have its number at the end of their names."""
    members = [
        register.moved(FIRST_DECODER + n * DECODER_STRIDE + register.at, f"{register.name}_{n}")
        for n in range(decoders)
        for register in DECODER
    ]
    capability = CAPABILITY.moved(0, decoder_count=COUNT_CODES[decoders])
    return Block(
        "HDM decoders", FIRST_DECODER + decoders * DECODER_STRIDE, capability, GLOBAL_CONTROL, *members
    )
