"""Traffic through a compiled pair of link layers; the loop over cycles is C++ (`native/link.cpp`)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from ctypes import c_char, c_uint32, c_uint64
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkv_hw.abi.cxl import M2S_REQ, M2S_RWD, S2M_DRS, S2M_NDR
from nearkv_hw.abi.flits import CRC_BITS, FLIT_BITS, Retry
from nearkv_hw.abi.flits256 import BEAT_BITS, BEATS, MESSAGES
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES

from .designs import design_of
from .verilate import NATIVE, Recipe, Report, build

if TYPE_CHECKING:
    from nearkv_hw.verilog import VerilogDesign

KINDS = ("req", "rwd", "ndr", "drs")
"""Kinds of messages, in the order of every tuple of four here."""
WIRES = ("to_device", "to_host")
_OPTIONS = (
    ("seed", c_uint64, 1),
    ("messages", c_uint64, 1),
    ("idle", c_uint32, 4),
    ("backpressure", c_uint32, 4),
    ("full", c_uint32, 1),
    ("flip", c_uint32, 1),
    ("drop", c_uint32, 1),
    ("repeat", c_uint32, 1),
    ("answering", c_uint32, 1),
)
_RESULTS = (
    ("cycles", 1),
    ("sent", 4),
    ("received", 4),
    ("latency_cycles", 4),
    ("shortest", 4),
    ("flits", 2),
    ("replayed", 2),
    ("accepted", 2),
    ("crc_errors", 2),
    ("flipped", 1),
    ("dropped", 1),
    ("repeated", 1),
    ("retrainings", 1),
    ("recoveries", 1),
    ("recovery_cycles", 1),
    ("longest_recovery", 1),
)
_MESSAGE_ROOM = 400
_C_NAMES = {c_uint64: "std::uint64_t", c_uint32: "std::uint32_t"}


class LinkFailed(AssertionError):
    """A message was lost, repeated, changed or late, or a link layer gave up; with the run's options."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What goes through a link.

    Parameters
    ----------
    messages : messages to create; with `answers`, requests.
    seed : of all that is random.
    idle : for each of `KINDS` the probability of a cycle in which none is offered, though there is one.
        1 for a kind that is not sent.
    backpressure : for each of `KINDS` the probability of a cycle without ready.
    full : of the RwD messages those with all byte enables set; the others' are random.
    flip, drop, repeat : probability, for each flit, of a wrong bit, of a loss and of a repetition.
    answers : the device answers each Req with a DRS and each RwD with an NDR, and sends nothing else.
    """

    messages: int
    seed: int = 1
    idle: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    backpressure: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    full: float = 0.5
    flip: float = 0.0
    drop: float = 0.0
    repeat: float = 0.0
    answers: bool = False

    def __post_init__(self) -> None:
        if self.messages < 1:
            raise ValueError(f"messages must be at least 1, not {self.messages}")
        for name in ("idle", "backpressure"):
            if len(getattr(self, name)) != len(KINDS):
                raise ValueError(f"{name} must have a probability for each of {', '.join(KINDS)}")
        for name in ("idle", "backpressure", "full", "flip", "drop", "repeat"):
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if not 0 <= part <= 1:
                    raise ValueError(f"{name} must be probabilities from 0 to 1, not {part}")
        if any(part == 1 for part in self.backpressure):
            raise ValueError("backpressure must be below 1: what is never taken never ends")
        if all(part == 1 for part in (self.idle[:2] if self.answers else self.idle)):
            raise ValueError("idle must be below 1 for a kind of message that starts the traffic")


@dataclass(frozen=True)
class Passed:
    """What happened.

    Parameters
    ----------
    cycles : of the link layers' clock.
    seconds : of wall time.
    sent, received, latency_cycles, shortest : for each of `KINDS`; latencies from a message's first offer,
        summed, and the least. With answers, from the request's.
    flits, replayed, accepted, crc_errors : for each of `WIRES`: flits on the wire (whole ones), those out of
        the retry buffer, those accepted in sequence, those with a wrong CRC.
    flipped, dropped, repeated : errors injected.
    retrainings : of the physical layer.
    recoveries, recovery_cycles, longest_recovery : from the discovery of an error to the first flit accepted
        after it: how often, and cycles in all and at most.
    """

    cycles: int
    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    latency_cycles: tuple[int, ...]
    shortest: tuple[int, ...]
    flits: tuple[int, ...]
    replayed: tuple[int, ...]
    accepted: tuple[int, ...]
    crc_errors: tuple[int, ...]
    flipped: int
    dropped: int
    repeated: int
    retrainings: int
    recoveries: int
    recovery_cycles: int
    longest_recovery: int


@dataclass(frozen=True, kw_only=True)
class LinkSetup:
    """Which pair of link layers: parameters of `nearkv_hw.link.link.Link`, those of both as `layer`."""

    flit_bytes: int = 68
    latency_cycles: int = 4
    flits_per_cycle: Fraction | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beats(self) -> int:
        """Transfers of the wire for a flit."""
        return 1 if self.flit_bytes == 68 else BEATS


class CompiledLink:
    """A pair of link layers and the wires between them, compiled.

    Parameters
    ----------
    setup : which; built at the first use, then found in the cache.
    report : told of build steps.

    Raises
    ------
    BuildError, ToolMissing : it could not be built.
    """

    def __init__(self, setup: LinkSetup | None = None, report: Report = lambda line: None):
        self.setup = setup or LinkSetup()
        self._library = ctypes.CDLL(str(_library(self.setup, report)))

    def run(self, traffic: Traffic) -> Passed:
        """Send traffic and check every message that arrives, in its order.

        Raises
        ------
        LinkFailed : what went wrong, and the cycle.
        """
        options = _options(traffic, self.setup.beats)
        results, message = _Results(), (c_char * _MESSAGE_ROOM)()
        started = time.perf_counter()
        status = self._library.nearkv_link_run(
            ctypes.byref(options), ctypes.byref(results), message, ctypes.c_size_t(_MESSAGE_ROOM)
        )
        seconds = time.perf_counter() - started
        values: dict[str, Any] = {
            name: int(getattr(results, name)) if count == 1 else tuple(getattr(results, name))
            for name, count in _RESULTS
        }
        passed = Passed(seconds=seconds, **values)
        if status != 0:
            raise LinkFailed(f"{message.value.decode()} with {traffic}, {self.setup}; so far {passed}")
        return passed


class _Options(ctypes.Structure):
    _fields_ = tuple((name, kind if count == 1 else kind * count) for name, kind, count in _OPTIONS)


class _Results(ctypes.Structure):
    _fields_ = tuple((name, c_uint64 if count == 1 else c_uint64 * count) for name, count in _RESULTS)


def _options(traffic: Traffic, beats: int) -> _Options:
    """Traffic as C++ takes it, probabilities in 1 / 2^32; those of errors for each transfer of the wire."""
    options = _Options(seed=traffic.seed, messages=traffic.messages, answering=int(traffic.answers))
    options.full = _probability(traffic.full)
    for name in ("flip", "drop", "repeat"):
        of_flit = getattr(traffic, name)
        setattr(options, name, _probability(1 - (1 - of_flit) ** (1 / beats)))
    for name in ("idle", "backpressure"):
        setattr(options, name, (c_uint32 * len(KINDS))(*map(_probability, getattr(traffic, name))))
    return options


def _probability(value: float) -> int:
    return min(round(value * 2**32), 2**32 - 1)


def link_design(setup: LinkSetup, report: Report) -> VerilogDesign:
    """The Verilog of a link."""
    from nearkv_hw.link.link import Link

    return design_of(
        Link,
        report=report,
        flit_bytes=setup.flit_bytes,
        latency_cycles=setup.latency_cycles,
        flits_per_cycle=setup.flits_per_cycle,
        **setup.layer,
    )


def _library(setup: LinkSetup, report: Report) -> Path:
    design = link_design(setup, report)
    recipe = Recipe(
        name="link",
        top=design.name,
        sources={
            "link_abi.h": link_header(setup),
            "control.vlt": '`verilator_config\nlint_off -file "*.v"\n',
            "design.v": design.text,
        },
        native=[NATIVE / "link.cpp"],
        library=True,
        verilator=["--x-assign", "fast", "--x-initial", "fast", "--no-assert"],
        compile=["-fvisibility=hidden", "-I.."],
        link=["-Wl,-Bsymbolic"],
    )
    return build(recipe, report)


def link_header(setup: LinkSetup) -> str:
    """What C++ is told: the structs above, widths of messages, and which bits of theirs do not cross."""

    def member(kind: str, name: str, count: int) -> str:
        return f"    {kind} {name}{f'[{count}]' if count > 1 else ''};"

    lost = {kind: 0 if setup.beats == 1 else _lost(kind) for kind in KINDS}
    constants = {
        "kReqBits": M2S_REQ.width,
        "kRwdBits": M2S_RWD.width + LINE_BYTES + LINE_BITS,
        "kRwdEnable": M2S_RWD.width,
        "kNdrBits": S2M_NDR.width,
        "kDrsBits": S2M_DRS.width + LINE_BITS,
        "kWireBits": FLIT_BITS + CRC_BITS if setup.beats == 1 else BEAT_BITS,
        "kBeats": setup.beats,
        "kRetryNormal": int(Retry.NORMAL),
        "kRetryAbort": int(Retry.ABORT),
    }
    return "\n".join(
        [
            "// Made by nearkv_sim/link.py.",
            "#pragma once",
            "#include <cstdint>",
            "namespace nearkv {",
            *(f"constexpr unsigned {name} = {value};" for name, value in constants.items()),
            *(
                f"constexpr std::uint32_t k{kind.title()}Lost[] = {_words(bits)};"
                for kind, bits in lost.items()
            ),
            "struct LinkOptions {",
            *(member(_C_NAMES[kind], name, count) for name, kind, count in _OPTIONS),
            "};",
            "struct LinkResults {",
            *(member("std::uint64_t", name, count) for name, count in _RESULTS),
            "};",
            "}",
            "",
        ]
    )


def _lost(kind: str) -> int:
    """The bits of a header that 256-byte messages do not have."""
    here, there = MESSAGES[kind]
    names = {field.name for field in there if not field.reserved}
    return sum(
        ((1 << field.width) - 1) << here.offset(field.name) for field in here if field.name not in names
    )


def _words(bits: int) -> str:
    """An integer as the words of a header in C++."""
    return "{" + ", ".join(f"{bits >> 32 * n & 0xFFFFFFFF:#x}u" for n in range(3)) + "}"
