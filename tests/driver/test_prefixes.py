"""Prefixes: what is found is what was published, token by token; stale handles read nothing."""

import nearkv
import pytest
import torch
from driver_cases import context, expected, same_bits, values
from nearkv import prefixes
from nearkv.device import Device
from nearkv.errors import ArgumentError, DeviceError, DtypeError, OutOfMemoryError, StalePrefixError
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.model import ModelPort

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "fp16", "page_rows": 4}


def rows_of(tokens, layer, salt=0):
    """K of each token, which all tokens before it have a part in, as a model's rows do."""
    seed, found = 17 * layer + salt, []
    for token in tokens:
        seed = (seed * 31 + int(token) + 1) % (1 << 31)
        found.append(values(2, 8, seed=seed))
    return torch.stack(found) if found else torch.zeros(0, 2, 8).half()


def prefill(kv, handle, tokens, begin=0, salt=0):
    for layer in range(kv.layers):
        k = rows_of(tokens, layer, salt)[begin:]
        kv.append(handle, layer=layer, k=k, v=-k)


def prompt(kv, tokens, **options):
    """A sequence with a prompt's rows, those of a prefix taken over, and how many these are."""
    handle, rows = kv.sequence_like(tokens, **options)
    prefill(kv, handle, tokens, rows)
    return handle, rows


def holds(kv, handle, tokens, salt=0):
    return all(
        same_bits(kv.read(handle, layer=layer)[0], rows_of(tokens, layer, salt)) for layer in range(kv.layers)
    )


def test_f11_a_hit_gives_the_bits_of_a_miss(device):
    """The same prompt twice, the second time from the prefix; and a third one that goes on elsewhere."""
    tokens, other = list(range(30)), [*range(22), 5, 6, 7]
    q = values(1, 4, 8, seed=9)
    with device.kv_cache(**SHAPE) as kv:
        first, rows = prompt(kv, tokens)
        assert rows == 0
        kv.publish(first, tokens)
        pages = kv._pages.used
        second, rows = prompt(kv, tokens)
        assert (rows, kv._pages.used) == (30, pages)
        third, rows = prompt(kv, other)
        assert rows == 22
        for handle, own in ((first, tokens), (second, tokens), (third, other)):
            assert holds(kv, handle, own)
            for layer in range(2):
                k = rows_of(own, layer)
                out = kv.attend([handle], layer=layer, q=q, scale=0.3)
                assert same_bits(out, expected(q, [(k, -k)], scale=0.3))
        use = kv.memory()
        assert (use.prefix_hits, use.prefix_misses, use.prefixes) == (2, 1, 1)


def test_f17_the_last_token_of_a_known_prompt_is_not_there_twice(device):
    """A model that has to see the last token itself asks for all rows but that one's."""
    tokens = list(range(12))
    with device.kv_cache(**SHAPE) as kv:
        first, _ = prompt(kv, tokens)
        kv.publish(first, tokens)
        again, rows = prompt(kv, tokens, most_rows=len(tokens) - 1)
        assert rows == 11
        assert [kv.length(again, layer) for layer in range(2)] == [12, 12]
        assert holds(kv, again, tokens)
        assert holds(kv, first, tokens)


def test_f9_tokens_are_compared_not_their_hashes(model, monkeypatch):
    """All keys alike: what is found has the tokens all the same, and the salt."""
    monkeypatch.setattr(
        prefixes, "_hash", lambda *parts: b"0123456789abcdef" if len(parts) == 2 else parts[-1]
    )
    with model.kv_cache(**SHAPE) as kv:
        published = {}
        for salt, tokens in ((b"", [1, 2, 3, 4]), (b"", [1, 2, 9, 9, 9]), (b"adapter", [1, 2, 3, 4, 5])):
            handle = kv.sequence()
            prefill(kv, handle, tokens, salt=len(salt))
            published[salt, tuple(tokens)] = kv.publish(handle, tokens, salt=salt)
        assert len(set(published.values())) == 3
        for wanted, salt, own, rows in (
            ([1, 2, 3, 4, 5], b"", [1, 2, 3, 4], 4),
            ([1, 2, 9, 9], b"", [1, 2, 9, 9, 9], 4),
            ([1, 2, 3, 4, 5], b"adapter", [1, 2, 3, 4, 5], 5),
            ([1], b"adapter", [1, 2, 3, 4, 5], 1),
        ):
            assert kv.find_prefix(wanted, salt=salt) == (published[salt, tuple(own)], rows)
        assert kv.find_prefix([2, 3], salt=b"") == (None, 0)
        assert kv.find_prefix([1, 2], salt=b"other") == (None, 0)
        other, rows = kv.sequence_like([1, 2, 3, 7], salt=b"adapter")
        assert holds(kv, other, [1, 2, 3], salt=7)
        assert rows == 3


