"""An engine's blocks on the device: slots, block tables, sharing, and blocks that are used again."""

import random

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import expected, same_bits, values
from nearkv.blocks import BlockCache
from nearkv.errors import ArgumentError, ClosedError, DtypeError, OutOfMemoryError, ShapeError

LAYERS, KV_HEADS, GROUP, DIM = 2, 3, 2, 32


def cache_on(device, **changes):
    shape = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": DIM, "blocks": 24, "block_rows": 16}
    return BlockCache(device, **(shape | {"dtype": "fp16"} | changes))


class Engine:
    """Hands out blocks as an engine with a prefix cache does, and keeps its own copy of every row."""

    def __init__(self, cache, rng, seed):
        self.cache, self.rng, self.seed = cache, rng, seed
        self.free = list(range(cache.blocks))
        self.users = dict.fromkeys(self.free, 0)
        self.k = torch.full((LAYERS, cache.blocks * cache.block_rows, KV_HEADS, DIM), 7.0).half()
        self.v = self.k.clone()
        self.running = []  # [blocks, length]

    def start(self):
        """A new sequence: of its own, or after the whole blocks of one that there is."""
        blocks = []
        if self.running and self.rng.random() < 0.6:
            of, length = self.rng.choice(self.running)
            blocks = of[: self.rng.randint(0, length // self.cache.block_rows)]
        for block in blocks:
            self.users[block] += 1
        self.running.append([list(blocks), len(blocks) * self.cache.block_rows])

    def stop(self, index):
        for block in self.running.pop(index)[0]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def grow(self, sequence, rows):
        """The slots of so many rows more; fewer when there are no blocks left."""
        blocks, length = sequence
        size = self.cache.block_rows
        while len(blocks) * size < length + rows and self.free:
            blocks.append(self.free.pop(0))
            self.users[blocks[-1]] += 1
        sequence[1] = min(length + rows, len(blocks) * size)
        return [blocks[i // size] * size + i % size for i in range(length, sequence[1])]

    def write(self, slots):
        for layer in range(LAYERS):
            self.seed += 2
            k, v = (values(len(slots), KV_HEADS, DIM, seed=self.seed + part) for part in (0, 1))
            kept = [i for i, slot in enumerate(slots) if slot >= 0]
            self.k[layer, [slots[i] for i in kept]] = k[kept]
            self.v[layer, [slots[i] for i in kept]] = v[kept]
            self.cache.write(slots, layer=layer, k=k, v=v)

    def rows(self, layer, sequence):
        blocks, length = sequence
        size = self.cache.block_rows
        slots = [blocks[i // size] * size + i % size for i in range(length)]
        return self.k[layer, slots], self.v[layer, slots]


@pytest.mark.parametrize("block_rows", [16, 48])
def test_random_engine_gets_the_references_bits(device, block_rows):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with cache_on(device, block_rows=block_rows, blocks=10 if block_rows == 48 else 24) as cache:
        engine = Engine(cache, rng, seed)
        for _ in range(12):
            while len(engine.running) < 4 and engine.free:
                engine.start()
            slots = []
            for sequence in engine.running:
                slots += engine.grow(sequence, rng.choice([1, 1, 1, 5, 20]))
            slots += [-1] * rng.randint(0, 2)  # padding of the engine's batch
            engine.write(slots)
            for layer in range(LAYERS):
                check(engine, layer, query_rows=1, seed=seed, window=rng.choice([None, None, 9]))
            if rng.random() < 0.5 or not engine.free:
                engine.stop(rng.randrange(len(engine.running)))
        blocks, length = engine.running[0]
        held = cache.read(blocks, length, layer=1)
        assert all(map(torch.equal, held, engine.rows(1, engine.running[0])))


def check(engine, layer, *, query_rows, seed, **options):
    """One call for all sequences that have rows, in an order of its own."""
    batch = [s for s in engine.running if s[1] >= query_rows]
    engine.rng.shuffle(batch)
    q = values(len(batch), query_rows, KV_HEADS * GROUP, DIM, seed=seed + layer)
    longest = max(len(blocks) for blocks, _ in batch)
    tables = [blocks + [-1] * (longest - len(blocks)) for blocks, _ in batch]
    out = engine.cache.attend(tables, [length for _, length in batch], layer=layer, q=q, **options)
    contexts = [engine.rows(layer, sequence) for sequence in batch]
    options["causal"] = True
    assert same_bits(out, expected(q, contexts, scale=DIM**-0.5, **options))


def test_pieces_of_prompts_see_the_rows_before_them(device):
    with cache_on(device) as cache:
        engine = Engine(cache, random.Random(1), 1)
        for _ in range(2):
            engine.start()
        engine.running = [[[], 0], [[], 0]]
        for piece in (11, 20):
            for sequence in engine.running:
                engine.write(engine.grow(sequence, piece))
            check(engine, 0, query_rows=piece, seed=piece)


def test_a_shared_block_is_on_the_device_once(model):
    with cache_on(model) as cache:
        engine = Engine(cache, random.Random(2), 2)
        engine.running = [[[], 0]]
        engine.write(engine.grow(engine.running[0], 32))
        before = model.memory().pages
        engine.running += [[engine.running[0][0][:2], 32] for _ in range(7)]
        for sequence in engine.running:
            sequence[0] = list(sequence[0])
            engine.write(engine.grow(sequence, 1))
        check(engine, 1, query_rows=1, seed=2)
        assert cache.held_blocks == LAYERS * (2 + 8)
        assert model.memory().pages - before == LAYERS * 8 * KV_HEADS


def test_a_block_that_is_used_again_takes_no_more_memory_and_shows_nothing_of_before(model):
    with cache_on(model, blocks=2) as cache:
        engine = Engine(cache, random.Random(3), 3)
        for length in (32, 5, 17):
            engine.running = [[[], 0]]
            engine.free, engine.users = [1, 0], {0: 0, 1: 0}
            engine.write(engine.grow(engine.running[0], length))
            check(engine, 0, query_rows=1, seed=length)
        assert cache.held_blocks == LAYERS * 2


def test_only_what_is_new_in_a_table_is_written(model):
    """A decode step writes rows, queries and one header for each sequence; another place, whole tables."""
    with cache_on(model) as cache:
        engine = Engine(cache, random.Random(4), 4)
        engine.running = [[[], 0], [[], 0]]
        for sequence in engine.running:
            engine.write(engine.grow(sequence, 20))
        q = values(2, KV_HEADS * GROUP, DIM, seed=4)

        def step(places):
            tables, lengths = zip(*engine.running, strict=True)
            written = model.stats().link_bytes
            out = cache.attend(list(tables), list(lengths), layer=0, q=q, places=places)
            return out, model.stats().link_bytes - written

        first, of_first = step([5, 9])
        again, of_again = step([5, 9])
        swapped, of_swapped = step([9, 5])
        assert same_bits(first, again)
        assert same_bits(first, swapped)
        assert of_again < of_swapped <= of_first


def test_memory_comes_back_when_the_cache_is_closed(model):
    def held():
        memory = model.memory()
        return memory.page_bytes, memory.owned_bytes - memory.free_bytes

    with cache_on(model) as cache:  # areas of calls stay with the device
        run_once(cache)
    before = held()
    with cache_on(model) as cache:
        run_once(cache)
    assert held() == before
    assert cache.closed
    with pytest.raises(ClosedError):
        run_once(cache)


def run_once(cache):
    rows = values(3, KV_HEADS, DIM, seed=5)
    for layer in range(LAYERS):
        cache.write([0, 1, 2], layer=layer, k=rows, v=rows)
        cache.attend([[0]], [3], layer=layer, q=values(1, KV_HEADS * GROUP, DIM, seed=6))


def test_a_device_that_is_full_says_what_to_do():
    with nearkv.open("model", capacity_bytes=4 << 20) as device:
        with cache_on(device, blocks=4096) as cache:
            rows = values(1, KV_HEADS, DIM, seed=7)

            def fill():
                for block in range(4096):
                    cache.write([block * 16], layer=0, k=rows, v=rows)

            with pytest.raises(OutOfMemoryError, match="give the engine fewer blocks"):
                fill()


def test_a_refused_call_changes_nothing(model):
    with cache_on(model) as cache:
        run_once(cache)
        q = values(1, KV_HEADS * GROUP, DIM, seed=6)
        good = cache.attend([[0]], [3], layer=0, q=q)
        for wrong in ({"q": q.bfloat16()}, {"q": q, "window": 0}, {"q": q, "no_option": 1}):
            with pytest.raises((ArgumentError, DtypeError)):
                cache.attend([[0]], [2], layer=0, **wrong)
        assert same_bits(cache.attend([[0]], [3], layer=0, q=q), good)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, r, q: c.write([0, 384], layer=0, k=r, v=r), ArgumentError, "slot 384.*slots 0 to 383"),
        (lambda c, r, q: c.write([3, 3], layer=0, k=r, v=r), ArgumentError, "stands twice"),
        (lambda c, r, q: c.write([3], layer=0, k=r, v=r), ShapeError, r"k has shape \[2, 3, 32\]"),
        (lambda c, r, q: c.write([0, 1], layer=2, k=r, v=r), ArgumentError, "layer=2"),
        (lambda c, r, q: c.write([0, 1], layer=0, k=r.float(), v=r.float()), DtypeError, "the cache holds"),
        (lambda c, r, q: c.attend([[0]], [17], layer=0, q=q), ArgumentError, "17 rows need 2 blocks of 16"),
        (lambda c, r, q: c.attend([[24]], [1], layer=0, q=q), ArgumentError, "blocks 0 to 23"),
        (lambda c, r, q: c.attend([[4]], [1], layer=0, q=q), ArgumentError, r"written to blocks \[4\]"),
        (lambda c, r, q: c.attend([[0]], [1, 1], layer=0, q=q), ShapeError, "1 block tables, but 2 lengths"),
        (lambda c, r, q: c.attend([[0]], [-1], layer=0, q=q), ArgumentError, "must be from 0 to"),
        (lambda c, r, q: c.attend([[0.5]], [1], layer=0, q=q), ShapeError, "must be integers"),
        (lambda c, r, q: c.attend([[0]], [1], layer=0, q=q, places=[1, 2]), ArgumentError, "1 different"),
    ],
)
def test_arguments_are_checked_before_the_device_is_asked(model, call, error, message):
    with cache_on(model) as cache:
        run_once(cache)
        with pytest.raises(error, match=message):
            call(cache, values(2, KV_HEADS, DIM, seed=8), values(1, KV_HEADS * GROUP, DIM, seed=9))


def test_rows_that_share_lines_are_refused(model):
    with pytest.raises(ArgumentError, match="share lines with others"):
        cache_on(model, head_dim=16)
    with pytest.raises(ArgumentError, match="share lines with others"):
        cache_on(model, dtype="int8")


def test_a_table_outgrows_its_memory(model):
    with cache_on(model) as cache:
        engine = Engine(cache, random.Random(10), 10)
        engine.running = [[[], 0]]
        for _ in range(20):
            engine.write(engine.grow(engine.running[0], 16))
            check(engine, 0, query_rows=1, seed=10)
        assert np.count_nonzero(cache._pages[0, :, 0]) == 20
