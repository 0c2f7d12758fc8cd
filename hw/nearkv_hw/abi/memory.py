"""What lies in device memory: page tables, pages, results, and the records that let a second host attach."""

from __future__ import annotations

from dataclasses import dataclass

from .bits import Field, Layout
from .config import EXTENT_BYTES
from .descriptor import MAX_PAGE_ROWS_LOG2, MIN_PAGE_ROWS_LOG2
from .formats import OutputForm
from .lines import LINE_BITS, LINE_BYTES, lines_of

LAYOUT_VERSION = 1

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
    Field("sequence", 32, "the sequence's slot in the directory"),
    Field("cache", 64, "device address of the cache record"),
)
"""One table per sequence and layer: this line, then each head's entries. One write commits rows."""

CACHE_MAGIC = int.from_bytes(b"NKKV", "little")
CACHE = Layout(
    "cache record",
    LINE_BITS,
    Field("magic", 32, '"NKKV"'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("k_format", 4, "element format of K"),
    Field("v_format", 4, "element format of V"),
    Field("page_rows_log2", 8, "log2 of the rows of a page"),
    Field("reserved_format", 8),
    Field("layers", 16, "layers"),
    Field("kv_heads", 16, "KV heads per layer"),
    Field("head_dim", 16, "elements of a K row"),
    Field("value_dim", 16, "elements of a V row"),
    Field("sequences", 32, "slots of the sequence directory"),
    Field("reserved_sequences", 32),
    Field(
        "directory",
        64,
        "device address of the directory: sequences * layers addresses of page tables, zero for none",
    ),
    Field("next", 64, "device address of the tenant's next cache record, zero at the end"),
)

ROOT_MAGIC = int.from_bytes(b"NKROOT\0\0", "little")
ROOT = Layout(
    "root record",
    LINE_BITS,
    Field("magic", 64, '"NKROOT"'),
    Field("version", 8, "`LAYOUT_VERSION`"),
    Field("reserved_version", 56),
    Field("first_cache", 64, "device address of the first cache record, zero for none"),
)
"""The first line of a tenant's first extent: where a second host starts to read."""

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
    """How rows lie in pages: K rows of `page_rows`, then V rows, every row padded to whole lines.

    Parameters
    ----------
    head_dim, value_dim : elements of a K and of a V row.
    element_bytes : bytes of an element.
    page_rows : rows of a page, a power of two.

    Raises
    ------
    ValueError : when page_rows is no power of two in range or the page is larger than an extent.
    """

    head_dim: int
    value_dim: int
    page_rows: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        low, high = 1 << MIN_PAGE_ROWS_LOG2, 1 << MAX_PAGE_ROWS_LOG2
        if self.page_rows & (self.page_rows - 1) or not low <= self.page_rows <= high:
            raise ValueError(f"page_rows must be a power of two from {low} to {high}, not {self.page_rows}")
        if self.page_bytes > EXTENT_BYTES:
            raise ValueError(
                f"a page of {self.page_rows} rows takes {self.page_bytes} bytes, more than an extent of "
                f"{EXTENT_BYTES}; use at most {1 << (EXTENT_BYTES // self.row_bytes).bit_length() - 1} rows"
            )

    @property
    def k_lines(self) -> int:
        """Lines of a K row, and of a query."""
        return lines_of(self.head_dim * self.element_bytes)

    @property
    def v_lines(self) -> int:
        """Lines of a V row."""
        return lines_of(self.value_dim * self.element_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, K and V."""
        return (self.k_lines + self.v_lines) * LINE_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_rows * self.row_bytes

    def k_offset(self, row: int) -> int:
        """Byte offset in a page of the K part of row `row` of the page."""
        return row * self.k_lines * LINE_BYTES

    def v_offset(self, row: int) -> int:
        """Byte offset in a page of the V part of row `row` of the page."""
        return (self.page_rows * self.k_lines + row * self.v_lines) * LINE_BYTES


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
