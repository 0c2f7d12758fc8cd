"""HDM decoders in software: published translations, what interleaving means, and every commit rule."""

import numpy as np
import pytest
from hdm_vectors import MODULO, XOR
from hypothesis import given
from hypothesis import strategies as st
from nearkv_hw.abi import hdm
from nearkv_hw.abi.hdm import CONTROL, DECODER, DECODER_STRIDE, FIRST_DECODER, GLOBAL_CONTROL, WAYS
from nearkv_sim.cxl_io.hdm import NOWHERE, HdmDecoders, device_offset, host_distance

UNIT = 256 << 20


def test_published_translations():
    for offset, code, distances in MODULO:
        assert len(distances) == WAYS[code]
        for position, distance in enumerate(distances):
            assert device_offset(distance, WAYS[code], 256) == (position, offset)
            assert host_distance(offset, position, WAYS[code], 256) == distance
    for code, pairs in XOR.items():
        for offset, distance in pairs:
            assert device_offset(distance, WAYS[code], 256)[1] == offset


@pytest.mark.parametrize("ways", WAYS.values())
@pytest.mark.parametrize("granularity", [256 << n for n in range(hdm.MAX_GRANULARITY + 1)])
def test_chunks_go_round_the_set(ways, granularity):
    """Counted chunk by chunk: each device gets every ways-th one, and packs what it gets."""
    have = [0] * ways
    for chunk in range(5 * ways):
        position = chunk % ways
        assert device_offset(chunk * granularity + 77, ways, granularity) == (position, have[position] + 77)
        have[position] += granularity


@given(st.integers(0, (1 << 50) - 1), st.sampled_from(list(WAYS.values())), st.integers(0, 6))
def test_there_and_back(distance, ways, code):
    position, offset = device_offset(distance, ways, 256 << code)
    assert host_distance(offset, position, ways, 256 << code) == distance


def program(decoders, n, *, base, size, skip=0, **control):
    """Program a decoder and commit it; its control register afterwards."""
    at = FIRST_DECODER + n * DECODER_STRIDE
    for name, value in (("base", base), ("size", size), ("skip", skip)):
        decoders.write(at + DECODER[f"{name}_low"].at, value & 0xFFFFFFFF)
        decoders.write(at + DECODER[f"{name}_high"].at, value >> 32)
    decoders.write(at + CONTROL.at, CONTROL.pack(commit=1, **control))
    return state(decoders, n)


def state(decoders, n):
    return CONTROL.unpack(decoders.read(FIRST_DECODER + n * DECODER_STRIDE + CONTROL.at))


@pytest.fixture
def decoders():
    made = HdmDecoders(4, 64 * UNIT)
    made.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    return made


def test_decoders_lie_one_behind_the_other(decoders):
    assert program(decoders, 0, base=4 * UNIT, size=12 * UNIT, ways=10, granularity=1)["committed"]
    assert program(decoders, 1, base=20 * UNIT, size=2 * UNIT, skip=3 * UNIT)["committed"]
    assert decoders.translate(4 * UNIT - 1) is None
    assert decoders.translate(4 * UNIT + 12 * 512 + 5) == 512 + 5
    assert decoders.translate(16 * UNIT) is None
    assert decoders.translate(20 * UNIT + 7) == 4 * UNIT + 7, "a unit of decoder 0, three skipped"
    assert decoders.translate(22 * UNIT - 1) == 6 * UNIT - 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"size": 0}, "an empty range"),
        ({"base": UNIT}, "it begins before decoder 0 ends"),
        ({"ways": 5, "size": 32 * UNIT}, "no such interleaving"),
        ({"ways": 11, "size": 32 * UNIT}, "no such interleaving"),
        ({"granularity": 7}, "no such granularity"),
        ({"ways": 8, "size": 4 * UNIT}, "a third of it is not whole units"),
        ({"ways": 2, "size": 6 * UNIT}, "a quarter of it is not whole units"),
        ({"size": 63 * UNIT}, "more memory than there is"),
        ({"skip": 62 * UNIT}, "more memory than there is"),
        ({"base": (1 << 52) - UNIT, "size": 2 * UNIT}, "beyond the address space"),
    ],
)
def test_what_is_not_in_order_is_refused(decoders, wrong, why):
    program(decoders, 0, base=0, size=2 * UNIT)
    told = program(decoders, 1, **{"base": 2 * UNIT, "size": UNIT} | wrong)
    assert (told["committed"], told["error"]) == (0, 1), why
    decoders.write(FIRST_DECODER + DECODER_STRIDE + CONTROL.at, 0)
    assert state(decoders, 1)["error"] == 0
    assert program(decoders, 1, base=2 * UNIT, size=UNIT)["committed"], "what is put right is taken"


