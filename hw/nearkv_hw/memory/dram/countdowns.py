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
    over_others : for each distance, whether it can be started while a longer one is under way, which it must
        not shorten; by default all.

    Members
    -------
    tick : In(1) : a frame ends.
    start : In(count).array : for each distance, the count-downs that start it in this frame. Effective with
        `tick`. A start never shortens what is under way.
    over : Out(count) : those in whose frame the next command may be; registers.
    soon : Out(count) : those that are over in the next frame, unless something starts in this one; registers.

    After a start of distance n in frame f, `over` is clear in frames f + 1 to f + n - 1.
    """

    def __init__(self, *, count, distances, over_others=None):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be a positive integer, not {count!r}")
        distances = tuple(distances)
        if not distances or not all(isinstance(d, int) and d >= 1 for d in distances):
            raise ValueError(f"distances must be integers of at least 1, not {distances!r}")
        self.count = count
        self.distances = distances
        self.over_others = (True,) * len(distances) if over_others is None else tuple(over_others)
        if len(self.over_others) != len(distances):
            raise ValueError(f"over_others must say it of {len(distances)} distances, not {over_others!r}")
        super().__init__(
            {
                "tick": In(1),
                "start": In(count).array(len(distances)),
                "over": Out(count),
                "soon": Out(count),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(max(self.distances))
        if bits == 0:  # a distance of one frame leaves nothing to wait for
            m.d.comb += [self.over.eq(~Const(0, self.count)), self.soon.eq(~Const(0, self.count))]
            return m
        planes = [Signal(self.count, name=f"bit_{k}") for k in range(bits)]
        running, later = Signal(self.count), Signal(self.count)  # any bit of them; but for the lowest one
        m.d.comb += [self.over.eq(~running), self.soon.eq(~later)]

        left, borrow = [], running
        for plane in planes:
            left.append(plane ^ borrow)
            borrow = borrow & ~plane
        # more than one is left, more than two are
        runs_on = reduce_tree(planes[1:], or_) if bits > 1 else Const(0, self.count)
        runs_later = reduce_tree([planes[0] & planes[1], *planes[2:]], or_) if bits > 1 else runs_on
        for n, (start, distance) in enumerate(zip(self.start, self.distances, strict=True)):
            value = distance - 1
            if not value:  # nothing to wait for
                continue
            chosen = Signal(self.count, name=f"chosen_{n}")
            guarded = self.over_others[n] and distance < max(self.distances)
            m.d.comb += chosen.eq(start & ~self._reached(left, value) if guarded else start)
            merged = []
            for k in range(bits):
                plane = Signal(self.count, name=f"left_{n}_{k}")
                m.d.comb += plane.eq(left[k] | chosen if value >> k & 1 else left[k] & ~chosen)
                merged.append(plane)
            left = merged
            runs_on = runs_on | start
            runs_later = runs_later | start if value > 1 else runs_later
        with m.If(self.tick):
            m.d.sync += [
                *(plane.eq(value) for plane, value in zip(planes, left, strict=True)),
                running.eq(runs_on),
                later.eq(runs_later),
            ]
        return m

    def _reached(self, left, value):
        """The count-downs that are as far off as a start would put them, or further."""
        further, equal = [], ~Const(0, self.count)
        for k in reversed(range(len(left))):
            if value >> k & 1:
                equal = equal & left[k]
            else:
                further.append(equal & left[k])
        return reduce(or_, further, equal)
