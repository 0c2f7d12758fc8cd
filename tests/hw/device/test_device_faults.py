"""What must not work: bad descriptors, memory of others, broken tables; and that nothing stops the device."""

import pytest
from nearkv_hw.abi import Opcode, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, DESCRIPTOR_VERSION, NOP
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import ENTRY, TABLE
from nearkv_hw.abi.window import RING, RING_LINE
from raw_device import Aperture, Space, claim_descriptor, ok, random_context

CAPACITY = 2 << 30


@pytest.fixture
def apertures(open_port):
    """Two tenants; the first owns extents 0 to 15, the second 16 to 31, nobody the rest."""
    port = open_port()
    pair = [Aperture(port, n) for n in range(2)]
    for n, aperture in enumerate(pair):
        ok([aperture.claim(16 * n, 16)])
    return pair


@pytest.fixture
def placed(apertures, rng):
    """A good context of the first tenant."""
    context = random_context(rng, rows=50, page_rows=4, group=5, sinks=[0.5] * 5)
    context.place(apertures[0], Space(rng, range(16)))
    return context


def check_status(aperture, descriptor, status, detail=0):
    (record,) = aperture.run([descriptor])
    assert (Status(record["status"]), record["detail"]) == (status, detail)
    return record


BAD_FIELDS = [
    (Status.BAD_VERSION, {"version": 0}),
    (Status.BAD_VERSION, {"version": 1, "opcode": 77, "head_dim": 0}),
    (Status.BAD_OPCODE, {"opcode": len(Opcode), "flags": 0xFFFF}),
    (Status.BAD_FLAGS, {"flags": 1 << 2}),
    (Status.BAD_FLAGS, {"flags": 1 << 15, "group": 0}),
    (Status.BAD_GEOMETRY, {"head_dim": 0, "k_format": 9}),
    (Status.BAD_GEOMETRY, {"value_dim": 0}),
    (Status.BAD_GEOMETRY, {"group": 0}),
    (Status.BAD_GEOMETRY, {"group": 129}),
    (Status.BAD_GEOMETRY, {"query_rows": 2}),
    (Status.BAD_GEOMETRY, {"page_rows_log2": 1}),
    (Status.BAD_GEOMETRY, {"page_rows_log2": 14}),
    (Status.BAD_FORMAT, {"k_format": 8, "score_factor": 0x7F800000}),
    (Status.BAD_FORMAT, {"v_format": 15}),
    (Status.BAD_FORMAT, {"query_format": 2}),
    (Status.BAD_FORMAT, {"output_form": 4}),
    (Status.BAD_FACTOR, {"score_factor": 0x7F800000, "table": 1}),
    (Status.BAD_FACTOR, {"score_factor": 0xFFC00000}),
    (Status.BAD_ADDRESS, {"table": 32}),
    (Status.BAD_ADDRESS, {"queries": CAPACITY}),
    (Status.BAD_ADDRESS, {"result": 1 << 63}),
    (Status.BAD_ADDRESS, {"sinks": 4}),
    (Status.BAD_TABLE, {"kv_head": 1}),
    (Status.BAD_RANGE, {"row_begin": 20, "row_end": 19}),
    (Status.BAD_RANGE, {"row_end": 51}),
    (Status.BAD_RANGE, {"row_end": (1 << 32) - 1, "row_begin": (1 << 32) - 1}),
    (Status.DENIED, {"table": 16 * EXTENT_BYTES}),
    (Status.DENIED, {"queries": 17 * EXTENT_BYTES}),
    (Status.DENIED, {"queries": CAPACITY - 64}),
    (Status.DENIED, {"sinks": 40 * EXTENT_BYTES}),
    (Status.RESULT_DENIED, {"result": 18 * EXTENT_BYTES}),
    (Status.RESULT_DENIED, {"result": CAPACITY - 64}),
]


@pytest.mark.parametrize(("status", "changes"), BAD_FIELDS)
def test_bad_fields(apertures, placed, status, changes):
    """Every status that a descriptor's own fields can bring; faults are told in the order of the codes."""
    own, other = apertures
    before = other.read(16 * EXTENT_BYTES, 4096), other.read(18 * EXTENT_BYTES, 4096)
    record = check_status(own, placed.descriptor(tag=77, **changes), status)
    assert record["tag"] == 77
    if status < Status.DENIED:
        assert (record["passes"], record["lines"]) == (0, 0)
        assert set(own.read(placed.placed["result"], 5 * LINE_BYTES)) == {0xEE}
    assert (other.read(16 * EXTENT_BYTES, 4096), other.read(18 * EXTENT_BYTES, 4096)) == before
    ok(own.run([placed.descriptor()]))
    placed.check(own)


@pytest.mark.parametrize("fields", [{"magic": 1}, {"version": 1}, {"heads": 0}])
def test_bad_table(apertures, placed, fields):
    own = apertures[0]
    header = own.read(placed.placed["table"], LINE_BYTES)
    own.write(placed.placed["table"], TABLE.pack_bytes({**TABLE.unpack(header), **fields}))
    check_status(own, placed.descriptor(), Status.BAD_TABLE)
    own.write(placed.placed["table"], header)
    ok(own.run([placed.descriptor()]))


