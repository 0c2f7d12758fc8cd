"""Many count-downs in step."""

from functools import reduce
from operator import or_

from amaranth.hdl import Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ...common.trees import reduce_tree


class Countdowns(wiring.Component):
    """Distances in frames that must pass, one for each of several banks or groups.

    Bit k of all count-downs is one vector, so that one operation on vectors counts all of them: few cells,
    and few instructions in simulation.

    Parameters
    ----------
    count : count-downs.
    distances : distances that can be started, in frames, each at least 1.

    Members
    -------
    tick : In(1) : a frame ends.
    start : In(count).array : for each distance, the count-downs that start it in this frame. Effective with
        `tick`. A start never shortens what is under way.
    over : Out(count) : those in whose frame the next command may be.

    After a start of distance n in frame f, `over` is clear in frames f + 1 to f + n - 1.
    """

    def __init__(self, *, count, distances):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be a positive integer, not {count!r}")
        distances = tuple(distances)
        if not distances or not all(isinstance(d, int) and d >= 1 for d in distances):
            raise ValueError(f"distances must be integers of at least 1, not {distances!r}")
        self.count = count
        self.distances = distances
        super().__init__({"tick": In(1), "start": In(count).array(len(distances)), "over": Out(count)})

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(max(self.distances))
        if bits == 0:  # a distance of one frame leaves nothing to wait for
            m.d.comb += self.over.eq(~Const(0, self.count))
            return m
        planes = [Signal(self.count, name=f"bit_{k}") for k in range(bits)]
        running = Signal(self.count)
        m.d.comb += [running.eq(reduce_tree(planes, or_)), self.over.eq(~running)]

        left, borrow = [], running
        for plane in planes:
            left.append(plane ^ borrow)
            borrow = borrow & ~plane
        for n, (start, distance) in enumerate(zip(self.start, self.distances, strict=True)):
            value = distance - 1
            reached = Signal(self.count, name=f"reached_{n}")  # as far or further off already
            further, equal = [], ~Const(0, self.count)
            for k in reversed(range(bits)):
                if value >> k & 1:
                    equal = equal & left[k]
                else:
                    further.append(equal & left[k])
            m.d.comb += reached.eq(reduce(or_, further, equal))
            chosen = Signal(self.count, name=f"chosen_{n}")
            m.d.comb += chosen.eq(start & ~reached)
            merged = []
            for k in range(bits):
                plane = Signal(self.count, name=f"left_{n}_{k}")
                m.d.comb += plane.eq(left[k] | chosen if value >> k & 1 else left[k] & ~chosen)
                merged.append(plane)
            left = merged
        with m.If(self.tick):
            m.d.sync += [plane.eq(value) for plane, value in zip(planes, left, strict=True)]
        return m
