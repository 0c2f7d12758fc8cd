"""Element decode: a bf16 or fp16 code becomes a sign, a normalised significand and an exponent."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import BF16, FP16
from ..common.trees import normalise_steps

SIGNIFICAND_BITS = max(BF16.significand_bits, FP16.significand_bits)
"""Bits of a decoded significand; its leading one is its top bit."""
EXPONENT_BITS = 9
"""Bits of a decoded exponent, signed: -133 (the smallest bf16 subnormal) to 127."""
CODE_BITS = 16


class Element(data.Struct):
    """A finite element's magnitude: significand / 2^10 * 2^exponent; a zero element has significand zero.

    The significand's leading one is its top bit, so that the exponent is that of the leading one.
    """

    significand: unsigned(SIGNIFICAND_BITS)
    exponent: signed(EXPONENT_BITS)


class ElementDecoder(wiring.Component):
    """Decodes one element per cycle, `latency_cycles` after it came; never waits.

    Members
    -------
    code : In : the element's code.
    half : In : the code is fp16, else bf16.
    present : In : the element counts; one that does not is decoded as zero, whatever its code.
    element : Out(Element) : the magnitude; zero for NaN and infinities.
    negative, nan, infinite : Out : the sign, and what the element is when it is no number.
    """

    latency_cycles = 2
    code: In(CODE_BITS)
    half: In(1)
    present: In(1)
    element: Out(Element)
    negative: Out(1)
    nan: Out(1)
    infinite: Out(1)

    def elaborate(self, platform):
        m = Module()
        magnitude = self.code[:-1]
        pads = {format: SIGNIFICAND_BITS - 1 - format.fraction_bits for format in (BF16, FP16)}
        fields = {format: magnitude[format.fraction_bits :] for format in (BF16, FP16)}

        def select(of):
            return Mux(self.half, of(FP16), of(BF16))

        def leading_exponent(format):
            bias = format.exponent_bias - format.fraction_bits
            return Mux(fields[format] == 0, 1, fields[format]) - bias

        fraction = Signal(SIGNIFICAND_BITS - 1)
        m.d.comb += fraction.eq(
            select(
                lambda f: (
                    Cat(Const(0, pads[f]), magnitude[: f.fraction_bits])
                    if pads[f]
                    else magnitude[: f.fraction_bits]
                )
            )
        )
        special = Signal()
        m.d.comb += special.eq(select(lambda f: fields[f].all()))

        raw = Signal(SIGNIFICAND_BITS, reset_less=True)
        raw_exponent = Signal(signed(EXPONENT_BITS), reset_less=True)
        raw_negative = Signal(reset_less=True)
        raw_nan = Signal(reset_less=True)
        raw_infinite = Signal(reset_less=True)
        m.d.sync += [
            raw.eq(Mux(self.present & ~special, Cat(fraction, select(lambda f: fields[f].any())), 0)),
            raw_exponent.eq(select(leading_exponent)),
            raw_negative.eq(self.code[-1]),
            raw_nan.eq(self.present & special & fraction.any()),
            raw_infinite.eq(self.present & special & ~fraction.any()),
        ]
        normalised, shift = normalise_steps(m, raw, (8, 4, 2, 1), "raw")
        element = Signal(Element, reset_less=True)
        negative = Signal(reset_less=True)
        nan = Signal(reset_less=True)
        infinite = Signal(reset_less=True)
        m.d.sync += [
            element.significand.eq(normalised),
            element.exponent.eq(raw_exponent - shift),
            negative.eq(raw_negative),
            nan.eq(raw_nan),
            infinite.eq(raw_infinite),
        ]
        m.d.comb += [
            self.element.eq(element),
            self.negative.eq(negative),
            self.nan.eq(nan),
            self.infinite.eq(infinite),
        ]
        return m
