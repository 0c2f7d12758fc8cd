"""CXL.mem messages as they cross the top of the design: headers of `abi.cxl`, data beside its header."""

from amaranth.lib import data

from ..abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR
from ..abi.lines import LINE_BITS, LINE_BYTES
from ..structs import layout_of

REQ = layout_of(M2S_REQ)
RWD = data.StructLayout({"header": layout_of(M2S_RWD), "enable": LINE_BYTES, "data": LINE_BITS})
NDR = layout_of(S2M_NDR)
DRS = data.StructLayout({"header": layout_of(S2M_DRS), "data": LINE_BITS})
