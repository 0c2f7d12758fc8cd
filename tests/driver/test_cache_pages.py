"""Pages that sequences share, give back and run out of: forks, beams, windows, eviction, and figures."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.errors import ArgumentError, ClosedError, EvictedError, OutOfMemoryError
from nearkv_hw.abi.config import EXTENT_BYTES

PAGE = 4


def cache(device, *, layers=1, kv_heads=2, head_dim=8, value_dim=8, dtype="fp16", **options):
    return device.kv_cache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        page_rows=PAGE,
        **options,
    )


def joined(*parts):
    return tuple(torch.cat(own) for own in zip(*parts, strict=True))


def append(kv, handle, rows, layer=0):
    kv.append(handle, layer=layer, k=rows[0], v=rows[1])


def reads_of(device, work):
    """Lines that the host read for some work, without those of the counters."""
    first = device.stats()
    second = device.stats()
    work()
    return (device.stats() - second).link_reads - (second - first).link_reads


def holds(kv, handle, rows, layer=0):
    return all(same_bits(*pair) for pair in zip(kv.read(handle, layer=layer), rows, strict=True))


# Copy on write


@pytest.mark.parametrize("first", ["parent", "child"])
def test_e11_a_shared_partial_page_is_never_written_through(device, first):
    """Three of four rows of a page are shared; both append another fourth row, in either order."""
    shared, one, two = (context(n, 2, 8, 8, seed=s) for n, s in ((3, 1), (1, 3), (1, 5)))
    q = values(2, 4, 8, seed=7)
    with cache(device) as kv:
        (parent,) = filled(kv, [shared])
        child = kv.fork(parent)
        assert (kv._pages.used, kv._pages.shared) == (2, 2)
        order = [(parent, one), (child, two)]
        for handle, rows in order if first == "parent" else order[::-1]:
            append(kv, handle, rows)
        assert (kv._pages.used, kv._pages.shared) == (4, 0)
        contexts = [joined(shared, one), joined(shared, two)]
        for handle, rows in zip((parent, child), contexts, strict=True):
            assert holds(kv, handle, rows)
        out = kv.attend([parent, child], layer=0, q=q, scale=0.3)
        assert same_bits(out, expected(q, contexts, scale=0.3))
        kv.free(parent)
        kv.free(child)
        assert kv._pages.used == 0


def test_a_fork_costs_page_tables_and_no_rows(model):
    rows = context(1000, 2, 8, 8, seed=1)
    with cache(model) as kv:
        (parent,) = filled(kv, [rows])
        before, pages, copies = model.stats(), kv._pages.used, []
        assert reads_of(model, lambda: copies.extend(kv.fork(parent) for _ in range(6))) == 0
        moved = model.stats() - before
        assert kv._pages.used == pages
        assert moved.link_writes == 6 * (1 + 2 * -(-pages // 2 // 8) + 1)
        kv.free(parent)
        assert all(holds(kv, copy, rows) for copy in copies)


def test_the_last_of_several_writes_in_place(model):
    """Beams that fork and go: who is left alone with a page needs no copy of it."""
    shared, more = context(3, 2, 8, 8, seed=1), context(1, 2, 8, 8, seed=2)
    with cache(model) as kv:
        (parent,) = filled(kv, [shared])
        child = kv.fork(parent)
        kv.free(parent)
        assert reads_of(model, lambda: append(kv, child, more)) == 0
        assert holds(kv, child, joined(shared, more))


@pytest.mark.parametrize("rows", [0, 1, 4, 7, 8])
def test_a_fork_of_some_rows(device, rows):
    whole, more = context(8, 2, 8, 8, seed=1), context(2, 2, 8, 8, seed=2)
    with cache(device) as kv:
        (parent,) = filled(kv, [whole])
        child = kv.fork(parent, rows)
        append(kv, child, more)
        assert holds(kv, child, joined(tuple(x[:rows] for x in whole), more))
        assert holds(kv, parent, whole)
        with pytest.raises(ArgumentError, match="rows=9: must be an integer from 0 to 8"):
            kv.fork(parent, 9)


@pytest.mark.parametrize("dtype", ["mxfp4", "int8", "q8_0"])
def test_rows_and_scales_that_share_lines_are_copied(device, dtype):
    """F13: short rows and narrow scales lie several to a line, and a copy keeps those before."""
    shared, one, two = (values(n, 1, 32, seed=s) for n, s in ((3, 1), (2, 3), (4, 5)))
    with (
        cache(device, kv_heads=1, head_dim=32, value_dim=32, dtype=dtype) as kv,
        cache(device, kv_heads=1, head_dim=32, value_dim=32, dtype=dtype) as plain,
    ):
        parent = kv.sequence()
        append(kv, parent, (shared, -shared))
        child = kv.fork(parent)
        for handle, more in ((child, two), (parent, one)):
            append(kv, handle, (more, -more))
            alone = plain.sequence()
            append(plain, alone, (shared, -shared))
            append(plain, alone, (more, -more))
            for part, other in zip(
                kv.read_codes(handle, layer=0), plain.read_codes(alone, layer=0), strict=True
            ):
                assert torch.equal(part.codes, other.codes)
                assert torch.equal(part.scales, other.scales)


def test_summaries_of_a_shared_page_stay_whose_they_are(model):
    """A crop and an append change a page's extremes, in the sequence that was cropped alone."""
    k = torch.arange(1, 9, dtype=torch.float16).reshape(8, 1, 1).expand(8, 1, 8).contiguous()
    q = torch.ones(1, 1, 8).half()
    with cache(model, kv_heads=1, summaries=True) as kv:
        (parent,) = filled(kv, [(k[:6], k[:6])])
        child = kv.fork(parent)
        kv.crop(child, 5)
        assert kv._pages.used == 3
        append(kv, child, (-k[:1], k[:1]))
        own = joined((k[:5], k[:5]), (-k[:1], k[:1]))
        for handle, rows in ((parent, (k[:6], k[:6])), (child, own)):
            out, pages = kv.attend([handle], layer=0, q=q, select_pages=2)
            assert same_bits(out, expected(q, [rows], scale=8**-0.5))
            assert pages.all()
        extremes = [kv._tenant.read(summary_lines(kv, handle)) for handle in (parent, child)]
        least = [int(lines.view(np.float16)[0, 0]) for lines in extremes]
        largest = [int(lines.view(np.float16)[1, 0]) for lines in extremes]
        assert (least, largest) == ([5, -1], [6, 5])


