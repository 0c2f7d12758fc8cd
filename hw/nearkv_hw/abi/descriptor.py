"""Descriptors that a host posts and the completion records that the device answers with.

A ring slot has room for two lines. The second is an attend descriptor's `EXTENSION` (scales, pitches, who
sees what) and is looked at only when `FLAG_EXTENDED` says so. A device without the features that it needs
refuses it.
"""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout
from .lines import LINE_BITS, LINE_BYTES

DESCRIPTOR_VERSION = 2
DESCRIPTOR_BYTES = 2 * LINE_BYTES
COMPLETION_BYTES = LINE_BYTES


class Opcode(IntEnum):
    """What a descriptor asks for."""

    NOP = 0
    """Complete at once: a fence in the ring."""
    ATTEND = 1
    """Attention of a group of query heads over a range of rows."""
    CLAIM_EXTENTS = 2
    """Take ownership of extents that nobody owns."""
    RELEASE_EXTENTS = 3
    """Give back those of the extents that the tenant owns: each is free once zeros are all over it."""


FLAG_EXTENDED = 1 << 0
"""The slot's second line is the descriptor's `EXTENSION`."""
FLAG_SINKS = 1 << 1
"""`sinks` names one float32 per query head of the group; every query row has them."""

_HEAD = (
    Field("version", 8, "`DESCRIPTOR_VERSION`"),
    Field("opcode", 8, "`Opcode`"),
    Field("flags", 16, "bit 0 extended, bit 1 sinks; other bits zero"),
    Field("tag", 32, "returned in the completion record"),
)

ATTEND = Layout(
    "attend descriptor",
    LINE_BITS,
    *_HEAD,
    Field("table", 64, "device address of the page table's header line"),
    Field(
        "queries",
        64,
        "device address of the first query: query row after query row, in each the heads of the group; "
        "each query takes whole lines",
    ),
    Field("result", 64, "device address of the result area, whole lines, in the order of the queries"),
    Field("sinks", 64, "device address of the sinks, or zero"),
    Field("row_begin", 32, "first visible row"),
    Field("row_end", 32, "first row no longer visible"),
    Field("score_factor", 32, "float32 bits of c (contract, sections 3 and 8)"),
    Field("output_scale", 32, "float32 bits of the output scale, zero for none"),
    Field("head_dim", 10, "elements of a K row and of a query"),
    Field("value_dim", 10, "elements of a V row and of a result"),
    Field("group", 8, "query heads of this job, in each query row"),
    Field("query_rows", 8, "query rows; more than 1 only in an extended descriptor"),
    Field("page_rows_log2", 4, "log2 of the rows of a page"),
    Field("k_format", 4, "element format of K"),
    Field("v_format", 4, "element format of V"),
    Field("query_format", 2, "element format of the queries: bf16 or fp16"),
    Field("output_form", 3, "`OutputForm`"),
    Field("kv_head", 11, "which of the page table's heads"),
)

OPTION_CAUSAL = 1 << 0
"""A query row sees no row whose position is after its own."""
OPTION_TREE = 1 << 1
"""`tree` names positions and masks of the query rows, whose own rows are the last `query_rows` before
`row_end`."""
OPTION_LATENT = 1 << 2
"""V is the first `value_dim` elements of the K row; the fields of V are zero."""
OPTION_SUMMARIES = 1 << 3
"""Pages end with a summary of their K rows."""
OPTION_SELECT = 1 << 4
"""Only `select_pages` pages are attended to, which are written to `selected`; needs `OPTION_SUMMARIES`."""
OPTION_ALIBI = 1 << 5
"""`slopes` names one float32 per query head of the group."""
OPTION_RANGES = 1 << 6
"""`ranges` names the rows that are seen, of those from `row_begin` to `row_end`."""
OPTION_CODEBOOK = 1 << 7
"""`codebooks` names the numbers that codes of lut4 stand for."""

