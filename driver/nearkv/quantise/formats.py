"""Cache formats: how K and V rows are stored, what they take, and the presets that others use, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from nearkv_hw.abi.formats import LUT_SCALES, ROW_FORMATS, SCALE_BLOCKS, SCALE_FORMATS, SCALED_BITS, Format
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import RowLayout
from nearkv_hw.abi.rows import Stored

from nearkv.arguments import one_of
from nearkv.errors import ArgumentError


class Rule(Enum):
    """How numbers become codes."""

    NEAREST = "nearest"
    """The block's scale first, to nearest: its largest magnitude / the element format's largest. Then each
    element, to nearest, of the exact quotient by the scale as stored. An e8m0 scale is OCP MX's:
    2^(floor(log2(largest magnitude)) - floor(log2(the element format's largest)))."""
    Q8_0 = "q8_0"
    """llama.cpp's `quantize_row_q8_0_ref`, in float32: d = largest magnitude / 127; code = x * (1 / d) to the
    nearest integer, ties away from zero; d is stored as fp16."""
    Q4_0 = "q4_0"
    """llama.cpp's `quantize_row_q4_0_ref`, in float32: d = the first element of largest magnitude / -8;
    code = min(15, floor(x * (1 / d) + 8.5)) - 8; d is stored as fp16."""


@dataclass(frozen=True)
class RowFormat:
    """How the elements of a K or of a V row are stored.

    Parameters
    ----------
    element : name of the element format, of `nearkv_hw.abi.formats.ROW_FORMATS`. The 16 numbers of lut4 are
        found by `codebook`, or given.
    scale : name of the format of scales along a row, of `SCALE_FORMATS`, or None.
    block : elements that share a scale: 16, 32, 64, 128, or None for the whole row. The last may be short.
    head_scale : one float32 for all rows of a KV head; besides scales along the row, where those are e4m3.
    rule : how numbers become codes.

    Raises
    ------
    ArgumentError : for names and combinations that no device has.
    """

    element: str
    scale: str | None = None
    block: int | None = None
    head_scale: bool = False
    rule: Rule = Rule.NEAREST

    def __post_init__(self) -> None:
        form = one_of("element", self.element, ROW_FORMATS)
        if self.scale is not None:
            one_of("scale", self.scale, SCALE_FORMATS)
        elif self.block is not None:
            raise ArgumentError(f"block={self.block} needs a scale format: {', '.join(SCALE_FORMATS)}")
        if form.bits > SCALED_BITS and (self.scale or self.head_scale):
            raise ArgumentError(f"{form.name} takes no scales; formats of {SCALED_BITS} bits or fewer do")
        if self.head_scale and self.scale not in (None, "e4m3"):
            raise ArgumentError(
                f"{self.scale} scales have range enough; a scale per head goes with e4m3 or none"
            )
        if form.codebook and self.scale not in (None, *LUT_SCALES):
            raise ArgumentError(f"scales of {form.name} must be {', '.join(LUT_SCALES)}, not {self.scale}")
        if form.codebook and self.head_scale:
            raise ArgumentError(f"the numbers of {form.name} are each head's own; it has no scale per head")
        if self.block is not None and self.block not in SCALE_BLOCKS:
            allowed = ", ".join(map(str, SCALE_BLOCKS))
            raise ArgumentError(f"block={self.block!r}: must be {allowed}, or None for the whole row")
        needed = _RULES.get(self.rule)
        if needed and (self.element, self.scale, self.block, self.head_scale) != (*needed, False):
            raise ArgumentError(
                f"the rule {self.rule.value} needs element={needed[0]!r}, scale={needed[1]!r}, "
                f"block={needed[2]} and no scale per head"
            )

    @property
    def form(self) -> Format:
        """The element format."""
        return ROW_FORMATS[self.element]

    @property
    def scale_form(self) -> Format | None:
        """The format of scales along a row."""
        return None if self.scale is None else SCALE_FORMATS[self.scale]

    def stored(self, *, short: bool = True) -> Stored:
        """How rows lie in memory, of a device that lets short rows share lines or not."""
        return Stored(self.form, self.scale_form, self.block, short)

    def blocks(self, dim: int) -> int:
        """Scales of a row of `dim` elements."""
        return self.stored().blocks(dim)

    def code_bytes(self, dim: int) -> int:
        """Bytes of a row's codes."""
        return self.stored().code_bytes(dim)

    def pitch_bytes(self, dim: int) -> int:
        """Bytes from one row's codes to the next's: 16, 32 or whole lines."""
        return self.stored().pitch_bytes(dim)

    def scale_bytes(self, dim: int) -> int:
        """Bytes of a row's scales, without padding; they lie apart from the codes."""
        return self.stored().scale_bytes(dim)

    def scale_pitch_bytes(self, dim: int) -> int:
        """Bytes from one row's scales to the next's: a power of two up to a line, beyond that whole lines."""
        return self.stored().scale_pitch_bytes(dim)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row on a device, codes and scales at their pitches."""
        return self.pitch_bytes(dim) + self.scale_pitch_bytes(dim)

    def rows_per_line(self, dim: int) -> int:
        """Rows whose codes share a line: 4, 2 or 1."""
        return max(LINE_BYTES // self.pitch_bytes(dim), 1)

    def code_lines(self, dim: int) -> Fraction:
        """Lines of a row's codes: 1/4, 1/2 or a whole number."""
        return Fraction(self.pitch_bytes(dim), LINE_BYTES)

    def bits_per_element(self, dim: int) -> float:
        """Bits that an element takes without padding, its share of the scales included."""
        return self.form.bits + 8 * self.scale_bytes(dim) / dim


_RULES = {Rule.Q8_0: ("int8", "fp16", 32), Rule.Q4_0: ("int4", "fp16", 32)}
"""What a rule of llama.cpp is defined for."""


@dataclass(frozen=True)
class CacheFormat:
    """How a cache stores its rows, K and V each in their own way.

    Parameters
    ----------
    name : as users write it.
    k : of K rows.
    v : of V rows, or None where V is the first elements of the K row (latent attention).
    """

    name: str
    k: RowFormat
    v: RowFormat | None = field(default=None)

    def row_bytes(self, head_dim: int, value_dim: int) -> int:
        """Bytes that a row takes on a device for one KV head, K and V, scales included."""
        return self.k.row_bytes(head_dim) + (self.v.row_bytes(value_dim) if self.v else 0)

    def row_lines(self, head_dim: int, value_dim: int) -> Fraction:
        """Lines of codes that a row takes for one KV head, K and V; short rows share lines."""
        return self.k.code_lines(head_dim) + (self.v.code_lines(value_dim) if self.v else 0)

    def layout(
        self,
        head_dim: int,
        value_dim: int,
        page_rows: int,
        *,
        short: bool = True,
        summaries: bool = False,
    ) -> RowLayout:
        """How a page of one KV head lies in memory, of a device that lets short rows share lines or not.

        Raises
        ------
        ValueError : for page_rows out of range, or a page larger than an extent.
        """
        value = None if self.v is None else self.v.stored(short=short)
        return RowLayout(
            head_dim, value_dim, page_rows, self.k.stored(short=short), value, self.v is None, summaries
        )

    def page_lines(self, head_dim: int, value_dim: int, page_rows: int) -> int:
        """Lines of a page of one KV head: codes and scales of K, then of V, each in whole lines."""
        return self.layout(head_dim, value_dim, page_rows).page_lines


def _both(name: str, row: RowFormat) -> CacheFormat:
    return CacheFormat(name, row, row)


PRESETS: dict[str, CacheFormat] = {
    preset.name: preset
    for preset in (
        _both("bf16", RowFormat("bf16")),
        _both("fp16", RowFormat("fp16")),
        _both("fp8", RowFormat("fp8_e4m3", head_scale=True)),
        _both("int8", RowFormat("int8", "fp16")),
        _both("int4", RowFormat("int4", "fp16", 32)),
        _both("q8_0", RowFormat("int8", "fp16", 32, rule=Rule.Q8_0)),
        _both("q4_0", RowFormat("int4", "fp16", 32, rule=Rule.Q4_0)),
        _both("mxfp8", RowFormat("fp8_e4m3", "e8m0", 32)),
        _both("mxfp4", RowFormat("fp4_e2m1", "e8m0", 32)),
        _both("nvfp4", RowFormat("fp4_e2m1", "e4m3", 16, head_scale=True)),
    )
}
"""Formats by the names that others use: fp8 as serving engines have it (a float32 per KV head), int8 with a
scale per row, int4 with one per 32 elements, llama.cpp's q8_0 and q4_0, OCP's mxfp8 (of e4m3) and mxfp4, and
nvfp4 (e4m3 per 16 elements, float32 per KV head)."""


def cache_format(k: str, v: str | None = None) -> CacheFormat:
    """A preset by its name, or K of one preset with V of another.

    Raises
    ------
    ArgumentError : there is no preset of that name.

    Examples
    --------
    >>> cache_format("mxfp4").row_bytes(128, 128), cache_format("int8").row_lines(64, 64)
    (136, Fraction(2, 1))
    >>> cache_format("q8_0", "q4_0").name
    'q8_0/q4_0'
    """
    first = one_of("format", k, PRESETS)
    if v is None or v == k:
        return first
    return CacheFormat(f"{k}/{v}", first.k, one_of("format", v, PRESETS).v)
