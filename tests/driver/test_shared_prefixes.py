"""Prefixes that hosts of a served device share: the bits of rows of one's own, and nobody else's rows."""

import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial

import nearkv
import pytest
import torch
from driver_cases import expected, same_answers, same_bits, values
from leaks import no_leak
from nearkv.errors import ArgumentError, LinkError, OutOfMemoryError, StalePrefixError, TenantTakenError
from nearkv.library import Library
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.model import ModelPort
from nearkv_sim.served import Server
from test_prefixes import SHAPE, holds, prefill, rows_of

APERTURES = 4
LIBRARY = 3
TOKENS = list(range(30))
Q = values(1, 4, 8, seed=3)


def served(tmp_path, **overrides):
    port = ModelPort(configure("small", apertures=APERTURES, **overrides))
    library = Library(port, LIBRARY)
    server = Server(port, tmp_path / "socket", library)
    threading.Thread(target=server.serve, daemon=True).start()
    return server, library


@pytest.fixture
def shared(tmp_path):
    server, library = served(tmp_path)
    yield server, library
    server.close()


def host(server):
    return nearkv.open(f"unix:{server.path}")


def published(kv, tokens=TOKENS, **options):
    """A prompt's rows, given to all hosts; the host's own copy of them is freed."""
    handle = kv.sequence()
    prefill(kv, handle, tokens)
    prefix = kv.publish(handle, tokens, shared=True, **options)
    kv.free(handle)
    return prefix


def until(holds, seconds=10):
    """Wait for what another process or thread brings about."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def test_a_hit_of_another_host_has_the_bits_of_a_miss(shared):
    """Rows of one host, seen by another whose tenant has none of them; both go on alike."""
    server, library = shared
    with host(server) as one, host(server) as two:
        mine, other = one.kv_cache(**SHAPE), two.kv_cache(**SHAPE, tenant=1)
        published(mine)
        tokens = [*TOKENS[:26], 5, 6, 7]
        handle, rows = other.sequence_like(tokens, shared=True)
        assert rows == 24  # whole pages
        assert (other.memory().pages, mine.memory().pages) == (0, 0)
        assert other.length(handle) == 24
        prefill(other, handle, tokens, rows)
        assert holds(other, handle, tokens)
        assert other.memory().pages == 2 * 2 * 2
        for layer in range(2):
            k = rows_of(tokens, layer)
            out = other.attend([handle], layer=layer, q=Q, scale=0.3)
            assert same_bits(out, expected(Q, [(k, -k)], scale=0.3))
        assert library.uses == 1
        other.free(handle)
        assert library.uses == 0
        no_leak(other)


OPTIONS = [
    {},
    {"window": 7},
    {"window": 7, "kept_rows": 3},
    {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    {"rows": (5, 27)},
    {"rows": [(0, 3), (25, 29), (1, 30)]},
    {"out_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("query_rows", [None, 1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_whatever_a_call_asks_for(shared, options, query_rows):
    """A batch of a shared prefix twice, at different lengths, and a sequence without one."""
    server, _ = shared
    with host(server) as one, host(server) as two:
        published(one.kv_cache(**SHAPE))
        kv = two.kv_cache(**SHAPE, tenant=1)
        plain = two.kv_cache(**SHAPE, tenant=2)
        pairs = []
        for tokens in ([*TOKENS, 1, 2, 3], [*TOKENS[:20], *range(50, 59)], list(range(100, 131))):
            handle, rows = kv.sequence_like(tokens, shared=True)
            prefill(kv, handle, tokens, rows)
            own = plain.sequence()
            prefill(plain, own, tokens)
            pairs.append((handle, own))
        assert [pair[0].shared and pair[0].shared.rows for pair in pairs] == [28, 20, None]
        q = values(3, *([] if query_rows is None else [query_rows]), 4, 8, seed=7)
        assert same_answers(kv, plain, pairs, layer=1, q=q, scale=0.3, **options)
        parts = [
            cache.attend(list(handles), layer=1, q=q, scale=0.3, partial=True)
            for cache, handles in zip((kv, plain), zip(*pairs, strict=True), strict=True)
        ]
        assert parts[0].equal(parts[1])
        pending = kv.attend_async([pairs[0][0]], layer=0, q=q[:1], scale=0.3)
        assert same_bits(pending.result(), plain.attend([pairs[0][1]], layer=0, q=q[:1], scale=0.3))
        row = values(1, 1, 2, 8, seed=9)
        out = [
            cache.append_attend([handle], layer=0, k=row, v=row, q=q[:1], scale=0.3)
            for cache, handle in zip((kv, plain), pairs[0], strict=True)
        ]
        assert same_bits(*out)


def test_masks_and_trees(shared):
    """Masks of every kind, and drafts as trees with positions of their own, biased and windowed."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    server, _ = shared
    with host(server) as one, host(server) as two:
        published(one.kv_cache(**SHAPE))
        kv = two.kv_cache(**SHAPE, tenant=1)
        plain = two.kv_cache(**SHAPE, tenant=2)
        pairs = []
        for more in (4, 7):
            tokens = [*TOKENS, *range(60, 60 + more)]
            handle, rows = kv.sequence_like(tokens, shared=True)
            prefill(kv, handle, tokens, rows)
            pairs.append((handle, plain.sequence()))
            prefill(plain, pairs[-1][1], tokens)
        there = torch.arange(37) < torch.tensor([[34], [37]])
        q = values(2, 3, 4, 8, seed=seed)
        slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
        for shape in ((2, 37), (2, 3, 37)):
            mask = torch.rand(shape, generator=generator).lt(0.5) & (
                there if len(shape) == 2 else there[:, None]
            )
            for options in ({}, {"alibi_slopes": slopes}, {"window": 9}):
                assert same_answers(kv, plain, pairs, layer=0, q=q, visible=mask, **options)
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        at = torch.tensor([[31, 32, 32], [34, 35, 35]])
        for options in (
            {},
            {"query_positions": at},
            {"query_positions": at, "window": 9},
            {"query_positions": at, "window": 9, "kept_rows": 2},
            {"query_positions": at, "alibi_slopes": slopes},
            {"rows": (3, 33)},
        ):
            assert same_answers(kv, plain, pairs, layer=0, q=q, tree=tree, **options), options


