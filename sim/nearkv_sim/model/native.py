"""The model device's attention in C++: jobs to the kernel of `native/attention.cpp`, result lines back.

Good jobs of a doorbell are checked and walked in C++, too (`native/attention_walk.cpp`), and never become
objects of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import numerics
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.descriptor import ATTEND, TREE_ROW_BYTES
from nearkv_hw.abi.formats import E8M0, LUT4, LUT_ENTRIES, LUT_FORMAT, Format, OutputForm
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import (
    DENOMINATOR,
    ENTRIES_PER_LINE,
    ENTRY,
    LANE_NAN,
    LANE_NEGATIVE_INFINITY,
    LANE_POSITIVE_INFINITY,
    LAYOUT_VERSION,
    QUERY_NAN,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
)
from nearkv_hw.abi.rows import ELEMENTS_BY_CODE, SCALES_BY_CODE

from ..compiled import compiled_library
from ..port import Lines
from ..verilate import NATIVE, Report
from .attention import Work
from .job import Job
from .memory import EXTENT_LINES_SHIFT, Memory
from .walker import ENTRY_FIXED_BITS, list_lines

JOB = np.dtype(
    [
        *((name, "u8") for name in ("entries", "result", "runs", "positions", "tree", "slopes", "codebooks")),
        *((name, "i8") for name in ("row_begin", "row_end", "run_count", "own_rows", "window", "kept")),
        *((name, "i8") for name in ("query_line", "sink_line", "result_bytes")),
        *((name, "u4") for name in ("factor", "softcap", "output_scale")),
        *((name, "i4") for name in ("page_rows_log2", "head_dim", "value_dim", "group", "query_rows")),
        *((name, "i4") for name in ("causal", "latent", "k_format", "v_format", "query_format", "form")),
        *((name, "i4") for name in ("k_scale", "v_scale", "k_block", "v_block")),
        *((name, "i4") for name in ("k_pitch", "k_scale_pitch", "v_pitch", "v_scale_pitch")),
        *((name, "i4") for name in ("k_scales_at", "v_at", "v_scales_at")),
        *((name, "i4") for name in ("high", "low", "flags", "denominator")),
    ],
    align=True,
)
"""A job as the kernel takes it. Entries are the page table's from the row range's first page on; without runs
all rows of the range are read; line -1 stands for no sinks. k_block and v_block are elements, 0 for the whole
row; pitches are bytes; k_scales_at, v_at and v_scales_at are byte offsets of areas in a page; high, low,
flags and denominator are byte offsets of planes in a query's result."""
KIND = np.dtype(
    [
        ("job", JOB),
        ("query_lines", "i8"),
        ("result_lines", "i8"),
        ("sink_lines", "i8"),
        ("page_lines", "i8"),
        ("passes", "i8"),
    ],
    align=True,
)
"""What descriptors that are walked together have in common: their job, in which each one's entries, result,
rows, lines and factors are left to the walk; lines of all its queries and results, of its sinks (0 for
none), and of a page; and how often rows are read."""
DEVICE = np.dtype([("image", "u8"), ("owners", "u8"), ("extents", "i8"), ("slices", "i8")], align=True)
"""A device's memory: its lines, and the owner of each extent."""
_CPP_TYPES = {"u4": "std::uint32_t", "i4": "std::int32_t", "i8": "std::int64_t"}
_CPP_POINTERS = {
    "entries": "const std::uint64_t*",
    "result": "std::uint8_t*",
    "runs": "const std::int64_t*",
    "positions": "const std::int64_t*",
    "tree": "const std::uint8_t*",
    "slopes": "const std::uint32_t*",
    "codebooks": "const std::uint16_t*",
    "image": "const std::uint8_t*",
    "owners": "const std::int8_t*",
}
_PLACES = (
    ("attend", ATTEND, ("table", "queries", "result", "sinks", "row_begin", "row_end", "kv_head")),
    ("attend", ATTEND, ("score_factor", "output_scale")),
    ("table", TABLE, ("magic", "version", "heads", "entries", "committed_rows")),
)
"""Fields that C++ takes out of records."""
SOURCES = tuple(f"attention{part}.cpp" for part in ("", "_rows", "_decode", "_partial", "_walk"))
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
        "EXTENT_LINES_SHIFT": EXTENT_LINES_SHIFT,
        "ENTRIES_PER_LINE": ENTRIES_PER_LINE,
        "ENTRY_LINE_SHIFT": ENTRY.offset("line"),
        "ENTRY_LINE_MASK": (1 << ENTRY["line"].width) - 1,
        "LAYOUT_VERSION": LAYOUT_VERSION,
        "TABLE_MAGIC_NUMBER": TABLE_MAGIC,
        "LUT_CODE": LUT4.code,
        "LUT_FORMAT": LUT_FORMAT.code,
        "LUT_ENTRIES": LUT_ENTRIES,
        "TREE_ROW_BYTES": TREE_ROW_BYTES,
    }
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
            "// An element or scale format; a NaN code of -1 is none, `power` stands for e8m0.",
            "struct Format { int bits; int exponent_bits; int fraction_bits; int exponent_bias;",
            "                bool infinities; int nan_code; bool power; };",
            *_formats("kFormats", ELEMENTS_BY_CODE),
            *_formats("kScales", {code - 1: form for code, form in SCALES_BY_CODE.items()}),
            "struct TanhOctave { int bits; int width; int first; };",
            f"constexpr TanhOctave kTanhOctaves[] = {{{_braced(numerics.TANH_OCTAVES)}}};",
            "struct TanhSegment { std::int64_t t; std::int64_t b; std::int64_t c; };",
            f"constexpr TanhSegment kTanhTable[] = {{{_braced(numerics.TANH_TABLE)}}};",
            "// A field of a record: the byte at which its word of 64 bits begins, and its bits in there.",
            "struct Place { int byte; int shift; std::uint64_t mask; };",
            *(
                f"constexpr Place k{_camel(f'{record}_{name}')} = {_place(layout, name)};"
                for record, layout, names in _PLACES
                for name in names
            ),
            f"constexpr std::uint64_t kEntryFixedBits = {ENTRY_FIXED_BITS:#x};",
            *_struct("Job", JOB),
            *_struct("Kind", KIND),
            *_struct("Device", DEVICE),
            "}",
            "",
        ]
    )


