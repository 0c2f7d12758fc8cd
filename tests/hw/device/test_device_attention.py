"""Attention by descriptors written by hand, bit for bit against the reference."""

import json
from pathlib import Path

import pytest
import torch
from nearkv_hw.abi import OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import DESCRIPTOR_VERSION, NOP
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC
from raw_device import Aperture, Context, Space, ok, random_context

VECTORS = Path(__file__).parents[2] / "conformance" / "data" / "contract.json"
COVERED = ("bf16", "fp16")


@pytest.fixture
def aperture(open_port):
    """The first aperture of `small`, owner of everything."""
    aperture = Aperture(open_port())
    ok([aperture.claim()])
    return aperture


@pytest.fixture
def space(aperture, rng):
    return Space(rng, rng.sample(range(aperture.config.extents), 8))


def attend(aperture, space, contexts, ranges=None):
    """Place contexts, attend them in one batch, compare; the records."""
    ranges = ranges or [(0, context.rows) for context in contexts]
    for context in contexts:
        context.place(aperture, space)
    records = aperture.run([c.descriptor(*r) for c, r in zip(contexts, ranges, strict=True)])
    ok(records)
    for context, (begin, end), record in zip(contexts, ranges, records, strict=True):
        context.check(aperture, begin, end)
        passes = -(-len(context.q) // aperture.config.queries)
        assert record["passes"] == passes
        assert record["lines"] == passes * (end - begin) * context.layout.row_bytes // LINE_BYTES
    return records


def test_one_small_job(aperture, space, rng):
    attend(aperture, space, [random_context(rng)])


def covered_vectors():
    for entry in json.loads(VECTORS.read_text()):
        if all(entry[name] in COVERED for name in ("q_format", "k_format", "v_format")):
            yield entry


def contiguous_visible(entry):
    """The visible rows as a range, or none where they are no range."""
    rows = range(len(entry["k"]))
    visible = entry["visible"]
    seen = [n for n in rows if visible is None or visible[n]]
    if not seen:
        return (0, 0)
    return (seen[0], seen[-1] + 1) if len(seen) == seen[-1] + 1 - seen[0] else None


@pytest.mark.parametrize("form", list(OutputForm))
def test_contract_vectors(aperture, space, form):
    """Every vector in these formats: states as the contract gives them, outputs in all three formats."""
    chosen = []
    for entry in covered_vectors():
        keep = list(range(len(entry["k"])))
        rows = contiguous_visible(entry)
        if rows is None:  # a set of rows is what counts: leave the invisible ones out
            keep = [n for n in keep if entry["visible"][n]]
            rows = (0, len(keep))
        q = torch.tensor(entry["q"]).to(torch.int16)
        k = torch.tensor(entry["k"]).to(torch.int16).reshape(-1, len(q))[keep]
        v = torch.tensor(entry["v"]).to(torch.int16)
        v = v.reshape(len(entry["k"]), -1)[keep] if len(v) else v.reshape(0, 1)
        formats = {name: entry[name] for name in ("q_format", "k_format", "v_format")}
        sinks = None if entry["sink"] is None else [float(entry["sink"])]
        context = Context(q[None], k, v, **formats, scale=entry["scale"], sinks=sinks, page_rows=4, form=form)
        partial = context.expected(*rows)
        if not entry["query_nan"]:
            top, high, low = (int(plane[0, 0]) for plane in vars(partial.denominator).values())
            wanted = entry["denominator"]
            assert [top, high, low] == ([-(1 << 31), 0, 0] if wanted[0] is None else wanted), entry["name"]
        chosen.append((context, rows))
    assert len(chosen) > 30
    attend(aperture, space, [context for context, _ in chosen], [rows for _, rows in chosen])


@pytest.mark.parametrize("group", [*range(1, 17), 33, 128])
def test_groups(aperture, space, rng, group):
    """More query heads than are kept take more passes; sinks and results go with their heads."""
    sinks = [rng.uniform(-3, 3) for _ in range(group)]
    attend(aperture, space, [random_context(rng, group=group, head_dim=32, rows=21, sinks=sinks)])


@pytest.mark.parametrize(
    "dims", [(1, 1), (1, 256), (256, 1), (31, 33), (32, 32), (63, 64), (96, 40), (127, 129), (256, 256)]
)
def test_dims(aperture, space, rng, dims):
    """Any dimensions from 1 to 256; padding holds NaN and changes nothing."""
    attend(
        aperture,
        space,
        [random_context(rng, head_dim=dims[0], value_dim=dims[1], rows=37, form=form) for form in OutputForm],
    )


@pytest.mark.parametrize("page_rows", [4, 8, 16, 64, 256])
def test_page_rows(aperture, space, rng, page_rows):
    """E1: contexts that end before, at and after a page's last row."""
    lengths = [page_rows - 1, page_rows, page_rows + 1, 2 * page_rows]
    attend(
        aperture,
        space,
        [random_context(rng, rows=rows, page_rows=page_rows, head_dim=32) for rows in lengths],
    )


@pytest.mark.parametrize("formats", [("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp16")])
def test_formats(aperture, space, rng, formats):
    query, rows = formats
    attend(
        aperture,
        space,
        [random_context(rng, q_format=query, k_format=rows, v_format=rows, form=OutputForm.PARTIAL)],
    )


def test_windows(aperture, space, rng):
    """Row ranges: any begin and end, also within one page; an empty one gives +0, with a sink or without."""
    ranges = [(0, 1), (5, 6), (3, 4), (4, 8), (7, 9), (0, 50), (49, 50), (50, 50), (0, 0), (8, 8), (13, 41)]
    contexts = [
        random_context(rng, rows=50, page_rows=4, sinks=rng.choice([None, [0.5, -1.0, 2.0, 0.0]]))
        for _ in ranges
    ]
    contexts += [random_context(rng, rows=50, sinks=[1.0] * 4, form=form) for form in OutputForm]
    contexts += [random_context(rng, rows=50, form=form) for form in OutputForm]
    attend(aperture, space, contexts, [*ranges, *[(7, 7)] * 8])


def test_no_rows_at_all(aperture, space, rng):
    """A9: an empty context between others; its result is written and the others are as they should be."""
    contexts = [random_context(rng, rows=rows) for rows in (3, 0, 2)]
    attend(aperture, space, contexts)
    assert aperture.read(contexts[1].placed["result"], 256) == bytes(256)


def test_long_batch(aperture, space, rng):
    """Jobs of all kinds behind each other, more than the ring's slots in all: laps, phases, order."""
    for _ in range(3):
        contexts = [
            random_context(
                rng,
                group=rng.randint(1, 6),
                head_dim=rng.choice([16, 32, 64, 80]),
                rows=rng.randint(0, 30),
                page_rows=rng.choice([4, 8]),
                form=rng.choice(list(OutputForm)),
            )
            for _ in range(30)
        ]
        attend(aperture, space, contexts)


def test_ring_laps(aperture, space, rng):
    """Laps of the ring, mostly of NOPs: every record is new, none is taken for another."""
    context = random_context(rng, rows=9, head_dim=32, group=1)
    context.place(aperture, space)
    slots = aperture.config.ring_slots
    while aperture.posted < 3 * slots:
        jobs = [rng.random() < 0.05 for _ in range(rng.choice([1, slots // 2, slots]))]
        tags = [rng.getrandbits(32) for _ in jobs]
        descriptors = [
            context.descriptor(tag=tag) if job else NOP.pack(version=DESCRIPTOR_VERSION, tag=tag)
            for job, tag in zip(jobs, tags, strict=True)
        ]
        records = aperture.run(descriptors)
        ok(records)
        assert [record["tag"] for record in records] == tags
    context.check(aperture)


def test_beyond_the_table(aperture, space, rng):
    """E2: nine rows asked for, two pages of four there: an error, and not a line is read."""
    context = random_context(rng, rows=8, page_rows=4)
    context.place(aperture, space)
    header = TABLE.unpack(aperture.read(context.placed["table"], LINE_BYTES))
    aperture.write(context.placed["table"], TABLE.pack_bytes({**header, "committed_rows": 9}))
    (record,) = aperture.run([context.descriptor(end=9)])
    assert (record["status"], record["lines"], record["passes"]) == (Status.BAD_RANGE, 0, 0)
    (record,) = aperture.run([context.descriptor(end=8)])
    ok([record])


def test_high_pages(aperture, rng):
    """E3: pages number 65,536 and 70,000 of the memory, and of the context."""
    context = random_context(rng, rows=16, page_rows=8, head_dim=32, group=2)
    size = context.layout.page_bytes
    context.place(aperture, Space(rng, [0, 1]), pages=[65_536 * size, 70_000 * size])
    ok(aperture.run([context.descriptor()]))
    context.check(aperture)

    pages = 70_003
    table = 8 * EXTENT_BYTES
    header = {"magic": TABLE_MAGIC, "version": LAYOUT_VERSION, "heads": 1}
    aperture.write(table, TABLE.pack_bytes(header, entries=pages, committed_rows=pages * 8))
    for first in (65_536, 70_000):
        for n in range(2):
            entry = [0] * 8
            entry[(first + n) % 8] = ENTRY.pack(valid=1, line=context.placed["pages"][n] // LINE_BYTES)
            if n:
                entry[first % 8] = ENTRY.pack(valid=1, line=context.placed["pages"][0] // LINE_BYTES)
            line = b"".join(bits.to_bytes(8, "little") for bits in entry)
            aperture.write(table + LINE_BYTES + (first + n) // 8 * LINE_BYTES, line)
        ok(aperture.run([context.descriptor(first * 8, first * 8 + 16, table=table)]))
        context.check(aperture)


def test_split_and_merge(aperture, space, rng):
    """A context in two partials merges to the whole, bit for bit; a sink belongs to one of them."""
    context = random_context(rng, rows=45, page_rows=8, form=OutputForm.PARTIAL)
    attend(aperture, space, [context])
    for cut in (1, 8, 19):
        ok(aperture.run([context.descriptor(0, cut)]))
        context.check(aperture, 0, cut)
        ok(aperture.run([context.descriptor(cut, 45)]))
        context.check(aperture, cut, 45)


def test_results_of_neighbours_stay(aperture, space, rng):
    """A result is written where it belongs and nowhere else."""
    context = random_context(rng, group=3, value_dim=40)
    context.place(aperture, space)
    size = len(context.q) * context.result.lines * LINE_BYTES
    start = context.placed["result"]
    around = [start - LINE_BYTES, start + size]
    if start % EXTENT_BYTES == 0:
        around = around[1:]
    before = [aperture.read(address, LINE_BYTES) for address in around]
    ok(aperture.run([context.descriptor()]))
    assert [aperture.read(address, LINE_BYTES) for address in around] == before
