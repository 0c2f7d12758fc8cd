"""A DRAM controller with its part, frames and refresh, as a component for benches."""

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import Out
from amaranth.utils import exact_log2
from nearkv_hw.abi.dram import PARTS, Dram, Place, Refresh, ceiling, line_of
from nearkv_hw.abi.lines import LINE_BITS
from nearkv_hw.memory.dram.controller import DramController, fabric_layout, unit_layout
from nearkv_hw.memory.dram.part import DramBox
from nearkv_hw.memory.dram.pins import CHECK_BITS
from nearkv_hw.memory.dram.refresh import RefreshTimer
from nearkv_sim.cocotb.streams import StreamSource, cycles, value

TAG_BITS = 16
OFTEN = [
    (Dram.DDR5_6400, Refresh.ALL_BANK),
    (Dram.DDR5_6400, Refresh.PER_BANK),
    (Dram.HBM3_6400, Refresh.ALL_BANK),
]
PARTS_AND_MODES = [
    pytest.param(
        dram,
        refresh,
        marks=() if (dram, refresh) in OFTEN else pytest.mark.slow,
        id=f"{dram.name}-{refresh.name}".lower(),
    )
    for dram in PARTS
    for refresh in Refresh
]
"""Every part and refresh mode; each is a build of its own, so most of them run on demand."""
COUNTS = (
    "unit_lines",
    "fabric_lines",
    "written_lines",
    "drains",
    "hits",
    "misses",
    "conflicts",
    "busy_cycles",
    "turn_cycles",
)


class ControllerBench(wiring.Component):
    """The clients' ports of a controller, its answers with their data, and counts since reset.

    The timer is not told what waits, so refreshes come when they fall due.

    Parameters
    ----------
    dram : the part. Everything else goes to the controller.

    Members
    -------
    unit, fabric, written : the controller's. answers : Out(stream) : lines, and whose they are.
    Out(32) by the names in `COUNTS`.
    """

    def __init__(self, *, dram, refresh=Refresh.ALL_BANK, **parameters):
        self.part = PARTS[dram]
        self.controller = DramController(part=dram, refresh=refresh, tag=TAG_BITS, **parameters)
        self.box = DramBox(
            channel=0,
            subchannel=0,
            part=self.part,
            density_gbit=self.controller.density_gbit,
            refresh=refresh,
        )
        self.timer = RefreshTimer(part=dram, density_gbit=self.controller.density_gbit, refresh=refresh)
        members = self.controller.signature.members
        answer = data.StructLayout(
            {"unit": 1, "tag": TAG_BITS, "data": LINE_BITS, "check": CHECK_BITS, "poison": 1}
        )
        super().__init__(
            {
                "unit": members["unit"],
                "fabric": members["fabric"],
                "written": members["written"],
                "answers": Out(stream.Signature(answer, always_ready=True)),
                **{name: Out(32) for name in COUNTS},
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.controller = controller = self.controller
        m.submodules.box = box = self.box
        m.submodules.timer = self.timer
        turn = Signal(range(self.part.subchannels))
        m.d.sync += turn.eq(turn + 1)
        for name in ("unit", "fabric", "written"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(controller, name))
        wiring.connect(m, controller.pins, box.pins)
        answer = self.answers.payload
        m.d.comb += [
            controller.phase.eq(turn == 0),
            controller.due.eq(self.timer.due),
            self.answers.valid.eq(controller.answers.valid),
            answer.unit.eq(controller.answers.payload.unit),
            answer.tag.eq(controller.answers.payload.tag),
            answer.data.eq(box.pins.read_data),
            answer.check.eq(box.pins.read_check),
            answer.poison.eq(box.pins.read_poison),
        ]
        pins, before = controller.pins, Signal()
        with m.If(pins.column_valid):
            m.d.sync += before.eq(pins.column_write)
        counted = (
            self.answers.valid & answer.unit,
            self.answers.valid & ~answer.unit,
            pins.column_valid & pins.column_write,
            pins.column_valid & pins.column_write & ~before,
            controller.row_hit,
            controller.row_miss,
            controller.row_conflict,
            controller.refresh_busy,
            controller.turnaround,
        )
        for name, event in zip(COUNTS, counted, strict=True):
            count = getattr(self, name)
            m.d.sync += count.eq(count + event)
        return m


def place_line(part, bank, row, column):
    """The sub-channel line at a place."""
    return line_of(part, Place(0, bank, row, column)) // part.subchannels


class Traffic:
    """Both clients of a `ControllerBench`, in cocotb.

    Members
    -------
    part, frames : the part and its timings. unit, fabric : sources of reads, and of accesses.
    """

    def __init__(self, dut, dram, refresh):
        self.dut = dut
        self.part = PARTS[Dram(dram)]
        self.density_gbit = self.part.default_density
        self.refresh = Refresh(refresh)
        self.frames = self.part.frames(self.density_gbit, self.refresh)
        self.lines = self.part.channel_lines(self.density_gbit) // self.part.subchannels
        self.ceiling = ceiling(self.part, self.density_gbit, Refresh.ALL_BANK)
        bits = exact_log2(self.lines)
        self.unit = StreamSource(dut, "unit", shape=unit_layout(bits, TAG_BITS))
        self.fabric = StreamSource(dut, "fabric", shape=fabric_layout(bits, TAG_BITS))

    async def pass_frames(self, frames):
        """Wait."""
        await cycles(self.dut, frames * self.part.subchannels)

    async def count(self, frames, warm_frames=400):
        """What the bench counts in so many frames, once it runs."""
        await self.pass_frames(warm_frames)
        before = self.counts()
        await self.pass_frames(frames)
        return {name: count - before[name] for name, count in self.counts().items()}

    def counts(self):
        """What the bench has counted."""
        return {name: value(getattr(self.dut, name)) for name in COUNTS}

    @property
    def long_frames(self):
        """Twenty intervals of refreshes of all banks."""
        return 20 * self.part.frames(self.density_gbit, Refresh.ALL_BANK).refresh_interval
