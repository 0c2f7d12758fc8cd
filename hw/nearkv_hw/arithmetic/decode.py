"""Element decode: a code becomes a sign, a normalised significand and an exponent."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, enum, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import BF16, FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, INT4, INT8, LUT4, ROW_FORMATS
from ..common.trees import normalise_steps, one_hot_select

CODE_SIGNIFICAND_BITS = max(BF16.significand_bits, FP16.significand_bits)
"""Bits of a decoded code's significand; its leading one is its top bit."""
EXPONENT_BITS = 9
"""Bits of an element's exponent, signed: scales included, -149 to 142."""
CODE_BITS = 16

EXPANDED = (BF16, FP16, FP8_E4M3, FP4_E2M1, INT8, INT4)
"""Formats that the decoder tells apart. A code of e5m2 is the upper byte of an fp16 code, and one of e8m0
has a bf16 code of its value."""


class CodeKind(data.Struct):
    """A code's format: one bit of `EXPANDED` is set."""

    bf16: 1
    fp16: 1
    fp8_e4m3: 1
    fp4_e2m1: 1
    int8: 1
    int4: 1


def code_kind(code):
    """The `CodeKind` of a format's number in descriptors, as a value; of lut4 that of its table's numbers."""
    as_fp16 = (FP16, FP8_E5M2, LUT4)
    return Cat(Cat(code == f.code for f in (as_fp16 if form is FP16 else (form,))).any() for form in EXPANDED)


class CodeWidth(enum.Enum, shape=2):
    """Bits of a code: 16, 8 or 4."""

    WHOLE = 0
    BYTE = 1
    NIBBLE = 2


def code_width(code):
    """The `CodeWidth` of a format's number in descriptors, as a value."""
    of_bits = {16: CodeWidth.WHOLE, 8: CodeWidth.BYTE, 4: CodeWidth.NIBBLE}
    width = Const(0, 2)
    for form in ROW_FORMATS.values():
        width = Mux(code == form.code, of_bits[form.bits].value, width)
    return width


class CodeElement(data.Struct):
    """A finite code's magnitude: significand / 2^10 * 2^exponent; a zero has significand zero.

    The significand's leading one is its top bit, so that the exponent is that of the leading one.
    """

    significand: unsigned(CODE_SIGNIFICAND_BITS)
    exponent: signed(EXPONENT_BITS)


class ElementDecoder(wiring.Component):
    """Decodes one code per cycle, `latency_cycles` after it came; never waits.

    Parameters
    ----------
    formats : formats that come, of `EXPANDED`.

    Members
    -------
    code : In : the code, from bit 0 up; a code of e5m2 as fp16, from bit 8 up.
    kind : In(CodeKind) : its format.
    present : In : the code counts; one that does not is decoded as zero, whatever it is.
    counts : Out : it did.
    element : Out(CodeElement) : the magnitude; zero for NaN and infinities.
    negative, nan, infinite : Out : the sign, and what the element is when it is no number.
    """

    latency_cycles = 2

    def __init__(self, formats=EXPANDED):
        self.formats = tuple(formats)
        unknown = [form.name for form in self.formats if form not in EXPANDED]
        if unknown or not self.formats:
            raise ValueError(f"formats must be some of {', '.join(f.name for f in EXPANDED)}, not {unknown}")
        super().__init__(
            {
                "code": In(CODE_BITS),
                "kind": In(CodeKind),
                "present": In(1),
                "element": Out(CodeElement),
                "negative": Out(1),
                "nan": Out(1),
                "infinite": Out(1),
                "counts": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        floats = [form for form in self.formats if not form.integer]
        integers = [form for form in self.formats if form.integer]

        def chosen(forms, values):
            """The value of the kind's format, zero if it is none of these."""
            return one_hot_select([self.kind[form.name] for form in forms], values) if forms else Const(0, 1)

        # fields of floats, with the fraction's first bit and the exponent's last one in fixed places
        fraction, field = Signal(CODE_SIGNIFICAND_BITS - 1), Signal(_FIELD_BITS)
        bias, nan, special = Signal(_FIELD_BITS), Signal(), Signal()
        pads = {form: CODE_SIGNIFICAND_BITS - form.significand_bits for form in floats}
        m.d.comb += [
            fraction.eq(
                chosen(floats, [Cat(Const(0, pads[f]), self.code[: f.fraction_bits]) for f in floats])
            ),
            field.eq(chosen(floats, [self.code[f.fraction_bits : f.bits - 1] for f in floats])),
            bias.eq(chosen(floats, [Const(f.exponent_bias - f.fraction_bits, _FIELD_BITS) for f in floats])),
            special.eq(
                chosen(
                    floats,
                    [
                        self.code[f.fraction_bits : f.bits - 1].all()
                        if f.infinities
                        else _is_nan(f, self.code)
                        for f in floats
                    ],
                )
            ),
            nan.eq(special & fraction.any()),
        ]
        # integers: the magnitude's first bit in the place of the significand's
        magnitudes = [
            Cat(
                Const(0, CODE_SIGNIFICAND_BITS - f.bits),
                Mux(self.code[f.bits - 1], -self.code[: f.bits], self.code[: f.bits])[: f.bits],
            )
            for f in integers
        ]
        magnitude = chosen(integers, magnitudes)
        whole = Cat(self.kind[f.name] for f in integers).any() if integers else Const(0)
        top = chosen(integers, [Const(f.bits - 1, 4) for f in integers])

        raw = Signal(CODE_SIGNIFICAND_BITS, reset_less=True)
        raw_exponent = Signal(EXPONENT_BITS, reset_less=True)
        raw_negative = Signal(reset_less=True)
        raw_nan = Signal(reset_less=True)
        raw_infinite = Signal(reset_less=True)
        raw_counts = Signal(reset_less=True)
        m.d.sync += [
            raw.eq(Mux(self.present & ~special, Cat(fraction, field.any()) | magnitude, 0)),
            raw_exponent.eq(Mux(whole, top, Mux(field == 0, 1, field) - bias)),
            raw_negative.eq(chosen(self.formats, [self.code[f.bits - 1] for f in self.formats])),
            raw_counts.eq(self.present),
            raw_nan.eq(self.present & nan),
            raw_infinite.eq(self.present & special & ~nan),
        ]
        normalised, shift = normalise_steps(m, raw, (8, 4, 2, 1), "raw")
        element = Signal(CodeElement, reset_less=True)
        negative = Signal(reset_less=True)
        element_nan = Signal(reset_less=True)
        infinite = Signal(reset_less=True)
        counts = Signal(reset_less=True)
        m.d.sync += [
            element.significand.eq(normalised),
            element.exponent.eq(raw_exponent - shift),
            negative.eq(raw_negative),
            element_nan.eq(raw_nan),
            infinite.eq(raw_infinite),
            counts.eq(raw_counts),
        ]
        m.d.comb += [
            self.element.eq(element),
            self.negative.eq(negative),
            self.nan.eq(element_nan),
            self.infinite.eq(infinite),
            self.counts.eq(counts),
        ]
        return m


_FIELD_BITS = max(form.exponent_bits for form in EXPANDED)


def _is_nan(form, code):
    """Whether a code of a format without infinities is NaN."""
    return (
        Cat(code[: form.bits - 1] == nan for nan in form.nan_codes).any() if form.nan_codes else Const(0, 1)
    )
