"""CXL.mem messages in 68-byte mode (CXL 3.1 specification, sections 3.3 and 4.2)."""

from __future__ import annotations

from enum import IntEnum

from .bits import Field, Layout

TAG_BITS = 16


class M2SReqOp(IntEnum):
    """Opcodes of M2S Req."""

    MEM_INV = 0
    MEM_RD = 1
    MEM_RD_DATA = 2
    MEM_RD_FWD = 3
    MEM_WR_FWD = 4
    MEM_SPEC_RD = 8
    MEM_INV_NT = 9
    MEM_CLN_EVCT = 10


class M2SRwDOp(IntEnum):
    """Opcodes of M2S RwD."""

    MEM_WR = 1
    MEM_WR_PTL = 2


class S2MNdrOp(IntEnum):
    """Opcodes of S2M NDR."""

    CMP = 0
    CMP_S = 1
    CMP_E = 2


class S2MDrsOp(IntEnum):
    """Opcodes of S2M DRS."""

    MEM_DATA = 0
    MEM_DATA_NXM = 1


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
    Field("tag", 16, "returned with the answer"),
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
    Field("tag", 16),
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
    Field("tag", 16),
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
    Field("tag", 16),
    Field("poison", 1),
    Field("ld_id", 4),
    Field("dev_load", 2, "`DevLoad`"),
    Field("reserved", 9),
)
