"""A device driven by hand: descriptors, tables and pages from the layouts, results against the reference.

Works with any `Port`. Nothing of the driver is used but `nearkv.reference`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from nearkv.reference import Partial, decode_attention, finish, score_factor
from nearkv_hw.abi import Opcode, OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, COMPLETION, DESCRIPTOR_VERSION, FLAG_SINKS
from nearkv_hw.abi.formats import ELEMENT_FORMATS
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import (
    DENOMINATOR,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.window import (
    DEVICE_COUNTERS,
    DOORBELL_OFFSET,
    completion_address,
    completion_phase,
    descriptor_address,
    register_address,
    window_base,
)
from nearkv_sim.port import Access, Fence, Poll, Read, Write

OUT_TYPES = {OutputForm.FP32: torch.float32, OutputForm.BF16: torch.bfloat16, OutputForm.FP16: torch.float16}
VALUE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TIMEOUT_CYCLES = 2_000_000


class Aperture:
    """One tenant's view of a device: its memory and its command window.

    Parameters
    ----------
    port : the device.
    number : which aperture.
    """

    def __init__(self, port, number=0):
        self.port = port
        self.number = number
        self.config = port.config
        self.posted = 0
        self.base = number * self.config.aperture_bytes

    def write(self, address, data):
        """Write whole lines at a device address."""
        lines = np.frombuffer(bytes(data), np.uint8).reshape(-1, LINE_BYTES)
        self.port.run([Write(self.addresses(address, len(lines)), lines)])

    def read(self, address, size):
        """Bytes at a device address, all of which must be this tenant's."""
        (result,) = self.port.run([Read(self.addresses(address, -(-size // LINE_BYTES)))])
        assert (result.access == Access.DATA).all()
        return result.data.tobytes()[:size]

    def addresses(self, address, lines):
        return (self.base + address + LINE_BYTES * np.arange(lines)).astype(np.uint64)

    def post(self, descriptors):
        """Write descriptors (as integers) into the ring and ring the doorbell; no more than fit."""
        self.port.run(self.writes(descriptors))

    def writes(self, descriptors):
        """The program that posts descriptors; counts them as posted."""
        writes = []
        for n, line in enumerate(descriptors):
            address = descriptor_address(self.config, self.number, self.posted + n)
            writes.append(_write_line(address, line))
        self.posted += len(descriptors)
        doorbell = window_base(self.config, self.number) + DOORBELL_OFFSET
        return [*writes, Fence(), _write_line(doorbell, self.posted % (1 << 32))]

    def collect(self, count):
        """The records of the last `count` descriptors posted, in order, once they are all there."""
        indices = range(self.posted - count, self.posted)
        last = indices[-1]
        address = completion_address(self.config, self.number, last)
        poll = Poll(address, 1, completion_phase(self.config, last), TIMEOUT_CYCLES)
        reads = np.array([completion_address(self.config, self.number, n) for n in indices], np.uint64)
        (result,) = self.port.run([poll, Read(reads)])
        records = [COMPLETION.unpack(line.tobytes()) for line in result.data]
        for index, record in zip(indices, records, strict=True):
            assert record["phase"] == completion_phase(self.config, index)
        return records

    def run(self, descriptors):
        """Post and collect."""
        self.post(descriptors)
        return self.collect(len(descriptors))

    def claim(self, first=0, count=None):
        """Own extents, by default all of the device."""
        (record,) = self.run([claim_descriptor(first, self.config.extents if count is None else count)])
        return record

    def counters(self, layout=DEVICE_COUNTERS, line=1):
        """A register line's fields."""
        address = register_address(self.config, self.number, line)
        (result,) = self.port.run([Read(np.array([address], np.uint64))])
        return layout.unpack(result.data.tobytes())


def claim_descriptor(first, count, **fields):
    return CLAIM.pack(
        {
            "version": DESCRIPTOR_VERSION,
            "opcode": Opcode.CLAIM_EXTENTS,
            "first_extent": first,
            "extent_count": count,
        }
        | fields
    )


class Space:
    """Hands out device memory of one tenant, never across extents."""

    def __init__(self, rng, extents):
        self.rng = rng
        self.extents = list(extents)
        self.used = dict.fromkeys(self.extents, 0)

    def take(self, size, extent=None):
        """The address of `size` bytes in some extent."""
        size = -(-size // LINE_BYTES) * LINE_BYTES
        choices = [extent] if extent is not None else self.extents
        fitting = [n for n in choices if self.used[n] + size <= EXTENT_BYTES]
        chosen = self.rng.choice(fitting)
        address = chosen * EXTENT_BYTES + self.used[chosen]
        self.used[chosen] += size
        return address


@dataclass
class Context:
    """One sequence's rows of one KV head, and the queries of its group.

    Parameters
    ----------
    q, k, v : codes, int16 [group, head_dim], [rows, head_dim], [rows, value_dim].
    scale : of q·k, natural base.
    sinks : floats, one per query head, or none.
    page_rows : rows of a page.
    heads, kv_head : KV heads of the page table, and which of them this is.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_format: str = "bf16"
    k_format: str = "bf16"
    v_format: str = "bf16"
    scale: float = 0.125
    sinks: list | None = None
    page_rows: int = 16
    heads: int = 1
    kv_head: int = 0
    form: OutputForm = OutputForm.FP32
    placed: dict = field(default_factory=dict)

    @property
    def rows(self):
        return len(self.k)

    @property
    def layout(self):
        return RowLayout(self.q.shape[1], self.v.shape[1], self.page_rows)

    @property
    def result(self):
        return ResultLayout(self.v.shape[1], self.form)

    def place(self, aperture, space, pages=None, padding=0xFF):
        """Write everything into the tenant's memory; `pages` are addresses to use instead of chosen ones.

        What is no element is filled with `padding`: it must not matter.
        """
        layout, count = self.layout, -(-self.rows // self.page_rows)
        if pages is None:
            pages = [space.take(layout.page_bytes) for _ in range(count)]
        for n, page in enumerate(pages):
            chunk = slice(n * self.page_rows, (n + 1) * self.page_rows)
            data = bytearray([padding]) * layout.page_bytes
            for part, offset_of in ((self.k, layout.k_offset), (self.v, layout.v_offset)):
                for row, codes in enumerate(part[chunk]):
                    _put(data, offset_of(row), codes)
            aperture.write(page, data)
        entry_bytes = table_entry_lines(count) * LINE_BYTES
        table = space.take(LINE_BYTES + self.heads * entry_bytes)
        header = TABLE.pack_bytes(
            magic=TABLE_MAGIC,
            version=LAYOUT_VERSION,
            heads=self.heads,
            entries=count,
            committed_rows=self.rows,
        )
        entries = b"".join(ENTRY.pack_bytes(valid=1, line=page // LINE_BYTES) for page in pages)
        aperture.write(table, header)
        if entries:
            aperture.write(table + LINE_BYTES + self.kv_head * entry_bytes, entries.ljust(entry_bytes, b"\0"))
        self.place_queries(aperture, space, padding)
        self.placed.update(table=table, pages=pages, entries=table + LINE_BYTES + self.kv_head * entry_bytes)

    def place_queries(self, aperture, space, padding=0xFF):
        """Write queries and sinks, and set room for the result aside."""
        query_bytes = self.layout.k_lines * LINE_BYTES
        data = bytearray([padding]) * (len(self.q) * query_bytes)
        for n, codes in enumerate(self.q):
            _put(data, n * query_bytes, codes)
        queries, sinks = space.take(len(data)), 0
        aperture.write(queries, data)
        if self.sinks is not None:
            values = np.array(self.sinks, np.float32).tobytes()
            sinks = space.take(len(values))
            aperture.write(sinks, values.ljust(-(-len(values) // LINE_BYTES) * LINE_BYTES, bytes([padding])))
        result_bytes = len(self.q) * self.result.lines * LINE_BYTES
        result = space.take(result_bytes)
        aperture.write(result, b"\xee" * result_bytes)
        self.placed.update(queries=queries, sinks=sinks, result=result)

    def fields(self, begin=0, end=None, **changes):
        """The fields of the descriptor that attends rows [begin, end)."""
        return {
            "version": DESCRIPTOR_VERSION,
            "opcode": Opcode.ATTEND,
            "flags": FLAG_SINKS if self.sinks is not None else 0,
            "table": self.placed["table"],
            "queries": self.placed["queries"],
            "result": self.placed["result"],
            "sinks": self.placed["sinks"],
            "row_begin": begin,
            "row_end": self.rows if end is None else end,
            "score_factor": score_factor(self.scale),
            "head_dim": self.q.shape[1],
            "value_dim": self.v.shape[1],
            "group": len(self.q),
            "query_rows": 1,
            "page_rows_log2": self.page_rows.bit_length() - 1,
            "k_format": ELEMENT_FORMATS[self.k_format].code,
            "v_format": ELEMENT_FORMATS[self.v_format].code,
            "query_format": ELEMENT_FORMATS[self.q_format].code,
            "output_form": self.form,
            "kv_head": self.kv_head,
        } | changes

    def descriptor(self, begin=0, end=None, **changes):
        """`fields`, packed."""
        return ATTEND.pack(self.fields(begin, end, **changes))

    def expected(self, begin=0, end=None):
        """The reference's partial, queries [1, group]."""
        rows = slice(begin, self.rows if end is None else end)
        return decode_attention(
            self.q.view(VALUE_TYPES[self.q_format])[None],
            self.k[None, rows, None],
            self.v[None, rows, None],
            scale=self.scale,
            k_format=self.k_format,
            v_format=self.v_format,
            sinks=None if self.sinks is None else torch.tensor(self.sinks, dtype=torch.float32),
            partial=True,
        )

    def check(self, aperture, begin=0, end=None):
        """Compare what lies in the result area with the reference, bit by bit."""
        expected, result = self.expected(begin, end), self.result
        size = result.lines * LINE_BYTES
        data = np.frombuffer(aperture.read(self.placed["result"], len(self.q) * size), np.uint8)
        data = data.reshape(len(self.q), size)
        ends = np.cumsum([0, *result.planes, 1]) * LINE_BYTES
        denominators = [DENOMINATOR.unpack(row[ends[-2] :].tobytes()) for row in data]
        width = self.v.shape[1]
        if self.form is OutputForm.PARTIAL:
            types = (np.int32, np.int64, np.int64, np.uint8)
            planes = [
                np.ascontiguousarray(data[:, a:b]).view(kind)[:, :width]
                for a, b, kind in zip(ends, ends[1:-1], types, strict=False)
            ]
            *numerators, flags = (torch.from_numpy(plane.copy())[None] for plane in planes)
        else:
            *numerators, flags = _planes(expected.numerators), expected.lane_flags
            numerators = numerators[0]
        got = Partial.from_planes(
            [torch.tensor([[d[name] for d in denominators]]) for name in ("top", "high", "low")],
            numerators,
            torch.tensor([[d["flags"] & 1 for d in denominators]]),
            flags,
        )
        assert got.equal(expected), (
            f"queries {got.differing(expected).nonzero().tolist()} differ from the reference"
        )
        if self.form is not OutputForm.PARTIAL:
            kind = np.uint32 if self.form is OutputForm.FP32 else np.uint16
            lanes = np.ascontiguousarray(data[:, : ends[1]]).view(kind)[:, :width]
            finished = finish(expected, OUT_TYPES[self.form])[0]
            codes = finished.view(torch.int32 if kind is np.uint32 else torch.int16).numpy().view(kind)
            np.testing.assert_array_equal(lanes, codes)


def random_context(rng, *, group=4, head_dim=64, value_dim=None, rows=40, page_rows=16, **options):
    """Random finite codes of ordinary sizes."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    value_dim = head_dim if value_dim is None else value_dim
    formats = {name: options.get(name, "bf16") for name in ("q_format", "k_format", "v_format")}
    codes = [
        torch.randn(shape, generator=generator).to(VALUE_TYPES[form]).view(torch.int16)
        for shape, form in zip(
            ((group, head_dim), (rows, head_dim), (rows, value_dim)), formats.values(), strict=True
        )
    ]
    return Context(*codes, page_rows=page_rows, **options)


def ok(records):
    """Assert that every record says OK."""
    assert [Status(record["status"]).name for record in records] == ["OK"] * len(records)


def _put(data, offset, codes):
    raw = codes.numpy().astype("<i2").tobytes()
    data[offset : offset + len(raw)] = raw


def _planes(state):
    return [state.top, state.high, state.low]


def _write_line(address, value):
    data = np.frombuffer(value.to_bytes(LINE_BYTES, "little"), np.uint8).reshape(1, LINE_BYTES)
    return Write(np.array([address], np.uint64), data)
