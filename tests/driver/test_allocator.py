"""The allocator: nothing overlaps, nothing leaks, pages rotate over channels and never cross an extent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearkv.allocator import Arena, Extents, Pages
from nearkv.errors import OutOfMemoryError
from nearkv_hw.abi.config import EXTENT_BYTES


class Memory:
    """A device's extents, some of them another tenant's."""

    def __init__(self, extents: int, taken: frozenset[int] = frozenset()) -> None:
        self.taken = taken
        self.extents = extents
        self.claimed: set[int] = set()
        self.free = False

    def claim(self, runs):
        return [self.claim_run(range(first, first + count)) for first, count in runs]

    def claim_run(self, wanted: range) -> bool:
        assert wanted.stop <= self.extents
        if self.taken.intersection(wanted):
            return False
        self.claimed.update(wanted)
        return True

    def tenant(self, channels: int = 2) -> Extents:
        return Extents(
            self.claim, extents=self.extents, channels=channels, any_free=lambda wait: self.free and not wait
        )


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * EXTENT_BYTES // 2)), max_size=40), st.data())
@settings(deadline=None, print_blob=True)
def test_runs_of_an_arena_never_overlap(steps, data):
    memory = Memory(64, taken=frozenset({3, 10, 11}))
    arena = Arena(memory.tenant())
    runs: dict[int, int] = {}
    for take, size in steps:
        if take or not runs:
            address = arena.take(size)
            assert address % 64 == 0
            assert set(range(address >> 20, (address + size - 1 >> 20) + 1)) <= memory.claimed
            for other, length in runs.items():
                assert address + size <= other or other + length <= address
            runs[address] = size
        else:
            address = data.draw(st.sampled_from(sorted(runs)))
            arena.give(address, runs.pop(address))
    claimed = len(memory.claimed)
    for address, size in runs.items():
        arena.give(address, size)
    if claimed:
        arena.take(EXTENT_BYTES)
    assert len(memory.claimed) == claimed, "what was given back is one run again"


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([128, 4096, 96 << 10, 1 << 20]),
    st.lists(st.integers(-20, 60), max_size=25),
)
@settings(deadline=None, print_blob=True)
def test_pages_rotate_and_never_overlap(channels, page_bytes, steps):
    memory = Memory(4096, taken=frozenset(range(5, 9)))
    load = [0] * channels
    pages = Pages(memory.tenant(channels), page_bytes, load)
    used: list[int] = []
    for count in steps:
        if count > 0:
            least = min(load)
            first = load.index(least)
            taken = pages.take(count)
            place = [page // EXTENT_BYTES % channels for page in taken.tolist()]
            assert place == [(first + i) % channels for i in range(count)]
            used += taken.tolist()
        else:
            pages.give(np.array(used[:-count], np.uint64))
            del used[:-count]
        assert len(set(used)) == len(used)
        for page in used:
            assert page // EXTENT_BYTES in memory.claimed
            assert page % EXTENT_BYTES % page_bytes == 0
            assert page % EXTENT_BYTES + page_bytes <= EXTENT_BYTES
        assert sum(load) == len(used) * page_bytes


def test_a_full_channel_is_passed_over_and_a_full_device_takes_nothing():
    memory = Memory(4, taken=frozenset({1}))
    load = [0, 0]
    pages = Pages(memory.tenant(), EXTENT_BYTES, load)
    assert (pages.take(3) >> np.uint64(20)).tolist() == [0, 3, 2]
    before = list(load)
    with pytest.raises(OutOfMemoryError, match="no room for 1 pages of 1048576 bytes"):
        pages.take(1)
    assert load == before
    pages.give(np.array([2 << 20], np.uint64))
    with pytest.raises(OutOfMemoryError):
        pages.take(2)
    assert pages.take(1).tolist() == [2 << 20], "the failed call gave back what it had taken"


def test_an_empty_extent_serves_another_page_size():
    memory = Memory(2)
    extents = memory.tenant(channels=1)
    load = [0]
    small, large = Pages(extents, 4096, load), Pages(extents, EXTENT_BYTES, load)
    taken = small.take(300)
    with pytest.raises(OutOfMemoryError):
        large.take(1)
    small.give(taken)
    assert len(large.take(2)) == 2


def test_an_arena_without_room_says_so():
    arena = Arena(Memory(4, taken=frozenset({2})).tenant())
    with pytest.raises(OutOfMemoryError, match="no 3 consecutive extents left"):
        arena.take(5 * EXTENT_BYTES // 2)
    assert arena.take(2 * EXTENT_BYTES) == 0


def test_an_empty_arena_leaves_its_extents_to_pages():
    extents = Memory(4).tenant(1)
    arena, pages = Arena(extents), Pages(extents, EXTENT_BYTES, [0])
    kept = arena.take(64)
    runs = [arena.take(EXTENT_BYTES - 64), arena.take(2 * EXTENT_BYTES), arena.take(EXTENT_BYTES)]
    with pytest.raises(OutOfMemoryError):
        pages.take(1)
    for run, size in zip(runs, (EXTENT_BYTES - 64, 2 * EXTENT_BYTES, EXTENT_BYTES), strict=True):
        arena.give(run, size)
    taken = pages.take(3)
    assert kept // EXTENT_BYTES not in (taken // EXTENT_BYTES).tolist()
    pages.give(taken)
    assert arena.take(3 * EXTENT_BYTES)


def test_memory_comes_and_goes():
    """What was refused is tried again once it is there; what is gone is not given out."""
    memory = Memory(6, taken=frozenset({2, 3, 5}))
    extents = memory.tenant(channels=1)
    assert [extents.take(0) for _ in range(3)] == [0, 1, 4]
    assert extents.take(0) is None
    memory.taken = frozenset({3, 5})
    assert extents.take(0) is None, "the device says that there is none"
    memory.free = True
    assert (extents.take(0), extents.take(0)) == (2, None)
    memory.taken = frozenset({0, 2, 5})
    extents.give(0)
    extents.give(4)
    extents.removed(range(3))
    assert [extents.take(0) for _ in range(3)] == [4, 3, None]
    memory.taken = frozenset({0, 2})
    assert (extents.take_run(2), extents.owned) == (None, 4)


def test_what_is_given_back_is_claimed_again_when_nothing_else_is_left():
    memory = Memory(8)
    extents = memory.tenant()
    memory.free = True
    assert extents.take_run(5) == 0
    for extent in (0, 1, 3):
        extents.give(extent)
    assert extents.free == 3
    assert extents.release() == [(0, 2), (3, 1)]
    assert (extents.free, extents.owned) == (0, 2)
    memory.claimed -= {0, 1, 3}
    assert [extents.take_run(1) for _ in range(3)] == [5, 6, 7], "what was never tried comes first"
    assert extents.take(1) == 1
    assert sorted([extents.take(0), extents.take(1)]) == [0, 3]
    assert extents.take_near(0) is None
    assert extents.owned == 8
    assert extents.release() == []
