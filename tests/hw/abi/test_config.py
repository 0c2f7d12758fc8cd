"""The configuration: presets, derived sizes, and a refusal for every field."""

import dataclasses

import pytest
from nearkv_hw.abi import PRESETS, configure
from nearkv_hw.abi.config import EXTENT_BYTES, LinkLayer
from nearkv_hw.abi.dram import PARTS, Dram


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_say(name):
    config = configure(name)
    assert config.name == name
    assert config.extents * EXTENT_BYTES == config.capacity_bytes
    assert config.slice_lines * 64 * config.channels == config.capacity_bytes
    assert set(config.to_dict()) == {f.name for f in dataclasses.fields(config)}


def test_extents_alternate_over_channels():
    config = configure("card")
    assert [config.slice_of(i * EXTENT_BYTES) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert config.slice_of(EXTENT_BYTES - 1) == 0


def test_enumerations_may_be_given_by_name():
    assert configure("small", link="x16_64").to_dict()["link"] == "x16_64"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("channels", 3, "must be 1, 2, 4, 8 or 16"),
        ("channels", 2.0, "must be an integer"),
        ("channels", True, "must be an integer"),
        ("lanes", 16, "must be 32"),
        ("queries", 3, "must be 1, 2, 4, 8 or 16"),
        ("finish_lanes", 3, "must be 2, 4 or 8"),
        ("apertures", 9, "must be 1 to 8"),
        ("ring_slots", 512, "power of two from 4 to 256"),
        ("capacity_bytes", 1 << 20, "power of two from 2 extents"),
        ("memory_latency_cycles", 1, "must be 2 to 200"),
        ("clock_mhz", 0, "must be 1 to 10,000"),
        ("dram", "ddr9", "must be one of fixed"),
        ("link", 9, "must be one of x8_32"),
        ("link_layer", "flits_68", "must be off where the link is not at 32 GT/s"),
        ("link_layer", "flits", "must be one of off, flits_68, flits_256"),
        ("logical_devices", 3, "must be 1, 2, 4 or 8"),
        ("hdm_decoders", 3, "must be 0 or one of 1, 2, 4, 6"),
        ("placement", "moon", "must be one of rank, phy, controller, fabric, host"),
        ("fabric_share", 0, "must be 1 to 15 sixteenths"),
        ("fabric_share", 16, "must be 1 to 15 sixteenths"),
        ("ranks", 2, "must be 2 or 4 with placement=rank, and 1 with every other"),
    ],
)
def test_refusals_name_field_and_value(field, value, message):
    with pytest.raises(ValueError, match=f"{field}=.*{message}"):
        configure("small", **{field: value})


def test_a_link_layer_makes_a_flit_per_cycle():
    """463 million flits per second of x8, twice as many of x16."""
    assert configure("small", link="x8_32", link_layer="flits_68").link_layer is LinkLayer.FLITS_68
    assert configure("small", link="x16_32", link_layer="flits_68", dram="lpddr5x_8533").clock_mhz == 1067
    with pytest.raises(ValueError, match=r"link_layer=.*more than a flit per device cycle"):
        configure("small", link="x16_32", link_layer="flits_68")


def test_a_link_layer_makes_a_beat_of_64_bytes_per_cycle():
    """256-byte flits are four; x8 brings 123 million flits per second at 32 GT/s, 250 million at 64 GT/s."""
    assert configure("small", link="x8_32", link_layer="flits_256").link_layer is LinkLayer.FLITS_256
    assert configure("small", link="x8_64", link_layer="flits_256", dram="lpddr5x_8533").clock_mhz == 1067
    with pytest.raises(ValueError, match=r"link_layer=.*more than a quarter of a flit per device cycle"):
        configure("small", link="x8_64", link_layer="flits_256")


def test_decoders_count_in_units():
    assert configure("small", hdm_decoders=20).hdm_decoders == 20
    with pytest.raises(ValueError, match=r"capacity_bytes=.*must be at least 268435456"):
        configure("small", hdm_decoders=4, capacity_bytes=128 << 20)


def test_logical_devices_have_equal_parts():
    config = configure("small", apertures=8, logical_devices=4)
    assert (config.logical_apertures, config.logical_extents) == (2, 512)
    assert [config.extents_of(a).start for a in range(8)] == [0, 0, 512, 512, 1024, 1024, 1536, 1536]
    assert config.extents_of(7).stop == config.extents
    assert configure("small", apertures=3).extents_of(2) == range(2048)
    for apertures in (3, 6, 2):
        with pytest.raises(ValueError, match=r"apertures=.*must be 4 times a power of two with"):
            configure("small", apertures=apertures, logical_devices=4)
    with pytest.raises(ValueError, match=r"capacity_bytes=.*must be at least 4 times 2 extents"):
        configure("small", apertures=4, logical_devices=4, capacity_bytes=4 << 20)
    with pytest.raises(ValueError, match=r"hdm_decoders=.*must be 0 with several logical devices"):
        configure("small", logical_devices=2, hdm_decoders=4)


def test_the_fixed_memory_has_no_part():
    assert configure("small", dram="fixed", clock_mhz=1).density_gbit == 0
    with pytest.raises(ValueError, match="density_gbit=16: must be 0 with dram=fixed"):
        configure("small", dram="fixed", density_gbit=16)
    with pytest.raises(ValueError, match=r"refresh=.*: must be all_bank with dram=fixed"):
        configure("small", dram="fixed", refresh="per_bank")
    with pytest.raises(ValueError, match="clock_mhz=0: must be 1 to 10,000"):
        configure("small", dram="fixed", clock_mhz=0)


def test_a_part_lays_down_clock_and_density():
    config = configure("small", dram="lpddr5x_8533")
    part = PARTS[Dram.LPDDR5X_8533]
    assert (config.clock_mhz, config.density_gbit) == (part.clock_mhz, part.default_density) == (1067, 32)
    assert configure("small", dram="ddr5_6400", density_gbit=32).density_gbit == 32
    assert configure("small", dram="fixed").clock_mhz == 800
    with pytest.raises(ValueError, match="clock_mhz=800: must be the part's 600"):
        configure("small", dram="ddr5_4800", clock_mhz=800)
    with pytest.raises(ValueError, match=r"density_gbit=7: must be one of .*16.* with dram=ddr5_6400"):
        configure("small", dram="ddr5_6400", density_gbit=7)
    with pytest.raises(ValueError, match=r"capacity_bytes=.*must be at most"):
        configure("small", dram="hbm3_6400", capacity_bytes=1 << 40)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_is_a_slice_with_a_unit(ranks):
    config = configure("small", placement="rank", ranks=ranks)
    assert config.slices == config.units == 2 * ranks
    assert config.slice_lines * 64 * config.slices == config.capacity_bytes
    assert [config.slice_of(i * EXTENT_BYTES) for i in range(2 * ranks + 1)] == [*range(2 * ranks), 0]
    with pytest.raises(ValueError, match="ranks=1: must be 2 or 4"):
        configure("small", placement="rank")
    with pytest.raises(ValueError, match="channels=16: with ranks="):
        configure("small", placement="rank", ranks=ranks, channels=16)


def test_a_host_placement_has_no_units():
    config = configure("small", placement="host")
    assert (config.units, config.slices) == (0, 2)


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match="there are small, card"):
        configure("tiny")
    with pytest.raises(ValueError, match="unknown configuration field 'chanels'; there are name, channels"):
        configure("small", chanels=1)
