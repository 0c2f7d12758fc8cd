"""256-byte flits of CXL.mem, standard layout: slots, formats, limits, credits (CXL 3.1 section 4.3).

A flit is sixteen parts of 16 bytes. Slot 0 is 14 bytes behind the two of the physical layer's header; slots 1
to 14 follow; the last part has the credits and, of the physical layer, 8 bytes of CRC and 6 of FEC. So a flit
is four beats of 64 bytes, as wide as a 68-byte flit, and each of the specification's groups of 128 bytes is
two beats that follow each other.
"""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout
from .cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR
from .flits import LINE_CHUNKS, SLOT_BITS, SLOTS, Side

BEATS = 4
BEAT_BITS = SLOTS * SLOT_BITS
FLIT_BYTES = BEATS * BEAT_BITS // 8
PHY_BITS = 16
"""Of slot 0: the physical layer's header."""
FORMAT_BITS = 4
"""A slot without data begins with its format."""
H_AT = PHY_BITS + FORMAT_BITS
"""Where slot 0 has messages; the other slots have them from `FORMAT_BITS` on."""
LAST_SLOT = SLOTS - 1
"""Of the last beat: the part that is no slot. Credits are its lowest bits."""

_COMMON = ("valid", "opcode", "snoop", "meta_field", "meta_value", "tag", "address")


def _fields(layout: Layout, *names: str) -> list[Field]:
    """Fields of a message of 68-byte mode, which mean the same here."""
    return [layout[name] for name in names]


REQ_256 = Layout(
    "M2S Req, 256-byte mode",
    100,
    *_fields(M2S_REQ, *_COMMON, "ld_id"),
    Field("reserved", 20),
    *_fields(M2S_REQ, "traffic_class"),
)
RWD_256 = Layout(
    "M2S RwD header, 256-byte mode",
    104,
    *_fields(M2S_RWD, *_COMMON, "poison"),
    Field("trailer", 1, "a slot of byte enables follows the data"),
    *_fields(M2S_RWD, "ld_id"),
    Field("reserved", 22),
    *_fields(M2S_RWD, "traffic_class"),
)
NDR_256 = Layout(
    "S2M NDR, 256-byte mode",
    40,
    *_fields(S2M_NDR, "valid", "opcode", "meta_field", "meta_value", "tag", "ld_id", "dev_load"),
    Field("reserved", 10),
)
DRS_256 = Layout(
    "S2M DRS header, 256-byte mode",
    40,
    *_fields(S2M_DRS, "valid", "opcode", "meta_field", "meta_value", "tag", "poison", "dev_load", "ld_id"),
    Field("trailer", 1, "a slot of extended metadata follows the data; this device has none"),
    Field("reserved", 8),
)
MESSAGES = {
    "req": (M2S_REQ, REQ_256),
    "rwd": (M2S_RWD, RWD_256),
    "ndr": (S2M_NDR, NDR_256),
    "drs": (S2M_DRS, DRS_256),
}
"""Of each kind the message as devices have it, and as it lies in a slot (tables 4-14, 4-15)."""

FORMAT = {"req": 4, "ndr": 7, "rwd": 14, "drs": 15}
"""The format of slots that hold messages of a kind, and of no other."""
H_MESSAGES = {"req": 1, "rwd": 1, "ndr": 2, "drs": 2}
G_MESSAGES = {"req": 1, "rwd": 1, "ndr": 3, "drs": 3}
"""Messages of a kind in slot 0, and in another slot."""
GROUP_MESSAGES = {"req": 4, "rwd": 2, "ndr": 6, "drs": 3}
"""Messages of a kind in two beats that follow each other: groups of slots 0 to 7, 4 to 11, 8 to 14, and 12 to
14 with 0 to 3 of the next flit."""
MAX_H_BACKLOG = 16
"""Slots of data owed with which slot 0 may still have a data header."""
MAX_BACKLOG = 36
"""Slots of data owed at most."""

CREDIT_BITS = 5
CREDIT_NAMES = ("req", "data", "rsp")
"""The credit fields, from the lowest bits on."""
CREDITS_BITS = 16
_STEPS = (1, 4, 8, 12, 16)


def _codes(first: int) -> dict[int, int]:
    return {first + n: step for n, step in enumerate(_STEPS)}


CREDIT_CODES = {"req": _codes(0x14), "rwd": _codes(0x14), "ndr": _codes(0x19), "drs": _codes(0x19)}
"""What a code returns of a kind; Req and data in the field of their name, NDR in that of responses."""


def message_slots(beat: int) -> int:
    """Slots of a beat that may hold data: all but slot 0 and the part without a slot."""
    return SLOTS - (beat == 0) - (beat == BEATS - 1)


def kinds(sender: Side) -> tuple[str, str]:
    """Kinds of messages that a side sends, the one without data first."""
    return ("req", "rwd") if sender is Side.HOST else ("ndr", "drs")


READ_LINES = (27, 8)
"""Lines that this packer's flits of reads carry, and in how many flits: as many as any packer's can, by the
limits above (tests/hw/abi/test_flits256.py looks for more in all ways there are to fill flits)."""
WRITE_LINES = (3, 1)


PHY_HEADER = Layout(
    "physical layer's header",
    PHY_BITS,
    Field("sequence", 10, "the flit's own, or the last one received, by the command"),
    Field("command", 2, "`Command`"),
    Field("reserved", 3),
    Field("payload", 1, "the flit has slots, a sequence number and a place in the replay buffer"),
)
"""What this model puts there. That a flit has a sequence number of ten bits or a command in its place is PCIe
6.0's flit mode; which bit is which is not confirmed."""


class Command(IntEnum):
    """What the sequence number of a header is."""

    OWN = 0
    """The flit's; of a flit without payload that of the last one with."""
    ACK = 1
    """The last flit that was received; the flit's own is the next one."""
    NAK = 2
    """As with ACK, and everything behind it shall be sent again."""


SEQUENCE_BITS = 10
MAX_REPLAY_ENTRIES = 256

assert LINE_CHUNKS == SLOTS
