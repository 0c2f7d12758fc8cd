"""How descriptors end that cannot be done: every status, their order, and what is left untouched."""

import numpy as np
import pytest
from contract_cases import seed_of_run
from nearkv_hw.abi import LINE_BYTES, Feature, Opcode, OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.memory import ENTRY, TABLE
from nearkv_hw.abi.numerics import MAX_ROWS
from rawhost import RawHost, claim_descriptor, factor_bits, nop_descriptor

EMPTY_RESULT = b"\xff"


class Setup:
    """A tenant with a small good job, and a second tenant with memory of its own."""

    def __init__(self, port):
        self.port = port
        self.host = RawHost(port, 0)
        self.other = RawHost(port, 1, first_extent=100)
        rng = np.random.default_rng(5)
        k, v = (rng.integers(0x3F00, 0x3FFF, (2, 20, 40), dtype=np.uint16) for _ in range(2))
        q = rng.integers(0x3F00, 0x3FFF, (6, 40), dtype=np.uint16)
        self.table = self.host.table(list(k), list(v), page_rows=4)
        self.job = self.host.job(self.table, q, factor=factor_bits(0.1), sinks=[0] * 6, kv_head=1)
        self.theirs = self.other.allocate(EXTENT_BYTES)

    def end(self, tag=7, **changes):
        """How the job ends with some fields changed; unless it ends well its result must stay as it was."""
        counters = self.host.counters()
        [record] = self.host.post(self.job.descriptor(tag=tag, **changes))
        after = self.host.counters()
        assert record["tag"] == tag
        assert after["jobs"] == counters["jobs"] + 1
        assert after["errors"] == counters["errors"] + (record["status"] != 0)
        if record["status"]:
            area = self.host.read(self.job.fields["result"], self.job.result_bytes)
            assert area == EMPTY_RESULT * self.job.result_bytes
        return Status(record["status"]), record["detail"]

    def change_header(self, **changes):
        """Rewrite the page table's header with some fields changed."""
        header = TABLE.unpack(self.host.read(self.table.address, LINE_BYTES))
        self.host.write(self.table.address, TABLE.pack_bytes({**header, **changes}))

    def change_entry(self, page, **fields):
        """Rewrite a page-table entry of head 1."""
        self.host.write_bytes(self.table.entry_address(1, page, 5), ENTRY.pack_bytes(fields))


@pytest.fixture
def setup(open_port):
    return Setup(open_port(Feature(0), capacity_bytes=256 << 20))


def test_the_job_is_good(setup):
    assert setup.end() == (Status.OK, 0)


FIELDS_AT_FAULT = [  # in the order in which they are reported
    (Status.BAD_VERSION, {"version": (0, 1, 3, 255)}),
    (Status.BAD_OPCODE, {"opcode": (len(Opcode), 255)}),
    (Status.BAD_FLAGS, {"flags": (1, 3, 4, 0x8000)}),
    (Status.BAD_FLAGS, {"output_scale": (1, 0x3F800000)}),
    (Status.BAD_GEOMETRY, {"head_dim": (0, 257, 1023)}),
    (Status.BAD_GEOMETRY, {"value_dim": (0, 257, 1023)}),
    (Status.BAD_GEOMETRY, {"group": (0, 129, 255)}),
    (Status.BAD_GEOMETRY, {"query_rows": (0, 2, 255)}),
    (Status.BAD_GEOMETRY, {"page_rows_log2": (0, 1, 14, 15)}),
    (Status.BAD_FORMAT, {"k_format": (2, 6, 15)}),
    (Status.BAD_FORMAT, {"v_format": (2, 6, 15)}),
    (Status.BAD_FORMAT, {"query_format": (2, 3)}),
    (Status.BAD_FORMAT, {"output_form": (4, 7)}),
    (Status.BAD_FACTOR, {"score_factor": (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001)}),
    (Status.BAD_ADDRESS, {"table": (1, 32, 256 << 20, 1 << 63)}),
    (Status.BAD_ADDRESS, {"queries": (1, 32, 256 << 20, 1 << 63)}),
    (Status.BAD_ADDRESS, {"result": (1, 32, 256 << 20, 1 << 63)}),
    (Status.BAD_ADDRESS, {"sinks": (1, 4, 256 << 20, 1 << 63)}),
]


@pytest.mark.parametrize(("status", "fields"), FIELDS_AT_FAULT, ids=str)
def test_field_at_fault(setup, status, fields):
    for name, values in fields.items():
        for value in values:
            assert setup.end(**{name: value}) == (status, 0)


def test_first_fault_is_reported(setup):
    changes = {}
    for status, fields in reversed(FIELDS_AT_FAULT):
        changes |= {name: values[-1] for name, values in fields.items()}
        assert setup.end(**changes) == (status, 0)


