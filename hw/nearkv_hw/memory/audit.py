"""Reports of refused accesses, on their way from the channels to the log."""

from operator import add

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..abi.owner import RECORDS
from ..common.arbiter import RoundRobin
from ..common.buffer import Buffer
from ..common.trees import reduce_tree
from ..interfaces import Refusal
from .scrub import EXTENT_LINES_LOG2


class Reporter(wiring.Component):
    """Reports refused accesses of a channel, but not one that only repeats the last.

    Members
    -------
    i : In({valid, refusal}) : an access is refused; `line` is of the channel.
    forget : In(1) : what comes is no repetition.
    o : Out(stream(Refusal)) : reports.
    missed : Out(1) : a report found no room.

    A report is offered 2 cycles after its access; `RECORDS` may wait.
    """

    latency_cycles = 2

    i: In(data.StructLayout({"valid": 1, "refusal": Refusal}))
    forget: In(1)
    o: Out(stream.Signature(Refusal))
    missed: Out(1)

    def elaborate(self, platform):
        m = Module()
        m.submodules.buffer = buffer = Buffer(shape=Refusal, depth=RECORDS)
        valid, told, last = Signal(), Signal(Refusal, reset_less=True), Signal(Refusal, reset_less=True)
        repeats, fresh = Signal(), Signal()  # whether `last` is one
        same = Cat(
            told.line >> EXTENT_LINES_LOG2 == last.line >> EXTENT_LINES_LOG2,
            told.tenant == last.tenant,
            told.kind == last.kind,
        ).all()
        m.d.sync += valid.eq(self.i.valid)
        with m.If(self.i.valid):
            m.d.sync += told.eq(self.i.refusal)
        m.d.comb += [
            fresh.eq(valid & ~(repeats & same)),
            buffer.i.valid.eq(fresh),
            buffer.i.payload.eq(told),
            self.missed.eq(fresh & ~buffer.i.ready),
        ]
        with m.If(fresh & buffer.i.ready):
            m.d.sync += [repeats.eq(1), last.eq(told)]
        with m.If(self.forget):
            m.d.sync += repeats.eq(0)
        wiring.connect(m, buffer.o, wiring.flipped(self.o))
        return m


class Reports(wiring.Component):
    """Brings the reports of all channels together.

    Parameters
    ----------
    config : the device's configuration.
    each : reports of each channel.

    Members
    -------
    i : In(stream(Refusal)) x slices * each : reports, `each` of slice 0 first; `line` is of the channel.
    missed : In(slices * each) : reports that found no room, a bit of each.
    o : Out(stream(Refusal)) : reports, in turn; `line` is of the device.
    lost : Out : how many found no room.

    Latency is 0 cycles.
    """

    def __init__(self, *, config, each):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if each not in (1, 2):
            raise ValueError(f"each must be 1 or 2, not {each!r}")
        self.config = config
        self.each = each
        count = config.slices * each
        super().__init__(
            {
                "i": In(stream.Signature(Refusal)).array(count),
                "missed": In(count),
                "o": Out(stream.Signature(Refusal)),
                "lost": Out(range(count + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.turns = turns = RoundRobin(count=len(self.i))
        bits = (self.config.slices - 1).bit_length()
        m.d.comb += [
            turns.requests.eq(Cat(report.valid for report in self.i)),
            turns.accept.eq(self.o.valid & self.o.ready),
            self.o.valid.eq(turns.grant.any()),
            self.lost.eq(reduce_tree(list(self.missed), add)),
        ]
        for n, report in enumerate(self.i):
            line = report.payload.line
            of_device = Cat(line[:EXTENT_LINES_LOG2], Const(n // self.each, bits), line[EXTENT_LINES_LOG2:])
            m.d.comb += report.ready.eq(turns.grant[n] & self.o.ready)
            with m.If(turns.grant[n]):
                m.d.comb += [self.o.payload.eq(report.payload), self.o.payload.line.eq(of_device)]
        return m
