"""From a descriptor to the pages of a job: its checks, the page table, and what else the job reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Opcode, OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    FLAG_SINKS,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_PAGE_ROWS_LOG2,
    MAX_VALUE_DIM,
    MIN_PAGE_ROWS_LOG2,
    NOP,
)
from nearkv_hw.abi.formats import BF16, FP16, Format
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT, lines_of
from nearkv_hw.abi.memory import (
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    table_entry_lines,
)
from nearkv_hw.abi.numerics import MAX_ROWS

from .memory import LineIndices, Memory

FORMATS: dict[int, Format] = {form.code: form for form in (BF16, FP16)}
"""Element formats of K, V and queries that the device has, by code."""
SINK_BYTES = 4
_LAYOUTS = {Opcode.NOP: NOP, Opcode.ATTEND: ATTEND, Opcode.CLAIM_EXTENTS: CLAIM}
_EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
_LINE_OFFSET = np.uint64(ENTRY.offset("line"))
_LINE_MASK = np.uint64((1 << ENTRY["line"].width) - 1)
ENTRY_FIXED_BITS = 1 | ENTRY.reserved_mask()
"""Of a page-table entry: 1 in a good one, and nothing but that."""


class Refusal(Exception):
    """A descriptor cannot be done, or not to its end; `status` and `detail` are for its completion record."""

    def __init__(self, status: Status, detail: int = 0) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True)
class Shape:
    """What a job's descriptor says about its work, its addresses left aside.

    Jobs of equal shape are worked together.
    """

    head_dim: int
    value_dim: int
    group: int
    k_format: int
    v_format: int
    query_format: int
    form: OutputForm

    @property
    def k_lines(self) -> int:
        """Lines of a K row and of a query."""
        return lines_of(self.head_dim * FORMATS[self.k_format].bits // 8)

    @property
    def v_lines(self) -> int:
        """Lines of a V row."""
        return lines_of(self.value_dim * FORMATS[self.v_format].bits // 8)

    @property
    def result(self) -> ResultLayout:
        """How a query head's result lies in memory."""
        return ResultLayout(self.value_dim, self.form)


