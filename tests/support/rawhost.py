"""A host that drives any `Port` with raw descriptors, for device-level tests of whatever device.

Nothing of the driver is used. All memory that a host hands out is filled with ones (NaN in every float
format) before rows are put there, so that every test shows that padding and unused rows do not matter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import LINE_BYTES, Opcode, OutputForm, window
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, COMPLETION, DESCRIPTOR_VERSION, FLAG_SINKS, NOP
from nearkv_hw.abi.formats import ELEMENT_FORMATS
from nearkv_hw.abi.lines import lines_of
from nearkv_hw.abi.memory import (
    DENOMINATOR,
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.numerics import TOP_NONE
from nearkv_sim.port import Access, Fence, Poll, Port, Read, ReadResult, Write

State = tuple[int | None, int, int]
"""A binned sum: top bin (None when empty), high and low limb."""
Codes = npt.NDArray[np.uint16]


def factor_bits(scale: float) -> int:
    """Float32 bits of c = scale * log2(e)."""
    return float_bits(scale * math.log2(math.e))


def float_bits(value: float) -> int:
    """The bits of the float32 nearest to `value`."""
    return int(np.float32(value).view(np.uint32))


@dataclass(frozen=True)
class HeadResult:
    """One query head's result: `codes` of a finished one, `numerators` and `lane_flags` of a partial."""

    query_nan: bool
    denominator: State
    codes: list[int] = field(default_factory=list)
    numerators: list[State] = field(default_factory=list)
    lane_flags: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """A context in device memory: its page table and pages.

    `pages[h][i]` is the device address of head h's i-th page.
    """

    address: int
    pages: list[list[int]]
    layout: RowLayout
    rows: int
    formats: tuple[str, str]

    def entry_address(self, head: int, page: int, entries: int) -> int:
        """Device address of a page-table entry, for a table with room for `entries`."""
        return self.address + LINE_BYTES * (1 + head * table_entry_lines(entries)) + 8 * page


@dataclass(frozen=True)
class Job:
    """An attend descriptor with its operands in device memory."""

    fields: dict[str, int]

    def descriptor(self, **changes: int) -> bytes:
        """The descriptor's line, with some fields changed."""
        return ATTEND.pack_bytes({**self.fields, **changes})

    @property
    def layout(self) -> ResultLayout:
        """How each query head's result lies in memory."""
        return ResultLayout(self.fields["value_dim"], OutputForm(self.fields["output_form"]))

    @property
    def result_bytes(self) -> int:
        """Bytes of the whole result."""
        return self.fields["group"] * self.layout.lines * LINE_BYTES