def summary_lines(kv, handle):
    table = handle._tables[0]
    page = table.page_addresses(1, 2).reshape(-1) + np.uint64(kv._layout.summary_offset)
    return np.concatenate([page, page + np.uint64(64)])


# Beams


@pytest.mark.parametrize("chosen", [[1, 0], [0, 0, 1], [1, 1, 1], [0], [2, 0, 2]])
def test_f12_beams_are_chosen_and_duplicates_are_independent(device, chosen):
    contexts = [context(6, 2, 8, 8, seed=s) for s in (1, 3, 5)]
    with cache(device, layers=2) as kv:
        beams = filled(kv, contexts)
        for beam, rows in zip(beams, contexts, strict=True):
            append(kv, beam, rows, layer=1)
        beams = kv.select(beams, chosen)
        wanted = [contexts[i] for i in chosen]
        for layer in range(2):
            more = [context(1, 2, 8, 8, seed=20 + 2 * i) for i in range(len(beams))]
            k, v = (torch.stack(parts) for parts in zip(*more, strict=True))
            kv.append(beams, layer=layer, k=k, v=v)
            for beam, rows, own in zip(beams, wanted, more, strict=True):
                assert holds(kv, beam, joined(rows, own), layer)
        assert len({beam.slot for beam in beams}) == len(beams) == kv.memory().sequences


def test_a_choice_that_is_none(model):
    with cache(model) as kv:
        beams = filled(kv, [context(1, 2, 8, 8, seed=s) for s in (1, 2)])
        with pytest.raises(ArgumentError, match="index=2: must be an integer from 0 to 1"):
            kv.select(beams, [0, 2])
        with pytest.raises(ArgumentError, match="names a sequence twice"):
            kv.select([beams[0]] * 2, [0])
        assert kv.memory().sequences == 2


# Windows


