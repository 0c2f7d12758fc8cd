"""The largest score of a row over the queries of a pass: the bound of a page."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import SCORE_LIMIT
from ..arithmetic.score import SCORE_BITS
from ..common.queue import Queue
from ..common.trees import reduce_tree
from ..interfaces import Bound


class Bounds(wiring.Component):
    """Takes the scores of `pipes` queries of a row per cycle; never waits, but for `room`.

    Parameters
    ----------
    pipes : scores per cycle, at least 1.

    Members
    -------
    promised : In(1) : a row's last scores are on their way; only with `room`.
    room : Out(1) : there is a place for one more bound.
    valid, begins, ends : In(1) : scores of a row; its first ones, its last ones.
    bound : In(Bound) : what is known of the row's bound, all but the value; with `ends`.
    scores, nan, dropped, absent : In : of each pipe, the score, whether it is none, whether the row is
        dropped, whether there is no such query.
    o : Out(stream(Bound)) : the bounds, in order.

    Latency from a row's last scores is `latency_cycles`. Up to `places` bounds are promised or wait.
    """

    places = 16
    latency_cycles = 5

    def __init__(self, *, pipes):
        if not isinstance(pipes, int) or pipes < 1:
            raise ValueError(f"pipes must be a positive integer, not {pipes!r}")
        self.pipes = pipes
        super().__init__(
            {
                "promised": In(1),
                "room": Out(1),
                "valid": In(1),
                "begins": In(1),
                "ends": In(1),
                "bound": In(Bound),
                "scores": In(data.ArrayLayout(signed(SCORE_BITS), pipes)),
                "nan": In(pipes),
                "dropped": In(pipes),
                "absent": In(pipes),
                "o": Out(stream.Signature(Bound)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = Queue(shape=Bound, depth=self.places)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        free = Signal(range(self.places + 1), init=self.places)
        m.d.sync += free.eq(free - self.promised + (self.o.valid & self.o.ready))
        m.d.comb += self.room.eq(free != 0)

        step = data.StructLayout({"valid": 1, "begins": 1, "ends": 1})
        at_scores, at_largest, at_row = Signal(step), Signal(step), Signal(step)
        bounds = [
            Signal(Bound, reset_less=True, name=f"bound_{when}") for when in ("scores", "largest", "row")
        ]
        scores = [Signal(signed(SCORE_BITS), name=f"score_{n}", reset_less=True) for n in range(self.pipes)]
        largest, row = (
            Signal(signed(SCORE_BITS), reset_less=True, name="largest"),
            Signal(signed(SCORE_BITS), reset_less=True, name="row"),
        )
        m.d.sync += [
            at_scores.valid.eq(self.valid),
            at_scores.begins.eq(self.begins),
            at_scores.ends.eq(self.ends),
            at_largest.eq(at_scores),
            at_row.eq(at_largest),
        ]
        with m.If(self.valid):
            m.d.sync += bounds[0].eq(self.bound)
            for n, score in enumerate(scores):
                no_number = Mux(self.nan[n], SCORE_LIMIT, -SCORE_LIMIT)
                none = self.absent[n] | self.dropped[n] | self.nan[n]
                m.d.sync += score.eq(Mux(none, Mux(self.absent[n], -SCORE_LIMIT, no_number), self.scores[n]))
        with m.If(at_scores.valid):
            m.d.sync += [bounds[1].eq(bounds[0]), largest.eq(reduce_tree(scores, _larger))]
        with m.If(at_largest.valid):
            m.d.sync += [
                bounds[2].eq(bounds[1]),
                row.eq(Mux(at_largest.begins | (largest > row), largest, row)),
            ]
        m.d.comb += [
            queue.i.valid.eq(at_row.valid & at_row.ends),
            queue.i.payload.eq(bounds[2]),
            queue.i.payload.value.eq(row),
        ]
        return m


def _larger(a, b):
    return Mux(a > b, a, b)