class Native:
    """The kernel: called with jobs it returns their results, as `attention.attend` does.

    Parameters
    ----------
    library : the compiled kernel.
    """

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        self._attend = functions.nearkv_attend
        self._attend.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._attend.restype = ctypes.c_int
        self._walk = functions.nearkv_walk
        self._walk.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._walk.argtypes += [ctypes.c_size_t, *[ctypes.c_void_p] * 5]
        self._walk.restype = None

    def __call__(self, work: Sequence[Work], memory: Memory) -> list[Lines]:
        """The results of jobs, in their order: lines [queries * lines of a result, 64] each."""
        ends = [0, *accumulate(job.shape.queries * job.shape.result.lines for job, _ in work)]
        out = np.empty((ends[-1], LINE_BYTES), dtype=np.uint8)
        address = out.ctypes.data
        jobs = np.empty(len(work), dtype=JOB)
        kept: list[npt.NDArray[np.generic]] = []
        for index, (job, pages) in enumerate(work):
            entries = pages.astype(np.uint64) << np.uint64(ENTRY.offset("line"))
            kept.append(entries)  # alive until the kernel is done
            jobs[index] = _record(job)
            kept += _point_to_lists(jobs[index], job)
            jobs[index]["entries"] = entries.ctypes.data
            jobs[index]["result"] = address + ends[index] * LINE_BYTES
        self.attend(jobs, memory)
        return [out[begin:end] for begin, end in pairwise(ends)]

    def attend(self, jobs: npt.NDArray[np.void], memory: Memory) -> None:
        """Carry out jobs, `JOB` [n], on as many threads as torch would use."""
        image = memory.lines.ctypes.data
        if self._attend(image, jobs.ctypes.data, len(jobs), torch.get_num_threads()):
            raise MemoryError("the attention kernel has no memory for its sums")

    def walk(
        self,
        device: npt.NDArray[np.void],
        kind: npt.NDArray[np.void],
        descriptors: Lines,
        tenant: int,
    ) -> Walked:
        """Check and walk descriptors [n, 64] of one kind, by the records `DEVICE` [1] and `KIND` [1]."""
        count, slices = len(descriptors), int(device["slices"][0])
        results = np.empty((count, int(kind["result_lines"][0]), LINE_BYTES), np.uint8)
        jobs = np.empty(count, JOB)
        result_lines, streamed = np.empty(count, np.int64), np.empty((count, slices), np.int64)
        reads = np.zeros(slices, np.int64)
        outcome = (results, jobs, result_lines, streamed, reads)
        self._walk(
            device.ctypes.data,
            kind.ctypes.data,
            tenant,
            np.ascontiguousarray(descriptors).ctypes.data,
            count,
            *(array.ctypes.data for array in outcome),
        )
        return Walked(*outcome)


class Walked(NamedTuple):
    """What `Native.walk` found; where a result line is -1 a job is not good, and the rest says nothing.

    Members
    -------
    results : where jobs' results come to lie, [n, lines, 64].
    jobs : `JOB` [n].
    result_lines : the first line of each one's result in the memory, int64 [n].
    streamed : K and V lines of a pass in each slice, int64 [n, slices].
    reads : lines that good jobs read through the fabric, int64 [slices].
    """

    results: Lines
    jobs: npt.NDArray[np.void]
    result_lines: npt.NDArray[np.int64]
    streamed: npt.NDArray[np.int64]
    reads: npt.NDArray[np.int64]


def load_kernel(report: Report | None = None, options: Sequence[str] = ()) -> Native:
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
        sources=[NATIVE / name for name in SOURCES],
        generated={"attention_abi.h": attention_header()},
        options=[*_OPTIONS, *options],
        report=report,
    )
    return Native(library)


