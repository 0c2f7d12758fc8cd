"""Balanced trees, plain and pipelined, and the steps that bring a leading one to the top."""

from operator import or_

from amaranth.hdl import Const, Mux, Signal
from amaranth.utils import ceil_log2, exact_log2


def reduce_tree(items, operation):
    """`operation` over all items as a balanced tree; ValueError when there are none."""
    items = list(items)
    if not items:
        raise ValueError("a tree needs at least one item")
    while len(items) > 1:
        items = _level(items, operation)
    return items[0]


def one_hot_select(one_hot, values):
    """The value whose bit is set in `one_hot`, zero if none is: AND and OR, not a chain of multiplexers."""
    return reduce_tree(
        [value & bit.replicate(len(value)) for value, bit in zip(values, one_hot, strict=True)], or_
    )


def tree_stages(count, levels):
    """Register stages of a `pipelined_tree` over `count` items with `levels` levels between registers."""
    return -(-ceil_log2(count) // levels)


def pipelined_tree(m, items, operation, *, shape, levels, enables):
    """`operation` over all items with a register after every `levels` levels and after the last one.

    Parameters
    ----------
    m : the module that gets the registers.
    shape : shape of every register.
    enables : one enable per register stage, `tree_stages(len(items), levels)` of them: a stage without work
        holds still, which saves power in silicon and time in simulation.
    """
    items = list(items)
    for enable in enables:
        for _ in range(levels):
            items = _level(items, operation)
        registers = [Signal(shape, reset_less=True) for _ in items]
        with m.If(enable):
            m.d.sync += [register.eq(item) for register, item in zip(registers, items, strict=True)]
        items = registers
    if len(items) != 1:
        raise ValueError(
            f"{len(enables)} stages of {levels} levels leave {len(items)} items; give more enables"
        )
    return items[0]


def normalise_steps(m, value, steps, name):
    """Shift `value` left until its top bit is set, by powers of two in `steps`, largest first.

    Returns (normalised value of the same width, shift). Zero stays zero; its shift has no meaning.
    """
    width, shift = len(value), Const(0)
    for step in steps:
        stepped = Signal(width, name=f"{name}_by_{step}")
        empty = Signal(name=f"{name}_empty_{step}")
        m.d.comb += [
            empty.eq(value[width - step :] == 0),
            stepped.eq(Mux(empty, value << step, value)),
        ]
        value, shift = stepped, shift | empty << exact_log2(step)
    return value, shift


def _level(items, operation):
    return [operation(*items[i : i + 2]) if i + 1 < len(items) else items[i] for i in range(0, len(items), 2)]
