# amaranth: UnusedElaboratable=no
"""A DRAM part in Verilog: latency, data with check bits and poison, flips, violations that end the run."""

import ctypes

import cocotb
import pytest
from amaranth.sim import Simulator
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.dram import PARTS, Dram, Place, Refresh
from nearkv_hw.memory.dram.part import DramBox
from nearkv_hw.memory.dram.pins import DramPins
from nearkv_sim.cocotb.runner import SimulationFailed, parameters, run
from nearkv_sim.cocotb.streams import random, start, value
from nearkv_sim.dram import flip_bits

every_part = pytest.mark.parametrize("dram", PARTS, ids=lambda dram: dram.name)


def box(dram, refresh=Refresh.ALL_BANK):
    return DramBox(
        channel=3, subchannel=1, part=dram, density_gbit=PARTS[dram].default_density, refresh=refresh
    )


@pytest.mark.rtl
@every_part
def test_part(dram):
    run(box(dram), module=__file__, parameters={"dram": int(dram)}, tests="keeps_lines")


@pytest.mark.rtl
def test_a_violation_ends_the_simulation():
    text = (
        r"DRAM rule broken: RCD of DDR5_6400, channel 3, sub-channel 1: RD \(bank 4\) at tCK \d+ "
        r"\(cycle \d+\): 38 tCK after ACT \(bank 4\) at tCK \d+ \(cycle \d+\), must be at least 46"
    )
    with pytest.raises(SimulationFailed, match=text):
        run(
            box(Dram.DDR5_6400),
            module=__file__,
            parameters={"dram": int(Dram.DDR5_6400)},
            tests="reads_a_frame_too_early",
        )


def test_amaranths_simulator_is_refused():
    with pytest.raises(NotImplementedError, match="the DRAM is a black box that Amaranth's simulator would"):
        Simulator(box(Dram.DDR5_6400))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"channel": -1}, "channel must be a non-negative integer, not -1"),
        ({"subchannel": 2}, "subchannel must be from 0 to 1, not 2"),
        ({"part": Dram.FIXED}, "part must be a DramPart, or one of DDR5_6400, .*, not "),
        ({"density_gbit": 3}, "DDR5_6400 has no density of 3 Gbit; there are 16, 32"),
    ],
)
def test_parameters_are_checked(changed, message):
    fine = {
        "channel": 0,
        "subchannel": 0,
        "part": Dram.DDR5_6400,
        "density_gbit": 16,
        "refresh": Refresh.ALL_BANK,
    }
    DramBox(**fine)
    with pytest.raises(ValueError, match=message):
        DramBox(**fine | changed)


def test_pins_are_as_wide_as_the_part():
    members = DramPins(part=Dram.LPDDR5X_8533, density_gbit=32).members
    widths = {name: member.shape for name, member in members.items()}
    assert (widths["activate_bank"], widths["activate_row"], widths["column_column"]) == (4, 17, 5)
    assert widths["refresh_set"] == 3