@pytest.mark.parametrize("dtype", ["bf16", "int8", "q8_0", "mxfp4", "fp8", "nvfp4", "lut4"])
def test_formats(shared, dtype):
    """Also those whose heads have a scale or codebook: who shares rows has the same ones."""
    server, _ = shared
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    k, v = (values(19, 2, 32, seed=s, dtype=kind) for s in (1, 2))
    q = values(1, 4, 32, seed=3, dtype=kind)
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 32, "dtype": dtype, "page_rows": 4}
    with host(server) as one, host(server) as two:
        kv = one.kv_cache(**shape)
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k, v=v)
        kv.publish(handle, range(19), shared=True)
        tables = {
            f"{part}_{what}": table[None]
            for part in "kv"
            for what, table in (("scale", kv._heads.scale(part, 0)), ("lut", kv._heads.codebook(part, 0)))
            if table is not None
        }
        other = two.kv_cache(**shape, tenant=1, **tables)
        begun, rows = other.sequence_like(range(19), shared=True)
        assert rows == 16
        other.append(begun, layer=0, k=k[16:], v=v[16:])
        for options in ({}, {"out_dtype": torch.float16}, {"partial": True}):
            mine, theirs = (
                cache.attend([s], layer=0, q=q, **options) for cache, s in ((kv, handle), (other, begun))
            )
            assert mine.equal(theirs) if "partial" in options else same_bits(mine, theirs)
        if tables:
            alone = two.kv_cache(**shape, tenant=1)
            assert alone.find_prefix(range(19), shared=True) == (None, 0)


def test_latent_rows(shared):
    server, _ = shared
    k, q = values(30, 1, 24, seed=1), values(1, 4, 24, seed=3)
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 24, "value_dim": 16, "latent": True, "dtype": "fp16"}
    with host(server) as one, host(server) as two:
        kv, other = one.kv_cache(**shape), two.kv_cache(**shape, tenant=1)
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k)
        kv.publish(handle, range(30), shared=True)
        begun, rows = other.sequence_like(range(30), shared=True)
        other.append(begun, layer=0, k=k[rows:])
        assert rows == 16
        assert same_bits(*(c.attend([s], layer=0, q=q) for c, s in ((kv, handle), (other, begun))))


