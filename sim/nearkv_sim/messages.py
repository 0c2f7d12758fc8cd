"""The message layouts of `nearkv_hw.abi.cxl` for C++ and for Python hosts."""

from __future__ import annotations

from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR, M2SReqOp, M2SRwDOp, MetaField, S2MDrsOp
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES

RWD_ENABLE = M2S_RWD.width
"""Offset of the byte enables in the payload of the stream m2s_rwd."""
RWD_DATA = RWD_ENABLE + LINE_BYTES
DRS_DATA = S2M_DRS.width
_LAYOUTS = {"Req": M2S_REQ, "Rwd": M2S_RWD, "Ndr": S2M_NDR, "Drs": S2M_DRS}


def cpp_header() -> str:
    """The C++ header `messages.h`: each field's place, and the opcodes that the host uses."""
    lines = [
        "// Made from nearkv_hw.abi.cxl.",
        "#pragma once",
        '#include "bits.h"',
        "namespace nearkv::messages {",
    ]
    for prefix, layout in _LAYOUTS.items():
        lines += [f"constexpr Field k{prefix}{_camel(f.name)}{_place(layout, f.name)};" for f in layout]
    lines += [
        f"constexpr Field kRwdEnable{{{RWD_ENABLE}, {LINE_BYTES}}};",
        f"constexpr unsigned kRwdData = {RWD_DATA};",
        f"constexpr unsigned kDrsData = {DRS_DATA};",
        f"constexpr unsigned kReqWords = {_words(M2S_REQ.width)};",
        f"constexpr unsigned kRwdWords = {_words(RWD_DATA + LINE_BITS)};",
        f"constexpr unsigned kDrsWords = {_words(DRS_DATA + LINE_BITS)};",
    ]
    values = {
        "MemRd": M2SReqOp.MEM_RD,
        "MemWr": M2SRwDOp.MEM_WR,
        "MemWrPtl": M2SRwDOp.MEM_WR_PTL,
        "MemDataNxm": S2MDrsOp.MEM_DATA_NXM,
        "MetaNoOp": MetaField.NO_OP,
    }
    lines += [f"constexpr unsigned k{name} = {int(value)};" for name, value in values.items()]
    return "\n".join([*lines, "}", ""])


def _place(layout: Layout, name: str) -> str:
    return f"{{{layout.offset(name)}, {layout[name].width}}}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _words(bits: int) -> int:
    return (bits + 31) // 32
