"""Verilog from a component: short, stable text with port names that Verilator, cocotb and C++ can share.

A port's name is its path in the component's signature joined by single underscores (`m2s_req_payload`);
clock and reset are `clk` and `rst`. Amaranth emits a module per instance, so a design with many equal lanes
repeats itself: modules that differ only in generated names are emitted once, which keeps the text and what
Verilator makes of it small.
"""

import hashlib
import re
from dataclasses import dataclass, replace

from amaranth.back import verilog
from amaranth.hdl import Const, Value, ValueCastable
from amaranth.hdl._ir import PortDirection  # the only way to state a direction; pinned by pyproject.toml
from amaranth.lib import wiring

from .verilog_text import tidy

_NAME = r"(\\\S+ |\w+)"
_MODULE = re.compile(rf"^module {_NAME} ?\((.*?)\);\n(.*?)^endmodule\n", re.MULTILINE | re.DOTALL)
_INSTANCE = re.compile(rf"^  {_NAME}( +{_NAME} \(\n)((?:    \..*\n)*)", re.MULTILINE)
_CONNECTION = re.compile(rf"^    \.{_NAME}(.*?),?$", re.MULTILINE)
_DECLARATIONS = re.compile(r"(?:  (?:input|output|wire|reg|\(\*) ?.*\n)*")
_DECLARATION = re.compile(r"((?:  \(\*.*\n)*)(.*\n)")
_DIGITS = r"\d+'[bdh][0-9a-f]+"
_CONSTANT = re.compile(
    rf"^  always @\*\n(    [^=\n]+ = (?:{_DIGITS}|\{{ {_DIGITS}(?:, {_DIGITS})* \}});\n)", re.MULTILINE
)
_NUMBERED = re.compile(r"\\(?:\$auto\$\S+\$|port\$\d+\$)\d+ ")
"""Names that Yosys and Amaranth number through the whole design."""


@dataclass(frozen=True)
class VerilogPort:
    """A port of a design's top module.

    Parameters
    ----------
    name : its name in Verilog.
    direction : "in" or "out", seen from the module.
    width : bits.
    signed : whether the value is two's complement.
    """

    name: str
    direction: str
    width: int
    signed: bool = False


@dataclass(frozen=True)
class VerilogDesign:
    """A design as Verilog text.

    Parameters
    ----------
    name : the top module.
    text : every module, top first.
    ports : the top's ports in the order of the component's signature, after `clk` and `rst` if it has them.
    """

    name: str
    text: str
    ports: tuple[VerilogPort, ...]

    @property
    def clocked(self) -> bool:
        """Whether the design has a clock."""
        return any(port.name == "clk" for port in self.ports)

    def instantiates(self, module: str) -> bool:
        """Whether some module instantiates the black box `module`."""
        return re.search(rf"^ +{re.escape(module)} +(#\(|\S+ \()", self.text, re.MULTILINE) is not None


def to_verilog(component: wiring.Component, name: str = "top") -> VerilogDesign:
    """Convert a component; the same component gives the same text, byte for byte.

    Parameters
    ----------
    component : `wiring.Component` whose members make the ports.
    name : the top module's name, a Verilog identifier.

    Raises
    ------
    TypeError : the component has no signature.
    ValueError : the name is not an identifier, or two members would make ports of one name.
    """
    if not isinstance(component, wiring.Component):
        raise TypeError(f"component must be an amaranth.lib.wiring.Component, not {component!r}")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"name must be a Verilog identifier, not {name!r}")
    values: dict[str, tuple[Value, PortDirection]] = {}
    ports: list[VerilogPort] = []
    for path, member, value in component.signature.flatten(component):
        port = "_".join(map(str, path))
        if port in values or port in ("clk", "rst"):
            raise ValueError(
                f"two ports of {type(component).__name__} would be named {port!r}; rename a member"
            )
        if isinstance(value, ValueCastable):
            value = Value.cast(value)
        if isinstance(value, Const):  # the ready of a stream that is always ready
            continue
        inward = member.flow == wiring.In
        values[port] = (value, PortDirection.Input if inward else PortDirection.Output)
        ports.append(VerilogPort(port, "in" if inward else "out", len(value), value.shape().signed))
    text = verilog.convert(component, name=name, ports=values, emit_src=False, strip_internal_attrs=True)
    # Yosys drives constant bits of a variable in blocks without a trigger, which Verilator never runs.
    text = tidy(_merge_equal_modules(_CONSTANT.sub(r"  initial\n\1", text)))
    names = re.findall(r"\w+", next(_MODULE.finditer(text)).group(2))  # Yosys may break the line anywhere
    implied = [VerilogPort(signal, "in", 1) for signal in ("clk", "rst") if signal in names]
    return VerilogDesign(name, text, (*implied, *ports))


def _merge_equal_modules(text: str) -> str:
    """The design with each group of equal modules emitted once, under the name of its first member."""
    start = next(_MODULE.finditer(text)).start()
    modules = {match[1]: (match[2], match[3]) for match in _MODULE.finditer(text)}
    kept: dict[bytes, _Module] = {}
    merged: dict[str, _Module] = {}

    def merge(name: str) -> _Module:
        """The module that stands for `name`, after those that it instantiates."""
        if name not in merged:
            header, body = modules[name]
            body = _INSTANCE.sub(
                lambda i: _instance(i, merge(i[1])) if i[1] in modules else i[0],
                body,
            )
            module = _canonical(name, header, body)
            merged[name] = kept.setdefault(hashlib.sha256(module.text.encode()).digest(), module)
            merged[name] = replace(merged[name], renamed=module.renamed)
        return merged[name]

    for name in modules:
        merge(name)
    texts = {module.name: module.text for module in kept.values()}
    order = [name for name in modules if name in texts]
    return text[:start] + "\n".join(f"module {name.rstrip()} {texts[name]}endmodule\n" for name in order)


@dataclass(frozen=True)
class _Module:
    """A module without numbered names: what follows its name, and what became of its numbered names."""

    name: str
    text: str
    renamed: dict[str, str]


def _canonical(name: str, header: str, body: str) -> _Module:
    """The module with numbered names numbered by their first use, and what has no order sorted."""
    declarations = _DECLARATIONS.match(body)
    assert declarations is not None  # it matches nothing, too
    renamed: dict[str, str] = {}
    for match in _NUMBERED.finditer(body[declarations.end() :] + declarations[0]):
        renamed.setdefault(match[0], f"\\${len(renamed) + 1}$ ")

    def rename(text: str) -> str:
        return _NUMBERED.sub(lambda match: renamed.get(match[0], match[0]), text)

    ports = sorted(rename(header).split(", "))
    declared = sorted(_DECLARATION.findall(rename(declarations[0])), key=lambda pair: (pair[1], pair[0]))
    text = "".join(attributes + line for attributes, line in declared) + rename(body[declarations.end() :])
    return _Module(name, f"({', '.join(ports)});\n{text}", renamed)


def _instance(match: re.Match[str], module: _Module) -> str:
    """An instance of the module that stands for its own."""
    connections = sorted(
        f"    .{module.renamed.get(c[1], c[1])}{c[2]}" for c in _CONNECTION.finditer(match[4])
    )
    return f"  {module.name}{match[2]}" + ",\n".join(connections) + "\n"