def test_salts_caches_and_tenants_are_apart(model):
    tokens = list(range(9))
    with model.kv_cache(**SHAPE) as kv:
        handle, _ = prompt(kv, tokens)
        kv.publish(handle, tokens)
        for other in (model.kv_cache(**SHAPE), model.kv_cache(**SHAPE, tenant=1)):
            assert other.find_prefix(tokens) == (None, 0)
        assert kv.find_prefix(tokens, salt=b"lora") == (None, 0)
        assert kv.publish(handle, tokens) == kv.prefixes[0]
        assert len(kv.prefixes) == 1
        assert kv.publish(handle, tokens, salt=b"lora") != kv.prefixes[1]


def test_a_prefix_outlives_its_sequence_and_is_never_written(model):
    """Whoever has it appends, crops and goes; the prefix stays what it was."""
    tokens = list(range(10))
    with model.kv_cache(**SHAPE) as kv:
        first, _ = prompt(kv, tokens)
        prefix = kv.publish(first, tokens)
        more = context(3, 2, 8, 8, seed=5)
        kv.append(first, layer=0, k=more[0], v=more[1])
        kv.crop(first, 3)
        prefill(kv, first, [90, 91, 92, 93])
        kv.free(first)
        second = kv.fork_prefix(prefix)
        kv.append(second, layer=1, k=more[0], v=more[1])
        assert holds(kv, kv.fork_prefix(prefix), tokens)
        assert holds(kv, kv.fork_prefix(prefix, 7), tokens[:7])
        kv.drop_prefix(prefix)
        assert same_bits(kv.read(second, layer=0)[0], rows_of(tokens, 0))
        for handle in kv.sequences:
            kv.free(handle)
        assert kv._pages.used == 0


def test_a_stale_handle_reads_nothing(model):
    """Another prefix at the same place has another generation."""
    with model.kv_cache(**SHAPE) as kv:
        handles = [prompt(kv, tokens)[0] for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])]
        first = kv.publish(handles[0], [1, 2, 3, 4])
        kv.drop_prefix(first)
        second = kv.publish(handles[1], [5, 6, 7, 8])
        assert second.address == first.address
        assert second.generation > first.generation
        for use in (kv.fork_prefix, kv.drop_prefix):
            with pytest.raises(StalePrefixError, match="prefix 1 is no longer there"):
                use(first)
        assert holds(kv, kv.fork_prefix(second), [5, 6, 7, 8])


def test_generations_outlive_sessions():
    port = ModelPort(configure("small"))
    kv = Device(port).kv_cache(**SHAPE)
    handle, _ = prompt(kv, [1, 2, 3])
    gone, kept = kv.publish(handle, [1, 2, 3]), kv.publish(handle, [1, 2])
    kv.drop_prefix(gone)
    (found,) = Device(port).attach()
    assert found.prefixes == [kept]
    assert found.find_prefix([1, 2, 9]) == (kept, 2)
    with pytest.raises(StalePrefixError):
        found.fork_prefix(gone)
    assert holds(found, found.fork_prefix(kept), [1, 2])
    assert found.publish(found.sequences[0], [1, 2, 3]).generation == 3
    found.close()


