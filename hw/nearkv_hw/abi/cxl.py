"""CXL.mem messages in 68-byte mode (CXL 3.1 specification, sections 3.3 and 4.2)."""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout

TAG_BITS = 16
"""A tag may name one of 2^16 accesses under way."""


class M2SReqOp(IntEnum):
    """Opcodes of M2S Req."""

    MEM_INV = 0
    MEM_RD = 1
    MEM_RD_DATA = 2
    MEM_RD_FWD = 3
    MEM_WR_FWD = 4
    MEM_RD_TEE = 5
    MEM_RD_DATA_TEE = 6
    MEM_SPEC_RD = 8
    MEM_INV_NT = 9
    MEM_CLN_EVCT = 10
    MEM_SPEC_RD_TEE = 12


class M2SRwDOp(IntEnum):
    """Opcodes of M2S RwD."""

    MEM_WR = 1
    MEM_WR_PTL = 2
    BI_CONFLICT = 4
    MEM_RD_FILL = 5
    MEM_WR_TEE = 9
    MEM_WR_PTL_TEE = 10
    MEM_RD_FILL_TEE = 13


class S2MNdrOp(IntEnum):
    """Opcodes of S2M NDR."""

    CMP = 0
    CMP_S = 1
    CMP_E = 2
    CMP_M = 3
    BI_CONFLICT_ACK = 4
    CMP_TEE = 5


class S2MDrsOp(IntEnum):
    """Opcodes of S2M DRS."""

    MEM_DATA = 0
    MEM_DATA_NXM = 1
    MEM_DATA_TEE = 2


class Answer(IntEnum):
    """What the host waits for after a message."""

    NONE = 0
    NDR = 1
    """One NDR message, a completion."""
    DRS = 2
    """One DRS message with a line of data."""


READS = frozenset({M2SReqOp.MEM_RD, M2SReqOp.MEM_RD_DATA})
"""Requests that read a line; a device without a cache of its own treats them alike (section 3.3.5)."""
WRITES = frozenset({M2SRwDOp.MEM_WR, M2SRwDOp.MEM_WR_PTL})
"""Requests with data that write a line."""
NO_OPERATIONS = frozenset(
    {M2SReqOp.MEM_INV, M2SReqOp.MEM_INV_NT, M2SReqOp.MEM_CLN_EVCT, M2SReqOp.MEM_SPEC_RD}
)
"""Requests that a host-only coherent memory may receive and that change nothing in it."""


def req_answer(opcode: int) -> Answer:
    """What the host waits for after an M2S Req of this opcode; a completion where the opcode is reserved."""
    if opcode in (M2SReqOp.MEM_RD, M2SReqOp.MEM_RD_DATA, M2SReqOp.MEM_RD_TEE, M2SReqOp.MEM_RD_DATA_TEE):
        return Answer.DRS
    if opcode in (
        M2SReqOp.MEM_SPEC_RD,
        M2SReqOp.MEM_SPEC_RD_TEE,
        M2SReqOp.MEM_RD_FWD,
        M2SReqOp.MEM_WR_FWD,
    ):
        return Answer.NONE
    return Answer.NDR


class MetaField(IntEnum):
    """Values of the MetaField; a host-only memory uses No-Op."""

    META0_STATE = 0
    NO_OP = 3


class DevLoad(IntEnum):
    """The device's load as it tells the host."""

    LIGHT = 0
    OPTIMAL = 1
    MODERATE_OVERLOAD = 2
    SEVERE_OVERLOAD = 3


M2S_REQ = Layout(
    "M2S Req",
    87,
    Field("valid", 1),
    Field("opcode", 4, "`M2SReqOp`"),
    Field("snoop", 3),
    Field("meta_field", 2),
    Field("meta_value", 2),
    Field("tag", TAG_BITS, "returned with the answer"),
    Field("address_5", 1, "address bit 5: which half line comes first"),
    Field("address", 46, "address bits 51:6"),
    Field("traffic_class", 2),
    Field("ld_id", 4),
    Field("reserved", 6),
)
M2S_RWD = Layout(
    "M2S RwD header",
    87,
    Field("valid", 1),
    Field("opcode", 4, "`M2SRwDOp`"),
    Field("snoop", 3),
    Field("meta_field", 2),
    Field("meta_value", 2),
    Field("tag", TAG_BITS),
    Field("address", 46, "address bits 51:6"),
    Field("poison", 1),
    Field("traffic_class", 2),
    Field("ld_id", 4),
    Field("reserved", 6),
)
S2M_NDR = Layout(
    "S2M NDR",
    30,
    Field("valid", 1),
    Field("opcode", 3, "`S2MNdrOp`"),
    Field("meta_field", 2),
    Field("meta_value", 2),
    Field("tag", TAG_BITS),
    Field("ld_id", 4),
    Field("dev_load", 2, "`DevLoad`"),
)
S2M_DRS = Layout(
    "S2M DRS header",
    40,
    Field("valid", 1),
    Field("opcode", 3, "`S2MDrsOp`"),
    Field("meta_field", 2),
    Field("meta_value", 2),
    Field("tag", TAG_BITS),
    Field("poison", 1),
    Field("ld_id", 4),
    Field("dev_load", 2, "`DevLoad`"),
    Field("reserved", 9),
)
