"""An element: a code times its scale, exactly."""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi.formats import BF16, ELEMENT_FORMATS, FP8_E4M3, FP16, LUT_FORMAT, SCALE_FORMATS
from .decode import CODE_SIGNIFICAND_BITS, EXPONENT_BITS, CodeElement

SIGNIFICAND_BITS = 18
"""Bits of an element's significand, so that a product fits a multiplier of 18 by 18 bits."""


def _normalised_bits(form):
    """Bits of a normalised significand: the only integer of all its bits is a power of two."""
    return form.bits - 1 if form.integer else form.significand_bits


_NARROW = max(_normalised_bits(form) for form in ELEMENT_FORMATS.values() if form.bits <= 8)
assert _NARROW + max(form.significand_bits for form in SCALE_FORMATS.values()) <= SIGNIFICAND_BITS
assert LUT_FORMAT.significand_bits + FP8_E4M3.significand_bits <= SIGNIFICAND_BITS


SCALE_KINDS = (BF16, FP16, FP8_E4M3)
"""What a scale's code is decoded as; one of e8m0 as bf16."""


ELEMENT_BIAS = 1 << EXPONENT_BITS - 1
"""What an element's exponent is stored with, so that it has no sign."""


class Element(data.Struct):
    """A finite element's magnitude: significand / 2^17 * 2^(exponent - `ELEMENT_BIAS`); a zero element has
    significand zero.

    The significand's leading one is its top bit, so that the exponent is that of the leading one.
    """

    significand: unsigned(SIGNIFICAND_BITS)
    exponent: unsigned(EXPONENT_BITS)


class Decoded(data.Struct):
    """A code or a scale: a magnitude, its sign, and what it is when it is no number."""

    element: CodeElement
    negative: 1
    nan: 1
    infinite: 1
    counts: 1  # a code that does not is zero, whatever its scale


class Scaler(wiring.Component):
    """Multiplies one code by its scale per cycle, `latency_cycles` after they came; never waits.

    Members
    -------
    code, scale : In(Decoded).
    element : Out(Element) : the magnitude of the product; zero for NaN and infinities.
    negative, nan, infinite : Out : its sign, and what it is when it is no number.
    """

    latency_cycles = 2
    code: In(Decoded)
    scale: In(Decoded)
    element: Out(Element)
    negative: Out(1)
    nan: Out(1)
    infinite: Out(1)

    def elaborate(self, platform):
        m = Module()
        code, scale = self.code, self.scale

        def zero(side):
            return ~side.element.significand[-1] & ~side.infinite & ~side.nan

        product = Signal(2 * CODE_SIGNIFICAND_BITS, reset_less=True)
        exponent = Signal(EXPONENT_BITS, reset_less=True)
        first = {name: Signal(name=f"{name}_1", reset_less=True) for name in ("negative", "nan", "infinite")}
        second = {name: Signal(name=f"{name}_2", reset_less=True) for name in first}
        nan = code.counts & (
            code.nan | scale.nan | (code.infinite & zero(scale)) | (zero(code) & scale.infinite)
        )
        element = Signal(Element, reset_less=True)
        cut = len(product) - SIGNIFICAND_BITS  # bits that no pair of a format and its scales has
        m.d.sync += [
            product.eq(code.element.significand * scale.element.significand),
            exponent.eq(code.element.exponent.as_unsigned() + scale.element.exponent.as_unsigned()),
            first["negative"].eq(code.negative ^ scale.negative),
            first["nan"].eq(nan),
            first["infinite"].eq(code.counts & (code.infinite | scale.infinite) & ~nan),
            element.significand.eq(Mux(product[-1], product[cut:], product[cut - 1 :])),
            element.exponent.eq(exponent + product[-1] + ELEMENT_BIAS),
            *(second[name].eq(first[name]) for name in first),
        ]
        m.d.comb += [
            self.element.eq(element),
            self.negative.eq(second["negative"]),
            self.nan.eq(second["nan"]),
            self.infinite.eq(second["infinite"]),
        ]
        return m
