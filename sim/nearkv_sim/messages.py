"""What the C++ host is given at build time: message layouts, its seam with Python, and the device's ports."""

from __future__ import annotations

from enum import IntEnum

from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR, M2SReqOp, M2SRwDOp, MetaField, S2MDrsOp
from nearkv_hw.abi.hdm import WORD_BITS
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES

from .host_abi import OPERATION, Kind, Status
from .port import Access

RWD_ENABLE = M2S_RWD.width
"""Offset of the byte enables in the payload of the stream m2s_rwd."""
RWD_DATA = RWD_ENABLE + LINE_BYTES
DRS_DATA = S2M_DRS.width
_LAYOUTS = {"Req": M2S_REQ, "Rwd": M2S_RWD, "Ndr": S2M_NDR, "Drs": S2M_DRS}


def cpp_header(ports: int, *, registers: bool = False) -> str:
    """The C++ header `messages.h` of a device with so many endpoint ports, and registers of HDM decoders.

    It has each message field's place, the opcodes that the host uses, what Python hands to the host, the
    streams of the endpoint's ports, and the decoders' register port.
    """
    return "\n".join(
        [
            "// Made by nearkv_sim/messages.py.",
            "#pragma once",
            "#include <array>",
            "#include <cstddef>",
            "#include <cstdint>",
            "#include <optional>",
            '#include "bits.h"',
            "namespace nearkv {",
            *_enum(Kind, "std::uint32_t"),
            *_enum(Access, "std::uint8_t"),
            *_enum(Status, "int"),
            *_operation(),
            *_ports(ports),
            *_registers(registers),
            "namespace messages {",
            *_layouts(),
            "}",
            "}",
            "",
        ]
    )


def _layouts() -> list[str]:
    lines = []
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
    return lines + [f"constexpr unsigned k{name} = {int(value)};" for name, value in values.items()]


def _enum(kind: type[IntEnum], base: str) -> list[str]:
    members = ", ".join(f"k{_camel(member.name.lower())} = {member.value}" for member in kind)
    return [f"enum class {kind.__name__} : {base} {{ {members} }};"]


def _operation() -> list[str]:
    """One operation of a program."""
    members = [f"    {kind} {name};" + (f"  // {text}" if text else "") for name, _, kind, text in OPERATION]
    return ["struct Operation {", *members, "};"]


def _ports(ports: int) -> list[str]:
    """The streams of the device's endpoint, port by port."""
    inward = ("std::uint32_t*", "std::uint8_t*", "const std::uint8_t*")
    outward = ("const std::uint32_t*", "const std::uint8_t*", "std::uint8_t*")
    streams = {"m2s_req": inward, "m2s_rwd": inward, "s2m_ndr": outward, "s2m_drs": outward}

    def place(stream: str, port: int, member: str) -> str:
        wide = member == "payload" and stream != "s2m_ndr"
        return f"top.{stream}_{port}_{member}.data()" if wide else f"&top.{stream}_{port}_{member}"

    def places(port: int) -> str:
        return ", ".join(place(stream, port, member) for stream in streams for member in members)

    members = ("payload", "valid", "ready")
    return [
        "struct Port {",
        *(
            f"    {kind} {stream}_{member};"
            for stream, kinds in streams.items()
            for kind, member in zip(kinds, members, strict=True)
        ),
        "};",
        f"constexpr std::size_t kPorts = {ports};",
        "template <typename Top>",
        "std::array<Port, kPorts> ports_of(Top& top) {",
        "    return {{",
        *(f"        {{{places(port)}}}," for port in range(ports)),
        "    }};",
        "}",
    ]


def _registers(there: bool) -> list[str]:
    """The register port of the HDM decoders, if the device has it."""
    members = {
        "write_payload": "std::uint64_t*",
        "write_valid": "std::uint8_t*",
        "write_ready": "const std::uint8_t*",
        "read_word": "std::uint16_t*",
        "read_data": "const std::uint32_t*",
    }
    places = ", ".join(f"&top.decoder_{name}" for name in members)
    return [
        "struct RegisterPort {",
        *(f"    {kind} {name};" for name, kind in members.items()),
        "};",
        f"constexpr unsigned kRegisterWordBits = {WORD_BITS};",
        "template <typename Top>",
        "std::optional<RegisterPort> register_port([[maybe_unused]] Top& top) {",
        f"    return {f'RegisterPort{{{places}}}' if there else 'std::nullopt'};",
        "}",
    ]


def _place(layout: Layout, name: str) -> str:
    return f"{{{layout.offset(name)}, {layout[name].width}}}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _words(bits: int) -> int:
    return (bits + 31) // 32
