"""DRAM parts: ceilings, rules in frames, closed forms, the address map, and that every value has a source."""

import random
import secrets
from itertools import pairwise

import pytest
from nearkv_hw.abi.dram import (
    MEANINGS,
    PARTS,
    Dram,
    Place,
    Refresh,
    address,
    ceiling,
    line_of,
    random_fraction,
    turnaround_share,
    unloaded_read_ns,
    unloaded_read_tck,
    write_fraction,
)

every_part = pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.dram.name)


@pytest.mark.parametrize(
    ("dram", "density_gbit", "share"),
    [
        (Dram.DDR5_6400, 16, 0.917),
        (Dram.DDR5_6400, 32, 0.888),
        (Dram.LPDDR5X_8533, 32, 0.893),
        (Dram.HBM3_6400, 8, 0.901),
    ],
)
def test_refresh_ceilings(dram, density_gbit, share):
    part = PARTS[dram]
    assert abs(ceiling(part, density_gbit, Refresh.ALL_BANK) - share) <= 0.0005 + 1e-9
    assert ceiling(part, density_gbit, Refresh.PER_BANK) == 1


@every_part
def test_every_value_has_unit_source_and_confidence(part):
    assert set(part.values) <= set(MEANINGS)
    for name in set(MEANINGS) - {"RCD_WR", "REF_REF"}:
        assert name in part.values
    dense = [(density.rfc, density.rfc_set, density.rows) for density in part.densities.values()]
    for value in (*part.values.values(), *sum(dense, ())):
        assert value.value > 0
        assert value.unit in ("nCK", "ns", "")
        assert value.sure in ("published", "derived", "assumed")
        assert len(value.source) > 3


@every_part
def test_a_line_per_device_cycle_is_the_peak(part):
    """Bursts of all sub-channels fill their data buses with a line per frame, and a line per cycle in all."""
    assert part.frame_tck == part.n("BL") * part.bursts_per_line
    frame_ns = part.frame_tck * part.tck_ns
    assert part.cycle_ns * part.subchannels == frame_ns
    bits_per_pin = part.n("BL") * part.transfers_per_tck * part.bursts_per_line
    assert 512 % bits_per_pin == 0  # the width in pins
    assert 512 // bits_per_pin == {Dram.LPDDR5X_8533: 16}.get(part.dram, 32)
    assert part.clock_mhz == {Dram.DDR5_4800: 600, Dram.LPDDR5X_8533: 1067}.get(part.dram, 800)


def test_times_become_cycles_of_the_command_clock():
    part = PARTS[Dram.DDR5_6400]
    assert part.tck_ps == 312.5
    assert (part.n("FAW"), part.n("RRD_L"), part.n("REFI")) == (64, 16, 12480)
    assert (part.rfc(16, Refresh.ALL_BANK), part.rfc(16, Refresh.PER_BANK)) == (944, 416)
    low = PARTS[Dram.LPDDR5X_8533]
    assert (low.n("RCD"), low.n("RP"), low.n("REFI")) == (20, 23, 4166)  # 19.2, 22.4, 4166.4


def test_ddr5_6400_in_frames():
    part = PARTS[Dram.DDR5_6400]
    frames = part.frames(16, Refresh.ALL_BANK)
    # From the frame of an activate, which acts in tCK 5 of it, to a column command, which acts in tCK 3.
    assert 8 * frames.activate_to_column - 2 == part.n("RCD")
    assert frames.column_same_group == 2
    assert frames.column_other_group == 1
    assert frames.four_activates == 8
    assert frames.refresh_interval == 12480 // 8
    assert frames.read_cycles == 15  # acts in tCK 3, CL 46, 8 on the bus: 57 tCK
    assert part.frames(16, Refresh.PER_BANK).refresh_interval == 1560 // 8


def test_late_activates_make_a_window_whole():
    """Five activates from one in its place to a late one, and four more to the next one in its place."""
    part = PARTS[Dram.LPDDR5X_8533]
    frames = part.frames(32, Refresh.ALL_BANK)
    assert part.frame_tck * (frames.late.four_activates + frames.four_activates) == 2 * part.n("FAW")
    assert [
        dram for dram, part in PARTS.items() if part.frames(part.default_density, Refresh.ALL_BANK).late
    ] == [Dram.LPDDR5X_8533]


