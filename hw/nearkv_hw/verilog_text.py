"""Verilog written as Verilator compiles it best; it means the same.

Yosys writes a replicated bit as a concatenation of its copies, and a variable that is driven in parts as an
assignment per part. Verilator makes a shift of each copy, and reads, changes and writes the variable for each
part: a third of a device's code, which then no longer fits a processor's caches.
"""

import re
from itertools import groupby

_ID = r"(?:\\\S+ |\w+)"
_CONCATENATION = re.compile(r"\{ ([^{}]*) \}")
_MODULE = re.compile(r"^module .*?^endmodule$", re.MULTILINE | re.DOTALL)
_WIDE = re.compile(rf"^  (?:input|output|wire|reg)(?: signed)? \[(\d+):0\] ({_ID})", re.MULTILINE)
_PART = re.compile(rf"^  assign ({_ID}) ?\[(\d+)(?::(\d+))?\] = (.*);\n", re.MULTILINE)
_PLAIN = re.compile(rf"{_ID}(?: ?\[\d+(?::\d+)?\])?|\d+'[bdh][0-9a-f]+|\{{ [^{{}}]* \}}")
"""A right side without operators: its width does not depend on where it stands."""


def tidy(text: str) -> str:
    """The design with variables assigned whole and copies counted.

    Parameters
    ----------
    text : modules as Yosys writes them.
    """
    return _CONCATENATION.sub(_count_copies, _MODULE.sub(_join_parts, text))


def _count_copies(concatenation: re.Match[str]) -> str:
    """A concatenation with `{n{x}}` in place of n times x in a row."""
    items = [(item, len(list(copies))) for item, copies in groupby(concatenation[1].split(", "))]
    counted = [f"{{{count}{{{item}}}}}" if count > 1 else item for item, count in items]
    return counted[0] if len(items) == 1 else f"{{ {', '.join(counted)} }}"


def _join_parts(module: re.Match[str]) -> str:
    """A module that assigns once each variable all of whose parts it assigned, without operators."""
    text = module[0]
    widths = {name: int(high) + 1 for high, name in _WIDE.findall(text)}
    parts: dict[str, list[tuple[int, int, str]]] = {}
    for name, high, low, right in _PART.findall(text):
        parts.setdefault(name, []).append((int(high), int(low or high), right))
    whole: dict[str, str] = {}
    for name, pieces in parts.items():
        pieces.sort(reverse=True)
        ends = [low for _, low, _ in pieces]
        gapless = [high + 1 for high, _, _ in pieces] == [widths.get(name), *ends[:-1]] and ends[-1] == 0
        if gapless and all(_PLAIN.fullmatch(right) for *_, right in pieces):
            whole[name] = ", ".join(right.removeprefix("{ ").removesuffix(" }") for *_, right in pieces)

    def join(part: re.Match[str]) -> str:
        name = part[1]
        if name not in whole:
            return part[0]
        joined = f"  assign {name} = {{ {whole[name]} }};\n" if whole[name] else ""
        whole[name] = ""  # its other parts
        return joined

    return _PART.sub(join, text)
