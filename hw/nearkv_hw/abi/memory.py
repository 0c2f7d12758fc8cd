"""What lies in device memory: page tables, pages, results, and the records that let a second host attach."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from .bits import Field, Layout
from .config import EXTENT_BYTES
from .descriptor import MAX_PAGE_ROWS_LOG2, MIN_PAGE_ROWS_LOG2
from .formats import OutputForm
from .lines import LINE_BITS, LINE_BYTES, lines_of
from .rows import Stored

LAYOUT_VERSION = 3

ENTRY_BYTES = 8
ENTRIES_PER_LINE = LINE_BYTES // ENTRY_BYTES
ENTRY = Layout(
    "page-table entry",
    64,
    Field("valid", 1, "the entry names a page"),
    Field("reserved_low", 5),
    Field("line", 46, "device address of the page divided by 64"),
)

TABLE_MAGIC = int.from_bytes(b"NKPT", "little")
TABLE = Layout(
    "page-table header",
    LINE_BITS,
    Field("magic", 32, '"NKPT"'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("reserved_version", 8),
    Field("heads", 16, "KV heads that have entries here"),
    Field(
        "entries",
        32,
        "entries per head; head h's start h * lines_of(8 * entries) lines after the header",
    ),
    Field("committed_rows", 32, "rows that are completely written, the same for all heads"),
    Field("layer", 16, "the layer"),
    Field("reserved_layer", 16),
    Field("sequence", 32, "the sequence's slot in the directory, `NO_SEQUENCE` for a prefix"),
    Field("cache", 64, "device address of the cache record"),
    Field("released_begin", 32, "first row that nobody sees any more"),
    Field("released_end", 32, "first row after those; pages that lie between the two have no entries"),
)
"""One table per sequence and layer: this line, then each head's entries. One write commits rows. Tables may
name the same page, which is written by none of them then."""

NO_SEQUENCE = (1 << 32) - 1
"""In place of a slot, in page tables of prefixes."""

CACHE_MAGIC = int.from_bytes(b"NKKV", "little")
CACHE = Layout(
    "cache record",
    LINE_BITS,
    Field("magic", 32, '"NKKV"'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("k_format", 4, "element format of K"),
    Field("v_format", 4, "element format of V"),
    Field("page_rows_log2", 8, "log2 of the rows of a page"),
    Field("latent", 1, "V is the first elements of the K row"),
    Field("summaries", 1, "pages end with a summary"),
    Field("k_pitch", 2, "as in the attend extension"),
    Field("v_pitch", 2, "likewise"),
    Field("reserved_format", 2),
    Field("layers", 16, "layers"),
    Field("kv_heads", 16, "KV heads per layer"),
    Field("head_dim", 16, "elements of a K row"),
    Field("value_dim", 16, "elements of a V row"),
    Field("sequences", 32, "slots of the sequence directory"),
    Field("k_scale", 3, "as in the attend extension"),
    Field("v_scale", 3, "likewise"),
    Field("k_block", 3, "likewise"),
    Field("v_block", 3, "likewise"),
    Field("k_rule", 2, "how numbers become codes of K: `RULES`"),
    Field("v_rule", 2, "likewise of V"),
    Field("k_head_scale", 1, "K has a scale of each head"),
    Field("v_head_scale", 1, "likewise V"),
    Field("reserved_sequences", 14),
    Field(
        "directory",
        64,
        "device address of the directory: sequences * layers addresses of page tables, zero for none",
    ),
    Field("next", 64, "device address of the tenant's next cache record, zero at the end"),
    Field("head_scales", 64, "device address of layers * kv_heads `HEAD_SCALE`, zero where heads have none"),
    Field(
        "codebooks", 64, "device address of layers * kv_heads lines of codebooks, as jobs have them, or zero"
    ),
    Field("prefixes", 64, "device address of the first `PREFIX` record, zero for none"),
)
PREFIX_MAGIC = int.from_bytes(b"NKPX", "little")
PREFIX = Layout(
    "prefix record",
    LINE_BITS,
    Field("magic", 32, '"NKPX"; zero once the prefix is gone'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("reserved_version", 24),
    Field("rows", 32, "rows, and tokens, of the prefix"),
    Field("reserved_rows", 32),
    Field("generation", 64, "its number among all prefixes of the tenant"),
    Field("root", 128, "BLAKE2b-128 of what rows are, and of what the publisher keeps apart"),
    Field("key", 128, "root, hashed with one block of tokens (as many as a page has rows) after the other"),
    Field("next", 64, "device address of the next prefix record of the cache, zero at the end"),
)
"""A prefix: this line, then the addresses of its page tables, one for each layer, and its tokens, 32 bits
each, both in whole lines. The line that links it makes it exist."""
RULES = ("nearest", "q8_0", "q4_0")
"""How numbers become codes, by number: names of `nearkv.quantise.formats.Rule`."""
HEAD_SCALE = Layout(
    "scales of a head",
    64,
    Field("k_scale", 32, "float32 bits of what multiplies all K of the head; 0 where it is not known yet"),
    Field("v_scale", 32, "float32 bits of the output scale; 0 where it is not known yet"),
)
"""Of one layer's KV head; 1 where K or V has no scale of a head."""
SUMMARY_ELEMENT_BYTES = 2
"""Bytes of an element of a summary: K's format where that has 16 bits, else bf16."""