@every_part
@pytest.mark.parametrize("refresh", Refresh, ids=lambda refresh: refresh.name)
def test_two_bank_groups_stream_a_line_per_frame(part, refresh):
    for density in part.densities:
        frames = part.frames(density, refresh)
        assert frames.column_other_group == 1
        assert frames.column_same_group == 2
        # A row of two bank groups is long enough to open the next ones in its shadow.
        around = frames.column_to_precharge_read + frames.precharge_to_activate + frames.activate_to_column
        assert around < 2 * part.row_lines
        assert frames.refresh < frames.refresh_interval


@every_part
def test_sets_of_banks_share_the_banks_out(part):
    sets = part.refresh_sets(Refresh.PER_BANK)
    assert part.refresh_sets(Refresh.ALL_BANK) == 1
    members = [[bank for bank in range(part.banks) if part.bank_set(bank) == s] for s in range(sets)]
    assert [len(banks) for banks in members] == [part.banks // sets] * sets
    if part.dram in (Dram.DDR5_6400, Dram.DDR5_4800):
        assert all({bank % part.bank_groups for bank in banks} == set(range(8)) for banks in members)


@every_part
def test_a_density_that_there_is_not(part):
    for ask in (part.rows_of, lambda gbit: part.frames(gbit, Refresh.ALL_BANK)):
        with pytest.raises(ValueError, match=rf"{part.dram.name} has no density of 7 Gbit; there are "):
            ask(7)


def test_closed_forms():
    part = PARTS[Dram.DDR5_6400]
    assert unloaded_read_tck(part) == 46 + 46 + 8
    assert unloaded_read_ns(part) == 31.25
    assert random_fraction(part) == 0.5  # four activates in 64 tCK, a line takes 8
    assert [write_fraction(part, groups) for groups in (1, 2, 4, 8)] == [0.25, 0.5, 1, 1]
    lost = 14 - 8 + 44 + 8 + 5 - 8
    assert turnaround_share(part, 20, 10) == lost / (lost + 30 * 8)
    hbm = PARTS[Dram.HBM3_6400]
    assert unloaded_read_tck(hbm) == 31 + 20 + 4 + 2
    assert [write_fraction(hbm, groups) for groups in (1, 2)] == [0.5, 1]


@every_part
def test_address_map_is_a_bijection(part):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    lines = part.channel_lines(part.default_density)
    starts = [0, lines - 4096, *(rng.randrange(lines - 4096) for _ in range(20))]
    seen = {}
    for line in {line for start in starts for line in range(start, start + 4096)}:
        place = address(part, line)
        assert 0 <= place.subchannel < part.subchannels
        assert 0 <= place.bank < part.banks
        assert 0 <= place.row < part.rows
        assert 0 <= place.column < part.row_lines
        assert line_of(part, place) == line, f"seed {seed}"
        assert seen.setdefault(place, line) == line, f"seed {seed}"
    for _ in range(2000):
        place = Place(
            rng.randrange(part.subchannels),
            rng.randrange(part.banks),
            rng.randrange(part.rows),
            rng.randrange(part.row_lines),
        )
        line = line_of(part, place)
        assert 0 <= line < lines
        assert address(part, line) == place, f"seed {seed}"


@every_part
def test_runs_of_lines_stream(part):
    """Sub-channels take turns, in each two bank groups do, and a run stays in its two rows to their ends."""
    run = 2 * part.row_lines * part.subchannels
    places = [address(part, 5 * run + i) for i in range(run)]
    assert [place.subchannel for place in places] == [i % part.subchannels for i in range(run)]
    first = [place for place in places if place.subchannel == 0]
    assert len({(place.bank, place.row) for place in first}) == 2
    groups = [place.bank % part.bank_groups for place in first]
    assert all(a != b for a, b in pairwise(groups))
    assert [place.column for place in first] == [i // 2 for i in range(2 * part.row_lines)]


@every_part
def test_strides_of_powers_of_two_spread_over_banks(part):
    """Lines as far apart as a row of all banks is long, and twice that, meet in different banks."""
    row = 2 * part.row_lines * part.subchannels * (part.banks // 2)
    for stride in (row, 2 * row):
        banks = {address(part, i * stride).bank for i in range(part.banks // 4)}
        assert len(banks) == part.banks // 4
