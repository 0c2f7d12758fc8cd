"""What travels between the blocks of the command path.

A descriptor becomes a `Posted` line, a `Checked` one, a `Planned` one, and then a `Ticket` (for the
completion record) and, when it is a good attention job, a `Plan`, which is split into passes.
"""

from amaranth.hdl import signed
from amaranth.lib import data, stream
from amaranth.lib.wiring import In, Out, Signature

from ..abi.config import QUERY_CHOICES
from ..abi.descriptor import (
    CLAIM,
    EXTENSION,
    MAX_LARGE_DIM,
    MAX_PAGE_ROWS_LOG2,
    MAX_QUERY_ROWS,
    TREE_ROW_BYTES,
    WORD_BYTES,
    Status,
)
from ..abi.formats import OutputForm
from ..abi.lines import LINE_BITS, LINE_BYTES, lines_of
from ..abi.memory import ResultLayout
from ..interfaces import (
    CANDIDATE_BITS,
    LINE_ADDRESS_BITS,
    PAGE_BITS,
    POSITION_BITS,
    ROW_BITS,
    TENANT_BITS,
    Fault,
)

QUERIES_BITS = 15
"""Queries of a job: at most `MAX_GROUP` heads of 255 query rows."""
PASSES_BITS = QUERIES_BITS
"""Passes of a job: as many as queries, when a unit keeps one."""
ROW_LINES_BITS = lines_of(2 * MAX_LARGE_DIM).bit_length()
"""Lines of a row, and of a query."""
QUERY_LINES_BITS = (max(QUERY_CHOICES) * lines_of(2 * MAX_LARGE_DIM)).bit_length()
"""Lines of a pass's queries."""
RESULT_LINES_BITS = ResultLayout(MAX_LARGE_DIM, OutputForm.PARTIAL).lines.bit_length()
"""Lines of a query's result."""
PAGE_LINE_BITS = ROW_LINES_BITS + MAX_PAGE_ROWS_LOG2 + 2
"""Lines of a page, as a descriptor may ask for: K and V, and as many scales."""
LIST_LINES_BITS = 4
"""Lines of a list with a float32 for each of at most `MAX_GROUP` query heads."""
POSITION_LINES_BITS = lines_of(MAX_QUERY_ROWS * WORD_BYTES).bit_length()
"""Lines of the positions of a tree."""
MASK_LINES_BITS = (max(QUERY_CHOICES) * TREE_ROW_BYTES // LINE_BYTES + 1).bit_length()
"""Lines with the masks of a pass's query rows."""
SELECT_PAGES_BITS = EXTENSION["select_pages"].width
EXTENT_BITS = CLAIM["first_extent"].width
RUN_BITS = 19
"""Lines of a run of reads: a page table of 2^21 entries has 2^18 lines."""


class Posted(data.Struct):
    """A descriptor as it was taken from its ring."""

    line: LINE_BITS
    extension: LINE_BITS  # the slot's second line, which the descriptor may have
    tenant: TENANT_BITS
    index: 32  # descriptors of this ring before this one
    fetched: 32  # cycle in which it was taken


class Job(data.Struct):
    """An attention job whose descriptor is good. Addresses are lines of the device."""

    tenant: TENANT_BITS
    table_line: LINE_ADDRESS_BITS
    queries_line: LINE_ADDRESS_BITS
    result_line: LINE_ADDRESS_BITS
    sinks_line: LINE_ADDRESS_BITS
    slopes_line: LINE_ADDRESS_BITS
    codebook_line: LINE_ADDRESS_BITS
    row_begin: 32
    row_end: 32
    position: signed(POSITION_BITS)  # of the first query row
    causal: 1
    window: 24
    kept: 24
    ranges: 1  # a list says which rows of the job's are seen
    ranges_line: LINE_ADDRESS_BITS
    range_count: 16
    tree: 1
    tree_line: LINE_ADDRESS_BITS
    summaries: 1  # pages end with a summary
    select: 1  # only `select_pages` pages count, whose numbers are written
    select_pages: SELECT_PAGES_BITS
    selected_line: LINE_ADDRESS_BITS
    score_factor: 32
    softcap: 32
    head_dim: 10
    value_dim: 10
    group: 8
    query_rows: 8
    page_rows_log2: 4
    k_format: 4
    v_format: 4
    k_scale: 3  # scales as descriptors have them, 0 for none
    v_scale: 3
    k_block: 3
    v_block: 3
    k_pitch: 2
    v_pitch: 2
    query_format: 2
    form: OutputForm
    output_scale: 32
    kv_head: 11
    sinks: 1
    slopes: 1
    codebook: 1
    latent: 1


class Claim(data.Struct):
    """Extents to take, or to give back."""

    tenant: TENANT_BITS
    release: 1
    first_extent: EXTENT_BITS
    extent_count: EXTENT_BITS


class Ticket(data.Struct):
    """What the completer must know of a descriptor; one per descriptor, in the order of the records."""

    tenant: TENANT_BITS
    index: 32
    fetched: 32
    tag: 32
    status: Status
    detail: 32
    passes: PASSES_BITS  # times that its rows are read; 0 unless it is a good attention job
    bounds: 1  # as many passes before them find the bounds of pages


class Checked(data.Struct):
    """A descriptor with what its own line told: `job` or `claim` is meant by `attends` or `claims`."""

    ticket: Ticket
    attends: 1
    claims: 1
    job: Job
    claim: Claim


class RowLines(data.Struct):
    """How the codes and scales of K or V rows lie in lines."""

    lines: ROW_LINES_BITS  # of a row's codes
    pitch: 2  # log2 of the rows that share a line
    shift: 3  # log2 of the bytes of a row's scales


class PageLines(data.Struct):
    """How a page lies in lines. Offsets are lines from the page's first."""

    page_rows_log2: 4
    page_lines: PAGE_LINE_BITS
    k: RowLines
    v: RowLines
    k_scales: PAGE_LINE_BITS  # scales of a page's first K row, where rows have scales
    v_offset: PAGE_LINE_BITS  # first V row of a page
    v_scales: PAGE_LINE_BITS
    summary: PAGE_LINE_BITS  # where the page has one


class Selecting(data.Struct):
    """What a pass has to do with the selection of its job's pages; all zero for one without."""

    bounds: 1  # it finds the bounds of the pages
    selects: 1  # it reads the selected pages
    first: 1  # it is the job's first one of its kind
    pages: SELECT_PAGES_BITS
    line: LINE_ADDRESS_BITS  # where the numbers of the selected pages are written


class RangeWork(data.Struct):
    """The rows that a pass reads: of a list, or else from `begin` to `end`.

    Of these rows count those before `kept_end`, and those from `tail_begin` (no less) to `tail_end`.
    """

    tenant: TENANT_BITS
    listed: 1
    list_line: LINE_ADDRESS_BITS
    count: 16  # ranges in the list
    begin: ROW_BITS
    end: ROW_BITS
    kept_end: ROW_BITS
    tail_begin: ROW_BITS
    tail_end: ROW_BITS
    entry_line: LINE_ADDRESS_BITS  # with the entry of the context's first page
    pages: PageLines
    selecting: Selecting


class PageWork(data.Struct):
    """Consecutive rows of a pass, and how the entries of their pages become page items.

    Offsets are lines from a page's first.
    """

    tenant: TENANT_BITS
    selecting: Selecting
    empty: 1  # no rows
    last: 1  # of the pass
    status: Status  # why the pass ends early; such work is empty and the last
    first_page: PAGE_BITS
    last_page: PAGE_BITS
    first_begin: 14  # first row, in the first page
    last_end: 14  # the row after the last one, in the last page
    page_rows: 14
    page_lines: PAGE_LINE_BITS
    first_index: ROW_BITS  # first row of the first page, in the context
    k_scales: PAGE_LINE_BITS
    v_offset: PAGE_LINE_BITS
    v_scales: PAGE_LINE_BITS
    k_first: PAGE_LINE_BITS  # the first row, in the first page
    k_scales_first: PAGE_LINE_BITS
    v_first: PAGE_LINE_BITS
    v_scales_first: PAGE_LINE_BITS
    summary: PAGE_LINE_BITS


class Plan(data.Struct):
    """An attention job worked out: what its passes need. Addresses are lines of the device."""

    tenant: TENANT_BITS
    queries_line: LINE_ADDRESS_BITS
    result_line: LINE_ADDRESS_BITS
    sinks_line: LINE_ADDRESS_BITS
    slopes_line: LINE_ADDRESS_BITS
    codebook_line: LINE_ADDRESS_BITS
    tree_line: LINE_ADDRESS_BITS
    ranges_line: LINE_ADDRESS_BITS
    table_line: LINE_ADDRESS_BITS
    entry_lines: 30  # lines of one head's entries; known once the table's header is
    kv_head: 11
    score_factor: 32
    softcap: 32
    head_dim: 10
    value_dim: 10
    group: 8
    position: signed(POSITION_BITS)
    causal: 1
    window: 24
    kept: 24
    tree: 1
    select: 1
    select_pages: SELECT_PAGES_BITS
    selected_line: LINE_ADDRESS_BITS
    ranges: 1
    range_count: 16
    row_begin: ROW_BITS
    row_end: ROW_BITS
    query_rows: 8
    queries: QUERIES_BITS  # of all query rows
    query_lines: ROW_LINES_BITS  # lines of a query
    result_lines: RESULT_LINES_BITS  # lines of one query head's result
    k_format: 4
    v_format: 4
    k_scale: 3
    v_scale: 3
    k_block: 3
    v_block: 3
    k_pitch: 2
    v_pitch: 2
    query_format: 2
    form: OutputForm
    output_scale: 32
    sinks: 1
    slopes: 1
    codebook: 1
    latent: 1
    pages: PageLines


class Planned(data.Struct):
    """A descriptor as `Checked`, its job worked out: `plan` or `claim` is meant by `attends` or `claims`."""

    ticket: Ticket
    attends: 1
    claims: 1
    row_end: 32
    last_page: 32
    bad_rows: 1  # the rows are reversed, or more than a context may have
    bad_page: 1  # a page is larger than an extent, or there are too many to select from
    plan: Plan
    claim: Claim


class Outcome(data.Struct):
    """How one part of the walker's work for a pass ended."""

    status: Status
    page: PAGE_BITS


class Completed(data.Struct):
    """A completion record and the slot that it is for."""

    record: LINE_BITS
    tenant: TENANT_BITS
    index: 32
    failed: 1  # the status is not OK


class SelectorPort(Signature):
    """What the page feed has of the selector, seen from the feed; see `Selector`."""

    def __init__(self):
        super().__init__(
            {
                "start": Out(1),
                "select_pages": Out(SELECT_PAGES_BITS),
                "asked": Out(1),
                "idle": In(1),
                "selected": In(CANDIDATE_BITS + 1),
                "serve": Out(1),
                "verdicts": In(stream.Signature(1)),
            }
        )


class ListWord(data.Struct):
    """A word of the list of a job's selected pages, or its end."""

    end: 1  # no word
    word: PAGE_BITS
    tenant: TENANT_BITS
    line: LINE_ADDRESS_BITS  # where the list begins


class ListPort(Signature):
    """Where the page feed sends such a list, seen from the feed; see `ListWriter`."""

    def __init__(self):
        super().__init__({"words": Out(stream.Signature(ListWord)), "idle": In(1), "refused": In(1)})


class Run(data.Struct):
    """Consecutive lines to read."""

    tenant: TENANT_BITS
    line: LINE_ADDRESS_BITS
    count: RUN_BITS


class QueryWork(data.Struct):
    """The lines of a pass's queries and of the lists that belong to them."""

    tenant: TENANT_BITS
    line: LINE_ADDRESS_BITS
    lines: QUERY_LINES_BITS
    codebook: 1
    codebook_line: LINE_ADDRESS_BITS
    group: 8
    list_lines: LIST_LINES_BITS  # lines of each list with something for each query head
    slopes: 1
    slopes_line: LINE_ADDRESS_BITS
    query_rows: 8
    tree: 1
    tree_line: LINE_ADDRESS_BITS  # positions of the query rows
    position_lines: POSITION_LINES_BITS
    masks_line: LINE_ADDRESS_BITS  # with the mask of the pass's first query row
    mask_lines: MASK_LINES_BITS
    sinks: 1
    sinks_line: LINE_ADDRESS_BITS


class WalkRead(data.Struct):
    """A line that the walker wants to read."""

    line: LINE_ADDRESS_BITS
    tenant: TENANT_BITS
    last: 1  # of its run; comes back with the line


class WalkLine(data.Struct):
    """A line that the walker wanted; data is zero when there is a fault other than poison."""

    data: LINE_BITS
    fault: Fault
    last: 1
