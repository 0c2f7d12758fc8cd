"""Verilog written as Verilator compiles it best; it means the same.

Yosys writes a replicated bit as a concatenation of its copies, and a variable that is driven in parts as an
assignment per part. Verilator makes a shift of each copy, and reads, changes and writes the variable for each
part: a third of a device's code, which then no longer fits a processor's caches.

It writes what a memory begins with word by word, too, of which Verilator makes a statement each: half of a
device's text and most of what a compiler would get.
"""

import re
from itertools import count, groupby

_ID = r"(?:\\\S+ |\w+)"
_CONCATENATION = re.compile(r"\{ ([^{}]*) \}")
_MODULE = re.compile(r"^module .*?^endmodule$", re.MULTILINE | re.DOTALL)
_WIDE = re.compile(rf"^  (?:input|output|wire|reg)(?: signed)? \[(\d+):0\] ({_ID})", re.MULTILINE)
_PART = re.compile(rf"^  assign ({_ID}) ?\[(\d+)(?::(\d+))?\] = (.*);\n", re.MULTILINE)
_PLAIN = re.compile(rf"{_ID}(?: ?\[\d+(?::\d+)?\])?|\d+'[bdh][0-9a-f]+|\{{ [^{{}}]* \}}")
"""A right side without operators: its width does not depend on where it stands."""

_INITIAL = re.compile(r"^  initial begin\n((?:    .*;\n)*)  end\n", re.MULTILINE)
_WORD = re.compile(rf"^    ({_ID}) ?\[(\d+)\] = (\d+'[bdh][0-9a-f]+);$")
_RUN = 8
"""Words of a memory that begin alike, from which on a loop says so."""


def tidy(text: str) -> str:
    """The design with variables assigned whole, copies counted and memories filled by loops.

    Parameters
    ----------
    text : modules as Yosys writes them.
    """
    return _CONCATENATION.sub(_count_copies, _MODULE.sub(_join_parts, _MODULE.sub(_fill_memories, text)))


def _fill_memories(module: re.Match[str]) -> str:
    """A module whose memories get runs of equal words in loops."""
    number = count()

    def fill(block: re.Match[str]) -> str:
        words = ((_WORD.match(line), line) for line in block[1].splitlines(keepends=True))
        lines = []
        looped = False
        for _, group in groupby(enumerate(words), _run_of):
            run = [word for _, word in group]
            first, last = run[0][0], run[-1][0]
            if first is None or last is None or len(run) < _RUN:
                lines += [line for _, line in run]
            else:
                bounds = f"n = {first[2]}; n <= {last[2]}; n = n + 1"
                lines.append(f"    for ({bounds}) {first[1]}[n] = {first[3]};\n")
                looped = True
        if not looped:
            return block[0]
        # A block with a variable needs a name.
        return f"  initial begin : fill_{next(number)}\n    integer n;\n{''.join(lines)}  end\n"

    return _INITIAL.sub(fill, module[0])


def _run_of(item: tuple[int, tuple[re.Match[str] | None, str]]) -> tuple[object, ...]:
    """What lines of a block have in common that a loop can stand for."""
    place, (word, _) = item
    return (place,) if word is None else (word[1], word[3], int(word[2]) - place)


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
