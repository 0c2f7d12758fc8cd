# amaranth: UnusedElaboratable=no
"""Blocks of the command path refuse what they cannot be, and say why."""

import pytest
from nearkv_hw.abi import PRESETS
from nearkv_hw.abi.window import CHANNEL_COUNTERS_LINE, IDENTITY
from nearkv_hw.command.admit import Admit
from nearkv_hw.command.check import Check
from nearkv_hw.command.claim import Claimer
from nearkv_hw.command.pages import PageFeed
from nearkv_hw.command.passes import Passes
from nearkv_hw.command.plan import Planner
from nearkv_hw.command.queries import QueryFeed
from nearkv_hw.command.registers import REGISTER_BITS, Registers, identity_values
from nearkv_hw.command.walker import Walker
from nearkv_hw.command.window import CommandWindow
from nearkv_hw.common.fork import Fork
from nearkv_hw.device import Device

CLAIMS = {"slices": 4, "extents": 8, "apertures": 2}
PAGES = {"units": 2, "capacity_lines": 1 << 20, "pages_ahead": 4, "lines_ahead": 16}


@pytest.mark.parametrize(
    ("block", "parameters", "message"),
    [
        (Check, {"capacity_lines": 3, "units": 2}, "capacity_lines must be a power of two, not 3"),
        (Check, {"capacity_lines": 4, "units": -1}, "units must be a non-negative integer, not -1"),
        (Admit, {"queries": 0}, "queries must be a power of two, not 0"),
        (Claimer, {**CLAIMS, "slices": 3}, "slices must be a power of two, not 3"),
        (Claimer, {**CLAIMS, "extents": 2}, "extents must be at least 4, not 2"),
        (Claimer, {**CLAIMS, "apertures": 9}, "apertures must be from 1 to 8, not 9"),
        (Claimer, {**CLAIMS, "logical_devices": 4}, "logical_devices must divide 2 apertures, not be 4"),
        (Passes, {"queries": 3}, "queries must be 1, 2, 4, 8 or 16, not 3"),
        (QueryFeed, {"units": 0}, "units must be a positive integer, not 0"),
        (PageFeed, {**PAGES, "units": 3}, "units must be a power of two, not 3"),
        (PageFeed, {**PAGES, "capacity_lines": 1 << 14}, "capacity_lines must be at least 32768"),
        (PageFeed, {**PAGES, "pages_ahead": 1}, "pages_ahead must be an integer of at least 2, not 1"),
        (PageFeed, {**PAGES, "lines_ahead": 0}, "lines_ahead must be an integer of at least 2, not 0"),
        (Planner, {"candidates": 24}, "candidates must be a power of two from 2 to 65536, not 24"),
        (Fork, {"shape": 8, "outputs": 0}, "outputs must be a positive integer, not 0"),
    ],
)
def test_bad_parameters(block, parameters, message):
    with pytest.raises(ValueError, match=message):
        block(**parameters)


@pytest.mark.parametrize("block", [Walker, CommandWindow, Registers, Device])
def test_config_is_a_configuration(block):
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        block(config="small")


@pytest.mark.parametrize("preset", PRESETS)
def test_register_lines(preset):
    """Every counter line can be told apart, and the identity holds all of the configuration."""
    config = PRESETS[preset]
    assert CHANNEL_COUNTERS_LINE + 16 <= 1 << REGISTER_BITS
    values = IDENTITY.unpack(IDENTITY.pack(identity_values(config)))
    assert values["capacity_bytes"] == config.capacity_bytes
    assert {name: values[name] for name in ("channels", "queries", "finish_lanes", "clock_mhz")} == {
        name: getattr(config, name) for name in ("channels", "queries", "finish_lanes", "clock_mhz")
    }