class RawHost:
    """A host on one aperture of a device.

    Parameters
    ----------
    port : the device.
    aperture : the tenant.
    first_extent : where it starts to claim memory; hosts of one device start far enough apart.
    """

    def __init__(self, port: Port, aperture: int = 0, first_extent: int = 0) -> None:
        self.port = port
        self.config = port.config
        self.aperture = aperture
        self._base = aperture * self.config.aperture_bytes
        self._free = first_extent * EXTENT_BYTES
        self._claimed = self._free
        self.posted = self.register(window.RING_LINE, window.RING)["tail"]

    # Memory, by device address.

    def write(self, address: int, data: bytes) -> None:
        """Write bytes from a line's start on; the last line's rest becomes zero."""
        lines = _lines(data)
        self.port.run([Write(self._addresses(address, len(lines)), lines)])

    def write_bytes(self, address: int, data: bytes) -> None:
        """Write some bytes of one line, by byte enables."""
        offset = address % LINE_BYTES
        line = np.zeros((1, LINE_BYTES), dtype=np.uint8)
        line[0, offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        enables = np.array([((1 << len(data)) - 1) << offset], dtype=np.uint64)
        self.port.run([Write(self._addresses(address - offset, 1), line, enables)])

    def access(self, address: int, lines: int = 1) -> ReadResult:
        """Read lines, and how each was answered."""
        return self.port.run([Read(self._addresses(address, lines))])[0]

    def read(self, address: int, size: int) -> bytes:
        """Read bytes from a line's start on; AssertionError when a line was not answered with data."""
        result = self.access(address, lines_of(size))
        assert (result.access == Access.DATA).all(), (
            f"no data in {size} bytes at {address:#x}: {result.access}"
        )
        return result.data.tobytes()[:size]

    def allocate(self, size: int, channel: int | None = None) -> int:
        """Claim and fill whole lines, in `channel` if given; what fits an extent does not cross one."""
        size = lines_of(size) * LINE_BYTES
        if self._free % EXTENT_BYTES + size > EXTENT_BYTES:
            self._free = -(-self._free // EXTENT_BYTES) * EXTENT_BYTES
        while channel is not None and self.config.slice_of(self._free) != channel:
            self._free = (self._free // EXTENT_BYTES + 1) * EXTENT_BYTES
        address = self._free
        self._free += size
        end = -(-self._free // EXTENT_BYTES) * EXTENT_BYTES
        if end > self._claimed:
            record = self.claim(self._claimed // EXTENT_BYTES, (end - self._claimed) // EXTENT_BYTES)
            assert record["status"] == 0, record
            self._claimed = end
        self.write(address, b"\xff" * size)
        return address

    def place(self, data: bytes) -> int:
        """Allocate room for bytes and write them there."""
        address = self.allocate(len(data))
        self.write(address, data)
        return address

    # Commands.

    def register(self, line: int, layout: Layout) -> dict[str, int]:
        """A register line of this host's window."""
        address = np.array([window.register_address(self.config, self.aperture, line)], dtype=np.uint64)
        return layout.unpack(self.port.run([Read(address)])[0].data.tobytes())

    def counters(self) -> dict[str, int]:
        """The device's counters."""
        return self.register(window.DEVICE_COUNTERS_LINE, window.DEVICE_COUNTERS)

    def doorbell(self, tail: int) -> Write:
        """The write that tells the device how many descriptors are posted."""
        address = np.array(
            [window.window_base(self.config, self.aperture) + window.DOORBELL_OFFSET], np.uint64
        )
        return Write(address, _lines(window.DOORBELL.pack_bytes(tail=tail & 0xFFFFFFFF)))

    def post(self, *descriptors: bytes, timeout_cycles: int = 5_000_000) -> list[dict[str, int]]:
        """Post descriptors with one doorbell, at most a ring of them; their completion records."""
        indices = range(self.posted, self.posted + len(descriptors))
        slots = [window.descriptor_address(self.config, self.aperture, index) for index in indices]
        records = [window.completion_address(self.config, self.aperture, index) for index in indices]
        self.posted += len(descriptors)
        phase = window.completion_phase(self.config, indices[-1])
        [result] = self.port.run(
            [
                Write(np.array(slots, dtype=np.uint64), _lines(b"".join(descriptors))),
                Fence(),
                self.doorbell(self.posted),
                Poll(records[-1], 1, phase, timeout_cycles),
                Read(np.array(records, dtype=np.uint64)),
            ]
        )
        return [COMPLETION.unpack(line.tobytes()) for line in result.data]

    def post_extended(self, descriptor: bytes, extension: bytes) -> dict[str, int]:
        """Post one descriptor with its second line; its completion record."""
        slot = window.descriptor_address(self.config, self.aperture, self.posted)
        second = np.array([slot + LINE_BYTES], dtype=np.uint64)
        self.port.run([Write(second, _lines(extension)), Fence()])
        return self.post(descriptor)[0]

    def claim(self, first: int, count: int, tag: int = 0) -> dict[str, int]:
        """Claim extents; the completion record."""
        return self.post(claim_descriptor(first, count, tag))[0]

    # Attention.

    def table(
        self,
        k: Sequence[Codes],
        v: Sequence[Codes],
        *,
        page_rows: int = 16,
        formats: tuple[str, str] = ("bf16", "bf16"),
        entries: int | None = None,
        committed: int | None = None,
        order: Sequence[int] | None = None,
        channels: Sequence[int] | None = None,
    ) -> Table:
        """Put a context into memory.

        Parameters
        ----------
        k, v : for each head, codes [rows, dim].
        page_rows, formats : layout, and element formats of K and V.
        entries, committed : of the page table; by default room for just the rows, and all of them.
        order : in which order the pages take their places in memory.
        channels : the channels over which pages rotate; all by default.
        """
        rows = len(k[0])
        layout = RowLayout(k[0].shape[1], v[0].shape[1], page_rows)
        count = -(-rows // page_rows)
        entries = count if entries is None else entries
        channels = range(self.config.channels) if channels is None else channels
        pages: list[list[int]] = []
        lines = b""
        for head_k, head_v in zip(k, v, strict=True):
            addresses = [0] * count
            for place, page in enumerate(order or range(count)):
                addresses[page] = self.allocate(layout.page_bytes, channels[place % len(channels)])
                self.write(addresses[page], _page(layout, head_k, head_v, page))
            pages.append(addresses)
            words = [ENTRY.pack(valid=1, line=address // LINE_BYTES) for address in addresses[:entries]]
            words += [0] * (table_entry_lines(entries) * ENTRIES_PER_LINE - len(words))
            lines += struct.pack(f"<{len(words)}Q", *words)
        header = TABLE.pack_bytes(
            magic=TABLE_MAGIC,
            version=LAYOUT_VERSION,
            heads=len(k),
            entries=entries,
            committed_rows=rows if committed is None else committed,
        )
        return Table(self.place(header + lines), pages, layout, rows, formats)

    def job(
        self,
        table: Table,
        q: Codes,
        *,
        factor: int,
        form: OutputForm = OutputForm.PARTIAL,
        kv_head: int = 0,
        begin: int = 0,
        end: int | None = None,
        sinks: Sequence[int] | None = None,
        query_format: str | None = None,
        tag: int = 0,
    ) -> Job:
        """A job over a context; queries (codes [group, head_dim]) and sinks (float32 bits) are put there."""
        layout = table.layout
        query_lines = np.full((len(q), layout.k_lines * LINE_BYTES // 2), 0xFFFF, dtype="<u2")
        query_lines[:, : layout.head_dim] = q
        fields: dict[str, int] = {
            "version": DESCRIPTOR_VERSION,
            "opcode": Opcode.ATTEND,
            "flags": FLAG_SINKS if sinks is not None else 0,
            "tag": tag,
            "table": table.address,
            "queries": self.place(query_lines.tobytes()),
            "sinks": self.place(np.array(sinks, dtype="<u4").tobytes()) if sinks is not None else 0,
            "row_begin": begin,
            "row_end": table.rows if end is None else end,
            "score_factor": factor,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
            "group": len(q),
            "query_rows": 1,
            "page_rows_log2": layout.page_rows.bit_length() - 1,
            "k_format": ELEMENT_FORMATS[table.formats[0]].code,
            "v_format": ELEMENT_FORMATS[table.formats[1]].code,
            "query_format": ELEMENT_FORMATS[query_format or table.formats[0]].code,
            "output_form": form,
            "kv_head": kv_head,
        }
        job = Job(fields)
        job.fields["result"] = self.allocate(job.result_bytes)
        return job

    def results(self, job: Job) -> list[HeadResult]:
        """Read a job's results back."""
        data = self.read(job.fields["result"], job.result_bytes)
        size = job.layout.lines * LINE_BYTES
        return [_head_result(data[n * size : (n + 1) * size], job.layout) for n in range(job.fields["group"])]

    def attend(self, job: Job) -> list[HeadResult]:
        """Post a job, wait for it, and read its results; AssertionError when it does not end well."""
        [record] = self.post(job.descriptor())
        assert record["status"] == 0, record
        return self.results(job)

    def _addresses(self, address: int, lines: int) -> npt.NDArray[np.uint64]:
        return np.uint64(self._base + address) + np.arange(lines, dtype=np.uint64) * np.uint64(LINE_BYTES)


def claim_descriptor(first: int, count: int, tag: int = 0, **changes: int) -> bytes:
    """The line that claims extents."""
    fields = {
        "version": DESCRIPTOR_VERSION,
        "opcode": Opcode.CLAIM_EXTENTS,
        "tag": tag,
        "first_extent": first,
        "extent_count": count,
    }
    return CLAIM.pack_bytes({**fields, **changes})


def nop_descriptor(tag: int = 0, **changes: Any) -> bytes:
    """The line that asks for nothing."""
    fields = {"version": DESCRIPTOR_VERSION, "opcode": Opcode.NOP, "tag": tag}
    return NOP.pack_bytes({**fields, **changes})


def _lines(data: bytes) -> npt.NDArray[np.uint8]:
    padded = data + bytes(-len(data) % LINE_BYTES)
    return np.frombuffer(padded, dtype=np.uint8).reshape(-1, LINE_BYTES)


def _page(layout: RowLayout, k: Codes, v: Codes, page: int) -> bytes:
    """A page's bytes: ones wherever no element is."""
    rows = slice(page * layout.page_rows, (page + 1) * layout.page_rows)
    parts = []
    for codes, row_lines in ((k[rows], layout.k_lines), (v[rows], layout.v_lines)):
        part = np.full((layout.page_rows, row_lines * LINE_BYTES // 2), 0xFFFF, dtype="<u2")
        part[: len(codes), : codes.shape[1]] = codes
        parts.append(part.tobytes())
    return b"".join(parts)


def _head_result(data: bytes, layout: ResultLayout) -> HeadResult:
    line = DENOMINATOR.unpack(data[-LINE_BYTES:])
    nan, denominator = line["flags"] == 1, _state(line["top"], line["high"], line["low"])
    lanes = layout.value_dim
    if layout.form is not OutputForm.PARTIAL:
        codes = np.frombuffer(data, dtype=f"<u{layout.form.lane_bytes}")[:lanes].tolist()
        return HeadResult(nan, denominator, codes=codes)
    columns = []
    offset = 0
    for kind, plane_lines in zip(("<i4", "<i8", "<i8", "u1"), layout.planes, strict=True):
        columns.append(np.frombuffer(data, dtype=kind, offset=offset, count=lanes).tolist())
        offset += plane_lines * LINE_BYTES
    numerators = [_state(*lane) for lane in zip(*columns[:3], strict=True)]
    return HeadResult(nan, denominator, numerators=numerators, lane_flags=columns[3])


def _state(top: int, high: int, low: int) -> State:
    return (None if top == TOP_NONE else top, high, low)
