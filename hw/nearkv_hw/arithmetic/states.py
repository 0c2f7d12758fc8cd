"""Merges of binned sums (docs/numerics.md section 2)."""

from amaranth.hdl import Mux, Signal, signed

from ..abi.numerics import TOP_BITS
from ..common.pipeline import stage


def merge_states(m, merged, a, b):
    """Statements that load the register `merged` with the sum of the states `a` and `b`."""
    distance = Signal(signed(TOP_BITS + 1))
    a_higher, a_one_up, b_one_up, level = Signal(), Signal(), Signal(), Signal()
    m.d.comb += [
        distance.eq(a.top - b.top),
        a_higher.eq(~distance[-1]),
        a_one_up.eq(distance == 1),
        b_one_up.eq(distance == -1),
        level.eq(distance == 0),
    ]
    # keep: the state's top is the merged one. down: it lies one bin below, so its high limb becomes the low
    # one.
    keep_a, down_a, keep_b, down_b = Signal(), Signal(), Signal(), Signal()
    m.d.comb += [
        keep_a.eq(a.some & (~b.some | a_higher)),
        keep_b.eq(b.some & (~a.some | distance[-1] | level)),
        down_a.eq(a.some & b.some & b_one_up),
        down_b.eq(a.some & b.some & a_one_up),
    ]
    m.d.sync += [
        merged.some.eq(a.some | b.some),
        merged.top.eq(Mux(keep_a, a.top, b.top)),
        merged.high.eq(Mux(keep_a, a.high, 0) + Mux(keep_b, b.high, 0)),
        merged.low.eq(
            Mux(keep_a, a.low, Mux(down_a, a.high, 0)) + Mux(keep_b, b.low, Mux(down_b, b.high, 0))
        ),
    ]


def merge_tree(m, states, flags):
    """The sum of as many states as a power of two, and all of their flags: a cycle for every level."""
    while len(states) > 1:
        merged = [Signal.like(state, reset_less=True) for state in states[::2]]
        for into, a, b in zip(merged, states[::2], states[1::2], strict=True):
            merge_states(m, into, a, b)
        flags = [stage(m, a | b) for a, b in zip(flags[::2], flags[1::2], strict=True)]
        states = merged
    return states[0], flags[0]