EXTENSION = Layout(
    "attend extension",
    LINE_BITS,
    Field(
        "options",
        16,
        "bit 0 causal, 1 tree, 2 latent, 3 summaries, 4 select, 5 ALiBi, 6 ranges, 7 codebook; others zero",
    ),
    Field("k_scale", 3, "format of K's scales: 0 none, else 1 + its number (bf16 0, fp16 1, e4m3 2, e8m0 3)"),
    Field("v_scale", 3, "likewise of V"),
    Field("k_block", 3, "elements that share a scale: 0 the whole row, else 8 * 2^n"),
    Field("v_block", 3, "likewise of V"),
    Field("k_pitch", 2, "bytes from one K row to the next: 0 whole lines, 1 for 32, 2 for 16"),
    Field("v_pitch", 2, "likewise of V"),
    Field("softcap", 32, "float32 bits of C2, zero for none"),
    Field("first_position", 24, "position of query row 0; the others follow", signed=True),
    Field("range_count", 16, "ranges in the list"),
    Field("window", 24, "rows up to its own that a query row sees, zero for all; makes causal, too"),
    Field("kept", 24, "first rows of the context that the window leaves visible"),
    Field("select_pages", 24, "pages to select"),
    Field("reserved_select", 16),
    Field("ranges", 46, "device address / 64 of the list of `RANGE`, whole lines filled up with zeros"),
    Field("reserved_ranges", 18),
    Field(
        "tree",
        46,
        "device address / 64: positions of the query rows, 32 bits each, in whole lines; then 32 bytes for "
        "each query row, in which bit i says whether it sees query row i's row",
    ),
    Field("reserved_tree", 18),
    Field("slopes", 46, "device address / 64 of the slopes in base 2, float32, in whole lines"),
    Field("reserved_slopes", 18),
    Field("codebooks", 46, "device address / 64 of a line: K's 16 fp16 numbers, then V's"),
    Field("reserved_codebooks", 18),
    Field(
        "selected",
        46,
        "device address / 64 where the device writes how many pages it selected and their numbers, rising, "
        "32 bits each, in whole lines",
    ),
)
"""The second line of a slot with `FLAG_EXTENDED`. What is not used is zero."""
RANGE = Layout("row range", 64, Field("begin", 32, "first row"), Field("end", 32, "first row beyond"))
"""Ranges are sorted and disjoint, not empty, and lie from `row_begin` to `row_end`."""
WORD_BYTES = 4
"""Bytes of a position, a slope and a selected page's number."""
TREE_ROW_BYTES = 32
"""Bytes of a query row's mask in a tree."""

NOP = Layout("no-operation descriptor", LINE_BITS, *_HEAD)

CLAIM = Layout(
    "claim or release descriptor",
    LINE_BITS,
    *_HEAD,
    Field("first_extent", 32, "first extent"),
    Field("extent_count", 32, "consecutive extents, at least 1; all are claimed or none"),
)

COMPLETION = Layout(
    "completion record",
    LINE_BITS,
    Field(
        "phase", 1, "1 on the ring's first lap, then alternating: a record is new when it has the lap's phase"
    ),
    Field("reserved_phase", 7),
    Field("status", 8, "`Status`"),
    Field("passes", 16, "times that the rows were read, summaries aside"),
    Field("tag", 32, "the descriptor's tag"),
    Field("cycles", 32, "device cycles from the descriptor's fetch to this record"),
    Field("lines", 32, "K, V and summary lines streamed, all channels and passes"),
    Field(
        "detail",
        64,
        "page index at fault; for a refused claim, the first extent that cannot be had, or the quota; for a "
        "release, how many extents it gave back",
    ),
)


class Status(IntEnum):
    """How a descriptor ended."""

    OK = 0
    BAD_VERSION = 1
    BAD_OPCODE = 2
    BAD_FLAGS = 3
    """An unknown flag, or a reserved field that is not zero."""
    BAD_GEOMETRY = 4
    """head_dim, value_dim, group, query_rows, page_rows or pages to select out of range, or more pages to
    select from than `MAX_CANDIDATES`."""
    BAD_FORMAT = 5
    """An element format, scale, block, pitch or output form that is none or does not go with the rest."""
    BAD_FACTOR = 6
    """The score factor is NaN or infinite, or the softcap is not in 0 < C2 <= 1,024."""
    BAD_ADDRESS = 7
    """An address that is no whole line or lies beyond the memory."""
    BAD_TABLE = 8
    """The page table's header has no magic, another version, or fewer heads than kv_head."""
    BAD_RANGE = 9
    """The row range is reversed, or goes beyond the committed length or the table."""
    DENIED = 10
    """Table, queries, sinks or a list of the extension lie in an extent that the tenant does not own."""
    BAD_PAGE = 11
    """A page-table entry is not valid, or its page crosses an extent or the end; `detail` is the page."""
    PAGE_DENIED = 12
    """A page lies in an extent that the tenant does not own; `detail` is the page."""
    POISON = 13
    """A line was poisoned; `detail` is the page, or zero for all that is no page."""
    RESULT_DENIED = 14
    """The result area lies in an extent that the tenant does not own; nothing was written there."""
    EXTENT_TAKEN = 15
    """Another tenant owns an extent of the claim; nothing was claimed; `detail` is that extent."""
    BAD_EXTENT = 16
    """The claim or release goes beyond the memory or is empty."""
    NO_UNITS = 17
    """The device has no attention units: the host reads the rows and computes."""
    BAD_LIST = 18
    """What a list of the extension holds: ranges that are empty, not rising or not within the job's rows, a
    position of 2^23 or more, a slope that is NaN or infinite."""
    EXTENT_BUSY = 19
    """An extent of the claim was given back and is not zero yet; nothing was claimed; `detail` is that
    extent."""
    OVER_QUOTA = 20
    """With the claim the tenant would own more extents than it may; nothing was claimed; `detail` is how many
    it may."""


MIN_PAGE_ROWS_LOG2 = 2
MAX_PAGE_ROWS_LOG2 = 13
MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 256
MAX_GROUP = 128
"""What every device accepts; with `Feature.LARGE_ROWS` dims go to `MAX_LARGE_DIM`."""
MAX_LARGE_DIM = 1023
MAX_QUERY_ROWS = 255
MAX_CANDIDATES = 1 << 16
"""Pages from the first to the last row of a job that selects pages: their bounds are kept on chip."""