def test_nothing_is_shared_unless_both_ask(shared):
    """Publishing without `shared` and looking without it are the tenant's; so are salts and other rows."""
    server, library = shared
    with host(server) as one, host(server) as two:
        mine, other = one.kv_cache(**SHAPE), two.kv_cache(**SHAPE, tenant=1)
        handle = mine.sequence()
        prefill(mine, handle, TOKENS)
        mine.publish(handle, TOKENS)
        assert library.prefixes == []
        assert other.find_prefix(TOKENS, shared=True) == (None, 0)
        prefix = mine.publish(handle, TOKENS, shared=True, salt=b"group")
        assert mine.publish(handle, TOKENS, shared=True, salt=b"group") == prefix
        assert len(library.prefixes) == 1
        assert other.find_prefix(TOKENS) == (None, 0)
        assert other.find_prefix(TOKENS, shared=True) == (None, 0)
        assert other.find_prefix(TOKENS, shared=True, salt=b"group") == (prefix, 30)
        assert other.find_prefix([9, 9], shared=True, salt=b"group") == (None, 0)
        assert two.kv_cache(**SHAPE | {"page_rows": 8}, tenant=1).find_prefix(
            TOKENS, shared=True, salt=b"group"
        ) == (None, 0)
        with pytest.raises(TenantTakenError, match="the server itself uses tenant 3"):
            two.kv_cache(**SHAPE, tenant=LIBRARY)


def test_the_longer_one_counts(shared):
    """A tenant's own prefix, and a longer one that hosts share; most_rows narrows both."""
    server, _ = shared
    with host(server) as one, host(server) as two:
        published(one.kv_cache(**SHAPE))
        kv = two.kv_cache(**SHAPE, tenant=1)
        handle = kv.sequence()
        prefill(kv, handle, TOKENS[:10])
        kv.publish(handle, TOKENS[:10])
        for most, rows, common in ((None, 28, True), (20, 20, True), (11, 10, False), (9, 9, False)):
            found, had = kv.sequence_like(TOKENS, shared=True, most_rows=most)
            assert (had, found.shared is not None) == (rows, common)
            assert holds(kv, found, TOKENS[:rows])


def test_sequences_with_a_shared_beginning_live_like_others(shared):
    """Forks, beams, crops, windows and ends; a use for each sequence that begins with the prefix."""
    server, library = shared
    with host(server) as one, host(server) as two:
        published(one.kv_cache(**SHAPE))
        kv = two.kv_cache(**SHAPE, tenant=1)
        tokens = [*TOKENS, 1, 2, 3]
        handle, rows = kv.sequence_like(tokens, shared=True)
        prefill(kv, handle, tokens, rows)
        beams = kv.select([handle, kv.fork(handle), kv.fork(handle, 31)], [2, 2, 0])
        assert library.uses == 3
        assert [kv.length(beam) for beam in beams] == [31, 31, 33]
        prefill(kv, beams[0], [*TOKENS, 1, 8, 9], 31)
        assert holds(kv, beams[0], [*TOKENS, 1, 8, 9])
        assert holds(kv, beams[1], tokens[:31])
        assert holds(kv, beams[2], tokens)
        kv.crop(beams[2], 29)
        assert holds(kv, beams[2], tokens[:29])
        with pytest.raises(ArgumentError, match=r"the first 28 rows are a shared prefix's"):
            kv.crop(beams[2], 27)
        with pytest.raises(ArgumentError, match=r"the first 28 are a shared prefix's"):
            kv.release(beams[2], 5)
        again = kv.publish(beams[1], tokens[:31], shared=True)
        assert again.rows == 31
        q = values(1, 4, 8, seed=5)
        k = torch.cat([rows_of([*TOKENS, 1, 8, 9], 0), values(40, 2, 8, seed=6)])
        kv.append(beams[0], layer=0, k=k[33:], v=-k[33:])
        kv.slide(beams[0], 10, kept_rows=3, layer=0)
        out = kv.attend([beams[0]], layer=0, q=q, window=10, kept_rows=3, scale=0.3)
        assert same_bits(
            out, expected(q, [(torch.cat([k[:3], k[-10:]]), -torch.cat([k[:3], k[-10:]]))], scale=0.3)
        )
        with pytest.raises(ArgumentError, match="were released; a prefix has all its rows"):
            kv.publish(beams[0], tokens[:31], shared=True)
        kv.crop(beams[1], 0)
        prefill(kv, beams[1], [4, 5, 6])
        assert holds(kv, beams[1], [4, 5, 6])
        no_leak(kv)
        kv.close()
        assert library.uses == 0
        assert two.memory(1).pages == 0


