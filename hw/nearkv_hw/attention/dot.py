"""Dot products of one query: the lanes' products become a line's binned sum, the lines' sums a row's."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi.numerics import BIN_BITS
from ..arithmetic.binned import BinnedAccumulator, Select, lowered
from ..arithmetic.score import DOT_LIMB_BITS, DOT_TOP_BITS, DotProduct
from ..common.pipeline import later
from ..common.trees import pipelined_tree, reduce_tree, tree_stages
from .cell import DOT_BINS, Cell

TREE_LEVELS = 2
"""Adder levels between registers."""


class LineFlags(data.Struct):
    """What a line's products are beside numbers; with `nan` the rest has no meaning."""

    nan: 1
    positive: 1  # a product is +Inf
    negative: 1  # a product is -Inf


class DotProducts(wiring.Component):
    """Sums one line of products per cycle; never waits. A row's lines come as consecutive valid lines.

    Parameters
    ----------
    lanes : products of a line.

    Members
    -------
    Top stage of the cells:

    valid : In : a line of K is here.
    bins : In : every lane's bin, one bit per bin of `DOT_BINS`.

    Select stage, one cycle later:

    line_top : Out : the line's top bin, plus `DOT_BIN_BIAS`; zero if there is none.

    Limb stage, one cycle later:

    limb_valid : In : a line of K is here.
    high, low : In : every lane's aligned limbs, as magnitudes.
    negative : In : every lane's sign.

    Row stage, `tree_cycles_of(lanes)` later:

    row_valid, row_first : In : a line of K is here; it is its row's first.
    flags : In(LineFlags) : the line's special products.

    dot : Out(DotProduct) : the row's dot product, `row_cycles` after the row stage of its last line.
    """

    row_cycles = 2

    def __init__(self, *, lanes):
        if not isinstance(lanes, int) or lanes < 2:
            raise ValueError(f"lanes must be an integer of at least 2, not {lanes!r}")
        self.lanes = lanes
        super().__init__(
            {
                "valid": In(1),
                "bins": In(data.ArrayLayout(len(DOT_BINS), lanes)),
                "line_top": Out(DOT_TOP_BITS),
                "limb_valid": In(1),
                "high": In(data.ArrayLayout(BIN_BITS, lanes)),
                "low": In(data.ArrayLayout(BIN_BITS, lanes)),
                "negative": In(lanes),
                "row_valid": In(1),
                "row_first": In(1),
                "flags": In(LineFlags),
                "dot": Out(DotProduct),
            }
        )

    @staticmethod
    def tree_cycles_of(lanes):
        """Cycles from the limb stage to the row stage."""
        return tree_stages(lanes, TREE_LEVELS)

    def elaborate(self, platform):
        m = Module()
        tree_cycles = self.tree_cycles_of(self.lanes)

        # the highest bin of the line
        bins = reduce_tree([self.bins[lane] for lane in range(self.lanes)], lambda a, b: a | b)
        line_bins = Signal(len(DOT_BINS))
        m.d.comb += line_bins.eq(bins)
        line_top = Signal(DOT_TOP_BITS, reset_less=True)
        highest = Signal(DOT_TOP_BITS)
        for index, position in enumerate(DOT_BINS):
            with m.If(line_bins[index]):
                m.d.comb += highest.eq(position)
        with m.If(self.valid):
            m.d.sync += line_top.eq(highest)
        m.d.comb += self.line_top.eq(line_top)

        # Sums of the lanes' limbs. A negative limb is inverted, x becomes 2^32 - 1 - x; how many there are,
        # counted above the sum of the high limbs, sets that right for the sums of all lanes.
        enables = [self.limb_valid]
        for _ in range(tree_cycles - 1):
            enable = Signal()
            m.d.sync += enable.eq(enables[-1])
            enables.append(enable)
        sum_bits = BIN_BITS + ceil_log2(self.lanes)

        def lane_sum(limbs, bits):
            return pipelined_tree(
                m, limbs, lambda a, b: (a + b)[:bits], shape=bits, levels=TREE_LEVELS, enables=enables
            )

        def set_right(total):
            above = Signal(DOT_LIMB_BITS - BIN_BITS)
            m.d.comb += above.eq(total[BIN_BITS:sum_bits] - negatives)
            return (Cat(total[:BIN_BITS], above) + negatives)[:DOT_LIMB_BITS]

        highs, lows = (
            [limbs[lane] ^ negative.replicate(BIN_BITS) for lane, negative in enumerate(self.negative)]
            for limbs in (self.high, self.low)
        )
        room = Const(0, sum_bits - BIN_BITS)
        counted = [Cat(limb, room, negative) for limb, negative in zip(highs, self.negative, strict=True)]
        high = lane_sum(counted, sum_bits + self.lanes.bit_length())
        low = lane_sum(lows, sum_bits)
        negatives = high[sum_bits:]
        high, low = set_right(high), set_right(low)
        top = later(m, line_top, Cell.limb_cycles - Cell.select_cycles + tree_cycles)

        # sum of the lines
        m.submodules.row = row = BinnedAccumulator(
            states=1,
            top_bits=DOT_TOP_BITS,
            limb_bits=DOT_LIMB_BITS,
            addend=signed(DOT_LIMB_BITS),
            limb_delay_cycles=1,
        )
        line_high = Signal(signed(DOT_LIMB_BITS), reset_less=True)
        line_low = Signal(signed(DOT_LIMB_BITS), reset_less=True)
        row_valid = Signal()
        m.d.sync += [line_high.eq(high), line_low.eq(low), row_valid.eq(self.row_valid)]
        select = Signal(Select)
        m.d.comb += [
            row.add.eq(self.row_valid),
            row.first.eq(self.row_first),
            row.top.eq(top),
            select.eq(row.select),
            row.limb_add.eq(row_valid),
            row.high.eq(Mux(select.keep, line_high, 0)),
            row.low.eq(Mux(select.keep, line_low, Mux(select.down, line_high, 0))),
        ]
        flags = Signal(LineFlags, reset_less=True)
        with m.If(self.row_valid):
            m.d.sync += flags.eq(Mux(self.row_first, 0, flags.as_value()) | self.flags.as_value())
        row_top = Signal(DOT_TOP_BITS, reset_less=True)
        row_flags = Signal(LineFlags, reset_less=True)
        m.d.sync += [row_top.eq(row.held_top), row_flags.eq(flags)]
        m.d.comb += [
            self.dot.top.eq(lowered(row_top)),
            self.dot.high.eq(row.held_high),
            self.dot.low.eq(row.held_low),
            self.dot.nan.eq(row_flags.nan),
            self.dot.positive.eq(row_flags.positive),
            self.dot.negative.eq(row_flags.negative),
        ]
        return m