@dataclass(frozen=True)
class Job:
    """A job whose descriptor is good. Rows and pages are numbered in the context, lines in the device."""

    tenant: int
    shape: Shape
    factor: int
    row_begin: int
    row_end: int
    page_rows_log2: int
    kv_head: int
    table_line: int
    query_line: int
    result_line: int
    sink_line: int | None

    @property
    def rows(self) -> int:
        """Visible rows."""
        return self.row_end - self.row_begin

    @property
    def first_page(self) -> int:
        """The page of the first visible row."""
        return self.row_begin >> self.page_rows_log2

    @property
    def page_lines(self) -> int:
        """Lines of a page."""
        return (self.shape.k_lines + self.shape.v_lines) << self.page_rows_log2

    def rows_of(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many visible rows each page of the context holds."""
        starts = pages << self.page_rows_log2
        ends = starts + (1 << self.page_rows_log2)
        rows: npt.NDArray[np.int64] = np.minimum(ends, self.row_end) - np.maximum(starts, self.row_begin)
        return rows


def opcode_of(head: dict[str, int], descriptor: bytes) -> Opcode:
    """A descriptor's opcode; Refusal for what every opcode's descriptor may not hold."""
    if head["version"] != DESCRIPTOR_VERSION:
        raise Refusal(Status.BAD_VERSION)
    if head["opcode"] not in list(Opcode):
        raise Refusal(Status.BAD_OPCODE)
    opcode = Opcode(head["opcode"])
    known = FLAG_SINKS if opcode is Opcode.ATTEND else 0
    reserved = int.from_bytes(descriptor, "little") & _LAYOUTS[opcode].reserved_mask()
    if head["flags"] & ~known or reserved or (opcode is Opcode.ATTEND and head["output_scale"]):
        raise Refusal(Status.BAD_FLAGS)
    return opcode


def check(fields: dict[str, int], tenant: int, config: DeviceConfig) -> Job:
    """The job that an attend descriptor's fields ask for; Refusal in the order of the status codes, after
    NO_UNITS.

    Version, opcode and flags are the caller's to check, as they are for every opcode.
    """
    if config.units == 0:
        raise Refusal(Status.NO_UNITS)
    if not (
        1 <= fields["head_dim"] <= MAX_HEAD_DIM
        and 1 <= fields["value_dim"] <= MAX_VALUE_DIM
        and 1 <= fields["group"] <= MAX_GROUP
        and fields["query_rows"] == 1
        and MIN_PAGE_ROWS_LOG2 <= fields["page_rows_log2"] <= MAX_PAGE_ROWS_LOG2
    ):
        raise Refusal(Status.BAD_GEOMETRY)
    if not (
        all(fields[name] in FORMATS for name in ("k_format", "v_format", "query_format"))
        and fields["output_form"] in list(OutputForm)
    ):
        raise Refusal(Status.BAD_FORMAT)
    if fields["score_factor"] >> 23 & 0xFF == 0xFF:
        raise Refusal(Status.BAD_FACTOR)
    shape = Shape(
        head_dim=fields["head_dim"],
        value_dim=fields["value_dim"],
        group=fields["group"],
        k_format=fields["k_format"],
        v_format=fields["v_format"],
        query_format=fields["query_format"],
        form=OutputForm(fields["output_form"]),
    )

    def line_of(name: str) -> int:
        address = fields[name]
        if address % LINE_BYTES or address >= config.capacity_bytes:
            raise Refusal(Status.BAD_ADDRESS)
        return address >> LINE_SHIFT

    return Job(
        tenant=tenant,
        shape=shape,
        factor=fields["score_factor"],
        row_begin=fields["row_begin"],
        row_end=fields["row_end"],
        page_rows_log2=fields["page_rows_log2"],
        kv_head=fields["kv_head"],
        table_line=line_of("table"),
        query_line=line_of("queries"),
        result_line=line_of("result"),
        sink_line=line_of("sinks") if fields["flags"] & FLAG_SINKS else None,
    )


def sink_lines(group: int) -> int:
    """Lines that a group's sinks take."""
    return lines_of(group * SINK_BYTES)


def admit(job: Job, memory: Memory) -> int:
    """Check the page table's header, and the row range against it; the entries that a head has room for."""
    line, allowed = memory.read(np.array([job.table_line]), job.tenant)
    if not allowed.all():
        raise Refusal(Status.DENIED)
    if memory.poisoned(np.array([job.table_line])).any():
        raise Refusal(Status.POISON)
    table = TABLE.unpack(line.tobytes())
    if table["magic"] != TABLE_MAGIC or table["version"] != LAYOUT_VERSION or job.kv_head >= table["heads"]:
        raise Refusal(Status.BAD_TABLE)
    room = min(table["committed_rows"], table["entries"] << job.page_rows_log2, MAX_ROWS)
    if not job.row_begin <= job.row_end <= room:
        raise Refusal(Status.BAD_RANGE)
    return table["entries"]


@dataclass(frozen=True)
class Walk:
    """The pages that hold a job's visible rows, in order.

    Members
    -------
    pages : each page's first line, up to the first that cannot be read or is not good.
    fault : why the walk ended early, if it did.
    """

    pages: LineIndices
    fault: Refusal | None = None


def read_queries(job: Job, passes: list[int], memory: Memory) -> list[Status]:
    """For each pass, of so many query heads, how the reads of its queries and sinks end."""
    found = []
    first = 0
    for heads in passes:
        lines = job.query_line + job.shape.k_lines * first + np.arange(job.shape.k_lines * heads)
        if job.sink_line is not None:
            lines = np.append(lines, job.sink_line + first * SINK_BYTES // LINE_BYTES)
        allowed = memory.check(lines, job.tenant)
        lost = np.zeros(lines.shape, np.bool_)
        lost[allowed] = memory.poisoned(lines[allowed])
        faults = np.flatnonzero(~allowed | lost)
        if not len(faults):
            found.append(Status.OK)
        else:
            found.append(Status.POISON if lost[faults[0]] else Status.DENIED)
        first += heads
    return found


def walk(job: Job, room: int, memory: Memory) -> Walk:
    """Read a job's page-table entries; a head has room for `room` of them."""
    if job.rows == 0:
        return Walk(np.empty(0, dtype=np.int64))
    last_page = job.row_end - 1 >> job.page_rows_log2
    lines = np.arange(job.first_page // ENTRIES_PER_LINE, last_page // ENTRIES_PER_LINE + 1)
    lines += job.table_line + 1 + job.kv_head * table_entry_lines(room)
    data, allowed = memory.read(lines, job.tenant)
    begin = job.first_page % ENTRIES_PER_LINE
    these = slice(begin, begin + last_page - job.first_page + 1)
    entries = data.view("<u8").reshape(-1)[these]
    pages = (entries >> _LINE_OFFSET & _LINE_MASK).astype(np.int64)
    good = entries & np.uint64(ENTRY_FIXED_BITS) == 1
    good &= (pages % _EXTENT_LINES + job.page_lines <= _EXTENT_LINES) & (pages < len(memory.lines))
    if good.all() and allowed.all() and memory.intact:
        return Walk(pages)
    readable = allowed.repeat(ENTRIES_PER_LINE)[these]
    lost = np.zeros(lines.shape, np.bool_)
    lost[allowed] = memory.poisoned(lines[allowed])
    spoilt = lost.repeat(ENTRIES_PER_LINE)[these]
    fine = good & readable & ~spoilt
    if fine.all():
        return Walk(pages)
    first = int(np.argmin(fine))
    if not readable[first] or spoilt[first]:
        return Walk(pages[:first], Refusal(Status.POISON if spoilt[first] else Status.DENIED))
    return Walk(pages[:first], Refusal(Status.BAD_PAGE, job.first_page + first))
