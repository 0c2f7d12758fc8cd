"""What a CXL link carries: its slots per second, and how many of them each kind of message takes.

A flit is a number of 16-byte slots. A message takes the slots of its header, or its share of one where
several headers fit, and four more for a line of data. What a direction carries in a second is therefore its
slots, spent on whatever messages the host and the device send: CXL.mem payload ceilings without idle slots,
retries or credits that run out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from .config import Link, LinkLayer
from .lines import LINE_BYTES

_LINE_SLOTS = 4
"""Slots that a line of data takes."""


@dataclass(frozen=True)
class Figure:
    """A number of the table.

    Parameters
    ----------
    value : the number, exact.
    unit : of what.
    source : where it comes from.
    """

    value: Fraction
    unit: str
    source: str


@dataclass(frozen=True)
class Flits:
    """How messages are packed into the flits of a speed.

    Parameters
    ----------
    bytes : bytes of a flit on the wire, CRC and headers included.
    slots : slots of a flit that messages may use.
    line_code : what the line code leaves of the transfers.
    req, rwd, ndr, drs : slots that a message takes, its data included.
    """

    bytes: Figure
    slots: Figure
    line_code: Figure
    req: Figure
    rwd: Figure
    ndr: Figure
    drs: Figure


FLITS_68 = Flits(
    bytes=Figure(Fraction(68), "bytes", "CXL 3.1 section 4.2: 64 of slots, 2 of CRC, 2 of protocol ID"),
    slots=Figure(Fraction(4), "slots", "CXL 3.1 section 4.2"),
    line_code=Figure(Fraction(128, 130), "", "PCIe 5.0: 128b/130b"),
    req=Figure(Fraction(1), "slots", "CXL 3.1 section 4.2, formats H5 and G4: one in a slot"),
    rwd=Figure(Fraction(1 + _LINE_SLOTS), "slots", "CXL 3.1 section 4.2, formats H4 and G5: one in a slot"),
    ndr=Figure(Fraction(1, 2), "slots", "CXL 3.1 section 4.2, formats H4 and G5: two in a slot"),
    drs=Figure(
        Fraction(9 * 4, 8),
        "slots",
        "CXL 3.1 section 4.2, formats H5 and G6: a flit has the headers of 8 lines, which take 8 flits",
    ),
)
"""Flits of links at 32 GT/s."""

FLITS_256 = Flits(
    bytes=Figure(Fraction(256), "bytes", "CXL 3.1 section 4.3: 240 of slots, headers, CRC, FEC"),
    slots=Figure(Fraction(15), "slots", "CXL 3.1 section 4.3: an H slot and 14 G slots"),
    line_code=Figure(Fraction(1), "", "PCIe 6.0: flit mode has no line code; FEC and CRC are in the flit"),
    req=Figure(Fraction(1), "slots", "CXL 3.1 section 4.3, format 4: one in a slot"),
    rwd=Figure(Fraction(1 + _LINE_SLOTS), "slots", "CXL 3.1 section 4.3, format 14: three lines in a flit"),
    ndr=Figure(Fraction(1, 3), "slots", "CXL 3.1 section 4.3, format 7: three in a G slot"),
    drs=Figure(
        Fraction(13 * 15, 44),
        "slots",
        "CXL 3.1 section 4.3, format 15: an H slot has no data but 2 headers, a G slot 3; so 44 lines take "
        "13 flits (26 headers in H slots, 18 in 6 G slots, data in 176)",
    ),
)
"""Standard flits of links at 64 GT/s."""


@dataclass(frozen=True)
class LinkRate:
    """What a link carries in each direction.

    Parameters
    ----------
    wires : lanes of the link.
    transfers_per_second : of each lane, a bit each.
    flits : how messages are packed.
    """

    wires: int
    transfers_per_second: Figure
    flits: Flits

    @property
    def slots_per_second(self) -> Fraction:
        """Slots that a direction carries."""
        bytes_per_second = self.wires * self.transfers_per_second.value * self.flits.line_code.value / 8
        return bytes_per_second / self.flits.bytes.value * self.flits.slots.value

    @property
    def read_bytes_per_second(self) -> Fraction:
        """Bytes of lines that reads bring at most."""
        return LINE_BYTES * self.slots_per_second / self.flits.drs.value

    @property
    def write_bytes_per_second(self) -> Fraction:
        """Bytes of lines that writes take at most."""
        return LINE_BYTES * self.slots_per_second / self.flits.rwd.value


_AT_32 = Figure(Fraction(32 * 10**9), "transfers/s", "PCIe 5.0; CXL 3.1 chapter 6: 68-byte flits")
_AT_64 = Figure(Fraction(64 * 10**9), "transfers/s", "PCIe 6.0; CXL 3.1 chapter 6: 256-byte flits")

RATES: dict[Link, LinkRate] = {
    Link.X8_32: LinkRate(8, _AT_32, FLITS_68),
    Link.X16_32: LinkRate(16, _AT_32, FLITS_68),
    Link.X8_64: LinkRate(8, _AT_64, FLITS_256),
    Link.X16_64: LinkRate(16, _AT_64, FLITS_256),
}
"""Reads bring 26.4, 52.7, 54.2 and 108.3 GB/s, writes take 23.7, 47.4, 48.0 and 96.0."""


def lines_per_cycle(link: Link, clock_mhz: int) -> Fraction:
    """Lines that reads bring over the link in a device cycle."""
    return RATES[link].read_bytes_per_second / LINE_BYTES / (clock_mhz * 10**6)


def rate_of(link: Link, layer: LinkLayer) -> LinkRate:
    """What a link carries with a link layer; 256-byte flits at 32 GT/s have that speed's line code."""
    rate = RATES[link]
    if layer is LinkLayer.FLITS_256 and rate.flits is FLITS_68:
        return replace(rate, flits=replace(FLITS_256, line_code=FLITS_68.line_code))
    return rate


def flits_per_cycle(link: Link, clock_mhz: int, layer: LinkLayer = LinkLayer.OFF) -> Fraction:
    """Flits that the link carries in a device cycle, each way."""
    rate = rate_of(link, layer)
    return rate.slots_per_second / rate.flits.slots.value / (clock_mhz * 10**6)


def ports(link: Link, clock_mhz: int) -> int:
    """Messages of each kind that the endpoint must take and send in a device cycle to keep the link full."""
    return ceil(lines_per_cycle(link, clock_mhz))


WIRE_NS = 10
"""From one link layer to the other: both physical layers, package and trace. An assumption of this model."""

TOKEN_BITS = 12
"""A slot is 2^TOKEN_BITS tokens, in which the endpoint counts what the link carries."""


@dataclass(frozen=True)
class Tokens:
    """A link's rate in whole tokens.

    Parameters
    ----------
    per_cycle : what a direction of the link carries in a device cycle.
    req, rwd, ndr, drs : what a message takes.
    """

    per_cycle: int
    req: int
    rwd: int
    ndr: int
    drs: int


def tokens(link: Link, clock_mhz: int) -> Tokens:
    """What the endpoint counts; to within a thousandth of the exact rate."""
    rate = RATES[link]

    def whole(slots: Fraction) -> int:
        return round(slots * (1 << TOKEN_BITS))

    return Tokens(
        per_cycle=whole(rate.slots_per_second / (clock_mhz * 10**6)),
        req=whole(rate.flits.req.value),
        rwd=whole(rate.flits.rwd.value),
        ndr=whole(rate.flits.ndr.value),
        drs=whole(rate.flits.drs.value),
    )
