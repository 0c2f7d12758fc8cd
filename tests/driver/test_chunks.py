"""Chunks of bytes in device memory: what was stored comes back, whatever came and went in between."""

import random

import nearkv
import numpy as np
import pytest
from nearkv.chunks import ChunkMemory
from nearkv.errors import AccessError, ArgumentError, ClosedError, OutOfMemoryError, ShapeError
from nearkv_hw.abi.mailbox import Opcode


def content(rng, size):
    return np.frombuffer(rng.randbytes(size), np.uint8).copy()


@pytest.mark.parametrize("size", [1, 64, 100, (1 << 20) + 3])
def test_random_stores_loads_and_drops(model, size):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, kept = random.Random(seed), {}
    with ChunkMemory(model, chunk_bytes=size, capacity_bytes=8 * -(-size // 64) * 64) as chunks:
        for step in range(40):
            if kept and (len(kept) == 8 or rng.random() < 0.4):
                gone = rng.choice(list(kept))
                del kept[gone]
                chunks.drop(gone)
            else:
                kept[step] = content(rng, size)
                chunks.store(step, kept[step])
            assert len(chunks) == len(kept)
            key = rng.choice(list(kept)) if kept else None
            if key is not None:
                found = np.zeros(size, np.uint8)
                chunks.load(key, found)
                assert (found == kept[key]).all()


def test_memory_comes_back(model):
    before = model.memory()
    with ChunkMemory(model, chunk_bytes=5000) as chunks:
        chunks.store("a", np.zeros(5000, np.uint8))
        assert model.memory().other_bytes > before.other_bytes
    assert model.memory().other_bytes == before.other_bytes
    with pytest.raises(ClosedError, match="is closed"):
        chunks.store("b", np.zeros(5000, np.uint8))


def test_the_device_may_be_full_before_the_capacity_is():
    with nearkv.open("model", capacity_bytes=4 << 20) as device:
        chunks = ChunkMemory(device, chunk_bytes=1 << 20)

        def fill():
            for key in range(4):
                chunks.store(key, np.zeros(1 << 20, np.uint8))

        with pytest.raises(OutOfMemoryError):
            fill()
        assert 0 < len(chunks) < 4


def test_poison_loses_the_chunk_that_it_is_in(model):
    chunks = ChunkMemory(model, chunk_bytes=200)
    rng = random.Random(4)
    data = {key: content(rng, 200) for key in "ab"}
    for key, own in data.items():
        chunks.store(key, own)
    model.cxl().send(Opcode.INJECT_POISON, (chunks._at["a"] + 64).to_bytes(8, "little"))
    found = np.zeros(200, np.uint8)
    with pytest.raises(AccessError, match="is poisoned"):
        chunks.load("a", found)
    assert not found.any()
    chunks.load("b", found)
    assert (found == data["b"]).all()


def test_errors_say_what_is_allowed(model):
    chunks = ChunkMemory(model, chunk_bytes=64, capacity_bytes=64)
    chunks.store("a", np.zeros(64, np.uint8))
    for call, error, message in (
        (lambda: chunks.store("a", np.zeros(64, np.uint8)), ArgumentError, "there already"),
        (lambda: chunks.store("b", np.zeros(64, np.uint8)), OutOfMemoryError, "room for 1 chunks"),
        (lambda: chunks.store("b", np.zeros(63, np.uint8)), ShapeError, r"uint8 \[64\], not uint8 \[63\]"),
        (lambda: chunks.load("b", np.zeros(64, np.uint8)), ArgumentError, "no chunk 'b'"),
        (lambda: chunks.drop("b"), ArgumentError, "no chunk 'b'"),
        (lambda: ChunkMemory(model, chunk_bytes=65, capacity_bytes=64), ArgumentError, "from 128"),
    ):
        with pytest.raises(error, match=message):
            call()