def test_the_prefix_not_used_for_longest_goes_first():
    """A full device: prefixes go one by one, used ones last, and the one that is being forked never."""
    with nearkv.open("model", capacity_bytes=4 * EXTENT_BYTES) as device:
        kv = device.kv_cache(layers=1, kv_heads=1, head_dim=256, dtype="fp16", page_rows=32)
        k = values(32 * 8, 1, 256, seed=1)
        published = []
        for number in range(10):
            handle = kv.sequence()
            kv.append(handle, layer=0, k=k, v=k)
            published.append(kv.publish(handle, [number] * len(k)))
            kv.free(handle)
        kv.find_prefix([0] * 40)
        handle = kv.sequence()
        kv.append(handle, layer=0, k=torch.cat([k] * 4), v=torch.cat([k] * 4))
        assert kv.memory().prefixes_reclaimed == 2
        assert kv.prefixes == [published[n] for n in (*range(9, 2, -1), 0)]
        copy = kv.fork_prefix(published[0])
        with pytest.raises(OutOfMemoryError):
            kv.append(copy, layer=0, k=torch.cat([k] * 20), v=torch.cat([k] * 20))
        assert same_bits(kv.read(copy, layer=0)[0], k)


def test_prefixes_go_before_sequences_under_a_mark(model):
    with model.kv_cache(**SHAPE) as kv:
        page = 2 * kv._layout.page_bytes
        handle, _ = prompt(kv, [1, 2, 3, 4])
        handle.priority = 1
        kv.publish(handle, [1, 2, 3, 4])
        gone, _ = prompt(kv, [5, 6, 7, 8])
        kv.publish(gone, [5, 6, 7, 8])
        kv.free(gone)
        kv.keep_below(4 * page)
        prompt(kv, [9])
        assert (kv.memory().prefixes, kv.memory().evicted) == (0, 0)


def test_f5_a_prefix_whose_rows_are_lost_is_not_found(model):
    """A poisoned page: the call says so, and the next prompt is a miss; other prefixes stay."""
    tokens = list(range(10))
    with model.kv_cache(**SHAPE) as kv:
        first, _ = prompt(kv, tokens)
        other, _ = prompt(kv, [7, 7, 7, 7])
        kv.publish(first, tokens)
        stays = kv.publish(other, [7, 7, 7, 7])
        page = int(first._tables[1].page_addresses(1, 2)[0, 0])
        model._port.inject(page, [0, 1])
        q = values(2, 4, 8, seed=9)
        for call in (kv.attend, lambda *a, **o: kv.attend_async(*a, **o).result()):
            with pytest.raises(DeviceError, match="sequence 1 of the batch, KV head 0") as raised:
                call([other, first], layer=1, q=q)
            assert (raised.value.sequence, raised.value.page) == (1, 1)
        assert kv.prefixes == [stays]
        assert kv.find_prefix(tokens) == (None, 0)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ArgumentError, "0 tokens: must be 1 to 6", lambda kv, s: kv.publish(s, [])),
        (ArgumentError, "7 tokens: must be 1 to 6", lambda kv, s: kv.publish(s, range(7))),
        (ArgumentError, "tokens must be 0 to", lambda kv, s: kv.publish(s, [-1])),
        (DtypeError, "must be a list of integers", lambda kv, s: kv.publish(s, [0.5])),
        (DtypeError, "must be a list of integers", lambda kv, s: kv.find_prefix([[1]])),
        (DtypeError, "salt must be bytes, not str", lambda kv, s: kv.publish(s, [1], salt="a")),
        (DtypeError, "a prefix is what kv.publish", lambda kv, s: kv.fork_prefix(s)),
        (ArgumentError, "most_rows=-1", lambda kv, s: kv.sequence_like([1], most_rows=-1)),
    ],
)
def test_what_is_no_prefix(model, error, message, call):
    with model.kv_cache(**SHAPE) as kv:
        handle, _ = prompt(kv, [0, 1, 2, 3, 4, 5])
        with pytest.raises(error, match=message):
            call(kv, handle)
        kv.release(handle, 4, layer=1)
        with pytest.raises(ArgumentError, match="rows 0 to 4 of layer 1 were released; a prefix has all"):
            kv.publish(handle, [0, 1])


def test_tokens_may_be_a_tensor(model):
    with model.kv_cache(**SHAPE) as kv:
        handle, _ = prompt(kv, [3, 1, 2])
        published = kv.publish(handle, torch.tensor([3, 1, 2]))
        assert kv.find_prefix([3, 1, 2, 2]) == (published, 3)
