"""The check of everything that a descriptor's own line tells."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    MAX_GROUP,
    MAX_PAGE_ROWS_LOG2,
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
    Opcode,
    Status,
)
from ..abi.formats import (
    LUT4,
    LUT_SCALES,
    QUERY_FORMATS,
    ROW_FORMATS,
    SCALE_FORMATS,
    SCALED_BITS,
    OutputForm,
)
from ..abi.lines import LINE_BITS, LINE_BYTES, LINE_SHIFT
from ..abi.numerics import SOFTCAP_LIMIT
from ..abi.rows import BLOCK_CODES, SCALES_BY_CODE
from ..arithmetic.decode import code_width
from ..arithmetic.float32 import is_special
from ..interfaces import LINE_ADDRESS_BITS
from ..structs import among, layout_of
from .records import Checked, Posted, WalkRead

_OPTIONS = (
    *(OPTION_CAUSAL, OPTION_TREE, OPTION_LATENT, OPTION_SUMMARIES, OPTION_SELECT),
    *(OPTION_ALIBI, OPTION_RANGES, OPTION_CODEBOOK),
)
_CAUSAL, _TREE, _LATENT, _SUMMARIES, _SELECT, _ALIBI, _RANGES, _CODEBOOK = (
    option.bit_length() - 1 for option in _OPTIONS
)
_OF_EXTENTS = (Opcode.CLAIM_EXTENTS, Opcode.RELEASE_EXTENTS)
_LUT_SCALES = [SCALE_FORMATS[name] for name in LUT_SCALES]


class Check(wiring.Component):
    """Judges descriptors one after the other, in the order of the `Status` codes up to BAD_ADDRESS; NO_UNITS
    comes after BAD_FLAGS.

    Parameters
    ----------
    capacity_lines : lines of the device's memory, a power of two.
    units : attention units; without any, every attention job is refused.

    Members
    -------
    i : In(stream(Posted)) : descriptors.
    tables : Out(stream(WalkRead)) : for every good attention job the read of its table's header.
    o : Out(stream(Checked)) : every descriptor; a status other than OK ends it.
    idle : In(1) : no descriptor that went out is still unfinished.

    A claim, a release and a NOP go out when everything before them is finished, and what follows waits for
    their end: a job sees the extents as its place in the ring says. Latency is 1 cycle, throughput one
    descriptor in
    `interval_cycles`, a claim or NOP in one more.
    """

    latency_cycles = 1
    interval_cycles = 2

    def __init__(self, *, capacity_lines, units):
        if capacity_lines < 1 or capacity_lines & (capacity_lines - 1):
            raise ValueError(f"capacity_lines must be a power of two, not {capacity_lines!r}")
        if not isinstance(units, int) or units < 0:
            raise ValueError(f"units must be a non-negative integer, not {units!r}")
        self.capacity_lines = capacity_lines
        self.units = units
        super().__init__(
            {
                "i": In(stream.Signature(Posted)),
                "tables": Out(stream.Signature(WalkRead)),
                "o": Out(stream.Signature(Checked)),
                "idle": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        attend = data.View(layout_of(ATTEND), self.i.payload.line)
        extended = Signal()
        more = Signal(layout_of(EXTENSION))  # zero without an extension
        m.d.comb += [
            extended.eq((attend.flags & FLAG_EXTENDED) != 0),
            more.eq(Mux(extended, self.i.payload.extension, 0)),
        ]
        claim = data.View(layout_of(CLAIM), self.i.payload.line)
        is_attend = attend.opcode == Opcode.ATTEND
        faults = {  # in the order in which they are reported
            Status.BAD_VERSION: attend.version != DESCRIPTOR_VERSION,
            Status.BAD_OPCODE: ~among(attend.opcode, Opcode),
            Status.BAD_FLAGS: self._bad_flags(attend, more),
            Status.NO_UNITS: is_attend if self.units == 0 else Const(0),
            Status.BAD_GEOMETRY: is_attend & _bad_geometry(attend, extended, more),
            Status.BAD_FORMAT: is_attend & _bad_format(attend, more),
            Status.BAD_FACTOR: is_attend & (is_special(attend.score_factor) | (more.softcap > SOFTCAP_LIMIT)),
            Status.BAD_ADDRESS: is_attend & self._bad_address(attend, more),
        }
        found = Signal(len(faults))
        status = Signal(Status)
        is_job, is_claim = Signal(), Signal()
        table_line = Signal(LINE_ADDRESS_BITS, reset_less=True)
        good, attends, fence = Signal(), Signal(), Signal()
        sent, asked = Signal(), Signal()
        m.d.comb += [
            good.eq(~found.any()),
            attends.eq(is_job & good),
            fence.eq(~is_job & good),
        ]
        for n, fault in reversed(list(enumerate(faults))):
            with m.If(found[n]):
                m.d.comb += status.eq(fault)

        ticket, job, extents = self.o.payload.ticket, self.o.payload.job, self.o.payload.claim
        m.d.comb += [
            self.o.payload.attends.eq(attends),
            self.o.payload.claims.eq(is_claim & good),
            ticket.tenant.eq(self.i.payload.tenant),
            ticket.index.eq(self.i.payload.index),
            ticket.fetched.eq(self.i.payload.fetched),
            ticket.tag.eq(attend.tag),
            ticket.status.eq(status),
            job.tenant.eq(self.i.payload.tenant),
            job.form.eq(attend.output_form),
            job.sinks.eq((attend.flags & FLAG_SINKS) != 0),
            extents.tenant.eq(self.i.payload.tenant),
            extents.release.eq(attend.opcode == Opcode.RELEASE_EXTENTS),
            extents.first_extent.eq(claim.first_extent),
            extents.extent_count.eq(claim.extent_count),
            self.tables.payload.line.eq(table_line),
            self.tables.payload.last.eq(1),
            self.tables.payload.tenant.eq(self.i.payload.tenant),
        ]
        for name in ("table", "queries", "result", "sinks"):
            m.d.comb += job[f"{name}_line"].eq(attend[name] >> LINE_SHIFT)
        for name in (
            *("row_begin", "row_end", "score_factor", "output_scale"),
            *("head_dim", "value_dim", "group", "query_rows"),
            "page_rows_log2",
            *("k_format", "v_format", "query_format", "kv_head"),
        ):
            m.d.comb += job[name].eq(attend[name])
        for name in (*_ROW_FIELDS, "softcap", "window", "kept"):
            m.d.comb += job[name].eq(more[name])
        m.d.comb += [
            job.position.eq(more.first_position),
            job.causal.eq(more.options[_CAUSAL] | more.window.any()),
            job.ranges.eq(more.options[_RANGES]),
            job.ranges_line.eq(more.ranges),
            job.range_count.eq(more.range_count),
            job.tree.eq(more.options[_TREE]),
            job.tree_line.eq(more.tree),
            job.summaries.eq(more.options[_SUMMARIES]),
            job.select.eq(more.options[_SELECT]),
            job.select_pages.eq(more.select_pages),
            job.selected_line.eq(more.selected),
            job.slopes.eq(more.options[_ALIBI]),
            job.slopes_line.eq(more.slopes),
            job.codebook.eq(more.options[_CODEBOOK]),
            job.codebook_line.eq(more.codebooks),
            job.latent.eq(more.options[_LATENT]),
        ]

        with m.FSM():
            with m.State("TEST"):
                m.d.sync += [
                    found.eq(Cat(faults.values())),
                    is_job.eq(is_attend),
                    is_claim.eq(among(attend.opcode, _OF_EXTENTS)),
                    table_line.eq(attend.table >> LINE_SHIFT),
                    sent.eq(0),
                    asked.eq(0),
                ]
                with m.If(self.i.valid):
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += [
                    self.tables.valid.eq(attends & ~asked),
                    self.o.valid.eq(~sent & (self.idle | ~fence)),
                ]
                with m.If(self.tables.ready):
                    m.d.sync += asked.eq(1)
                with m.If(self.o.valid & self.o.ready):
                    m.d.sync += sent.eq(1)
                with m.If((asked | ~attends | self.tables.ready) & (sent | (self.o.valid & self.o.ready))):
                    with m.If(fence):
                        m.next = "FENCE"
                    with m.Else():
                        m.d.comb += self.i.ready.eq(1)
                        m.next = "TEST"
            with m.State("FENCE"):
                # By now `idle` tells of what just went out.
                with m.If(self.idle):
                    m.d.comb += self.i.ready.eq(1)
                    m.next = "TEST"
        return m

    def _bad_flags(self, attend, more):
        """A flag that opcode or device has not, or a field without meaning that is not zero."""
        line = self.i.payload.line
        known = FLAG_SINKS | FLAG_EXTENDED
        positioned = (more.options[_CAUSAL] | more.options[_ALIBI] | more.window.any()) & ~more.options[_TREE]
        allowed = (attend.opcode == Opcode.ATTEND) & ((attend.flags & ~known) == 0)
        reserved = (
            ((attend.opcode == Opcode.NOP) & (line & NOP.reserved_mask()).any())
            | (among(attend.opcode, _OF_EXTENTS) & (line & CLAIM.reserved_mask()).any())
            | (
                (attend.opcode == Opcode.ATTEND)
                & (
                    (line & ATTEND.reserved_mask()).any()
                    | (more.as_value() & _EXTENSION_NOT_HAD).any()
                    | (~positioned & more.first_position.any())
                    | (~more.window.any() & more.kept.any())
                    | (~more.options[_ALIBI] & more.slopes.any())
                    | (~more.options[_CODEBOOK] & more.codebooks.any())
                    | (~more.options[_RANGES] & Cat(more.ranges, more.range_count).any())
                    | (~more.options[_TREE] & more.tree.any())
                    | (~more.options[_SELECT] & Cat(more.select_pages, more.selected).any())
                    # trees hide rows, and with them pages, in ways that only their masks tell
                    | (more.options[_SELECT] & (~more.options[_SUMMARIES] | more.options[_TREE]))
                    | (
                        more.options[_LATENT]
                        & Cat(attend.v_format, more.v_scale, more.v_block, more.v_pitch).any()
                    )
                )
            )
        )
        return (attend.flags.any() & ~allowed) | reserved

    def _bad_address(self, attend, more):
        """A part of the job that starts at no whole line, or beyond the memory."""
        sinks = (attend.flags & FLAG_SINKS) != 0
        return (
            self._outside(attend.table)
            | self._outside(attend.queries)
            | self._outside(attend.result)
            | (sinks & self._outside(attend.sinks))
            | Cat(
                more[name] >> self.capacity_lines.bit_length() - 1
                for name in ("slopes", "codebooks", "ranges", "tree", "selected")
            ).any()
        )

    def _outside(self, address):
        capacity_shift = LINE_SHIFT + self.capacity_lines.bit_length() - 1
        return address[:LINE_SHIFT].any() | address[capacity_shift:].any()


def _bad_geometry(attend, extended, more):
    return Cat(
        attend.head_dim == 0,
        attend.value_dim == 0,
        attend.group == 0,
        attend.group > MAX_GROUP,
        more.options[_LATENT] & (attend.value_dim > attend.head_dim),
        more.options[_SELECT] & ~more.select_pages.any(),
        attend.query_rows == 0,
        (attend.query_rows != 1) & ~extended,
        attend.page_rows_log2 < MIN_PAGE_ROWS_LOG2,
        attend.page_rows_log2 > MAX_PAGE_ROWS_LOG2,
    ).any()


def _bad_format(attend, more):
    whole = [form.code for form in ROW_FORMATS.values() if form.bits > SCALED_BITS]
    latent = more.options[_LATENT]
    codebook = (attend.k_format == LUT4.code) | ((attend.v_format == LUT4.code) & ~latent)
    wrong = [
        ~among(attend.query_format, [form.code for form in QUERY_FORMATS.values()]),
        ~among(attend.output_form, OutputForm),
        codebook != more.options[_CODEBOOK],
    ]
    for rows, dim in (("k", "head"), ("v", "value")):
        form, scale, block = attend[f"{rows}_format"], more[f"{rows}_scale"], more[f"{rows}_block"]
        not_with_lut4 = [code for code, of in SCALES_BY_CODE.items() if of not in _LUT_SCALES]
        bad = [
            ~among(form, [form.code for form in ROW_FORMATS.values()]),
            (form == LUT4.code) & among(scale, not_with_lut4),
            ~among(scale, [0, *SCALES_BY_CODE]),
            ~among(block, BLOCK_CODES.values()),
            scale.any() & among(form, whole),
            block.any() & ~scale.any(),
            _bad_pitch(more[f"{rows}_pitch"], attend[f"{dim}_dim"], code_width(form)),
        ]
        wrong += bad if rows == "k" else [Cat(bad).any() & ~latent]
    return Cat(wrong).any()


def _bad_pitch(pitch, dim, width):
    """Whether rows share lines that they should not, or not as many of them as they should."""
    fits = [dim <= (LINE_BYTES // 2 >> shared) << width for shared in range(3)]  # of 16-bit elements
    return ((pitch == 1) & (~fits[1] | fits[2])) | ((pitch == 2) & ~fits[2]) | (pitch == 3)


_ROW_FIELDS = [f"{rows}_{what}" for rows in "kv" for what in ("scale", "block", "pitch")]
_FIELDS_HAD = (
    *(*_ROW_FIELDS, "softcap", "window", "kept", "first_position", "slopes", "codebooks"),
    *("ranges", "range_count", "tree", "select_pages", "selected"),
)
_EXTENSION_NOT_HAD = ((1 << LINE_BITS) - 1) & ~(
    sum(((1 << EXTENSION[name].width) - 1) << EXTENSION.offset(name) for name in _FIELDS_HAD)
    | sum(_OPTIONS) << EXTENSION.offset("options")
)
"""Bits of an extension that must be zero."""