def test_what_is_used_stays_and_the_rest_goes(tmp_path):
    """A library that may own 3 extents: the prefix of longest ago goes first, one that is in use does not."""
    server, library = served(tmp_path)
    try:
        nearkv.owner.Owner(server._port, server._port.config).set_quota(LIBRARY, 3 * EXTENT_BYTES)
        with host(server) as one, host(server) as two:
            mine, other = one.kv_cache(**SHAPE), two.kv_cache(**SHAPE, tenant=1)
            length = 2000
            prompts = [[n, *range(length)] for n in range(12)]
            first = published(mine, prompts[0])
            handle = other.fork_prefix(first)
            second = None
            for tokens in prompts[1:]:
                prefix = published(mine, tokens)
                second = second or prefix
            kept = [rows for p in prompts if (rows := other.find_prefix(p, shared=True)[1])]
            assert len(kept) < 12
            assert other.find_prefix(prompts[0], shared=True) == (first, length + 1)
            assert holds(other, handle, prompts[0][:length])
            with pytest.raises(StalePrefixError, match=r"shared prefix .* is no longer there"):
                other.fork_prefix(second)
            # with all of it in use there is no room, and nothing is left behind
            uses = [handle]
            for tokens in prompts:
                found, rows = other.find_prefix(tokens, shared=True)
                if rows:
                    uses.append(other.fork_prefix(found))
            with pytest.raises(OutOfMemoryError, match="tenant 3 may own 3 extents"):
                published(mine, [77, *range(length)])
            assert library._begun == {}
            for use in uses:
                other.free(use)
            assert library.uses == 0
            published(mine, [77, *range(length)])
            for cache in library.caches:
                no_leak(cache)
    finally:
        server.close()


def test_stale_handles_read_nothing(shared):
    """A prefix that went, and another one at its address: its old handle and its old uses are refused."""
    server, library = shared
    with host(server) as one, host(server) as two:
        mine, other = one.kv_cache(**SHAPE), two.kv_cache(**SHAPE, tenant=1)
        old = published(mine)
        handle = other.fork_prefix(old)
        (cache,) = library.caches
        cache.drop_prefix(cache.prefixes[0])  # as one that lost its content does
        new = published(mine, TOKENS[::-1])
        assert (new.address, new.rows) == (old.address, old.rows)
        assert new.generation != old.generation
        for call in (
            lambda: other.fork_prefix(old),
            lambda: other.attend([handle], layer=0, q=Q),
            lambda: other.read(handle, layer=0),
        ):
            with pytest.raises(StalePrefixError, match=rf"prefix {old.generation} is no longer there"):
                call()
        # a handle that another host uses is none of this one's
        one_more = mine.fork_prefix(new)
        with pytest.raises(StalePrefixError, match="does not use it"):
            other._shared.ask("read", {**new.fields, "layer": 0, "rows": 4})
        mine.free(one_more)
        other.free(handle)
        assert library.uses == 0
        no_leak(cache)


def test_devices_that_share_nothing(tmp_path, model):
    server = Server(ModelPort(configure("small", apertures=APERTURES)), tmp_path / "socket")
    threading.Thread(target=server.serve, daemon=True).start()
    with host(server) as device, device.kv_cache(**SHAPE) as kv:
        with pytest.raises(ArgumentError, match=r"this server shares no prefixes: .*--library"):
            kv.find_prefix(TOKENS, shared=True)
    server.close()
    with model.kv_cache(**SHAPE) as kv, pytest.raises(ArgumentError, match="shared=True needs a device"):
        kv.find_prefix(TOKENS, shared=True)


def test_a_server_that_ends(shared):
    server, _ = shared
    device = host(server)
    kv = device.kv_cache(**SHAPE)
    published(kv)
    handle, _ = kv.sequence_like(TOKENS, shared=True)
    server.close()
    with pytest.raises(LinkError):
        kv.attend([handle], layer=0, q=Q)