def test_commits_go_up(decoders):
    assert program(decoders, 1, base=0, size=UNIT)["error"], "decoder 0 is not committed"
    decoders.write(FIRST_DECODER + DECODER_STRIDE + CONTROL.at, 0)
    assert program(decoders, 0, base=0, size=UNIT)["committed"]
    assert program(decoders, 1, base=UNIT, size=UNIT)["committed"]
    decoders.write(FIRST_DECODER + CONTROL.at, 0)
    assert decoders.translate(0) is None
    assert decoders.translate(UNIT) == UNIT, "decoder 1 keeps its part"
    assert program(decoders, 0, base=0, size=UNIT)["error"], "decoder 1 is committed"


def test_a_locked_decoder_stays(decoders):
    assert program(decoders, 0, base=UNIT, size=UNIT, lock_on_commit=1)["committed"]
    decoders.write(FIRST_DECODER + CONTROL.at, 0)
    decoders.write(FIRST_DECODER, 0)
    assert state(decoders, 0)["committed"]
    assert decoders.read(FIRST_DECODER) == UNIT
    assert decoders.translate(UNIT + 3) == 3
    decoders.reset()
    assert decoders.read(FIRST_DECODER) == 0


def test_a_committed_decoder_is_programmed_for_its_next_commit(decoders):
    program(decoders, 0, base=0, size=UNIT)
    decoders.write(FIRST_DECODER + DECODER["base_low"].at, 2 * UNIT)
    assert decoders.translate(0) == 0
    decoders.write(FIRST_DECODER + CONTROL.at, 0)
    decoders.write(FIRST_DECODER + CONTROL.at, CONTROL.pack(commit=1))
    assert decoders.translate(0) is None
    assert decoders.translate(2 * UNIT) == 0


def test_before_they_are_enabled_the_dvsec_decodes():
    decoders = HdmDecoders(1, 4 * UNIT)
    decoders.dvsec = [(UNIT, 2 * UNIT), (8 * UNIT, 2 * UNIT)]
    assert [decoders.translate(n * UNIT) for n in range(11)] == [
        None, 0, UNIT, None, None, None, None, None, 2 * UNIT, 3 * UNIT, None,
    ]  # fmt: skip
    decoders.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=1))
    assert decoders.translate(UNIT) is None


@pytest.mark.parametrize("enabled", [0, 1])
def test_many_addresses_are_translated_as_one_is(decoders, enabled):
    """Of decoders and of the DVSEC's ranges; and every address of the device is found again."""
    rng = np.random.default_rng(5)
    decoders.write(GLOBAL_CONTROL.at, GLOBAL_CONTROL.pack(enable=enabled))
    decoders.dvsec = [(UNIT, 2 * UNIT), (8 * UNIT, 2 * UNIT)]
    assert program(decoders, 0, base=4 * UNIT, size=12 * UNIT, ways=10, granularity=1)["committed"]
    assert program(decoders, 1, base=20 * UNIT, size=2 * UNIT, skip=3 * UNIT)["committed"]
    assert program(decoders, 2, base=30 * UNIT, size=4 * UNIT, ways=1, granularity=6)["committed"]
    addresses = rng.integers(0, 36 * UNIT // 64, 3000).astype(np.uint64) * 64
    found = decoders.translate_all(addresses)
    expected = [decoders.translate(int(address)) for address in addresses]
    assert found.tolist() == [NOWHERE if place is None else place for place in expected]
    inside = [place for place in expected if place is not None]
    assert len(inside) > 200
    for place in inside:
        assert decoders.translate(decoders.host_address(place)) == place
    assert decoders.host_address(63 * UNIT) is None


def test_the_capability_says_how_many():
    for count, code in hdm.COUNT_CODES.items():
        told = hdm.CAPABILITY.unpack(HdmDecoders(count, UNIT).read(0))
        assert (told["decoder_count"], told["ways_3_6_12"], told["ways_16"]) == (code, 1, 1)
    with pytest.raises(ValueError, match="decoders must be one of 1, 2, 4, 6"):
        hdm.capability_of(3)
    with pytest.raises(ValueError, match="capacity_bytes must be a multiple"):
        HdmDecoders(1, 100)
