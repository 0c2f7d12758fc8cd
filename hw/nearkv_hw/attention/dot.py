"""Dot products of one query: the lanes' products become a line's binned sum, the lines' sums a row's."""

from operator import or_

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from ..abi.numerics import BIN_BITS
from ..arithmetic.binned import BinnedAccumulator, Select, lowered
from ..arithmetic.score import DOT_LIMB_BITS, DOT_TOP_BITS, DotProduct
from ..common.pipeline import later, stage
from ..common.trees import pipelined_tree, reduce_tree, tree_stages
from .abreast import first_blocks, of_blocks, of_rows
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

    With `rows` of four the lanes are four blocks, which can have two or four rows beside each other, each of
    one line: row n of two has blocks 2n and 2n + 1, row n of four block n. There is a dot product for each.

    Parameters
    ----------
    lanes : products of a line.
    rows : rows that the lanes can have at once, at most: 1 or 4.

    Members
    -------
    Top stage of the cells:

    valid : In : a line of K is here.
    abreast : In : log2 of the rows that it has at once.
    bins : In : every lane's bin, one bit per bin of `DOT_BINS`.

    Select stage, one cycle later:

    line_tops : Out : of every block of lanes the top bin of its row's line, plus `DOT_BIN_BIAS`; zero if
        there is none.

    Limb stage, one cycle later:

    limb_valid : In : a line of K is here.
    high, low : In : every lane's aligned limbs, as magnitudes.
    negative : In : every lane's sign.

    Row stage, `tree_cycles_of(lanes)` later:

    row_valid, row_first : In : a line of K is here; it is its row's first.
    flags : In(LineFlags) per row : the line's special products.

    dots : Out(DotProduct) per row : the row's dot product, `row_cycles` after the row stage of its last line.
    """

    row_cycles = 2

    def __init__(self, *, lanes, rows=1):
        if not isinstance(lanes, int) or lanes < 2:
            raise ValueError(f"lanes must be an integer of at least 2, not {lanes!r}")
        if rows not in (1, 4) or lanes % rows:
            raise ValueError(f"rows must be 1 or 4 and divide lanes={lanes}, not {rows!r}")
        self.lanes = lanes
        self.rows = rows
        super().__init__(
            {
                "valid": In(1),
                "abreast": In(exact_log2(rows)),
                "bins": In(data.ArrayLayout(len(DOT_BINS), lanes)),
                "line_tops": Out(data.ArrayLayout(DOT_TOP_BITS, rows)),
                "limb_valid": In(1),
                "high": In(data.ArrayLayout(BIN_BITS, lanes)),
                "low": In(data.ArrayLayout(BIN_BITS, lanes)),
                "negative": In(lanes),
                "row_valid": In(1),
                "row_first": In(1),
                "flags": In(data.ArrayLayout(LineFlags, rows)),
                "dots": Out(data.ArrayLayout(DotProduct, rows)),
            }
        )

    @staticmethod
    def tree_cycles_of(lanes):
        """Cycles from the limb stage to the row stage."""
        return tree_stages(lanes, TREE_LEVELS)

    def elaborate(self, platform):
        m = Module()
        tree_cycles = self.tree_cycles_of(self.lanes)

        # the highest bin of each row's line
        def over(block):
            size = self.lanes // self.rows
            return range(block * size, (block + 1) * size)

        blocks = range(self.rows)
        bins = [reduce_tree([self.bins[lane] for lane in over(block)], or_) for block in blocks]
        tops = []
        for block, row_bins in enumerate(of_blocks(self.abreast, of_rows(self.abreast, bins, or_))):
            line_bins = Signal(len(DOT_BINS), name=f"line_bins_{block}")
            line_top = Signal(DOT_TOP_BITS, reset_less=True, name=f"line_top_{block}")
            highest = Signal(DOT_TOP_BITS, name=f"highest_{block}")
            m.d.comb += line_bins.eq(row_bins)
            for index, position in enumerate(DOT_BINS):
                with m.If(line_bins[index]):
                    m.d.comb += highest.eq(position)
            with m.If(self.valid):
                m.d.sync += line_top.eq(highest)
            m.d.comb += self.line_tops[block].eq(line_top)
            tops.append(later(m, line_top, Cell.limb_cycles - Cell.select_cycles + tree_cycles))

        # Sums of the lanes' limbs. A negative limb is inverted, x becomes 2^32 - 1 - x; how many there are,
        # counted above the sum of the high limbs, sets that right for the sums of all lanes.
        enables = [self.limb_valid]
        for _ in range(tree_cycles - 1):
            enable = Signal()
            m.d.sync += enable.eq(enables[-1])
            enables.append(enable)
        sum_bits = BIN_BITS + ceil_log2(self.lanes)
        at_sums = later(m, self.abreast, Cell.limb_cycles - Cell.top_cycles + tree_cycles - 1)
        at_row = later(m, at_sums, 1)

        def lane_sums(limbs, bits):
            """Of each row the sum over its lanes."""

            def add(a, b):
                return (a + b)[:bits]

            def tree(block, enables):
                items = [limbs[lane] for lane in over(block)]
                return pipelined_tree(m, items, add, shape=bits, levels=TREE_LEVELS, enables=enables)

            if self.rows == 1:
                return [tree(0, enables)]
            sums = []  # the last two levels are those over the blocks
            for total in of_rows(at_sums, [tree(block, enables[:-1]) for block in blocks], add):
                register = Signal(bits, reset_less=True)
                with m.If(enables[-1]):
                    m.d.sync += register.eq(total)
                sums.append(register)
            return sums

        def set_right(total, negatives):
            above = Signal(DOT_LIMB_BITS - BIN_BITS)
            m.d.comb += above.eq(total[BIN_BITS:sum_bits] - negatives)
            return (Cat(total[:BIN_BITS], above) + negatives)[:DOT_LIMB_BITS]

        highs, lows = (
            [limbs[lane] ^ negative.replicate(BIN_BITS) for lane, negative in enumerate(self.negative)]
            for limbs in (self.high, self.low)
        )
        room = Const(0, sum_bits - BIN_BITS)
        counted = [Cat(limb, room, negative) for limb, negative in zip(highs, self.negative, strict=True)]
        high_sums = lane_sums(counted, sum_bits + self.lanes.bit_length())
        low_sums = lane_sums(lows, sum_bits)
        row_tops = first_blocks(at_row, tops)
        for row, (high, low, top) in enumerate(zip(high_sums, low_sums, row_tops, strict=True)):
            negatives = high[sum_bits:]
            line_high = Signal(signed(DOT_LIMB_BITS), reset_less=True, name=f"line_high_{row}")
            line_low = Signal(signed(DOT_LIMB_BITS), reset_less=True, name=f"line_low_{row}")
            m.d.sync += [
                line_high.eq(set_right(high, negatives)),
                line_low.eq(set_right(low, negatives)),
            ]
            if row == 0:
                self._row_of_lines(m, top, line_high, line_low)
            else:
                m.d.comb += [
                    self.dots[row].top.eq(lowered(later(m, top, self.row_cycles))),
                    self.dots[row].high.eq(stage(m, line_high)),
                    self.dots[row].low.eq(stage(m, line_low)),
                    _flags_of(self.dots[row]).eq(later(m, self.flags[row].as_value(), self.row_cycles)),
                ]
        return m

    def _row_of_lines(self, m, top, high, low):
        """The first row's dot product sums its lines: `top` is here, the limbs come a cycle later."""
        m.submodules.row = row = BinnedAccumulator(
            states=1,
            top_bits=DOT_TOP_BITS,
            limb_bits=DOT_LIMB_BITS,
            addend=signed(DOT_LIMB_BITS),
            limb_delay_cycles=1,
        )
        select = Signal(Select)
        m.d.comb += [
            row.add.eq(self.row_valid),
            row.first.eq(self.row_first),
            row.top.eq(top),
            select.eq(row.select),
            row.limb_add.eq(later(m, self.row_valid, 1)),
            row.high.eq(Mux(select.keep, high, 0)),
            row.low.eq(Mux(select.keep, low, Mux(select.down, high, 0))),
        ]
        flags = Signal(LineFlags, reset_less=True)
        with m.If(self.row_valid):
            m.d.sync += flags.eq(Mux(self.row_first, 0, flags.as_value()) | self.flags[0].as_value())
        row_top = Signal(DOT_TOP_BITS, reset_less=True)
        m.d.sync += row_top.eq(row.held_top)
        m.d.comb += [
            self.dots[0].top.eq(lowered(row_top)),
            self.dots[0].high.eq(row.held_high),
            self.dots[0].low.eq(row.held_low),
            _flags_of(self.dots[0]).eq(stage(m, flags.as_value())),
        ]


def _flags_of(dot):
    """A dot product's flags, as `LineFlags` has them."""
    return Cat(dot.nan, dot.positive, dot.negative)
