"""The model device's attention in C++: jobs to the kernel of `native/attention.cpp`, result lines back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from nearkv_hw.abi import numerics
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import (
    DENOMINATOR,
    LANE_NAN,
    LANE_NEGATIVE_INFINITY,
    LANE_POSITIVE_INFINITY,
    QUERY_NAN,
    ResultLayout,
)

from ..compiled import compiled_library
from ..port import Lines
from ..verilate import NATIVE, Report
from .attention import Work
from .kernels import Attend
from .memory import Memory
from .walker import FORMATS

JOB = np.dtype(
    [
        ("pages", "u8"),
        ("result", "u8"),
        ("row_begin", "i8"),
        ("row_end", "i8"),
        ("query_line", "i8"),
        ("sink_line", "i8"),
        ("result_bytes", "i8"),
        ("factor", "u4"),
        ("page_rows_log2", "i4"),
        ("head_dim", "i4"),
        ("value_dim", "i4"),
        ("group", "i4"),
        ("k_format", "i4"),
        ("v_format", "i4"),
        ("query_format", "i4"),
        ("form", "i4"),
        ("high", "i4"),
        ("low", "i4"),
        ("flags", "i4"),
        ("denominator", "i4"),
    ],
    align=True,
)
"""A job as the kernel takes it. Pages are the numbers of their first lines, line -1 stands for no sinks, and
high, low, flags and denominator are byte offsets of planes in a query head's result."""
_CPP_TYPES = {"u4": "std::uint32_t", "i4": "std::int32_t", "i8": "std::int64_t"}
_CPP_POINTERS = {"pages": "const std::int64_t*", "result": "std::uint8_t*"}
_SOURCES = ("attention.cpp", "attention_rows.cpp", "attention_partial.cpp")
# Every rounding of a double is the kernel's own; contraction is safe, because each product is exact.
_OPTIONS = ("-O3", "-frounding-math", "-ffp-contract=fast", "-pthread")


def attention_header() -> str:
    """The C++ header `attention_abi.h`: constants of the contract, element formats, and what a job is."""
    constants = {
        **{
            name: value for name, value in vars(numerics).items() if name.isupper() and isinstance(value, int)
        },
        "LINE_BYTES": LINE_BYTES,
        "LANE_NAN": LANE_NAN,
        "LANE_POSITIVE_INFINITY": LANE_POSITIVE_INFINITY,
        "LANE_NEGATIVE_INFINITY": LANE_NEGATIVE_INFINITY,
        "QUERY_NAN": QUERY_NAN,
        **{
            f"DENOMINATOR_{name.upper()}": DENOMINATOR.offset(name) // 8
            for name in ("top", "flags", "high", "low")
        },
        **{f"FORM_{form.name}": int(form) for form in OutputForm},
    }
    members = [
        f"{_CPP_POINTERS.get(name) or _CPP_TYPES[JOB[name].str[1:]]} {name};" for name in JOB.names or ()
    ]
    formats = [
        f"{{{FORMATS[code].exponent_bits}, {FORMATS[code].fraction_bits}, {FORMATS[code].exponent_bias}}}"
        for code in sorted(FORMATS)
    ]
    assert sorted(FORMATS) == list(range(len(FORMATS)))
    table = numerics.EXP2_TABLE
    return "\n".join(
        [
            "// Made by nearkv_sim/model/native.py.",
            "#pragma once",
            "#include <cstdint>",
            "namespace nearkv {",
            *(
                f"constexpr {_constant_type(value)} k{_camel(name)} = {value};"
                for name, value in constants.items()
            ),
            f"constexpr std::int32_t kExp2Table[{len(table)}] = {{{', '.join(map(str, table))}}};",
            "struct Format { int exponent_bits; int fraction_bits; int exponent_bias; };",
            f"constexpr Format kFormats[] = {{{', '.join(formats)}}};",
            f"struct Job {{ {' '.join(members)} }};",
            f"static_assert(sizeof(Job) == {JOB.itemsize});",
            "}",
            "",
        ]
    )


def load_kernel(report: Report | None = None, options: Sequence[str] = ()) -> Attend:
    """The kernel, compiled unless the cache has it.

    Parameters
    ----------
    report : told of that; by default the terminal.
    options : more options of the compiler.

    Raises
    ------
    ToolMissing, BuildError : there is no C++ compiler, or it failed.
    """
    library = compiled_library(
        name="attention",
        sources=[NATIVE / name for name in _SOURCES],
        generated={"attention_abi.h": attention_header()},
        options=[*_OPTIONS, *options],
        report=report,
    )
    function = _function(library)

    def attend(work: Sequence[Work], memory: Memory) -> list[Lines]:
        return _attend(function, work, memory)

    return attend


@cache
def _function(library: Path) -> Callable[..., int]:
    function = ctypes.CDLL(str(library)).nearkv_attend
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


def _attend(function: Callable[..., int], work: Sequence[Work], memory: Memory) -> list[Lines]:
    """The results of jobs, in their order, on as many threads as torch would use."""
    places = [_result_places(job.shape.value_dim, job.shape.form) for job, _ in work]
    ends = [
        0,
        *accumulate(job.shape.group * lines for (job, _), (lines, _) in zip(work, places, strict=True)),
    ]
    out = np.empty((ends[-1], LINE_BYTES), dtype=np.uint8)
    address = out.ctypes.data
    rows, kept = [], []
    for (job, pages), (lines, planes), begin in zip(work, places, ends[:-1], strict=True):
        shape = job.shape
        pages = np.ascontiguousarray(pages, dtype=np.int64)
        kept.append(pages)  # alive until the kernel is done
        rows.append(
            (
                *(pages.__array_interface__["data"][0], address + begin * LINE_BYTES),
                *(job.row_begin, job.row_end),
                *(job.query_line, -1 if job.sink_line is None else job.sink_line),
                *(lines * LINE_BYTES, job.factor, job.page_rows_log2),
                *(shape.head_dim, shape.value_dim, shape.group),
                *(shape.k_format, shape.v_format, shape.query_format, shape.form),
                *planes,
            )
        )
    jobs = np.array(rows, dtype=JOB)
    status = function(memory.lines.ctypes.data, jobs.ctypes.data, len(work), torch.get_num_threads())
    if status:
        raise MemoryError("the attention kernel has no memory for its sums")
    return [out[begin:end] for begin, end in pairwise(ends)]


@cache
def _result_places(value_dim: int, form: OutputForm) -> tuple[int, tuple[int, int, int, int]]:
    """Lines of a query head's result, and where its high, low, flags and denominator begin."""
    layout = ResultLayout(value_dim, form)
    ends = [lines * LINE_BYTES for lines in accumulate(layout.planes)]
    high, low, flags = ends[:3] if form is OutputForm.PARTIAL else (0, 0, 0)
    return layout.lines, (high, low, flags, ends[-1])


def _constant_type(value: int) -> str:
    return "int" if -(1 << 31) <= value < 1 << 31 else "std::int64_t"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
