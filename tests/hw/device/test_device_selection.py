"""Jobs that select pages: what is selected, what is read for it, how such jobs end that cannot be done."""

import numpy as np
import pytest
from attention_golden import bound
from nearkv_hw.abi import LINE_BYTES, OutputForm, Status
from nearkv_hw.abi import descriptor as abi
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.formats import BF16
from nearkv_hw.abi.memory import (
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    RowLayout,
)
from rawhost import RawHost, factor_bits

ROWS, PAGE_ROWS, DIM, GROUP = 150, 4, 40, 6
"""38 pages, the last of two rows; rows and summary rows of two lines."""
PAGES = -(-ROWS // PAGE_ROWS)
LAYOUT = RowLayout(DIM, DIM, PAGE_ROWS, summaries=True)
RESULT = ResultLayout(DIM, OutputForm.PARTIAL)
LIST_BYTES = 4 * (1 + PAGES)
CLEARED = 0xEE


class Setup:
    """A tenant with a context whose pages have summaries of any numbers, some of them equal."""

    def __init__(self, port, rng):
        self.host = host = RawHost(port, 0)
        self.theirs = RawHost(port, 1, first_extent=100).allocate(EXTENT_BYTES)
        codes = np.random.default_rng(rng.getrandbits(32))
        k, v = (codes.integers(0x3E00, 0x3FFF, (ROWS, DIM)).astype(np.uint16) for _ in range(2))
        self.q = codes.integers(0x3E00, 0x3FFF, (GROUP, DIM)).astype(np.uint16)
        self.q |= (codes.integers(0, 2, self.q.shape) << 15).astype(np.uint16)
        kinds = codes.integers(0x3E00, 0x3FFF, (9, 2, DIM)) | codes.integers(0, 2, (9, 2, DIM)) << 15
        self.summaries = kinds.astype(np.uint16)[codes.integers(0, 9, PAGES)]
        self.pages = []
        for page in range(PAGES):
            rows = slice(page * PAGE_ROWS, min((page + 1) * PAGE_ROWS, ROWS))
            data = np.full(LAYOUT.page_bytes, 0xFF, np.uint8)
            for own, offset, pitch in (
                (k[rows], 0, LAYOUT.k_pitch_bytes),
                (v[rows], LAYOUT.areas[2], LAYOUT.v_pitch_bytes),
                (self.summaries[page], LAYOUT.summary_offset, LAYOUT.summary_lines * LINE_BYTES),
            ):
                for n, row in enumerate(own):
                    data[offset + n * pitch :][: 2 * DIM] = row.view(np.uint8)
            self.pages.append(host.allocate(LAYOUT.page_bytes, page % host.config.channels))
            host.write(self.pages[-1], data.tobytes())
        header = TABLE.pack_bytes(
            magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=PAGES, committed_rows=ROWS
        )
        self.table = host.place(header + self._entries(self.pages))
        lines = np.full((GROUP, LAYOUT.query_lines * LINE_BYTES // 2), 0xFFFF, "<u2")
        lines[:, :DIM] = self.q
        self.queries = host.place(lines.tobytes())
        self.result = host.allocate(GROUP * RESULT.lines * LINE_BYTES)
        self.selected = host.allocate(LIST_BYTES)
        self.ranges = host.allocate(8 * PAGES)

    @staticmethod
    def _entries(pages):
        words = [ENTRY.pack(valid=1, line=page // LINE_BYTES) for page in pages]
        words += [0] * (-len(words) % ENTRIES_PER_LINE)
        return np.array(words, "<u8").tobytes()

    def put_entry(self, number, page):
        """Put another page in the place of one."""
        self.host.write(
            self.table + LINE_BYTES, self._entries([*self.pages[:number], page, *self.pages[number + 1 :]])
        )

    def lines(self, select=None, *, ranges=None, fields=None, **more):
        """The two lines of a job; of one that reads some pages' rows alone with `ranges`."""
        options = abi.OPTION_SUMMARIES
        if select is not None:
            options |= abi.OPTION_SELECT
            more = {"select_pages": select, "selected": self.selected // LINE_BYTES, **more}
        if ranges is not None:
            options |= abi.OPTION_RANGES
            self.host.write(self.ranges, np.array(ranges, "<u4").tobytes())
            more |= {"ranges": self.ranges // LINE_BYTES, "range_count": len(ranges)}
        more["options"] = options | more.get("options", 0)
        line = {
            "version": abi.DESCRIPTOR_VERSION,
            "opcode": abi.Opcode.ATTEND,
            "flags": abi.FLAG_EXTENDED,
            "table": self.table,
            "queries": self.queries,
            "result": self.result,
            "row_end": ROWS,
            "score_factor": factor_bits(0.1),
            "head_dim": DIM,
            "value_dim": DIM,
            "group": GROUP,
            "query_rows": 1,
            "page_rows_log2": 2,
            "output_form": OutputForm.PARTIAL,
        }
        return abi.ATTEND.pack_bytes({**line, **(fields or {})}), abi.EXTENSION.pack_bytes(more)

    def run(self, *arguments, **options):
        """Post a job; its record, its result, and what stands in the list of selected pages."""
        self.host.write(self.selected, bytes([CLEARED]) * LIST_BYTES)
        record = self.host.post_extended(*self.lines(*arguments, **options))
        result = self.host.read(self.result, GROUP * RESULT.lines * LINE_BYTES)
        return record, result, self.host.read(self.selected, LIST_BYTES)

    def expected(self, select, pages=range(PAGES), factor=None):
        """The pages that are selected of some."""
        factor = factor_bits(0.1) if factor is None else factor
        bounds = {}
        for page in pages:
            least, largest = ([BF16.decode(int(code)) for code in row] for row in self.summaries[page])
            of_heads = [bound([int(code) for code in q], BF16, least, largest, factor) for q in self.q]
            bounds[page] = max(of_heads)
        *others, last = pages
        return sorted([*sorted(others, key=lambda page: (-bounds[page], page))[: select - 1], last])


def the_list(pages):
    """The bytes of a list of selected pages, as far as a test looks at them."""
    words = [len(pages), *pages]
    return np.array(words + [0] * (-len(words) % 16), "<u4").tobytes()


def ranges_of(pages):
    """The rows of pages, as a list of ranges."""
    return [(page * PAGE_ROWS, min((page + 1) * PAGE_ROWS, ROWS)) for page in pages]


@pytest.fixture
def setup(open_port, rng):
    return Setup(open_port(), rng)


@pytest.mark.parametrize("select", [1, 2, 15, 16, 37, 38, 1 << 20])
def test_the_best_pages_count(setup, select):
    """The list, the result of a job over just these pages, and the lines of these and of the summaries."""
    chosen = setup.expected(select)
    record, result, selected = setup.run(select)
    assert record["status"] == Status.OK
    assert selected.startswith(the_list(chosen)[:LIST_BYTES])
    rows = sum(end - begin for begin, end in ranges_of(chosen))
    passes = -(-GROUP // setup.host.config.queries)
    assert record["passes"] == passes
    assert record["lines"] == passes * (PAGES * 2 * 2 + rows * 4)
    record, other, _ = setup.run(ranges=ranges_of(chosen))
    assert record["lines"] == passes * rows * 4
    assert result == other


def test_pages_of_ranges(setup):
    """A page that two ranges share is one candidate; others are none. The factor's sign chooses, too."""
    ranges = [(3, 9), (10, 11), (40, 41), (42, 43), (100, 149)]
    pages = sorted({row // PAGE_ROWS for begin, end in ranges for row in range(begin, end)})
    for factor in (0.1, -0.1, 0.0):
        bits = factor_bits(factor)
        chosen = setup.expected(6, pages, bits)
        record, result, selected = setup.run(6, ranges=ranges, fields={"score_factor": bits})
        assert record["status"] == Status.OK
        assert selected.startswith(the_list(chosen))
        left = [
            (max(begin, first), min(end, last))
            for begin, end in ranges
            for first, last in ranges_of(chosen)
            if max(begin, first) < min(end, last)
        ]
        _, other, _ = setup.run(ranges=left, fields={"score_factor": bits})
        assert result == other


def test_nothing_to_select_from(setup):
    record, _, selected = setup.run(3, fields={"row_end": 0})
    assert record["status"] == Status.OK
    assert selected.startswith(the_list([]))
    assert record["lines"] == 0


def test_jobs_at_once(setup):
    """Jobs with and without a selection in one ring: each ends as it does alone."""
    host = setup.host
    jobs = [2, None, 5, 5, None, 1]
    alone = []
    places = []
    for select in jobs:
        record, result, selected = setup.run(select)
        alone.append((record["status"], record["lines"], result, select and selected))
        places.append((host.allocate(len(result)), host.allocate(LIST_BYTES)))
    descriptors = []
    for n, (select, (result, selected)) in enumerate(zip(jobs, places, strict=True)):
        host.write(selected, bytes([CLEARED]) * LIST_BYTES)
        more = {"selected": selected // LINE_BYTES} if select else {}
        line, extension = setup.lines(select, fields={"result": result}, **more)
        slot = host.posted + n
        host.port.run(extension_writes(host, slot, extension))
        descriptors.append(line)
    records = host.post(*descriptors)
    for record, (result, selected), (status, lines, wanted, pages) in zip(
        records, places, alone, strict=True
    ):
        assert (record["status"], record["lines"]) == (status, lines)
        assert host.read(result, len(wanted)) == wanted
        if pages:
            assert host.read(selected, LIST_BYTES) == pages


def extension_writes(host, index, extension):
    """The program that writes the second line of a slot."""
    from nearkv_hw.abi import window
    from nearkv_sim.port import Fence, Write

    address = window.descriptor_address(host.config, host.aperture, index) + LINE_BYTES
    lines = np.frombuffer(extension, np.uint8).reshape(1, -1)
    return [Write(np.array([address], np.uint64), lines), Fence()]


def test_what_is_at_fault_is_told(setup):
    """And the job behind ends as it should."""
    host = setup.host
    wanted = setup.run(5)
    chosen = setup.expected(5)
    lost = next(page for page in range(PAGES) if page not in chosen)

    def ends(status, detail=0, *, writes_list=False, **options):
        record, _, selected = setup.run(5, **options)
        assert (record["status"], record["detail"]) == (status, detail)
        if not writes_list:
            assert selected == bytes([CLEARED]) * LIST_BYTES

    def is_well():
        record, result, selected = setup.run(5)
        assert record["lines"] == wanted[0]["lines"]
        assert (record["status"], result, selected) == (Status.OK, *wanted[1:])

    setup.put_entry(lost, setup.theirs)
    ends(Status.PAGE_DENIED, lost, writes_list=True)
    host.write(setup.table + LINE_BYTES, bytes(LINE_BYTES))
    ends(Status.BAD_PAGE, 0)
    setup.put_entry(0, setup.pages[0])
    is_well()
    ends(Status.RESULT_DENIED, selected=setup.theirs // LINE_BYTES)
    ends(Status.RESULT_DENIED, selected=(host.config.capacity_bytes - LINE_BYTES) // LINE_BYTES)
    ends(Status.BAD_ADDRESS, selected=host.config.capacity_bytes // LINE_BYTES)
    ends(Status.BAD_LIST, ranges=[(0, 9), (8, 12)])
    ends(Status.BAD_GEOMETRY, fields={"row_end": (abi.MAX_CANDIDATES << 2) + 1})
    ends(Status.BAD_RANGE, fields={"row_end": abi.MAX_CANDIDATES << 2})
    ends(Status.BAD_FLAGS, options=abi.OPTION_TREE)
    is_well()
    host.port.inject(setup.pages[lost], [0, 1])  # a row that nobody reads
    is_well()
    host.port.inject(setup.pages[lost] + LAYOUT.summary_offset + 3 * LINE_BYTES, [0, 1])
    ends(Status.POISON, lost, writes_list=True)