class Bench:
    """Tells the part commands in frames, and watches what it shows."""

    def __init__(self, dut):
        self.dut = dut
        self.part = PARTS[Dram(parameters()["dram"])]
        self.timings = self.part.frames(self.part.default_density, Refresh.ALL_BANK)
        self.edge = RisingEdge(dut.clk)
        self.cycle = 0  # of the present frame's first cycle
        self.frame = 0
        self.shown = []  # (cycle, data, check, poison)
        for kind in ("column", "activate", "precharge", "refresh"):
            self.pin(f"{kind}_valid", 0)
        self.pin("refresh_all", 1)
        self.pin("refresh_set", 0)

    def pin(self, name, to):
        getattr(self.dut, f"pins_{name}").value = to

    async def _pass_cycle(self):
        await self.edge
        if value(self.dut.pins_read_valid):
            line = (value(getattr(self.dut, f"pins_read_{name}")) for name in ("data", "check", "poison"))
            self.shown.append((self.cycle, *line))
        self.cycle += 1

    async def next_frame(self, column=None, **rows):
        """Passes a frame with at most one command of a kind, told in the cycle of its place."""
        slots, told = self.part.slots, self.cycle
        self.pin("odd", self.frame % 2)
        for cycle in range(self.part.subchannels):
            self.pin("column_valid", int(column is not None and cycle == slots.column.cycle))
            for name, to in (column or {}).items():
                self.pin(name, to)
            for kind in ("activate", "precharge", "refresh"):
                self.pin(f"{kind}_valid", int(kind in rows and cycle == slots.activate.cycle))
                for name, to in rows.get(kind, {}).items():
                    self.pin(f"{kind}_{name}", to)
            await self._pass_cycle()
        self.frame += 1
        return told + slots.column.cycle

    async def frames(self, count):
        for _ in range(count):
            await self.next_frame()

    async def read(self, bank, column):
        return await self.next_frame({"column_write": 0, "column_bank": bank, "column_column": column})

    async def write(self, bank, column, data, check, poison):
        pins = {"column_write": 1, "column_bank": bank, "column_column": column}
        pins |= {"write_data": data, "write_check": check, "write_poison": poison}
        return await self.next_frame(pins)

    async def activate(self, bank, row):
        await self.next_frame(activate={"bank": bank, "row": row})
        await self.frames(max(self.timings.activate_same_group, self.timings.activate_to_column))


@cocotb.test()
async def keeps_lines(dut):
    """Random lines of two bank groups against a dictionary, in rows at both ends of the part."""
    rng = random("lines")
    await start(dut)
    bench = Bench(dut)
    part, t = bench.part, bench.timings
    banks, expected, told = (2, 5), {}, []
    library = ctypes.CDLL(None)
    for row in (0, part.rows - 1, 0):
        for bank in banks:
            await bench.activate(bank, row)
        for _ in range(4):
            for i in range(8):
                place = Place(1, banks[i % 2], row, rng.choice([0, 1, part.row_lines - 1]))
                line = (rng.getrandbits(512), rng.getrandbits(64), int(rng.random() < 0.2))
                expected[place] = line
                await bench.write(place.bank, place.column, *line)
                await bench.frames(t.column_same_group_write)
            await bench.frames(t.write_to_read_same_group)
            if row:
                place, line = rng.choice(list(expected.items()))
                bits = rng.sample(range(576), 3)
                flip_bits(library, None, 3, place, bits)
                data = line[0] ^ sum(1 << bit for bit in bits if bit < 512)
                check = line[1] ^ sum(1 << bit - 512 for bit in bits if bit >= 512)
                expected[place] = (data, check, line[2])
            for i in range(16):  # a line per frame
                place = Place(1, banks[i % 2], row, rng.choice([0, 1, 2, part.row_lines - 1]))
                cycle = await bench.read(place.bank, place.column)
                told.append((cycle + t.read_cycles, *expected.get(place, (0, 0, 0))))
            await bench.frames(t.read_to_write)
        await bench.frames(t.column_to_precharge_write)
        await bench.next_frame(precharge={"all": 1, "bank": 0})
        await bench.frames(t.precharge_to_refresh)
        await bench.next_frame(refresh={"all": 1})
        await bench.frames(t.refresh)
    assert len(told) == 3 * 4 * 16
    assert bench.shown == told
    for wrong in (Place(0, 0, 0, 0), Place(1, part.banks, 0, 0), Place(1, 0, part.rows, 0)):
        with pytest.raises(ValueError, match="there is no bit 5 at "):
            flip_bits(library, None, 3, wrong, [5])
    with pytest.raises(ValueError, match="there is no bit 576 at "):
        flip_bits(library, None, 3, Place(1, 0, 0, 0), [576])


@cocotb.test()
async def reads_a_frame_too_early(dut):
    await start(dut)
    bench = Bench(dut)
    await bench.next_frame(activate={"bank": 4, "row": 1})
    await bench.frames(bench.timings.activate_to_column - 2)
    await bench.read(4, 0)
    await bench.frames(4)
