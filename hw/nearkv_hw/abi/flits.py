"""68-byte flits of CXL.mem: header, slot formats, control flits, credits, CRC (CXL 3.1 section 4.2).

A flit is 64 bytes of slots and 16 bits of CRC; two more bytes on the wire, the protocol ID, belong to the
physical layer. Slot 0 begins with the flit's header, so that 96 of its 128 bits hold messages; an all-data
flit has no header.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from .bits import Field, Layout
from .cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR

SLOTS = 4
SLOT_BITS = 128
CHUNK_BITS = SLOT_BITS
"""A chunk of data fills a slot."""
LINE_CHUNKS = 4
FLIT_BITS = SLOTS * SLOT_BITS
"""Without the CRC."""
CRC_BITS = 16
CRC_POLYNOMIAL = 0x1F053
"""Section 4.2.8.7: CRC = (sum of flit[i] x^i) x^16 mod P, from zero, neither reflected nor inverted."""
WIRE_BYTES = 68


class Side(IntEnum):
    """The two ends of a link."""

    HOST = 0
    """Sends M2S messages and receives S2M messages."""
    DEVICE = 1


class FlitType(IntEnum):
    """What a flit that has a header is."""

    PROTOCOL = 0
    CONTROL = 1


FLIT_HEADER = Layout(
    "flit header",
    32,
    Field("type", 1, "`FlitType`"),
    Field("reserved", 1),
    Field("ak", 1, "eight flits are acknowledged"),
    Field("be", 1, "a slot of byte enables follows the data of this flit's header"),
    Field("sz", 1, "data is 64 bytes, not 32"),
    *(Field(f"slot{n}", 3, "`SlotFormat.code`") for n in range(SLOTS)),
    Field("reserved_mid", 3),
    *(Field(f"{name}_credit", 4, "returned, as `credit_code`") for name in ("rsp", "req", "data")),
)
HEADER_BITS = FLIT_HEADER.width
ACK_FLITS = 8
"""Flits that the header's ak bit acknowledges."""
CREDIT_STEPS = (0, 1, 2, 4, 8, 16, 32, 64)
"""What the low three bits of a credit field return (table 4-4)."""
CREDIT_MEM = 8
"""A credit field's bit that says CXL.mem; without it the credits are of CXL.cache."""

CREDIT_CODES = {CREDIT_MEM | code: step for code, step in enumerate(CREDIT_STEPS) if step}
"""What a credit field returns of CXL.mem."""


@dataclass(frozen=True)
class Place:
    """Where a message lies in a slot.

    Parameters
    ----------
    kind : "req", "rwd", "ndr" or "drs".
    pieces : (lowest bit of the message, lowest bit of the slot, width) each; bits of a slot 0 are counted
        from behind the header.
    """

    kind: str
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SlotFormat:
    """A slot format that holds messages of CXL.mem.

    Parameters
    ----------
    name : as the specification has it; H is slot 0, G the others.
    code : the header's slot field.
    places : messages of CXL.mem, lowest bits first.
    """

    name: str
    code: int
    places: tuple[Place, ...]

    @property
    def multi_data(self) -> bool:
        """Whether it has several data headers (an MDH slot)."""
        return sum(place.kind == "drs" for place in self.places) > 1


_DEV_LOAD = S2M_NDR.offset("dev_load")
_DEV_LOAD_BITS = S2M_NDR["dev_load"].width


def _whole(kind: str, layout: Layout, at: int) -> Place:
    return Place(kind, ((0, at, layout.width),))


def _pair(at: int) -> tuple[Place, Place]:
    """Two NDR, the first one's DevLoad behind the second."""
    second = at + _DEV_LOAD
    first_load = second + S2M_NDR.width
    return (
        Place("ndr", ((0, at, _DEV_LOAD), (_DEV_LOAD, first_load, _DEV_LOAD_BITS))),
        _whole("ndr", S2M_NDR, second),
    )


DATA_CODE = 0
"""Format G0: a chunk of data, or the byte enables of a line in its low 64 bits."""
M2S_H = (SlotFormat("H4", 4, (_whole("rwd", M2S_RWD, 0),)), SlotFormat("H5", 5, (_whole("req", M2S_REQ, 0),)))
M2S_G = (SlotFormat("G4", 4, (_whole("req", M2S_REQ, 0),)), SlotFormat("G5", 5, (_whole("rwd", M2S_RWD, 0),)))
S2M_H = (
    SlotFormat("H0", 0, (_whole("ndr", S2M_NDR, 57),)),
    SlotFormat("H3", 3, (_whole("drs", S2M_DRS, 0), _whole("ndr", S2M_NDR, 40))),
    SlotFormat("H4", 4, _pair(0)),
    SlotFormat("H5", 5, (_whole("drs", S2M_DRS, 0), _whole("drs", S2M_DRS, 40))),
)
S2M_G = (
    SlotFormat("G4", 4, (_whole("drs", S2M_DRS, 0), *_pair(40))),
    SlotFormat("G5", 5, _pair(0)),
    SlotFormat("G6", 6, tuple(_whole("drs", S2M_DRS, at) for at in (0, 40, 80))),
)
"""Formats that hold messages of CXL.mem (tables 4-7, 4-8, figures 4-10 to 4-34); others are CXL.cache's."""