@pytest.mark.parametrize("changes", [{"flags": 1}, {"flags": 2}, {"reserved_end": 1 << 300}], ids=str)
def test_claims_and_nops_have_no_flags(setup, changes):
    descriptors = claim_descriptor(0, 1, **changes), nop_descriptor(**changes)
    assert [record["status"] for record in setup.host.post(*descriptors)] == [Status.BAD_FLAGS] * 2


def test_sinks_without_the_flag_are_not_looked_at(setup):
    assert setup.end(flags=0, sinks=13) == (Status.OK, 0)


@pytest.mark.parametrize("changes", [{"magic": 0}, {"version": 1}, {"heads": 1}, {"heads": 0}], ids=str)
def test_bad_table(setup, changes):
    setup.change_header(**changes)
    assert setup.end() == (Status.BAD_TABLE, 0)


def test_bad_range(setup):
    assert setup.end(row_begin=5, row_end=4) == (Status.BAD_RANGE, 0)
    assert setup.end(row_end=21) == (Status.BAD_RANGE, 0)
    setup.change_header(committed_rows=19)
    assert setup.end() == (Status.BAD_RANGE, 0)
    setup.change_header(committed_rows=20, entries=4)
    assert setup.end() == (Status.BAD_RANGE, 0)
    setup.change_header(committed_rows=0xFFFFFFFF, entries=0xFFFFFFFF)
    assert setup.end(row_begin=MAX_ROWS + 1, row_end=MAX_ROWS + 1) == (Status.BAD_RANGE, 0)


@pytest.mark.parametrize("name", ["table", "queries", "sinks"])
def test_operand_denied(setup, name):
    violations = setup.host.counters()["violations"]
    assert setup.end(**{name: setup.theirs}) == (Status.DENIED, 0)  # another tenant's
    assert setup.end(**{name: 200 * EXTENT_BYTES}) == (Status.DENIED, 0)  # nobody's
    assert setup.host.counters()["violations"] > violations


def test_queries_beyond_the_memory_are_denied(setup):
    last = setup.host.config.extents - 1
    assert setup.host.claim(last, 1)["status"] == Status.OK
    assert setup.end(queries=setup.host.config.capacity_bytes - LINE_BYTES) == (Status.DENIED, 0)


def test_queries_of_a_later_pass_are_denied(setup):
    """The last query line lies in the next tenant's extent, the first pass's do not."""
    assert setup.host.claim(99, 1)["status"] == Status.OK
    edge = setup.theirs - 6 * 2 * LINE_BYTES
    setup.host.write(edge, bytes(12 * LINE_BYTES))
    assert setup.end(queries=edge) == (Status.OK, 0)
    setup.host.write(setup.job.fields["result"], EMPTY_RESULT * setup.job.result_bytes)
    record = setup.host.post(setup.job.descriptor(queries=edge + LINE_BYTES))[0]
    assert record["status"] == Status.DENIED


def test_sinks_of_a_later_pass_are_denied(setup):
    """Twenty sinks take two lines; the second lies in the next tenant's extent."""
    assert setup.host.claim(99, 1)["status"] == Status.OK
    edge = setup.theirs - LINE_BYTES
    assert setup.end(sinks=edge) == (Status.OK, 0)
    room = {
        "result": setup.host.allocate(20 * 21 * LINE_BYTES),
        "queries": setup.host.allocate(40 * LINE_BYTES),
    }
    for sinks, status in ((edge, Status.DENIED), (edge - LINE_BYTES, Status.OK)):
        [record] = setup.host.post(setup.job.descriptor(group=20, sinks=sinks, **room))
        assert record["status"] == status


