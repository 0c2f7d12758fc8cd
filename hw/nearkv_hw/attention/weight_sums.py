"""Denominators: the binned sums of weights, of the queries of every pass."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.numerics import WEIGHT_BITS
from ..arithmetic.binned import OFFSET_BITS, BinnedAccumulator, TermAligner, lowered, raised
from ..arithmetic.weight import Weight
from ..common.pipeline import later, stage
from ..interfaces import State


class WeightSums(wiring.Component):
    """Adds a weight per pipe and cycle; never waits. A cycle without an addition reads a sum.

    Parameters
    ----------
    pipes : pipes that weights come from.
    states : sums that each of them has.

    Members
    -------
    weights, nan : In : of every pipe a weight, and whether it makes its query NaN.
    add, first, address, pipe : In : the weights count; theirs are the first ones, whatever was kept; which
        sums; of which pipe to show it.
    limb_add, limb_address, limb_pipe : In : the same `limb_cycles` later.
    state, query_nan : Out : the sum before the addition, `latency_cycles` after it.
    """

    limb_cycles = 1 + TermAligner.latency_cycles
    latency_cycles = limb_cycles + 1

    def __init__(self, *, pipes, states):
        self.pipes = pipes
        self.states = states
        super().__init__(
            {
                "weights": In(data.ArrayLayout(Weight, pipes)),
                "nan": In(pipes),
                **{
                    when + name: In(shape)
                    for when in ("", "limb_")
                    for name, shape in (("add", 1), ("address", exact_log2(states)), ("pipe", range(pipes)))
                },
                "first": In(1),
                "state": Out(State),
                "query_nan": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        tops, highs, lows, nans = [], [], [], []
        for pipe, weight in enumerate(self.weights):
            m.submodules[f"denominators_{pipe}"] = sums = BinnedAccumulator(
                states=self.states, limb_delay_cycles=self.limb_cycles
            )
            m.submodules[f"aligner_{pipe}"] = aligner = TermAligner(significand_bits=WEIGHT_BITS)
            m.d.comb += [
                sums.add.eq(self.add),
                sums.first.eq(self.first),
                sums.address.eq(self.address),
                sums.top.eq(Mux(weight.significand[-1], raised(weight.exponent >> OFFSET_BITS), 0)),
                aligner.significand.eq(stage(m, weight.significand)),
                aligner.offset.eq(stage(m, weight.exponent[:OFFSET_BITS])),
                aligner.select.eq(sums.select),
                sums.limb_add.eq(self.limb_add),
                sums.limb_address.eq(self.limb_address),
                sums.high.eq(aligner.high),
                sums.low.eq(aligner.low),
            ]
            m.submodules[f"nans_{pipe}"] = kept = memory.Memory(shape=1, depth=self.states, init=[])
            read, write = kept.read_port(domain="comb"), kept.write_port()
            m.d.comb += [
                read.addr.eq(self.address),
                write.addr.eq(self.address),
                write.en.eq(self.add),
                write.data.eq((read.data & ~self.first) | self.nan[pipe]),
            ]
            tops.append(sums.held_top)
            nans.append(read.data)
            highs.append(sums.held_high)
            lows.append(sums.held_low)

        def selected(pipe, values, cycles):
            register = Signal(values[0].shape(), reset_less=True)
            with m.Switch(pipe):
                for number, value in enumerate(values):
                    with m.Case(number):
                        m.d.sync += register.eq(value)
            return later(m, register, cycles - 1)

        top = selected(self.pipe, tops, self.latency_cycles)
        m.d.comb += [
            self.state.some.eq(top.any()),
            self.state.top.eq(lowered(top)),
            self.state.high.eq(selected(self.limb_pipe, highs, 1)),
            self.state.low.eq(selected(self.limb_pipe, lows, 1)),
            self.query_nan.eq(selected(self.pipe, nans, self.latency_cycles)),
        ]
        return m