MAX_MESSAGES = {"req": 2, "rwd": 1, "ndr": 2, "drs": 3}
"""Headers of a kind in a flit (section 4.2.5)."""
MAX_ROLLOVER = 3
"""Chunks that slots 1 to 3 of a flit with a header can hold; with more owed an all-data flit follows."""


def formats(sender: Side) -> tuple[tuple[SlotFormat, ...], tuple[SlotFormat, ...]]:
    """The formats of slot 0 and of the other slots that a side sends."""
    return (M2S_H, M2S_G) if sender is Side.HOST else (S2M_H, S2M_G)


CREDIT_FIELD = {"req": "req_credit", "rwd": "data_credit", "ndr": "rsp_credit", "drs": "data_credit"}
"""The header field that returns a message's credit, in flits that travel the other way (table 4-5)."""


def credit_code(count: int) -> int:
    """The credit field that returns as much of `count` as a flit can."""
    return CREDIT_MEM | max(code for code, step in enumerate(CREDIT_STEPS) if step <= count)


class Control(IntEnum):
    """Control flits: sub type in bits 7:4, LLCTRL in bits 3:0 (tables 4-9, 4-10)."""

    LLCRD_ACK = 0x10
    RETRY_IDLE = 0x01
    RETRY_REQ = 0x11
    RETRY_ACK = 0x21
    RETRY_FRAME = 0x31
    IDE_IDLE = 0x02
    IDE_START = 0x12
    IDE_TMAC = 0x22
    INIT_PARAM = 0x8C


CONTROL_AT = 32
"""Where LLCTRL and sub type lie in a control flit."""
CONTROL_BITS = 8
PAYLOAD_AT = 64
PAYLOAD_BITS = 64
RETRY_LLCTRL = 1
"""Flits of this LLCTRL are not kept for retry, take no sequence number and are not acknowledged."""

LLCRD_PAYLOAD = Layout(
    "LLCRD",
    PAYLOAD_BITS,
    Field("acks_low", 3, "flits acknowledged, bits 2:0; bit 3 is the header's ak"),
    Field("reserved", 1),
    Field("acks_high", 4, "bits 7:4"),
)
RETRY_REQ_PAYLOAD = Layout(
    "RETRY.Req",
    PAYLOAD_BITS,
    Field("sequence", 8, "number of the flit that is asked for"),
    Field("reserved", 8),
    Field("retries", 5, "requests for this flit so far"),
    Field("reinits", 5, "retrainings for this flit so far"),
)
RETRY_ACK_PAYLOAD = Layout(
    "RETRY.Ack",
    PAYLOAD_BITS,
    Field("empty", 1, "there is nothing to send again"),
    Field("viral", 1),
    Field("reserved", 1),
    Field("retries", 5, "the request's"),
    Field("write", 8, "number of the next new flit"),
    Field("sequence", 8, "the request's"),
    Field("free", 8, "entries of the retry buffer that are free"),
    Field("viral_ld", 16, "which LD-IDs are viral"),
)
INIT_PAYLOAD = Layout(
    "INIT.Param",
    PAYLOAD_BITS,
    Field("version", 4, "2 from CXL 2.0 on"),
    Field("reserved", 20),
    Field("wrap", 8, "sequence numbers are counted modulo this"),
)
VERSION = 2
DEFAULT_WRAP = 9
"""Until INIT.Param tells."""
FRAMES = 5
"""RETRY.Frame flits before a RETRY.Req or RETRY.Ack: more than all-data flits that may follow each other."""
MIN_RETRY_ENTRIES = 22
MAX_RETRY_ENTRIES = 255
ACK_FORCE_FLITS = 16
"""Flits owed an acknowledgement from which on an LLCRD is sent for it."""
TIMEOUT_FLITS = 4096
"""Flits sent while a RETRY.Ack is awaited, until it is asked for again."""
MAX_RETRIES = 10
MAX_REINITS = 10


class Retry(IntEnum):
    """States of the local retry state machine (table 4-12)."""

    NORMAL = 0
    REQUEST = 1
    """RETRY_LLRREQ: a RETRY.Req has to be sent."""
    WAIT = 2
    """RETRY_LOCAL_IDLE: the RETRY.Ack is awaited."""
    REINIT = 3
    """RETRY_PHY_REINIT: the physical layer retrains."""
    ABORT = 4
    """RETRY_ABORT: the link has failed."""


def crc_column(bit: int) -> int:
    """What a set bit of the flit adds to its CRC: x^(bit + 16) mod P."""
    value = 1
    for _ in range(bit + CRC_BITS):
        value <<= 1
        if value >> CRC_BITS:
            value ^= CRC_POLYNOMIAL
    return value


@cache
def crc_masks() -> tuple[int, ...]:
    """For each bit of the CRC the bits of the flit whose parity it is."""
    masks = [0] * CRC_BITS
    column = crc_column(0)
    for bit in range(FLIT_BITS):
        for k in range(CRC_BITS):
            masks[k] |= (column >> k & 1) << bit
        column <<= 1
        if column >> CRC_BITS:
            column ^= CRC_POLYNOMIAL
    return tuple(masks)


def crc(flit: int) -> int:
    """The CRC of a flit's 512 bits."""
    return sum(((flit & mask).bit_count() & 1) << k for k, mask in enumerate(crc_masks()))
