"""A cell: one multiplier of the unit's array, with a query's elements and the sums of one lane.

The array has a cell per lane and query. In score mode a cell multiplies a K element by its query's element,
in value mode a V element by the row's weight; product, normalisation, shift and alignment are the same
hardware in both.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import BIN_BITS, LIMB_BITS, WEIGHT_BITS
from ..arithmetic.binned import HELD_TOP_BITS, OFFSET_BITS, BinnedAccumulator, Select, TermAligner
from ..arithmetic.decode import CODE_SIGNIFICAND_BITS, EXPONENT_BITS
from ..arithmetic.product import FACTOR_EXPONENT_BITS, PRODUCT_BITS, WEIGHT_BIAS, Product
from ..arithmetic.scale import ELEMENT_BIAS, Element
from ..arithmetic.score import DOT_TOP_BITS
from ..arithmetic.weight import Weight

DOT_BIN_BIAS = 2 * ELEMENT_BIAS >> OFFSET_BITS
"""What bins of products of a query's and a K element are counted with; it needs no addition."""
DOT_BINS = range(DOT_BIN_BIAS - 9, DOT_BIN_BIAS + 9)
"""These bins."""
SUM_BIN_BIAS = WEIGHT_BIAS + ELEMENT_BIAS >> OFFSET_BITS
"""What bins of products of a weight and a V element are counted with; the least is 3, as the lowest weight is
2^-2^23 and the lowest element 2^-149."""


class QueryElement(data.Struct):
    """An element of 16 bits, and its sign."""

    significand: unsigned(CODE_SIGNIFICAND_BITS)
    exponent: unsigned(EXPONENT_BITS)
    negative: 1


class Cell(wiring.Component):
    """One multiplication per cycle, score or value mode; never waits.

    Parameters
    ----------
    query_states : query elements kept: lines of a row times banks.
    states : binned sums kept: lines of a row times banks.

    Members
    -------
    Factor stage, one cycle before the element comes:

    value : In : value mode.
    weight : In(Weight) : the factor in value mode.
    query_read : In : which query element is the factor in score mode.
    drop : In : score mode: a positive query element counts as zero (bit 0), a negative one (bit 1).

    Element stage:

    element : In(Element) : the decoded element.
    query, query_negative : In : a query's element, which is a bf16 or fp16 number, and its sign.
    query_write, query_address : In : keep it as that query element, a factor from the next cycle on.

    Top stage, `top_cycles` after the element:

    add, first, address : In : value mode: the sum to add to, and whether it starts here.
    bins : Out : score mode: the product's bin, one bit per bin of `DOT_BINS`; none for a zero product.
    held_top : Out : the top bin of the sum at `address`, plus `SUM_BIN_BIAS`; zero if it is empty.

    Select stage, one cycle later:

    select_value : In : value mode.
    line_top : In : score mode: the line's top bin, plus `DOT_BIN_BIAS`.

    Limb stage, one cycle later:

    high, low : Out : the product's limbs under the line's or the sum's top, as magnitudes.
    limb_add, limb_address, negative : In : value mode: the sum to add them to, and their sign.
    held_high, held_low : Out : limbs of the sum at `limb_address`.
    """

    top_cycles = Product.latency_cycles
    select_cycles = top_cycles + 1
    limb_cycles = select_cycles + TermAligner.latency_cycles

    def __init__(self, *, query_states, states):
        self.query_states = query_states
        self.states = states
        super().__init__(
            {
                "value": In(1),
                "weight": In(Weight),
                "query_read": In(range(query_states)),
                "drop": In(2),
                "element": In(Element),
                "query": In(Element),
                "query_negative": In(1),
                "query_write": In(1),
                "query_address": In(range(query_states)),
                "add": In(1),
                "first": In(1),
                "address": In(range(states)),
                "bins": Out(len(DOT_BINS)),
                "held_top": Out(HELD_TOP_BITS),
                "select_value": In(1),
                "line_top": In(DOT_TOP_BITS),
                "high": Out(BIN_BITS),
                "low": Out(BIN_BITS),
                "limb_add": In(1),
                "limb_address": In(range(states)),
                "negative": In(1),
                "held_high": Out(signed(LIMB_BITS)),
                "held_low": Out(signed(LIMB_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.query = kept = memory.Memory(shape=QueryElement, depth=self.query_states, init=[])
        read, write = kept.read_port(domain="comb"), kept.write_port()
        m.d.comb += [
            read.addr.eq(self.query_read),
            write.addr.eq(self.query_address),
            write.data.significand.eq(self.query.significand[-CODE_SIGNIFICAND_BITS:]),
            write.data.exponent.eq(self.query.exponent),
            write.data.negative.eq(self.query_negative),
            write.en.eq(self.query_write),
        ]
        m.submodules.product = product = Product()
        factor = Signal(WEIGHT_BITS, reset_less=True)
        factor_exponent = Signal(FACTOR_EXPONENT_BITS, reset_less=True)
        query = Cat(Const(0, WEIGHT_BITS - CODE_SIGNIFICAND_BITS), read.data.significand)
        dropped = Mux(read.data.negative, self.drop[1], self.drop[0])
        m.d.sync += [
            factor.eq(Mux(self.value, self.weight.significand, Mux(dropped, 0, query))),
            factor_exponent.eq(
                Mux(self.value, self.weight.exponent.as_unsigned() ^ WEIGHT_BIAS, read.data.exponent)
            ),
        ]
        m.d.comb += [
            product.element.eq(self.element),
            product.factor.eq(factor),
            product.factor_exponent.eq(factor_exponent),
        ]

        some, bin = product.some, product.exponent[OFFSET_BITS:]
        m.d.comb += self.bins.eq((some << bin[:DOT_TOP_BITS])[DOT_BINS.start : DOT_BINS.stop])
        m.submodules.sums = sums = BinnedAccumulator(
            states=self.states, limb_delay_cycles=self.limb_cycles - self.top_cycles
        )
        m.d.comb += [
            sums.add.eq(self.add),
            sums.first.eq(self.first),
            sums.address.eq(self.address),
            sums.top.eq(Mux(some, bin, 0)),
            self.held_top.eq(sums.held_top),
        ]

        significand = Signal(PRODUCT_BITS, reset_less=True)
        place = Signal(OFFSET_BITS + DOT_TOP_BITS, reset_less=True)
        m.d.sync += [significand.eq(product.significand), place.eq(product.exponent)]
        below = Signal(DOT_TOP_BITS)
        line_select = Signal(Select)
        m.d.comb += [
            below.eq(self.line_top - place[OFFSET_BITS:]),
            line_select.keep.eq(below == 0),
            line_select.down.eq(below == 1),
        ]
        m.submodules.aligner = aligner = TermAligner(significand_bits=PRODUCT_BITS)
        m.d.comb += [
            aligner.significand.eq(significand),
            aligner.offset.eq(place[:OFFSET_BITS]),
            aligner.select.eq(Mux(self.select_value, sums.select, line_select)),
            self.high.eq(aligner.high),
            self.low.eq(aligner.low),
            sums.limb_add.eq(self.limb_add),
            sums.limb_address.eq(self.limb_address),
            sums.negative.eq(self.negative),
            sums.high.eq(aligner.high),
            sums.low.eq(aligner.low),
            self.held_high.eq(sums.held_high),
            self.held_low.eq(sums.held_low),
        ]
        return m
