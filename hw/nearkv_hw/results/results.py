"""The results side of the device: from the units' partial streams to results in memory."""

from amaranth.hdl import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..common.buffer import Buffer
from ..common.queue import Queue
from ..interfaces import FabricPort, LanePartial, PassDone, ResultJob, partial_beat
from .distribute import Distribute
from .finish import Finish
from .merge import Merge, merge_cycles
from .shapes import Denominator, PassEnd, check_finish_lanes, check_units
from .writer import Writer

_DENOMINATORS_AHEAD = 8


class Results(wiring.Component):
    """Merges the units' partials, finishes lanes, writes results and reports passes.

    Parameters
    ----------
    units : partial streams, 1, 2, 4, 8 or 16.
    finish_lanes : lanes per cycle, 2, 4 or 8.

    Members
    -------
    partials : In(stream(partial_beat)) per unit : all units send the same beats, in the order that
        `interfaces.partial_beat` gives.
    jobs : In(stream(ResultJob)) : one per pass, `jobs_held` of them taken ahead; a pass's beats wait for it.
    fabric : Out(FabricPort) : writes of whole lines, with the job's tenant.
    done : Out(stream(PassDone)) : one per pass, in order, when its last write has been answered.

    One beat per cycle; the first lanes of a pass wait `Finish.denominator_cycles` for their reciprocal. When
    nothing else is under way, `done` follows a pass's END beat after `end_cycles` and what the fabric takes
    to take and answer the last line. Back-pressure of the fabric reaches the partial streams; nothing is
    lost.
    """

    jobs_held = 4

    def __init__(self, *, units, finish_lanes):
        check_units(units)
        check_finish_lanes(finish_lanes)
        self.units = units
        self.finish_lanes = finish_lanes
        super().__init__(
            {
                "partials": In(stream.Signature(partial_beat(finish_lanes))).array(units),
                "jobs": In(stream.Signature(ResultJob)),
                "fabric": Out(FabricPort()),
                "done": Out(stream.Signature(PassDone)),
            }
        )

    @property
    def end_cycles(self):
        """Cycles from a pass's END beat to `done`, without the fabric's share; more with an output scale."""
        # The way of the last lanes, which go one cycle ahead of END and wait one in a buffer.
        finish = Finish.latency_cycles + Writer.latency_cycles + Writer.done_cycles
        return merge_cycles(self.units) + finish

    def elaborate(self, platform):
        m = Module()
        m.submodules.jobs_queue = jobs_queue = Queue(shape=ResultJob, depth=self.jobs_held)
        m.submodules.merge = merge = Merge(units=self.units, finish_lanes=self.finish_lanes)
        # Buffers keep the ready of later blocks out of earlier ones.
        m.submodules.merged_buffer = merged_buffer = Buffer(shape=partial_beat(self.finish_lanes))
        lanes = data.ArrayLayout(LanePartial, self.finish_lanes)
        m.submodules.partials_buffer = partials_buffer = Buffer(shape=lanes)
        # A pass's denominators find room while the writer still packs the lanes of the pass before.
        m.submodules.denominators_buffer = denominators_buffer = Buffer(
            shape=Denominator, depth=_DENOMINATORS_AHEAD
        )
        m.submodules.distribute = distribute = Distribute(finish_lanes=self.finish_lanes)
        m.submodules.finish = finish = Finish(finish_lanes=self.finish_lanes)
        m.submodules.writer = writer = Writer(finish_lanes=self.finish_lanes)
        # The next pass's denominators may be divided by while the writer still packs this one's lanes.
        m.submodules.started_queue = started_queue = Queue(shape=ResultJob, depth=2)
        m.submodules.ends_queue = ends_queue = Queue(shape=PassEnd, depth=2)

        for outer, inner in zip(self.partials, merge.partials, strict=True):
            connect(m, flipped(outer), inner)
        connect(m, flipped(self.jobs), jobs_queue.i)
        connect(m, jobs_queue.o, distribute.jobs)
        connect(m, merge.merged, merged_buffer.i)
        connect(m, merged_buffer.o, distribute.merged)
        connect(m, distribute.started, started_queue.i)
        connect(m, started_queue.o, writer.jobs)
        connect(m, distribute.denominators, denominators_buffer.i)
        connect(m, denominators_buffer.o, writer.denominators)
        connect(m, distribute.finish, finish.beats)
        connect(m, distribute.partials, partials_buffer.i)
        connect(m, partials_buffer.o, writer.partials)
        connect(m, distribute.ends, ends_queue.i)
        connect(m, ends_queue.o, writer.ends)
        connect(m, finish.codes, writer.codes)
        connect(m, writer.fabric, flipped(self.fabric))
        connect(m, writer.done, flipped(self.done))
        return m
