# amaranth: UnusedElaboratable=no
"""Register lines that only some devices have: options, and what the link layer tells."""

import random

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi import configure
from nearkv_hw.abi.window import (
    HOST_LINK_LAYER_COUNTERS_LINE,
    LINK_LAYER_COUNTERS,
    LINK_LAYER_COUNTERS_LINE,
    LINK_STATE,
    LINK_STATE_LINE,
    OPTIONS,
    OPTIONS_LINE,
)
from nearkv_hw.command.registers import Registers

LINK_LINES = (LINK_LAYER_COUNTERS_LINE, HOST_LINK_LAYER_COUNTERS_LINE, LINK_STATE_LINE)


def shown(config, lines, given=()):
    """What each line reads, with these (port, value)s of the block."""
    block, found = Registers(config=config), []

    async def bench(ctx):
        for port, bits in given:
            ctx.set(port(block).as_value(), bits)
        for line in lines:
            ctx.set(block.read, 1)
            ctx.set(block.line, line)
            await ctx.tick()
            found.append(ctx.get(block.data))

    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return found


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        ({}, {}),
        ({"hdm_decoders": 4}, {"hdm_decoders": 4}),
        ({"apertures": 4, "logical_devices": 4}, {"logical_devices": 3}),
    ],
)
def test_options(chosen, options):
    assert shown(configure("small", **chosen), [OPTIONS_LINE]) == [OPTIONS.pack(options)]


@pytest.mark.parametrize("layer", ["flits_68", "flits_256"])
def test_the_link_layer(layer):
    rng = random.Random(5)
    given = [rng.getrandbits(512) for _ in range(3)]
    ports = (lambda b: b.link_layers[0], lambda b: b.link_layers[1], lambda b: b.link_state)
    config = configure("small", link="x8_32", link_layer=layer)
    found = shown(config, LINK_LINES, zip(ports, given, strict=True))
    for layout, line, bits in zip(
        (LINK_LAYER_COUNTERS, LINK_LAYER_COUNTERS, LINK_STATE), found, given, strict=True
    ):
        assert layout.unpack(line) == layout.unpack(bits)


def test_without_a_link_layer_there_is_nothing():
    config = configure("small")
    assert shown(config, LINK_LINES) == [0, 0, 0]
    assert not hasattr(Registers(config=config), "link_state")
