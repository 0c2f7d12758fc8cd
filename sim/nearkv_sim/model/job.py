"""What a descriptor asks for: its fields checked, and brought to the form in which jobs are worked."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Feature, Opcode, OutputForm, Status
from nearkv_hw.abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    MAX_CANDIDATES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_LARGE_DIM,
    MAX_PAGE_ROWS_LOG2,
    MAX_VALUE_DIM,
    MIN_PAGE_ROWS_LOG2,
    NOP,
    OPTION_ALIBI,
    OPTION_CAUSAL,
    OPTION_CODEBOOK,
    OPTION_LATENT,
    OPTION_RANGES,
    OPTION_SELECT,
    OPTION_SUMMARIES,
    OPTION_TREE,
)
from nearkv_hw.abi.formats import LUT4, LUT_SCALES, QUERY_FORMATS, SCALE_CODES, SCALED_BITS, Format
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.memory import ResultLayout, RowLayout
from nearkv_hw.abi.numerics import SOFTCAP_LIMIT
from nearkv_hw.abi.rows import Stored

FORMATS: dict[int, Format] = {form.code: form for form in QUERY_FORMATS.values()}
"""Element formats of queries, by code."""
PLAIN = Feature(0)
EXTENDING = Feature.all() & ~(Feature.NARROW | Feature.LARGE_ROWS | Feature.OUTPUT_SCALE)
"""Features that a job asks for in its extension."""
_LAYOUTS = {
    Opcode.NOP: NOP,
    Opcode.ATTEND: ATTEND,
    Opcode.CLAIM_EXTENTS: CLAIM,
    Opcode.RELEASE_EXTENTS: CLAIM,
}
_OPTION_FEATURES = {
    OPTION_CAUSAL: Feature.QUERY_ROWS,
    OPTION_TREE: Feature.TREE,
    OPTION_LATENT: Feature.LATENT,
    OPTION_SUMMARIES: Feature.SELECTION,
    OPTION_SELECT: Feature.SELECTION,
    OPTION_ALIBI: Feature.ALIBI,
    OPTION_RANGES: Feature.RANGES,
    OPTION_CODEBOOK: Feature.CODEBOOKS,
}
_LUT_SCALES = {SCALE_CODES[name] + 1 for name in LUT_SCALES}
_NO_EXTENSION = {name.name: 0 for name in EXTENSION}
_OF_OPTIONS = {
    OPTION_RANGES: ("range_count", "ranges"),
    OPTION_TREE: ("tree",),
    OPTION_ALIBI: ("slopes",),
    OPTION_CODEBOOK: ("codebooks",),
    OPTION_SELECT: ("select_pages", "selected"),
}
"""Fields of the extension that are zero without an option."""


class Refusal(Exception):
    """A descriptor cannot be done, or not to its end; `status` and `detail` are for its completion record."""

    def __init__(self, status: Status, detail: int = 0) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True)
class Shape:
    """What a job's descriptor says about its work, its addresses left aside.

    Jobs of equal shape are worked together. Formats, scales, blocks and pitches are the descriptor's codes.
    """

    head_dim: int
    value_dim: int
    group: int
    k_format: int
    v_format: int
    query_format: int
    form: OutputForm
    query_rows: int = 1
    k_scale: int = 0
    v_scale: int = 0
    k_block: int = 0
    v_block: int = 0
    k_pitch: int = 0
    v_pitch: int = 0
    latent: bool = False
    summaries: bool = False
    softcap: int = 0
    output_scale: int = 0

    @property
    def queries(self) -> int:
        """Queries, query rows and heads together."""
        return self.query_rows * self.group

    def layout(self, page_rows_log2: int) -> RowLayout:
        """How the job's rows lie in pages."""
        return _layout(
            (self.head_dim, self.value_dim, 1 << page_rows_log2),
            (self.k_format, self.k_scale, self.k_block, self.k_pitch),
            (self.v_format, self.v_scale, self.v_block, self.v_pitch),
            self.latent,
            self.summaries,
        )

    @property
    def query_lines(self) -> int:
        """Lines of a query."""
        return self.layout(MIN_PAGE_ROWS_LOG2).query_lines

    @property
    def k_lines(self) -> int:
        """Lines of a K row's codes."""
        return self.layout(MIN_PAGE_ROWS_LOG2).k_lines

    @property
    def v_lines(self) -> int:
        """Lines of a V row's codes."""
        return self.layout(MIN_PAGE_ROWS_LOG2).v_lines

    @property
    def result(self) -> ResultLayout:
        """How a query's result lies in memory."""
        return ResultLayout(self.value_dim, self.form)