def test_order_of_faults_is_that_of_passes(setup):
    """The first pass's result comes before the second pass's queries, its pages before its result."""
    assert setup.host.claim(99, 1)["status"] == Status.OK
    edge = setup.theirs - 5 * 2 * LINE_BYTES  # the first pass has four heads of two lines
    assert setup.end(queries=edge) == (Status.DENIED, 0)
    assert setup.end(queries=edge, result=setup.theirs) == (Status.RESULT_DENIED, 0)
    setup.change_entry(2, valid=1, line=setup.theirs // LINE_BYTES)
    assert setup.end(queries=edge, result=setup.theirs) == (Status.PAGE_DENIED, 2)
    setup.change_entry(3, valid=0)
    assert setup.end(queries=edge, result=setup.theirs) == (Status.PAGE_DENIED, 2)
    setup.change_entry(1, valid=0)
    assert setup.end(queries=edge, result=setup.theirs) == (Status.BAD_PAGE, 1)
    assert setup.end(queries=setup.theirs, result=setup.theirs) == (Status.DENIED, 0)


def test_entries_denied(setup):
    """A table whose header is the last line of an extent: the entries lie in the next."""
    assert setup.host.claim(99, 1)["status"] == Status.OK
    header = setup.host.read(setup.table.address, LINE_BYTES)
    setup.host.write(setup.theirs - LINE_BYTES, header)
    assert setup.end(table=setup.theirs - LINE_BYTES) == (Status.DENIED, 0)
    setup.host.write(setup.theirs - LINE_BYTES, header)
    assert setup.end(table=setup.theirs - LINE_BYTES, row_begin=9, row_end=9, output_form=0)[0] == Status.OK


def test_bad_page(setup):
    line = setup.table.pages[1][3] // LINE_BYTES
    extent = EXTENT_BYTES // LINE_BYTES
    page_lines = 4 * 4
    for fields in (
        {"valid": 0, "line": line},
        {"valid": 1, "line": line, "reserved_low": 1},
        {"valid": 1, "line": line, "reserved_end": 1},
        {"valid": 1, "line": line // extent * extent + extent - page_lines + 1},
        {"valid": 1, "line": setup.host.config.capacity_bytes // LINE_BYTES},
        {"valid": 1, "line": (1 << 46) - 1},
    ):
        setup.change_entry(3, **fields)
        assert setup.end() == (Status.BAD_PAGE, 3)
        assert setup.end(row_end=12, result=setup.host.allocate(setup.job.result_bytes)) == (Status.OK, 0)


def test_page_denied(setup):
    setup.change_entry(2, valid=1, line=setup.theirs // LINE_BYTES)
    setup.change_entry(4, valid=1, line=200 * EXTENT_BYTES // LINE_BYTES)
    violations = setup.host.counters()["violations"]
    assert setup.end() == (Status.PAGE_DENIED, 2)
    # six queries take two passes, which each meet the 4 rows of K and V, two lines long, of both pages
    assert setup.host.counters()["violations"] == violations + 2 * 2 * 4 * 4


def test_the_lowest_page_at_fault_is_told(setup):
    setup.change_entry(1, valid=1, line=setup.theirs // LINE_BYTES)
    setup.change_entry(4, valid=0)
    assert setup.end() == (Status.PAGE_DENIED, 1)
    setup.change_entry(0, valid=0)
    assert setup.end() == (Status.BAD_PAGE, 0)


def test_result_denied(setup):
    before = setup.other.read(setup.theirs, EXTENT_BYTES)
    assert setup.end(result=setup.theirs) == (Status.RESULT_DENIED, 0)
    assert setup.end(result=200 * EXTENT_BYTES) == (Status.RESULT_DENIED, 0)
    assert setup.host.claim(99, 1)["status"] == Status.OK
    assert setup.end(result=setup.theirs - LINE_BYTES) == (Status.RESULT_DENIED, 0)
    assert setup.other.read(setup.theirs, EXTENT_BYTES) == before


def test_claims(setup):
    host, extents = setup.host, setup.host.config.extents

    def end(first, count):
        record = host.claim(first, count)
        return Status(record["status"]), record["detail"]

    assert end(0, 0) == (Status.BAD_EXTENT, 0)
    assert end(extents, 1) == (Status.BAD_EXTENT, 0)
    assert end(extents - 1, 2) == (Status.BAD_EXTENT, 0)
    assert end(0xFFFFFFFF, 0xFFFFFFFF) == (Status.BAD_EXTENT, 0)
    assert end(98, 5) == (Status.EXTENT_TAKEN, 100)
    assert setup.host.access(98 * EXTENT_BYTES).access[0] == 1  # nothing of it was taken
    assert end(98, 2) == (Status.OK, 0)
    assert end(97, 3) == (Status.OK, 0)  # what is its own already does not hinder
    assert setup.other.claim(99, 2)["detail"] == 99


def test_random_descriptors_never_break_the_device(setup):
    seed = seed_of_run()
    rng = np.random.default_rng(seed)
    good = setup.job.descriptor()
    for _ in range(40):
        descriptors = []
        for _ in range(16):
            line = bytearray(good if rng.random() < 0.8 else rng.bytes(LINE_BYTES))
            for _ in range(rng.integers(0, 4)):
                line[rng.integers(LINE_BYTES)] = rng.integers(256)
            descriptors.append(bytes(line))
        records = setup.host.post(*descriptors)
        for record, line in zip(records, descriptors, strict=True):
            assert record["status"] in list(Status)
            assert record["tag"] == int.from_bytes(line[4:8], "little")
    setup.host.write(setup.job.fields["result"], EMPTY_RESULT * setup.job.result_bytes)


def test_random_tables_never_break_the_device(setup):
    seed = seed_of_run()
    rng = np.random.default_rng(seed)
    size = LINE_BYTES * 3
    table = setup.host.read(setup.table.address, size)
    seen = set()
    for _ in range(200):
        changed = bytearray(table)
        for _ in range(rng.integers(1, 4)):
            changed[rng.integers(size)] ^= 1 << rng.integers(8)
        setup.host.write(setup.table.address, bytes(changed))
        form = list(OutputForm)[rng.integers(4)]
        [record] = setup.host.post(setup.job.descriptor(output_form=form, row_end=rng.integers(21)))
        seen.add(Status(record["status"]))
    assert Status.OK in seen
    assert len(seen) > 2
