"""How rows are stored: element codes at a pitch, and the scales of their blocks apart from them."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import BF16, ROW_FORMATS, SCALE_BLOCKS, SCALE_CODES, SCALE_FORMATS, Format
from .lines import LINE_BYTES, lines_of, row_pitch

PITCH_CODES: dict[int, int] = {32: 1, 16: 2}
"""How a descriptor names a pitch below a line; 0 stands for whole lines."""
ELEMENTS_BY_CODE: dict[int, Format] = {form.code: form for form in ROW_FORMATS.values()}
SCALES_BY_CODE: dict[int, Format] = {code + 1: SCALE_FORMATS[name] for name, code in SCALE_CODES.items()}
"""How a descriptor names a scale format; 0 stands for none."""
BLOCK_CODES: dict[int | None, int] = {None: 0, **{block: n + 1 for n, block in enumerate(SCALE_BLOCKS)}}
"""How a descriptor names the elements that share a scale; None is the whole row."""


@dataclass(frozen=True)
class Stored:
    """How rows of elements lie in memory.

    Parameters
    ----------
    element : format of a code.
    scale : format of a scale, or None where rows have none.
    block : elements that share a scale, or None for the whole row; the last block may be short.
    short : whether rows of at most 32 bytes share a line.
    """

    element: Format = BF16
    scale: Format | None = None
    block: int | None = None
    short: bool = False

    @classmethod
    def of(cls, *, element: int, scale: int, block: int, pitch: int) -> Stored:
        """From the codes of a descriptor or a cache record; KeyError for one that stands for nothing."""
        sizes = {code: size for size, code in BLOCK_CODES.items()}
        found = SCALES_BY_CODE[scale] if scale else None
        return cls(ELEMENTS_BY_CODE[element], found, sizes[block], short=pitch != 0)

    def code_bytes(self, dim: int) -> int:
        """Bytes of a row's codes."""
        return -(-dim * self.element.bits // 8)

    def pitch_bytes(self, dim: int) -> int:
        """Bytes from one row's codes to the next's: 16 or 32 where rows share lines, else whole lines."""
        size = self.code_bytes(dim)
        return row_pitch(size) if self.short else lines_of(size) * LINE_BYTES

    def pitch_code(self, dim: int) -> int:
        """The pitch as descriptors have it."""
        return PITCH_CODES.get(self.pitch_bytes(dim), 0)

    def steps(self, dim: int, lanes: int) -> int:
        """Cycles in which a unit of so many lanes takes a row's codes: a step is of one line and one row."""
        room_bytes = min(self.pitch_bytes(dim), LINE_BYTES)
        return -(-dim // min(lanes, room_bytes * 8 // self.element.bits))

    def blocks(self, dim: int) -> int:
        """Scales of a row."""
        return 0 if self.scale is None else -(-dim // (self.block or dim))

    def scale_bytes(self, dim: int) -> int:
        """Bytes of a row's scales, without padding."""
        return 0 if self.scale is None else self.blocks(dim) * self.scale.bits // 8

    def scale_pitch_bytes(self, dim: int) -> int:
        """Bytes from one row's scales to the next's: the smallest power of two that holds them up to a line,
        beyond that whole lines."""
        size = self.scale_bytes(dim)
        if size > LINE_BYTES:
            return lines_of(size) * LINE_BYTES
        return 1 << (size - 1).bit_length() if size else 0

    @property
    def scale_code(self) -> int:
        """The scales' format as descriptors have it."""
        if self.scale is None:
            return 0
        return next(code for code, form in SCALES_BY_CODE.items() if form == self.scale)

    @property
    def block_code(self) -> int:
        """The block as descriptors have it."""
        return BLOCK_CODES[self.block]
