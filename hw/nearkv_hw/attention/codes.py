"""How a pass's rows are stored, as the blocks of the unit need it, and the scales of every step."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.formats import BF16, E8M0, FP8_E4M3, FP16, LUT4
from ..abi.lines import LINE_BITS
from ..arithmetic.decode import CODE_BITS, CodeKind, CodeWidth, code_kind, code_width
from ..arithmetic.scale import SCALE_KINDS
from ..common.pipeline import later, stage
from ..interfaces import SCALE_ROW_BITS
from ..row_layout import block_number, is_scale, lines_less_one, scale_shift, wide_scale
from .abreast import of_blocks
from .shape import LineParts, abreast_bits

ONE = 0x3F80
"""The scale of what has none, in bf16."""


def row_codes(shape):
    """How the K or V rows of a pass are stored."""
    return data.StructLayout(
        {
            "kind": CodeKind,
            "width": CodeWidth,
            "codebook": 1,  # codes are those of lut4
            "pitch": 2,  # log2 of the rows that share a line
            "slot_shift": 1,  # log2 of the steps that each of these has
            "lines_last": range(shape.row_lines),  # last line of a row
            "parts": LineParts,  # steps of a line
            "step_shift": 3,  # log2 of the elements of a step
            "steps_last": range(shape.row_lines),  # last step of a row
            "count_last": range(shape.lanes + 1),  # elements of that step
            "scale": 3,  # as descriptors have it, 0 for none
            "block": 3,
            "scale_shift": 3,  # log2 of the bytes of a row's scales
            "abreast": abreast_bits(shape),  # log2 of the rows that are taken at once
        }
    )


def parts_less_one(parts):
    """Steps of a line, less one."""
    return Cat(parts != LineParts.ONE, parts == LineParts.FOUR)


def set_row_codes(shape, codes, *, dim, row_dim, form, scale, block, pitch):
    """Statements that work `row_codes` out from what a job says of the first `dim` elements of `row_dim`."""
    width, whole = code_width(form), exact_log2(shape.line_lanes)
    line_shift = whole + width  # log2 of the elements of a line
    row_shift = (line_shift - pitch)[:4]  # of those that a row has of it
    most = exact_log2(shape.lanes)
    step_shift = Mux(row_shift > most, most, row_shift)
    shifts = range(whole - 2, most + 1)
    lasts = {shift: (dim - 1)[: shift if shift else 1] if shift else Const(0) for shift in shifts}
    steps_last, count_last = Const(0), Const(0)
    for shift in shifts:
        steps_last = Mux(step_shift == shift, (dim - 1)[shift:], steps_last)
        count_last = Mux(step_shift == shift, lasts[shift] + 1, count_last)
    return [
        codes.kind.eq(code_kind(form)),
        codes.width.eq(width),
        codes.codebook.eq(form == LUT4.code),
        codes.pitch.eq(pitch),
        codes.slot_shift.eq(row_shift != step_shift),
        codes.lines_last.eq(lines_less_one(dim, width, CODE_BITS * shape.line_lanes)),
        codes.parts.eq(line_shift - step_shift),
        codes.step_shift.eq(step_shift),
        codes.steps_last.eq(steps_last),
        codes.count_last.eq(count_last),
        codes.scale.eq(scale),
        codes.block.eq(block),
        codes.scale_shift.eq(scale_shift(row_dim, scale, block)),
    ]


class Scales(wiring.Component):
    """Keeps a line of scales of K and one of V, and shows the scales of each step; never waits.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    load, load_value, line, row, second : In : a line of scales of K or of V; which of its rows comes next, or
        that it is the second line of a row's own.
    step, value, number, last, codes : In : a step is taken: of V or K, its number in the row, whether it is
        the row's last one, how the rows are stored. Without `step`, or without scales, all scales are one.
    rows : In : how many rows are taken at once, less one.
    scales, kind : Out : scales of every `shape.scale_lanes` lanes, and what they are, `latency_cycles` later.

    The first cycle works out where in the line the scales are, the second takes them from it. A line that is
    loaded meanwhile does no harm: it is seen from the next cycle on, and a step never comes with it.
    """

    latency_cycles = 2

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "load": In(1),
                "load_value": In(1),
                "line": In(LINE_BITS),
                "row": In(SCALE_ROW_BITS),
                "second": In(1),
                "step": In(1),
                "value": In(1),
                "number": In(range(shape.row_lines)),
                "last": In(1),
                "rows": In(abreast_bits(shape)),
                "codes": In(row_codes(shape)),
                "scales": Out(data.ArrayLayout(CODE_BITS, shape.scale_groups)),
                "kind": Out(CodeKind),
            }
        )

    def elaborate(self, platform):
        m = Module()
        codes = self.codes
        lines = [Signal(2 * LINE_BITS, name=f"line_{of}", reset_less=True) for of in "kv"]
        rows = [Signal(SCALE_ROW_BITS, name=f"row_{of}", reset_less=True) for of in "kv"]
        for value, (line, row) in enumerate(zip(lines, rows, strict=True)):
            with m.If(self.load & (self.load_value == value)):
                with m.If(self.second):
                    m.d.sync += line[LINE_BITS:].eq(self.line)
                with m.Else():
                    m.d.sync += [line[:LINE_BITS].eq(self.line), row.eq(self.row)]
            with m.Elif(self.step & self.last & (self.value == value)):
                m.d.sync += row.eq(row + self.rows + 1)
        row = Mux(self.value, rows[1], rows[0])

        wide, power = wide_scale(codes.scale), is_scale(codes.scale, E8M0)
        scaled = self.step & codes.scale.any()
        # rows abreast lie in a line as their scales do: the place among them is the row's number's end
        places = range(self.shape.rows_abreast)
        starts = [Signal(SCALE_ROW_BITS, name=f"start_{place}") for place in places]
        begin = row & ~Cat(*(codes.abreast >= n for n in places[1:3]), Const(0, SCALE_ROW_BITS))
        m.d.comb += [start.eq((begin | place) << codes.scale_shift) for place, start in enumerate(starts)]
        of_every_block = of_blocks(codes.abreast, starts)
        kinds = {
            BF16: ~scaled | is_scale(codes.scale, BF16) | power,
            FP16: scaled & is_scale(codes.scale, FP16),
            FP8_E4M3: scaled & is_scale(codes.scale, FP8_E4M3),
        }
        for form in SCALE_KINDS:
            m.d.comb += self.kind[form.name].eq(later(m, kinds[form], self.latency_cycles))
        element, element_value = self.number << codes.step_shift, stage(m, self.value)
        element_wide, element_power, element_scaled = stage(m, wide), stage(m, power), stage(m, scaled)
        for group in range(self.shape.scale_groups):
            lane = group * self.shape.scale_lanes
            start = of_every_block[lane // self.shape.line_lanes % len(starts)]
            place = Const(lane)
            for abreast in range(1, abreast_bits(self.shape) + 1):
                own = lane % (self.shape.lanes >> abreast)
                place = Mux(codes.abreast == abreast, own, place)
            at = Signal(SCALE_ROW_BITS + 1, name=f"at_{group}", reset_less=True)
            word = Signal(CODE_BITS, name=f"word_{group}")
            byte = Signal(8, name=f"byte_{group}")
            m.d.sync += at.eq(start + (block_number(element + place, codes.block) << wide))
            m.d.comb += [
                word.eq(
                    Mux(element_value, *(line.word_select(at[1:], CODE_BITS) for line in reversed(lines)))
                ),
                byte.eq(word.word_select(at[0] & ~element_wide, 8)),
            ]
            subnormal = (byte == 0) | byte.all()  # 2^-127 is one of bf16's; the other is NaN
            as_bf16 = Cat(Const(0, 6), subnormal, byte, Const(0, 1))
            code = Mux(element_power, as_bf16, Mux(element_wide, word, byte))
            m.d.sync += self.scales[group].eq(Mux(element_scaled, code, Const(ONE, CODE_BITS)))
        return m
