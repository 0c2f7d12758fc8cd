"""Merge of the units' partial streams: exact, lane by lane (docs/numerics.md section 2)."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.descriptor import Status
from ..arithmetic.states import merge_states
from ..interfaces import partial_beat
from .shapes import check_finish_lanes, check_units


def merge_cycles(units):
    """Latency of a `Merge` of so many units."""
    return units.bit_length() - 1


class Merge(wiring.Component):
    """Takes one beat of every unit's stream and gives their merge: a tree with a register per level.

    Parameters
    ----------
    units : streams, 1, 2, 4, 8 or 16. All carry the same beats in the same order.
    finish_lanes : lanes of a beat, 2, 4 or 8.

    Members
    -------
    partials : In(stream(partial_beat)) per unit : a beat is taken from all of them at once.
    merged : Out(stream(partial_beat)) : states merged, flags ORed. In an END beat: page and status of
        the lowest page at fault, whichever unit met it, and the sum of the lines.

    Latency is log2(units) cycles (`latency_cycles`), throughput one beat per cycle. Back-pressure stops
    all levels at once and the units with them; nothing is lost.
    """

    def __init__(self, *, units, finish_lanes):
        check_units(units)
        check_finish_lanes(finish_lanes)
        self.units = units
        self.finish_lanes = finish_lanes
        shape = partial_beat(finish_lanes)
        super().__init__(
            {
                "partials": In(stream.Signature(shape)).array(units),
                "merged": Out(stream.Signature(shape)),
            }
        )

    @property
    def latency_cycles(self):
        """Cycles from a beat of every unit to the merged beat."""
        return merge_cycles(self.units)

    def elaborate(self, platform):
        m = Module()
        advance = Signal()
        valid = Signal()
        m.d.comb += [
            advance.eq(~self.merged.valid | self.merged.ready),
            valid.eq(Cat(port.valid for port in self.partials).all()),
        ]
        for port in self.partials:
            m.d.comb += port.ready.eq(valid & advance)

        beats = [port.payload for port in self.partials]
        level = 0
        while len(beats) > 1:
            merged = [
                Signal(partial_beat(self.finish_lanes), name=f"level_{level}_{k}", reset_less=True)
                for k in range(len(beats) // 2)
            ]
            following = Signal(name=f"valid_{level}")
            with m.If(advance):
                m.d.sync += following.eq(valid)
                with m.If(valid):
                    for k, beat in enumerate(merged):
                        _merge_beats(m, beat, beats[2 * k], beats[2 * k + 1])
            beats, valid = merged, following
            level += 1
        m.d.comb += [self.merged.payload.eq(beats[0]), self.merged.valid.eq(valid)]
        return m


def _merge_beats(m, merged, a, b):
    """Statements that load `merged` with the merge of the beats `a` (of lower units) and `b`."""
    b_failed = b.status != Status.OK
    failed = (a.status != Status.OK) & (~b_failed | (a.page <= b.page))
    m.d.sync += [
        merged.kind.eq(a.kind),
        merged.status.eq(Mux(failed, a.status, b.status)),
        merged.page.eq(Mux(failed, a.page, b.page)),
        merged.lines.eq(a.lines + b.lines),
    ]
    for lane, lane_a, lane_b in zip(merged.lanes, a.lanes, b.lanes, strict=True):
        m.d.sync += lane.flags.eq(lane_a.flags | lane_b.flags)
        merge_states(m, lane.state, lane_a.state, lane_b.state)
