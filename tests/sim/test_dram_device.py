"""DRAM in a device in this process: a broken rule is its error, commands are recorded, bits flipped."""

import numpy as np
import pytest
from amaranth.hdl import Signal
from nearkv_hw.abi import configure
from nearkv_hw.abi.dram import Dram, Place, Refresh
from nearkv_hw.memory.dram.part import DramBox
from nearkv_hw.verilog import to_verilog
from nearkv_sim.build import device_library
from nearkv_sim.port import Fence, Poll, Read
from nearkv_sim.rtl import RtlPort
from toy_device import ToyDevice


class HastyDevice(ToyDevice):
    """Opens a row of its DRAM in cycle 501 or so, and reads it so many frames later, once."""

    def __init__(self, *, frames):
        super().__init__()
        self.frames = frames

    def elaborate(self, platform):
        m = super().elaborate(platform)
        m.submodules.dram = dram = DramBox(
            channel=2, subchannel=1, part=Dram.DDR5_6400, density_gbit=16, refresh=Refresh.ALL_BANK
        )
        cycle = Signal(16)
        opens = 501  # rows are told in the second cycle of a frame
        with m.If(cycle != 1000):
            m.d.sync += cycle.eq(cycle + 1)
        m.d.comb += [
            dram.pins.activate_valid.eq(cycle == opens),
            dram.pins.activate_bank.eq(9),
            dram.pins.activate_row.eq(77),
            dram.pins.column_valid.eq(cycle == opens - 1 + 2 * self.frames),
            dram.pins.column_bank.eq(9),
            dram.pins.column_column.eq(5),
        ]
        return m


def hasty(frames):
    library = device_library(to_verilog(HastyDevice(frames=frames)), name=f"hasty{frames}")
    return RtlPort(configure(), library=library)


@pytest.mark.rtl
def test_a_violation_is_an_error_of_the_device():
    message = r"^DRAM rule broken: RCD of DDR5_6400, channel 2, sub-channel 1: RD \(bank 9\) .* at least 46$"
    with hasty(5) as port:
        for _ in range(2):  # and it stays one
            with pytest.raises(RuntimeError, match=message):
                port.run([Poll(1 << 30, 1 << 12, 1 << 12, 9000), Fence(), Read(np.zeros(1, np.uint64))])


@pytest.mark.rtl
def test_commands_are_recorded_and_bits_flipped():
    with hasty(6) as port, hasty(6) as other:
        port.record()
        for device in (port, other):
            device.run([Poll(1 << 30, 1 << 12, 1 << 12, 9000)])  # until its clock has passed 4,096
        recorded = port.recorded()
        source = recorded.names.index("dram.2.1")
        events = recorded.events[recorded.events["source"] == source]
        assert [(int(e["kind"]), int(e["a"]), int(e["b"])) for e in events] == [(1, 9, 77), (2, 9, 5)]
        assert int(events[1]["cycle"]) - int(events[0]["cycle"]) == 2 * 6 - 1
        port.flip_bits(2, Place(1, 9, 77, 5), [0, 575])
        with pytest.raises(ValueError, match="there is no bit 3 at "):
            port.flip_bits(1, Place(1, 9, 77, 5), [3])