def test_table_that_runs_out_of_memory(apertures, placed):
    """A table that says its entries lie beyond the memory, or the address space."""
    own = apertures[0]
    header = TABLE.unpack(own.read(placed.placed["table"], LINE_BYTES))
    own.write(placed.placed["table"], TABLE.pack_bytes({**header, "heads": 2047, "entries": (1 << 32) - 1}))
    check_status(own, placed.descriptor(kv_head=2046), Status.DENIED)
    check_status(own, placed.descriptor(kv_head=1, row_begin=50), Status.OK)


@pytest.mark.parametrize("page", [0, 5, 12])
@pytest.mark.parametrize(
    ("status", "entry"),
    [
        (Status.BAD_PAGE, 0),
        (Status.BAD_PAGE, ENTRY.pack(valid=1, line=15 * EXTENT_BYTES // 64 - 15)),  # 16 lines: one too many
        (Status.BAD_PAGE, ENTRY.pack(valid=1, line=CAPACITY // 64)),
        (Status.BAD_PAGE, ENTRY.pack(valid=1, line=(1 << 46) - 1)),
        (Status.BAD_PAGE, ENTRY.pack(valid=1, line=0) | 2),
        (Status.BAD_PAGE, ENTRY.pack(valid=1, line=0) | 1 << 63),
        (Status.PAGE_DENIED, ENTRY.pack(valid=1, line=16 * EXTENT_BYTES // 64)),
        (Status.PAGE_DENIED, ENTRY.pack(valid=1, line=CAPACITY // 64 - 16)),
    ],
)
def test_bad_pages(apertures, placed, page, status, entry):
    """An entry that names no page, or a page of another tenant: the page at fault is told."""
    own, other = apertures
    where = placed.placed["entries"] + page // 8 * LINE_BYTES
    good = own.read(where, LINE_BYTES)
    bad = bytearray(good)
    bad[page % 8 * 8 :][:8] = entry.to_bytes(8, "little")
    bad = good[: page % 8 * 8] + entry.to_bytes(8, "little") + good[page % 8 * 8 + 8 :]
    own.write(where, bad)
    violations = own.counters()["violations"]
    check_status(own, placed.descriptor(), status, page)
    if status is Status.PAGE_DENIED:
        rows = min(4, placed.rows - 4 * page)
        assert own.counters()["violations"] == violations + 2 * 4 * rows  # two passes, four lines a row
    if page:
        ok(own.run([placed.descriptor(0, 4 * page)]))
        placed.check(own, 0, 4 * page)
    own.write(where, good)
    ok(own.run([placed.descriptor()]))
    placed.check(own)
    ok([other.run([NOP.pack(version=DESCRIPTOR_VERSION)])[0]])


@pytest.mark.parametrize(("denied", "invalid"), [(2, 5), (5, 2), (0, 1), (8, 7), (3, 12)])
def test_the_lowest_page_at_fault_is_told(apertures, placed, denied, invalid):
    """One page of another tenant, found by a unit, and one entry that names no page, found by the walker."""
    own = apertures[0]
    for page, entry in ((denied, ENTRY.pack(valid=1, line=16 * EXTENT_BYTES // 64)), (invalid, 0)):
        where = placed.placed["entries"] + page // 8 * LINE_BYTES
        line = bytearray(own.read(where, LINE_BYTES))
        line[page % 8 * 8 : page % 8 * 8 + 8] = entry.to_bytes(8, "little")
        own.write(where, bytes(line))
    expected = (Status.PAGE_DENIED, denied) if denied < invalid else (Status.BAD_PAGE, invalid)
    check_status(own, placed.descriptor(), *expected)


def test_a_lying_table_ends_at_once(apertures, placed):
    """A table that says it has two million entries, with nothing behind the first thirteen."""
    own = apertures[0]
    header = TABLE.unpack(own.read(placed.placed["table"], LINE_BYTES))
    lying = {**header, "entries": 1 << 21, "committed_rows": (1 << 23) - 1}
    own.write(placed.placed["table"], TABLE.pack_bytes(lying))
    line = placed.placed["entries"] + LINE_BYTES
    own.write(line, own.read(line, LINE_BYTES)[: 5 * 8] + bytes(3 * 8))
    record = check_status(own, placed.descriptor(row_end=(1 << 23) - 1), Status.BAD_PAGE, 13)
    assert record["cycles"] < 2_000


def test_entries_in_memory_of_others(apertures, placed, rng):
    """A table whose header is the tenant's and whose entries are not."""
    own = apertures[0]
    edge = 16 * EXTENT_BYTES - LINE_BYTES
    own.write(edge, own.read(placed.placed["table"], LINE_BYTES))
    check_status(own, placed.descriptor(table=edge), Status.DENIED)


def test_others_see_nothing(apertures, placed):
    """The second tenant cannot use the first one's table, and reads nothing of it."""
    other = apertures[1]
    check_status(other, placed.descriptor(), Status.DENIED)


def test_claims(apertures):
    own, other = apertures
    extents = own.config.extents
    check_status(own, claim_descriptor(0, 0), Status.BAD_EXTENT)
    check_status(own, claim_descriptor(extents, 1), Status.BAD_EXTENT)
    check_status(own, claim_descriptor(extents - 1, 2), Status.BAD_EXTENT)
    check_status(own, claim_descriptor((1 << 32) - 1, (1 << 32) - 1), Status.BAD_EXTENT)
    check_status(own, claim_descriptor(0, 1, flags=2), Status.BAD_FLAGS)
    check_status(own, claim_descriptor(0, 1) | 1 << 400, Status.BAD_FLAGS)
    check_status(own, NOP.pack(version=DESCRIPTOR_VERSION) | 1 << 64, Status.BAD_FLAGS)
    check_status(own, claim_descriptor(5, 60), Status.EXTENT_TAKEN, 16)
    check_status(own, claim_descriptor(29, 9), Status.EXTENT_TAKEN, 29)
    check_status(other, claim_descriptor(32, 2), Status.OK)  # nothing was claimed before
    check_status(other, claim_descriptor(16, 18), Status.OK)  # once more, and two that are its own already
    check_status(own, claim_descriptor(33, 1), Status.EXTENT_TAKEN, 33)
    check_status(own, claim_descriptor(34, extents - 34), Status.OK)
    check_status(other, claim_descriptor(extents - 1, 1), Status.EXTENT_TAKEN, extents - 1)


def test_jobs_around_a_claim(apertures, rng):
    """A job before the claim of its pages is refused, one behind it in the same batch is not."""
    own = apertures[0]
    context = random_context(rng, rows=9, page_rows=4)
    context.place(own, Space(rng, range(16)))
    extent = 100
    entry = ENTRY.pack_bytes(valid=1, line=extent * EXTENT_BYTES // LINE_BYTES)
    entries = own.read(context.placed["entries"], LINE_BYTES)
    own.write(context.placed["entries"], entries[:8] + entry + entries[16:])
    records = own.run([context.descriptor(), claim_descriptor(extent, 1), context.descriptor()])
    assert [Status(record["status"]) for record in records] == [Status.PAGE_DENIED, Status.OK, Status.OK]
    assert records[0]["detail"] == 1


def test_refused_doorbell(apertures):
    own = apertures[0]
    slots = own.config.ring_slots
    errors = own.counters()["errors"]
    own.post([NOP.pack(version=DESCRIPTOR_VERSION)] * (slots + 1))
    assert own.counters()["errors"] == errors + 1
    assert own.counters(RING, RING_LINE)["tail"] == 1
    own.posted = 1
    ok(own.run([NOP.pack(version=DESCRIPTOR_VERSION)]))


def test_two_tenants_at_once(apertures, rng):
    """Both rings full of jobs: each gets its own results, each in the order of its ring."""
    batches = []
    for n, aperture in enumerate(apertures):
        space = Space(rng, range(16 * n, 16 * n + 16))
        batch = [random_context(rng, rows=rng.randint(0, 60), group=rng.randint(1, 5)) for _ in range(12)]
        for context in batch:
            context.place(aperture, space)
        batches.append(batch)
    for aperture, batch in zip(apertures, batches, strict=True):
        aperture.post([context.descriptor(tag=tag) for tag, context in enumerate(batch)])
    for aperture, batch in zip(apertures, batches, strict=True):
        records = aperture.collect(len(batch))
        ok(records)
        assert [record["tag"] for record in records] == list(range(len(batch)))
        for context in batch:
            context.check(aperture)


def test_noise(apertures, placed, rng):
    """Random lines as descriptors, plainly random and random in a good one: every one is answered."""
    own = apertures[0]
    fields = placed.fields()
    for _ in range(8):
        batch = []
        for _ in range(60):
            kind = rng.randrange(4)
            line = rng.getrandbits(512)
            if kind == 1:  # a good head, the rest noise
                line = line >> 16 << 16 | DESCRIPTOR_VERSION | rng.choice(list(Opcode)) << 8
            elif kind == 2:  # a good job with some bits flipped
                line = ATTEND.pack(fields)
                for _ in range(rng.randint(1, 3)):
                    line ^= 1 << rng.randrange(512)
            elif kind == 3:  # a good job with a field of noise
                name = rng.choice(list(fields))
                line = ATTEND.pack({**fields, name: rng.getrandbits(ATTEND[name].width)})
            # Results stay where they harm nothing: the table must survive for the last job.
            offset, result = ATTEND.offset("result"), placed.placed["result"]
            line = line & ~((1 << 64) - 1 << offset) | result << offset
            batch.append(line)
        tags = [line >> ATTEND.offset("tag") & 0xFFFFFFFF for line in batch]
        records = own.run(batch)
        assert [record["tag"] for record in records] == tags
    ok(own.run([placed.descriptor()]))
    placed.check(own)