ROOT_MAGIC = int.from_bytes(b"NKROOT\0\0", "little")
ROOT = Layout(
    "root record",
    LINE_BITS,
    Field("magic", 64, '"NKROOT"'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("reserved_version", 56),
    Field("first_cache", 64, "device address of the first cache record, zero for none"),
    Field("generations", 64, "prefixes that were ever published"),
)
"""The first line of the extent that a tenant claimed first: where a second host starts to read."""

DENOMINATOR = Layout(
    "denominator line",
    LINE_BITS,
    Field("top", 32, "top bin T, TOP_NONE when no row had weight", signed=True),
    Field("flags", 8, "bit 0: the query's NaN flag"),
    Field("reserved_flags", 24),
    Field("high", 64, "limb H", signed=True),
    Field("low", 64, "limb L", signed=True),
)

LANE_NAN = 1 << 0
LANE_POSITIVE_INFINITY = 1 << 1
LANE_NEGATIVE_INFINITY = 1 << 2
"""Bits of a lane's flags byte in a partial."""
QUERY_NAN = 1 << 0
"""The bit of a denominator line's flags that makes the query's result NaN."""
PARTIAL_LANE_BYTES = (4, 8, 8, 1)
"""Bytes of a lane in each plane of a partial: top, high, low, flags."""


@dataclass(frozen=True)
class RowLayout:
    """How the rows of one KV head lie in a page.

    A page is areas of whole lines: K codes, K scales, V codes, V scales, and the summary (the row of the
    least K elements, then that of the largest). Areas that a cache does not have take nothing.

    Parameters
    ----------
    head_dim, value_dim : elements of a K and of a V row.
    page_rows : rows of a page, a power of two.
    k, v : how K and V rows are stored; V as K if not given.
    latent : V is the first elements of the K row and has no areas.
    summaries : pages end with a summary.

    Raises
    ------
    ValueError : when page_rows is no power of two in range or the page is larger than an extent.
    """

    head_dim: int
    value_dim: int
    page_rows: int
    k: Stored = field(default_factory=Stored)
    v: Stored | None = None
    latent: bool = False
    summaries: bool = False

    def __post_init__(self) -> None:
        low, high = 1 << MIN_PAGE_ROWS_LOG2, 1 << MAX_PAGE_ROWS_LOG2
        if self.page_rows & (self.page_rows - 1) or not low <= self.page_rows <= high:
            raise ValueError(f"page_rows must be a power of two from {low} to {high}, not {self.page_rows}")
        if self.page_lines > EXTENT_BYTES // LINE_BYTES:
            fits = next(
                (
                    rows
                    for n in range(MAX_PAGE_ROWS_LOG2, MIN_PAGE_ROWS_LOG2 - 1, -1)
                    if self._fits(rows := 1 << n)
                ),
                0,
            )
            raise ValueError(
                f"a page of {self.page_rows} rows takes {self.page_bytes} bytes, more than an extent of "
                f"{EXTENT_BYTES}; use at most {fits} rows"
            )

    @property
    def value(self) -> Stored:
        """How V's elements are stored, in rows of their own or in the K row."""
        return self.k if self.latent else self.v or self.k

    @property
    def row_fields(self) -> dict[str, int]:
        """What descriptors and cache records say of how rows are stored: format, scale, block and pitch of K
        and of V; zeros for V in the K row."""
        k, v = (
            {
                "format": rows.element.code,
                "scale": rows.scale_code,
                "block": rows.block_code,
                "pitch": rows.pitch_code(dim),
            }
            for rows, dim in ((self.k, self.head_dim), (self.value, self.value_dim))
        )
        v = dict.fromkeys(v, 0) if self.latent else v
        return {f"{name}_{what}": code for name, own in (("k", k), ("v", v)) for what, code in own.items()}

    @property
    def query_lines(self) -> int:
        """Lines of a query, whose elements have 16 bits."""
        return lines_of(2 * self.head_dim)

    @property
    def k_pitch_bytes(self) -> int:
        """Bytes from one row's K codes to the next's."""
        return self.k.pitch_bytes(self.head_dim)

    @property
    def v_pitch_bytes(self) -> int:
        """Bytes from one row's V codes to the next's; 0 where V is in the K row."""
        return 0 if self.latent else self.value.pitch_bytes(self.value_dim)

    @property
    def k_scale_pitch_bytes(self) -> int:
        """Bytes from one row's K scales to the next's; 0 without."""
        return self.k.scale_pitch_bytes(self.head_dim)

    @property
    def v_scale_pitch_bytes(self) -> int:
        """Bytes from one row's V scales to the next's; 0 without."""
        return 0 if self.latent else self.value.scale_pitch_bytes(self.value_dim)

    @property
    def pitches(self) -> tuple[int, int, int, int]:
        """Bytes from one row to the next in the areas of K codes, K scales, V codes and V scales."""
        return self.k_pitch_bytes, self.k_scale_pitch_bytes, self.v_pitch_bytes, self.v_scale_pitch_bytes

    @property
    def areas(self) -> tuple[int, int, int, int]:
        """Byte offsets in a page of K codes, K scales, V codes and V scales."""
        ends = [0, *accumulate(lines_of(self.page_rows * pitch) * LINE_BYTES for pitch in self.pitches)]
        return ends[0], ends[1], ends[2], ends[3]

    @property
    def summary_lines(self) -> int:
        """Lines of each of a summary's two rows; 0 without."""
        return lines_of(self.head_dim * SUMMARY_ELEMENT_BYTES) if self.summaries else 0

    @property
    def summary_offset(self) -> int:
        """Byte offset in a page of its summary."""
        return sum(lines_of(self.page_rows * pitch) for pitch in self.pitches) * LINE_BYTES

    @property
    def page_lines(self) -> int:
        """Lines of a page."""
        return self.summary_offset // LINE_BYTES + 2 * self.summary_lines

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_lines * LINE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: codes and scales of K and V at their pitches."""
        return sum(self.pitches)

    @property
    def k_lines(self) -> int:
        """Lines of a K row's codes, of which short rows share one."""
        return lines_of(self.k_pitch_bytes)

    @property
    def v_lines(self) -> int:
        """Lines of a V row's codes, of which short rows share one."""
        return lines_of(self.v_pitch_bytes)

    def lines(self, begin: int, end: int) -> int:
        """Lines that hold codes and scales of rows `begin` to `end` of a page."""
        return sum(
            lines_of(end * pitch) - begin * pitch // LINE_BYTES
            for pitch in self.pitches
            if pitch and begin < end
        )

    def k_offset(self, row: int) -> int:
        """Byte offset in a page of the K codes of row `row` of the page."""
        return row * self.k_pitch_bytes

    def v_offset(self, row: int) -> int:
        """Byte offset in a page of the V codes of row `row` of the page."""
        return self.areas[2] + row * self.v_pitch_bytes

    def _fits(self, page_rows: int) -> bool:
        lines = sum(lines_of(page_rows * pitch) for pitch in self.pitches) + 2 * self.summary_lines
        return lines * LINE_BYTES <= EXTENT_BYTES


@dataclass(frozen=True)
class ResultLayout:
    """How one query head's result lies in memory: planes of whole lines, then the denominator line.

    A finished result has one plane of lanes. A partial has four: int32 tops, int64 highs, int64 lows, uint8
    flags. The results of a job's query heads follow each other at `lines` lines.
    """

    value_dim: int
    form: OutputForm

    @property
    def planes(self) -> tuple[int, ...]:
        """Lines of each plane."""
        sizes = PARTIAL_LANE_BYTES if self.form is OutputForm.PARTIAL else (self.form.lane_bytes,)
        return tuple(lines_of(self.value_dim * size) for size in sizes)

    @property
    def lines(self) -> int:
        """Lines of one query head's result, the denominator line included."""
        return sum(self.planes) + 1


def table_entry_lines(entries: int) -> int:
    """Lines that one head's entries take."""
    return lines_of(entries * ENTRY_BYTES)


def table_bytes(heads: int, entries: int) -> int:
    """Bytes of a page table: the header line and every head's entries."""
    return (1 + heads * table_entry_lines(entries)) * LINE_BYTES
