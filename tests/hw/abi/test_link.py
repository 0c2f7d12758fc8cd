"""What each link carries, against the known ceilings, and the whole tokens in which it is counted."""

from fractions import Fraction

import pytest
from nearkv_hw.abi.config import Link, LinkLayer
from nearkv_hw.abi.link import RATES, TOKEN_BITS, flits_per_cycle, lines_per_cycle, ports, rate_of, tokens

PUBLISHED = {
    Link.X8_32: (26.4, 23.7),
    Link.X16_32: (52.7, 47.4),
    Link.X8_64: (54.2, 48.0),
    Link.X16_64: (108.3, 96.0),
}
"""Reads and writes in GB/s as they are known for these links."""


@pytest.mark.parametrize("link", Link)
def test_rates_are_the_known_ones(link):
    rate = RATES[link]
    seen = rate.read_bytes_per_second, rate.write_bytes_per_second
    assert tuple(round(float(bytes_per_second) / 1e9, 1) for bytes_per_second in seen) == PUBLISHED[link]
    # Reads and writes one to one: both their headers and the data of one pass each way.
    mixed = rate.slots_per_second / max(
        rate.flits.req.value + rate.flits.rwd.value, rate.flits.drs.value + rate.flits.ndr.value
    )
    if link is Link.X16_32:
        assert round(float(2 * 64 * mixed) / 1e9, 1) == 79.1


def test_flits_per_cycle():
    assert round(float(flits_per_cycle(Link.X8_32, 1000)), 3) == 0.463
    assert round(float(flits_per_cycle(Link.X16_32, 1000)), 3) == 0.927
    assert flits_per_cycle(Link.X16_64, 1000) == Fraction(1, 2)


def test_flits_of_256_bytes_at_both_speeds():
    """At 32 GT/s with that speed's line code; a layer of 68-byte flits or none has the speed's own flits."""
    assert flits_per_cycle(Link.X8_64, 1000, LinkLayer.FLITS_256) == Fraction(1, 4)
    assert flits_per_cycle(Link.X8_32, 1000, LinkLayer.FLITS_256) == Fraction(128, 130) / 8
    for layer in (LinkLayer.OFF, LinkLayer.FLITS_68):
        assert rate_of(Link.X8_32, layer) == RATES[Link.X8_32]


def test_ports_follow_link_and_clock():
    widths = {link: [ports(link, clock_mhz) for clock_mhz in (600, 800, 1067)] for link in Link}
    assert widths == {
        Link.X8_32: [1, 1, 1],
        Link.X16_32: [2, 2, 1],
        Link.X8_64: [2, 2, 1],
        Link.X16_64: [3, 3, 2],
    }
    assert lines_per_cycle(Link.X16_64, 800) == Fraction(55, 26)


@pytest.mark.parametrize("clock_mhz", [200, 600, 800, 1067, 2000])
@pytest.mark.parametrize("link", Link)
def test_tokens_keep_the_rate(link, clock_mhz):
    counted, flits = tokens(link, clock_mhz), RATES[link].flits
    per_cycle = RATES[link].slots_per_second / (clock_mhz * 10**6)
    assert abs(Fraction(counted.per_cycle, counted.drs) * flits.drs.value / per_cycle - 1) < Fraction(1, 1000)
    for name in ("req", "rwd", "ndr", "drs"):
        assert abs(Fraction(getattr(counted, name), 1 << TOKEN_BITS) - getattr(flits, name).value) < 2**-12
