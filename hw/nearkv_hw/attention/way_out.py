"""The way out of the array: a step's sums are taken from all lanes of a query at once, and leave in beats."""

from amaranth.hdl import Const, Module, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.numerics import LIMB_BITS
from ..arithmetic.binned import HELD_TOP_BITS
from ..arithmetic.states import merge_tree
from ..common.pipeline import later
from ..interfaces import LanePartial, State
from .abreast import has_block
from .cell import SUM_BIN_BIAS
from .shape import abreast_bits


class WayOut(wiring.Component):
    """Takes sums of `lanes` lanes and gives `finish_lanes` of them in a cycle; never waits.

    Where rows are abreast each row has sums in lanes of its own; those of an element are merged.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    Top stage of the cells:

    top_read, top_query : In : sums are read, of which query.
    tops, flags : In : the top bins and flags of every lane of every query.

    Limb stage:

    limb_read, limb_query : In : as at the top stage.
    beats : In : beats of the step, less one; the next read comes no sooner than they have left.
    abreast : In : log2 of the rows abreast whose sums they are.
    highs, lows : In : the limbs of every lane of every query.

    valid, lanes : Out : a beat; the first `latency_cycles_of(shape)` after the limb stage.
    """

    def __init__(self, *, shape):
        self.shape = shape
        sums = shape.queries * shape.lanes
        super().__init__(
            {
                "top_read": In(1),
                "top_query": In(range(shape.queries)),
                "tops": In(data.ArrayLayout(HELD_TOP_BITS, sums)),
                "flags": In(data.ArrayLayout(3, sums)),
                "limb_read": In(1),
                "limb_query": In(range(shape.queries)),
                "beats": In(range(shape.groups)),
                "abreast": In(abreast_bits(shape)),
                "highs": In(data.ArrayLayout(signed(LIMB_BITS), sums)),
                "lows": In(data.ArrayLayout(signed(LIMB_BITS), sums)),
                "valid": Out(1),
                "lanes": Out(data.ArrayLayout(LanePartial, shape.finish_lanes)),
            }
        )

    @staticmethod
    def latency_cycles_of(shape):
        """Cycles from the limb stage to the first beat."""
        return 2 + exact_log2(shape.rows_abreast)

    def elaborate(self, platform):
        m = Module()
        lanes, groups, rows = self.shape.lanes, self.shape.groups, self.shape.rows_abreast

        def taken(enable, query, values, shape):
            registers = [Signal(shape, reset_less=True) for _ in range(lanes)]
            with m.If(enable), m.Switch(query):
                for number in range(self.shape.queries):
                    with m.Case(number):
                        m.d.sync += [
                            register.eq(values[number * lanes + lane])
                            for lane, register in enumerate(registers)
                        ]
            return registers

        def held(values):
            """The tops stay while the next line's tops come, which they do ahead of its limbs."""
            registers = [Signal.like(value, reset_less=True) for value in values]
            with m.If(self.limb_read):
                m.d.sync += [register.eq(value) for register, value in zip(registers, values, strict=True)]
            return registers

        tops = held(taken(self.top_read, self.top_query, self.tops, HELD_TOP_BITS))
        flags = held(taken(self.top_read, self.top_query, self.flags, 3))
        highs = taken(self.limb_read, self.limb_query, self.highs, signed(LIMB_BITS))
        lows = taken(self.limb_read, self.limb_query, self.lows, signed(LIMB_BITS))

        group, leaves = Signal(range(groups)), Signal()
        last, abreast = Signal.like(group), Signal(abreast_bits(self.shape))
        with m.If(self.limb_read):
            m.d.sync += [group.eq(0), leaves.eq(1), last.eq(self.beats), abreast.eq(self.abreast)]
        with m.Elif(group == last):
            m.d.sync += leaves.eq(0)
        with m.Else():
            m.d.sync += group.eq(group + leaves)

        in_block = exact_log2(groups // rows)
        for lane in range(self.shape.finish_lanes):
            states, flags_of = [], []
            for block in range(rows):
                first = block * lanes // rows
                own = range(first + lane, first + lanes // rows, self.shape.finish_lanes)

                def selected(values, own=own):
                    register = Signal.like(values[0], reset_less=True)
                    with m.If(leaves), m.Switch(group[:in_block]):
                        for number, place in enumerate(own):
                            with m.Case(number):
                                m.d.sync += register.eq(values[place])
                    return register

                here = later(m, has_block(abreast, group[in_block:], block), 1) if rows > 1 else Const(1)
                top = selected(tops)
                state = Signal(State, name=f"state_{lane}_{block}")
                m.d.comb += [
                    state.some.eq(top.any() & here),
                    state.top.eq(top - SUM_BIN_BIAS),
                    state.high.eq(selected(highs)),
                    state.low.eq(selected(lows)),
                ]
                states.append(state)
                flags_of.append(selected(flags) & here.replicate(3))
            state, own_flags = merge_tree(m, states, flags_of)
            m.d.comb += [self.lanes[lane].state.eq(state), self.lanes[lane].flags.eq(own_flags)]
        m.d.sync += self.valid.eq(later(m, leaves, exact_log2(rows)))
        return m