def device_record(memory: Memory, slices: int) -> npt.NDArray[np.void]:
    """A device's memory for `Native.walk`."""
    owners = memory.owners
    return np.array([(memory.lines.ctypes.data, owners.ctypes.data, len(owners), slices)], DEVICE)


def kind_record(job: Job, passes: int) -> npt.NDArray[np.void]:
    """A kind of jobs for `Native.walk`, by one of them and how often it reads its rows."""
    shape = job.shape
    return np.array(
        [
            (
                _record(job),
                shape.queries * shape.query_lines,
                shape.queries * shape.result.lines,
                0 if job.sink_line is None else list_lines(shape.group),
                job.layout.page_lines,
                passes,
            )
        ],
        KIND,
    )


def _record(job: Job) -> tuple[int | tuple[int, ...], ...]:
    """A job as `JOB` has it, without what it points to."""
    shape, layout, asked = job.shape, job.layout, job.asked
    lines, planes = _result_places(shape.value_dim, shape.form)
    seen = job.seen
    values = {
        "row_begin": job.row_begin,
        "row_end": job.row_end,
        "run_count": 0 if seen is None else len(seen.runs),
        "own_rows": 0 if seen is None else seen.own_rows,
        "window": asked.window if asked else 0,
        "kept": asked.kept if asked else 0,
        "query_line": job.query_line,
        "sink_line": -1 if job.sink_line is None else job.sink_line,
        "result_bytes": lines * LINE_BYTES,
        "factor": job.factor,
        "page_rows_log2": job.page_rows_log2,
        "causal": asked.causal if asked else 0,
        "k_block": layout.k.block or 0,
        "v_block": layout.value.block or 0,
        **dict(zip(("k_pitch", "k_scale_pitch", "v_pitch", "v_scale_pitch"), layout.pitches, strict=True)),
        **dict(zip(("k_scales_at", "v_at", "v_scales_at"), layout.areas[1:], strict=True)),
        **dict(zip(("high", "low", "flags", "denominator"), planes, strict=True)),
    }
    return tuple(
        values[name] if name in values else 0 if name in _CPP_POINTERS else int(getattr(shape, name))
        for name in JOB.names or ()
    )


def _point_to_lists(record: np.void, job: Job) -> list[npt.NDArray[np.generic]]:
    """Let a job's record point to its lists; returns what has to live until the kernel is done."""
    seen = job.seen
    if seen is None:
        return []
    slopes = None if seen.slopes is None else seen.slopes.astype(np.uint32)
    lists = {
        "runs": seen.runs if len(seen.runs) else np.zeros((1, 2), np.int64),
        "positions": seen.positions,
        "tree": seen.tree,
        "slopes": slopes,
        "codebooks": seen.codebooks,
    }
    kept: list[npt.NDArray[np.generic]] = []
    for name, values in lists.items():
        if values is not None:
            kept.append(np.ascontiguousarray(values))
            record[name] = kept[-1].ctypes.data
    return kept


@cache
def _result_places(value_dim: int, form: OutputForm) -> tuple[int, tuple[int, int, int, int]]:
    """Lines of a query head's result, and where its high, low, flags and denominator begin."""
    layout = ResultLayout(value_dim, form)
    ends = [lines * LINE_BYTES for lines in accumulate(layout.planes)]
    high, low, flags = ends[:3] if form is OutputForm.PARTIAL else (0, 0, 0)
    return layout.lines, (high, low, flags, ends[-1])


def _constant_type(value: int) -> str:
    return "int" if -(1 << 31) <= value < 1 << 31 else "std::int64_t"


def _formats(name: str, formats: Mapping[int, Format]) -> list[str]:
    """A table of formats by their codes, which are 0, 1, 2, ..."""
    assert sorted(formats) == list(range(len(formats)))
    rows = []
    for code in sorted(formats):
        form = formats[code]
        nan = form.nan_codes[0] if form.nan_codes else -1
        fields = (form.bits, form.exponent_bits, form.fraction_bits, form.exponent_bias)
        flags = [str(flag).lower() for flag in (form.infinities, form is E8M0)]
        rows.append(f"{{{', '.join(map(str, fields))}, {flags[0]}, {nan}, {flags[1]}}}")
    return [f"constexpr Format {name}[] = {{{', '.join(rows)}}};"]


def _braced(rows: Iterable[Iterable[int]]) -> str:
    return ", ".join(f"{{{', '.join(map(str, row))}}}" for row in rows)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _place(layout: Layout, name: str) -> str:
    word, shift = divmod(layout.offset(name), 64)
    return f"{{{word * 8}, {shift}, {(1 << layout[name].width) - 1:#x}}}"


def _struct(name: str, kind: np.dtype[np.void]) -> list[str]:
    """A structure as numpy lays it out."""
    types = {"job": "Job", **_CPP_POINTERS}
    members = [f"{types.get(n) or _CPP_TYPES[kind[n].str[1:]]} {n};" for n in kind.names or ()]
    return [
        f"struct {name} {{ {' '.join(members)} }};",
        f"static_assert(sizeof({name}) == {kind.itemsize});",
    ]