@lru_cache(maxsize=1024)
def _layout(
    sizes: tuple[int, int, int],
    k: tuple[int, int, int, int],
    v: tuple[int, int, int, int],
    latent: bool,
    summaries: bool,
) -> RowLayout:
    def stored(element: int, scale: int, block: int, pitch: int) -> Stored:
        return Stored.of(element=element, scale=scale, block=block, pitch=pitch)

    return RowLayout(*sizes, stored(*k), stored(*v), latent, summaries)


@dataclass(frozen=True)
class Asked:
    """What the extension of a descriptor says of who sees what, its addresses as lines; -1 stands for none.

    Members
    -------
    causal, window, kept, first_position, select_pages, range_count : as in the extension; `causal` also
        where there is a window.
    ranges, tree, slopes, codebooks, selected : first lines of lists.
    """

    causal: bool = False
    window: int = 0
    kept: int = 0
    first_position: int = 0
    range_count: int = 0
    select_pages: int = 0
    ranges: int = -1
    tree: int = -1
    slopes: int = -1
    codebooks: int = -1
    selected: int = -1


@dataclass(frozen=True, eq=False)
class Seen:
    """What the lists of a job hold: the rows that count, and what says which query row sees which of them.

    Members
    -------
    runs : int64 [n, 2], rows (begin, end) that any query row may see, rising and disjoint.
    positions : int64 [query_rows].
    own_rows : the first of the query rows' own rows; beyond all rows where there is no tree.
    tree : uint8 [query_rows, 32] masks among the query rows, or None.
    slopes : float32 bits [group] as int64, or None.
    codebooks : uint16 [2, 16], K's and V's numbers, or None.
    """

    runs: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    own_rows: int
    tree: npt.NDArray[np.uint8] | None = None
    slopes: npt.NDArray[np.int64] | None = None
    codebooks: npt.NDArray[np.uint16] | None = None