@pytest.mark.parametrize("kept", [0, 2, 5])
@pytest.mark.parametrize("query_rows", [1, 3])
def test_released_rows_are_seen_by_nobody(model, kept, query_rows):
    """Whatever else a call says: no mask, a range, a mask, a window; on the device and on the host."""
    rows = context(23, 2, 8, 8, seed=1)
    q = values(1, query_rows, 4, 8, seed=3)
    index, query = torch.arange(23), torch.arange(23 - query_rows, 23)
    gone = (index >= kept) & (index < 14)
    causal = (index <= query[:, None]) & ~gone
    mask = torch.rand(1, query_rows, 23, generator=torch.Generator().manual_seed(5)) < 0.6
    with nearkv.open("model", placement="host") as host:
        for device in (model, host):
            with cache(device) as kv:
                (handle,) = filled(kv, [rows])
                kv.release(handle, 14, kept_rows=kept)
                held = [page for page in range(6) if page * 4 < kept or page * 4 + 4 > 14]
                assert handle._tables[0].held_pages.tolist() == held
                assert kv._pages.used == 2 * len(held)
                cases = (
                    ({}, causal),
                    ({"rows": (1, 20)}, causal & (index >= 1) & (index < 20)),
                    ({"visible": mask}, mask[0] & ~gone if query_rows == 1 else causal & mask[0]),
                    ({"window": 7}, causal & (index > query[:, None] - 7)),
                    (
                        {"window": 7, "kept_rows": 3},
                        causal & ((index > query[:, None] - 7) | (index < 3)),
                    ),
                )
                for options, seen in cases:
                    given = q[:, 0] if query_rows == 1 else q
                    if "visible" in options and query_rows == 1:
                        options = {"visible": mask[:, 0]}
                    out = kv.attend([handle], layer=0, q=given, scale=0.3, **options)
                    wanted = expected(q, [rows], scale=0.3, visible=seen[None])
                    assert same_bits(out, wanted[:, 0] if query_rows == 1 else wanted), options
                held_rows = tuple(part[~gone] for part in rows)
                assert holds(kv, handle, held_rows)


