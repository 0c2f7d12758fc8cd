"""The configuration: presets, derived sizes, and a refusal for every field."""

import dataclasses

import pytest
from nearkv_hw.abi import PRESETS, configure
from nearkv_hw.abi.config import EXTENT_BYTES


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_say(name):
    config = configure(name)
    assert config.name == name
    assert config.extents * EXTENT_BYTES == config.capacity_bytes
    assert config.channel_lines * 64 * config.channels == config.capacity_bytes
    assert set(config.to_dict()) == {f.name for f in dataclasses.fields(config)}


def test_extents_alternate_over_channels():
    config = configure("card")
    assert [config.channel_of(i * EXTENT_BYTES) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert config.channel_of(EXTENT_BYTES - 1) == 0


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
        ("placement", "moon", "must be one of controller"),
    ],
)
def test_refusals_name_field_and_value(field, value, message):
    with pytest.raises(ValueError, match=f"{field}=.*{message}"):
        configure("small", **{field: value})


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match="there are small, card"):
        configure("tiny")
    with pytest.raises(ValueError, match="unknown configuration field 'chanels'; there are name, channels"):
        configure("small", chanels=1)
