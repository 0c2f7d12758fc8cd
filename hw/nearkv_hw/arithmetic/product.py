"""The product of a factor (a query element or a weight) and a decoded element, normalised."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import SCORE_FRACTION_BITS, SCORE_LIMIT, WEIGHT_BITS
from .scale import SIGNIFICAND_BITS, Element

FACTOR_EXPONENT_BITS = SCORE_LIMIT.bit_length() + 1 - SCORE_FRACTION_BITS
"""Bits of a weight's exponent n, signed."""
PRODUCT_BITS = WEIGHT_BITS + SIGNIFICAND_BITS
PRODUCT_EXPONENT_BITS = FACTOR_EXPONENT_BITS + 1
WEIGHT_BIAS = 1 << FACTOR_EXPONENT_BITS - 1
"""What a weight's exponent is a factor's with, so that it has no sign."""


class Product(wiring.Component):
    """Multiplies one pair per cycle, `latency_cycles` after it came; never waits.

    Both factors have their leading one at the top, so the product has it at the top or one below, and one
    bit of normalisation is enough. A zero factor has significand zero, and so has the product.

    Members
    -------
    factor : In : a query's significand, padded on the right, or a weight's.
    factor_exponent : In : the exponent of the factor's leading one, with a bias that makes it unsigned.
    element : In(Element) : the element of K or V.
    significand : Out : the product; its top bit is its leading one, clear only when the product is zero.
    exponent : Out : the exponent of that leading one, with both factors' biases.
    some : Out : the product is not zero.
    """

    latency_cycles = 2
    factor: In(WEIGHT_BITS)
    factor_exponent: In(FACTOR_EXPONENT_BITS)
    element: In(Element)
    significand: Out(PRODUCT_BITS)
    exponent: Out(PRODUCT_EXPONENT_BITS)
    some: Out(1)

    def elaborate(self, platform):
        m = Module()
        product = Signal(PRODUCT_BITS, reset_less=True)
        exponent = Signal(PRODUCT_EXPONENT_BITS, reset_less=True)
        significand = Signal(PRODUCT_BITS, reset_less=True)
        leading_exponent = Signal(PRODUCT_EXPONENT_BITS, reset_less=True)
        some = Signal(reset_less=True)
        m.d.sync += [
            product.eq(self.factor * self.element.significand),
            exponent.eq(self.factor_exponent + self.element.exponent),
            some.eq(product[-2:].any()),
            significand.eq(product << ~product[-1]),
            leading_exponent.eq(exponent + product[-1]),
        ]
        m.d.comb += [
            self.significand.eq(significand),
            self.exponent.eq(leading_exponent),
            self.some.eq(some),
        ]
        return m