def test_requests_that_are_none(shared):
    server, library = shared
    with host(server) as device, device.kv_cache(**SHAPE) as kv:
        for request in ({}, {"library": "burn"}, {"library": "append"}, {"library": "hold", "address": "x"}):
            with pytest.raises(ValueError, match=r".*"):
                device._port.ask(request)
        with pytest.raises(ArgumentError, match="was not begun by this host"):
            kv._shared.ask("append", {"number": 5, "layer": 0, "areas": [False] * 4})
        prefix = published(kv)
        handle = kv.fork_prefix(prefix)
        use = {**prefix.fields, "layer": 0, "rows": None, "bf16": False, "tensors": [], "options": {}}
        q = Q.unsqueeze(1).view(torch.int16).numpy()
        for wrong in ({"seen": 31, "lengths": [40]}, {"seen": 8, "lengths": [4]}, {"layer": 2}):
            with pytest.raises(ArgumentError, match="must be"):
                kv._shared.ask("attend", {**use, "seen": 8, "lengths": [40], **wrong}, [q])
        assert holds(kv, handle, TOKENS[:28])
        assert library.uses == 1


# Processes


def use_for_ever(path, tenant, seed, said):
    """A host that publishes, finds, forks, attends and frees for ever; every result is what it has to be."""
    torch.set_num_threads(1)
    device = nearkv.open(f"unix:{path}")
    kv = device.kv_cache(**SHAPE, tenant=tenant)
    chance, handles = random.Random(seed), []
    while True:
        prompt = [chance.randrange(4), *range(20)]
        tokens = [*prompt, chance.randrange(9)]
        handle, rows = kv.sequence_like(tokens, shared=True)
        prefill(kv, handle, tokens, rows)
        k = rows_of(tokens, 0)
        out = kv.attend([handle], layer=0, q=Q, scale=0.3)
        said.send((rows, same_bits(out, expected(Q, [(k, -k)], scale=0.3))))
        if not rows:
            kv.publish(handle, prompt, shared=True)
        handles += [handle, kv.fork(handle)]
        while len(handles) > chance.randrange(1, 8):
            kv.free(handles.pop(chance.randrange(len(handles))))


def processes():
    hosts = multiprocessing.get_context("forkserver")
    hosts.set_forkserver_preload(["torch", "nearkv", "nearkv.device", "test_shared_prefixes"])
    return hosts


def start(hosts, server, tenant, seed):
    heard, said = hosts.Pipe(duplex=False)
    process = hosts.Process(target=use_for_ever, args=(str(server.path), tenant, seed, said))
    process.start()
    said.close()
    return process, heard


def test_a_process_publishes_and_another_one_hits(shared):
    """Two live processes: what one publishes the other one begins with; both compute what they have to."""
    server, library = shared
    hosts = processes()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    running = [start(hosts, server, tenant, seed + tenant) for tenant in range(2)]
    hits = [0, 0]
    try:
        for _ in range(25):
            for n, (_, heard) in enumerate(running):
                rows, right = heard.recv()
                assert right
                hits[n] += rows > 0
    finally:
        for process, _ in running:
            process.kill()
            process.join()
    assert min(hits) >= 20  # four prompts, of which a process publishes those that the other one has not yet
    until(lambda: library.uses == 0)
    assert len(library.prefixes) == 4


def test_hosts_that_are_killed_leave_nothing_and_take_nothing(shared):
    """SIGKILL at random moments of a process that uses prefixes: no use, no half-brought rows and no memory
    stay behind, and another host's sequences have their bits."""
    server, library = shared
    hosts = processes()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with host(server) as device:
        kv = device.kv_cache(**SHAPE, tenant=2)
        published(kv)
        handle, _ = kv.sequence_like(TOKENS, shared=True)
        connections = len(server._connections)
        for kill in range(int(os.environ.get("NEARKV_PROCESS_KILLS", "8"))):
            process, heard = start(hosts, server, kill % 2, seed + kill)
            assert heard.recv()[1]
            time.sleep(chance.random() * 0.05)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            until(lambda: len(server._connections) == connections)
            with server._lock:  # under which a host that is gone is forgotten
                assert library.uses == 1
                assert library._begun == {}
            for cache in library.caches:
                no_leak(cache)
                assert cache.sequences == []
            assert holds(kv, handle, TOKENS[:28])
            # the next host of the tenant finds none of the sequences that began with shared rows
            with host(server) as next_one:
                for found in retried(partial(next_one.attach, kill % 2)):
                    for sequence in found.sequences:
                        assert len(found.read(sequence, layer=0)[0]) == found.length(sequence)
                next_one.release(kill % 2)


def retried(call):
    """What a call returns once the tenant is no longer taken."""
    for _ in range(500):
        try:
            return call()
        except TenantTakenError:
            time.sleep(0.01)
    return call()