def test_a_sliding_window_takes_no_more_memory_as_it_goes(device):
    """A long context through a window of 12 rows: never more than its pages, and the window's bits."""
    rows = context(200, 2, 8, 8, seed=1)
    q = values(1, 4, 8, seed=3)
    with cache(device) as kv:
        handle = kv.sequence()
        for at in range(0, 200, 5):
            append(kv, handle, tuple(part[at : at + 5] for part in rows))
            kv.slide(handle, 12)
            assert kv._pages.used <= 2 * (12 // PAGE + 2)
        out = kv.attend([handle], layer=0, q=q, scale=0.3, window=12)
        assert same_bits(out, expected(q, [tuple(part[-12:] for part in rows)], scale=0.3))
        assert kv.length(handle) == 200
        kv.crop(handle, 0)
        assert kv._pages.used == 0
        append(kv, handle, rows)
        assert holds(kv, handle, rows)


def test_released_rows_stay_away_through_forks_and_growth(model):
    rows, more = context(30, 2, 8, 8, seed=1), context(60, 2, 8, 8, seed=3)
    with cache(model) as kv:
        (parent,) = filled(kv, [rows])
        kv.release(parent, 20, kept_rows=4)
        child = kv.fork(parent)
        append(kv, child, more)
        gone = (torch.arange(90) >= 4) & (torch.arange(90) < 20)
        whole = joined(rows, more)
        assert holds(kv, child, tuple(part[~gone] for part in whole))
        kv.release(child, 90, kept_rows=4)
        append(kv, child, more)
        assert holds(kv, child, joined(tuple(part[:4] for part in rows), more))
        assert holds(kv, parent, tuple(part[~gone[:30]] for part in rows))
        kv.free(child)
        kv.free(parent)
        assert kv._pages.used == 0


def test_releases_and_crops_that_do_not_fit(model):
    with cache(model) as kv:
        (handle,) = filled(kv, [context(30, 2, 8, 8, seed=1)])
        with pytest.raises(ArgumentError, match="before=31: must be an integer from 0 to 30"):
            kv.release(handle, 31)
        with pytest.raises(ArgumentError, match="kept_rows=9: must be an integer from 0 to 8"):
            kv.release(handle, 8, kept_rows=9)
        kv.release(handle, 12, kept_rows=8)
        with pytest.raises(ArgumentError, match="rows 8 to 12 of layer 0 were released, and rows 20 to 25"):
            kv.release(handle, 25, kept_rows=20)
        with pytest.raises(ArgumentError, match="keep 12 rows or more, or 8 or fewer"):
            kv.crop(handle, 10)
        kv.crop(handle, 8)
        assert handle._tables[0].released == (0, 0)


# Running out


def test_the_least_important_go_first(model):
    """Under a high mark: lowest priority first, then the one not used for longest; never one that stays."""
    row = context(4, 2, 8, 8, seed=1)
    with cache(model) as kv:
        page = kv._layout.page_bytes * 2
        gone = []
        kv.keep_below(5 * page, 3 * page, on_evict=lambda s: gone.append((s.slot, kv.length(s))))
        staying, old, new, low = (kv.sequence(priority) for priority in (None, 5, 5, 1))
        for handle in (staying, new, old, low):
            append(kv, handle, row)
        kv.attend([new], layer=0, q=values(1, 4, 8, seed=3))
        append(kv, staying, row)
        assert gone == []
        append(kv, staying, row)
        assert gone == [(3, 4), (1, 4), (2, 4)]
        assert low.evicted
        assert repr(low) == "<evicted sequence 3>"
        with pytest.raises(EvictedError, match="sequence 3 went because memory ran short"):
            kv.length(low)
        append(kv, staying, (torch.cat([row[0]] * 9), torch.cat([row[1]] * 9)))
        assert kv.length(staying) == 48, "what stays may pass the mark"
        assert kv.memory().evicted == 3


def test_a_sequence_of_the_call_is_not_evicted(model):
    row = context(4, 2, 8, 8, seed=1)
    with cache(model) as kv:
        kv.keep_below(2 * 2 * kv._layout.page_bytes)
        one, two = kv.sequence(0), kv.sequence(1)
        k, v = (torch.stack([part] * 2) for part in row)
        kv.append([one, two], layer=0, k=k, v=v)
        kv.append([one, two], layer=0, k=k, v=v)
        assert [kv.length(handle) for handle in (one, two)] == [8, 8]


def test_sequences_go_when_there_is_no_memory_left():
    with nearkv.open("model", capacity_bytes=2 * EXTENT_BYTES) as device:
        kv = device.kv_cache(layers=1, kv_heads=1, head_dim=256, dtype="fp16", page_rows=32)
        rows = context(32 * 16, 1, 256, 256, seed=1)
        going, staying = kv.sequence(0), kv.sequence()
        append(kv, going, rows)
        append(kv, staying, rows)
        append(kv, staying, rows) if not going.evicted else None
        assert going.evicted
        with pytest.raises(OutOfMemoryError):
            append(kv, staying, joined(*[rows] * 3))
        with pytest.raises(ClosedError):
            kv.fork(going)


@pytest.mark.parametrize(("high", "low"), [(None, 4), (3, 4), (-1, None), (1.5, None)])
def test_marks_that_are_none(model, high, low):
    with cache(model) as kv, pytest.raises(ArgumentError, match=r"high_bytes|low_bytes"):
        kv.keep_below(high, low)


# What is told of memory


def test_memory_adds_up(model):
    with cache(model, layers=2) as kv:
        handles = filled(kv, [context(n, 2, 8, 8, seed=n) for n in (10, 33)])
        copy = kv.fork(handles[1])
        use, own = model.memory(), kv.memory()
        assert use.pages == 2 * (3 + 9)
        assert use.shared_pages == 18
        assert use.page_bytes == use.pages * kv._layout.page_bytes
        assert own.pages == use.pages + use.shared_pages
        assert own.rows == 10 + 33 + 33
        assert own.table_bytes == sum(t.size_bytes for h in (*handles, copy) for t in h._tables)
        parts = use.free_bytes + use.page_bytes + use.free_page_bytes + use.other_bytes + use.free_other_bytes
        assert parts == use.owned_bytes <= use.capacity_bytes
        assert 0 < use.fragmentation < 1
        assert use.to_dict()["fragmentation"] == use.fragmentation
        for handle in (*handles, copy):
            kv.free(handle)
        assert (model.memory().pages, model.memory().page_bytes, kv.memory().host_bytes) == (0, 0, 0)


def test_a_million_rows_cost_only_their_pages(model):
    """On the device and on the host: no copy of rows, some bytes for each page."""
    chunk = torch.randn(1 << 17, 1, 8, generator=torch.Generator().manual_seed(1)).half()
    with model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", page_rows=64) as kv:
        handle = kv.sequence()
        for _ in range(8):
            append(kv, handle, (chunk, -chunk))
        assert kv.length(handle) == 1 << 20
        own = kv.memory()
        assert own.pages == (1 << 20) // 64
        assert own.page_bytes == (1 << 20) * kv.row_bytes
        assert own.table_bytes + own.host_bytes < own.page_bytes / 64
        q = values(1, 2, 8, seed=3)
        out = kv.attend([handle], layer=0, q=q, rows=((1 << 20) - 5, 1 << 20))
        assert same_bits(out, expected(q, [(chunk[-5:], -chunk[-5:])], scale=8**-0.5))


def test_pages_cost_the_same_however_many_there_are():
    """Accesses to the allocator's own state for a page, of few pages and of 64 times as many."""
    from nearkv.allocator import Extents, Pages

    def steps(count):
        extents = Extents(lambda runs: [True] * len(runs), extents=1 << 16, channels=4)
        pages = Pages(extents, 4096, [0] * 4)
        calls = 0

        def traced(frame, event, argument):
            nonlocal calls
            calls += event == "line"
            return traced

        import sys

        sys.settrace(traced)
        taken = pages.take(count)
        pages.share(taken)
        pages.give(taken)
        pages.give(taken)
        sys.settrace(None)
        return calls / count

    assert steps(1 << 16) < 1.5 * steps(1 << 10)