@dataclass(frozen=True)
class Job:
    """A job whose descriptor is good. Rows and pages are numbered in the context, lines in the device."""

    tenant: int
    shape: Shape
    factor: int
    row_begin: int
    row_end: int
    page_rows_log2: int
    kv_head: int
    table_line: int
    query_line: int
    result_line: int
    sink_line: int | None
    asked: Asked | None = None
    seen: Seen | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Rows of its range."""
        return self.row_end - self.row_begin

    @property
    def first_page(self) -> int:
        """The page of the first row of its range."""
        return self.row_begin >> self.page_rows_log2

    @property
    def layout(self) -> RowLayout:
        """How its rows lie in pages."""
        return self.shape.layout(self.page_rows_log2)

    @property
    def runs(self) -> npt.NDArray[np.int64]:
        """Rows (begin, end) that are read, int64 [n, 2]."""
        if self.seen is not None:
            return self.seen.runs
        return np.array([[self.row_begin, self.row_end]][: self.rows], dtype=np.int64).reshape(-1, 2)


def opcode_of(head: dict[str, int], descriptor: bytes, features: Feature = PLAIN) -> Opcode:
    """A descriptor's opcode; Refusal for what every opcode's descriptor may not hold."""
    if head["version"] != DESCRIPTOR_VERSION:
        raise Refusal(Status.BAD_VERSION)
    if head["opcode"] not in list(Opcode):
        raise Refusal(Status.BAD_OPCODE)
    opcode = Opcode(head["opcode"])
    known = 0
    if opcode is Opcode.ATTEND:
        known = FLAG_SINKS | (FLAG_EXTENDED if features & EXTENDING else 0)
    reserved = int.from_bytes(descriptor, "little") & _LAYOUTS[opcode].reserved_mask()
    scaled = opcode is Opcode.ATTEND and head["output_scale"] and Feature.OUTPUT_SCALE not in features
    if head["flags"] & ~known or reserved or scaled:
        raise Refusal(Status.BAD_FLAGS)
    return opcode


def check(
    fields: dict[str, int],
    tenant: int,
    config: DeviceConfig,
    features: Feature = PLAIN,
    extension: bytes = b"",
) -> Job:
    """The job that an attend descriptor's fields ask for; Refusal in the order of the status codes, but for
    NO_UNITS, which comes after BAD_FLAGS.

    Version, opcode and flags are the caller's to check, as they are for every opcode; the second line of the
    slot, `extension`, is checked here.
    """
    more = _NO_EXTENSION
    if fields["flags"] & FLAG_EXTENDED:
        more = EXTENSION.unpack(extension)
        _check_flags(fields, more, features)
    if config.units == 0:
        raise Refusal(Status.NO_UNITS)
    _check_geometry(fields, more, features)
    _check_formats(fields, more, features)
    softcap = more["softcap"]
    if fields["score_factor"] >> 23 & 0xFF == 0xFF or softcap > SOFTCAP_LIMIT:
        raise Refusal(Status.BAD_FACTOR)
    options = more["options"]
    shape = Shape(
        **{name: fields[name] for name in ("head_dim", "value_dim", "group", "query_rows")},
        **{name: fields[name] for name in ("k_format", "v_format", "query_format", "output_scale")},
        form=OutputForm(fields["output_form"]),
        **{f"{who}_{what}": more[f"{who}_{what}"] for who in "kv" for what in ("scale", "block", "pitch")},
        latent=bool(options & OPTION_LATENT),
        summaries=bool(options & OPTION_SUMMARIES),
        softcap=softcap,
    )

    def line_of(address: int) -> int:
        if address % LINE_BYTES or address >= config.capacity_bytes:
            raise Refusal(Status.BAD_ADDRESS)
        return address >> LINE_SHIFT

    lines = {name: line_of(fields[name]) for name in ("table", "queries", "result")}
    sinks = line_of(fields["sinks"]) if fields["flags"] & FLAG_SINKS else None
    asked = _asked(more, shape, config) if fields["flags"] & FLAG_EXTENDED else None
    log2 = fields["page_rows_log2"]
    try:
        shape.layout(log2)
    except ValueError:
        raise Refusal(Status.BAD_GEOMETRY) from None
    apart = (fields["row_end"] - 1 >> log2) - (fields["row_begin"] >> log2)
    if more["select_pages"] and apart >= MAX_CANDIDATES:
        raise Refusal(Status.BAD_GEOMETRY)
    return Job(
        tenant=tenant,
        shape=shape,
        factor=fields["score_factor"],
        row_begin=fields["row_begin"],
        row_end=fields["row_end"],
        page_rows_log2=fields["page_rows_log2"],
        kv_head=fields["kv_head"],
        table_line=lines["table"],
        query_line=lines["queries"],
        result_line=lines["result"],
        sink_line=sinks,
        asked=asked,
    )


def _check_flags(fields: dict[str, int], more: dict[str, int], features: Feature) -> None:
    """Whether the device has what an extension asks for, and what it does not use is zero."""
    options, query_rows = more["options"], fields["query_rows"]
    windowed = more["window"] or more["kept"]
    wanted = Feature(0)
    for option, feature in _OPTION_FEATURES.items():
        wanted |= feature if options & option else Feature(0)
    both = OPTION_TREE | OPTION_SELECT
    wanted |= Feature.TREE_SELECTION if options & both == both else Feature(0)
    wanted |= Feature.QUERY_ROWS if windowed or query_rows > 1 else Feature(0)
    wanted |= Feature.SOFTCAP if more["softcap"] else Feature(0)
    positions = (options & (OPTION_CAUSAL | OPTION_ALIBI) or more["window"]) and not options & OPTION_TREE
    unused = [
        options & ~sum(_OPTION_FEATURES),
        *(more[name] for option, names in _OF_OPTIONS.items() if not options & option for name in names),
        0 if positions else more["first_position"],
        0 if more["window"] else more["kept"],
        options & OPTION_SELECT and not options & OPTION_SUMMARIES,
        *(more[field.name] for field in EXTENSION if field.reserved),
    ]
    if options & OPTION_LATENT:
        unused += [fields["v_format"], more["v_scale"], more["v_block"], more["v_pitch"]]
    if wanted & ~features or any(unused):
        raise Refusal(Status.BAD_FLAGS)


def _check_geometry(fields: dict[str, int], more: dict[str, int], features: Feature) -> None:
    large = Feature.LARGE_ROWS in features
    head_dim = fields["head_dim"]
    most_value = MAX_LARGE_DIM if large else MAX_VALUE_DIM
    if more["options"] & OPTION_LATENT:
        most_value = min(most_value, head_dim)
    several = fields["flags"] & FLAG_EXTENDED
    if not (
        1 <= head_dim <= (MAX_LARGE_DIM if large else MAX_HEAD_DIM)
        and 1 <= fields["value_dim"] <= most_value
        and 1 <= fields["group"] <= MAX_GROUP
        and (fields["query_rows"] >= 1 if several else fields["query_rows"] == 1)
        and MIN_PAGE_ROWS_LOG2 <= fields["page_rows_log2"] <= MAX_PAGE_ROWS_LOG2
        and (more["select_pages"] >= 1 or not more["options"] & OPTION_SELECT)
    ):
        raise Refusal(Status.BAD_GEOMETRY)


def _check_formats(fields: dict[str, int], more: dict[str, int], features: Feature) -> None:
    latent = more["options"] & OPTION_LATENT
    rows = [_row_is_good("k", fields["head_dim"], fields, more, features)]
    rows += [] if latent else [_row_is_good("v", fields["value_dim"], fields, more, features)]
    codebook = LUT4.code in (fields["k_format"], -1 if latent else fields["v_format"])
    if not (
        all(rows)
        and codebook == bool(more["options"] & OPTION_CODEBOOK)
        and fields["query_format"] in FORMATS
        and fields["output_form"] in list(OutputForm)
    ):
        raise Refusal(Status.BAD_FORMAT)


def _row_is_good(
    name: str, dim: int, fields: dict[str, int], more: dict[str, int], features: Feature
) -> bool:
    """Whether K or V is stored in a way that exists and the device has."""
    codes = {what: more[f"{name}_{what}"] for what in ("scale", "block", "pitch")}
    try:
        stored = Stored.of(element=fields[f"{name}_format"], **codes)
    except KeyError:
        return False
    form = stored.element
    wanted = Feature(0) if form.code in FORMATS else Feature.NARROW
    wanted |= Feature.CODEBOOKS if form.codebook else Feature(0)
    wanted |= Feature.SCALES if stored.scale else Feature(0)
    wanted |= Feature.SHORT_ROWS if codes["pitch"] else Feature(0)
    return not (
        wanted & ~features
        or (stored.scale is not None and form.bits > SCALED_BITS)
        or (stored.scale is None and codes["block"])
        or (form.codebook and stored.scale is not None and codes["scale"] not in _LUT_SCALES)
        or stored.pitch_code(dim) != codes["pitch"]
    )


def _asked(more: dict[str, int], shape: Shape, config: DeviceConfig) -> Asked:
    options = more["options"]
    found = {}
    for option, names in _OF_OPTIONS.items():
        line = more[names[-1]]
        if options & option and line >= config.capacity_bytes >> LINE_SHIFT:
            raise Refusal(Status.BAD_ADDRESS)
        found[names[-1]] = line if options & option else -1
    return Asked(
        causal=bool(options & OPTION_CAUSAL or more["window"]),
        window=more["window"],
        kept=more["kept"],
        first_position=more["first_position"],
        range_count=more["range_count"],
        select_pages=more["select_pages"],
        **found,
    )
