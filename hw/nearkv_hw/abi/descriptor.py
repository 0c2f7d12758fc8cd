"""Descriptors that a host posts and the completion records that the device answers with.

A ring slot has room for two lines. Version 1 uses the first; the second is for extensions (scales, masks) and
is looked at only when a descriptor says so, which version 1 refuses.
"""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout
from .lines import LINE_BITS, LINE_BYTES

DESCRIPTOR_VERSION = 1
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


FLAG_EXTENDED = 1 << 0
"""The slot's second line belongs to the descriptor. Refused in version 1."""
FLAG_SINKS = 1 << 1
"""`sinks` names one float32 per query head."""

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
    Field("queries", 64, "device address of the group's first query row; each takes whole lines"),
    Field("result", 64, "device address of the result area, whole lines"),
    Field("sinks", 64, "device address of the sinks, or zero"),
    Field("row_begin", 32, "first visible row"),
    Field("row_end", 32, "first row no longer visible"),
    Field("score_factor", 32, "float32 bits of c = scale * log2(e)"),
    Field("output_scale", 32, "float32 bits of the output scale; zero (none) in version 1"),
    Field("head_dim", 10, "elements of a K row and of a query"),
    Field("value_dim", 10, "elements of a V row and of a result"),
    Field("group", 8, "query heads of this job"),
    Field("query_rows", 8, "query rows per head; 1 in version 1"),
    Field("page_rows_log2", 4, "log2 of the rows of a page"),
    Field("k_format", 4, "element format of K"),
    Field("v_format", 4, "element format of V"),
    Field("query_format", 2, "element format of the queries: bf16 or fp16"),
    Field("output_form", 3, "`OutputForm`"),
    Field("kv_head", 11, "which of the page table's heads"),
)

NOP = Layout("no-operation descriptor", LINE_BITS, *_HEAD)

CLAIM = Layout(
    "claim descriptor",
    LINE_BITS,
    *_HEAD,
    Field("first_extent", 32, "first extent"),
    Field("extent_count", 32, "consecutive extents, at least 1; all are taken or none"),
)

COMPLETION = Layout(
    "completion record",
    LINE_BITS,
    Field(
        "phase", 1, "1 on the ring's first lap, then alternating: a record is new when it has the lap's phase"
    ),
    Field("reserved_phase", 7),
    Field("status", 8, "`Status`"),
    Field("passes", 16, "times that the rows were read"),
    Field("tag", 32, "the descriptor's tag"),
    Field("cycles", 32, "device cycles from the descriptor's fetch to this record"),
    Field("lines", 32, "K and V lines streamed, all channels and passes"),
    Field("detail", 64, "page index at fault; for a refused claim, the first extent that is taken"),
)


class Status(IntEnum):
    """How a descriptor ended."""

    OK = 0
    BAD_VERSION = 1
    BAD_OPCODE = 2
    BAD_FLAGS = 3
    """An unknown flag, or a reserved field that is not zero."""
    BAD_GEOMETRY = 4
    """head_dim, value_dim, group, query_rows or page_rows out of range."""
    BAD_FORMAT = 5
    """An element format or output form that the device does not have."""
    BAD_FACTOR = 6
    """The score factor is NaN or infinite."""
    BAD_ADDRESS = 7
    """An address that is no whole line or lies beyond the memory."""
    BAD_TABLE = 8
    """The page table's header has no magic, another version, or fewer heads than kv_head."""
    BAD_RANGE = 9
    """The row range is reversed, or goes beyond the committed length or the table."""
    DENIED = 10
    """Table, queries or sinks lie in an extent that the tenant does not own."""
    BAD_PAGE = 11
    """A page-table entry is not valid, or its page crosses an extent or the end; `detail` is the page."""
    PAGE_DENIED = 12
    """A page lies in an extent that the tenant does not own; `detail` is the page."""
    POISON = 13
    """A line was poisoned; `detail` is the page, or zero for table, queries and sinks."""
    RESULT_DENIED = 14
    """The result area lies in an extent that the tenant does not own; nothing was written there."""
    EXTENT_TAKEN = 15
    """Another tenant owns an extent of the claim; nothing was claimed; `detail` is that extent."""
    BAD_EXTENT = 16
    """The claim goes beyond the memory or is empty."""
    NO_UNITS = 17
    """The device has no attention units: the host reads the rows and computes."""


MIN_PAGE_ROWS_LOG2 = 2
MAX_PAGE_ROWS_LOG2 = 13
MAX_HEAD_DIM = 256
MAX_VALUE_DIM = 256
MAX_GROUP = 128
"""What version 1 accepts; the fields have room for 1,023, 1,023 and 255."""
