"""The store: where the bytes of a channel's memory are while the design is simulated."""

import sys

from amaranth.hdl import ClockSignal, Instance, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS, LINE_BYTES
from ..interfaces import LINE_ADDRESS_BITS


class Store(wiring.Component):
    """Sparse memory of one channel, a black box `nearkv_store` that the simulator fills in (SystemVerilog and
    C++).

    A line keeps its data and a poison bit. A poisoned write marks its line, a full clean write clears the
    mark, a partial clean write leaves it. When one line is read and written in the same cycle, the read sees
    the old line.

    Amaranth's own simulator ignores black boxes without a word, so elaboration there is an error.

    Parameters
    ----------
    channel : which channel's memory this is.

    Members
    -------
    read_enable, read_line : In : read a line.
    read_data, read_poison : Out : the line, from the next cycle on until the next read.
    write_enable, write_line, write_data, write_mask, write_poison : In : write the bytes of a line that the
        mask names.

    Latency of a read is 1 cycle (`latency_cycles`); one read and one write per cycle.
    """

    latency_cycles = 1

    def __init__(self, *, channel):
        if not isinstance(channel, int) or channel < 0:
            raise ValueError(f"channel must be a non-negative integer, not {channel!r}")
        self.channel = channel
        super().__init__(
            {
                "read_enable": In(1),
                "read_line": In(LINE_ADDRESS_BITS),
                "read_data": Out(LINE_BITS),
                "read_poison": Out(1),
                "write_enable": In(1),
                "write_line": In(LINE_ADDRESS_BITS),
                "write_data": In(LINE_BITS),
                "write_mask": In(LINE_BYTES),
                "write_poison": In(1),
            }
        )

    def elaborate(self, platform):
        refuse_amaranth_simulator("the store")
        m = Module()
        m.submodules.store = Instance(
            "nearkv_store",
            p_CHANNEL=self.channel,
            i_clk=ClockSignal(),
            i_read_enable=self.read_enable,
            i_read_line=self.read_line,
            o_read_data=self.read_data,
            o_read_poison=self.read_poison,
            i_write_enable=self.write_enable,
            i_write_line=self.write_line,
            i_write_data=self.write_data,
            i_write_mask=self.write_mask,
            i_write_poison=self.write_poison,
        )
        return m


def refuse_amaranth_simulator(what):
    """Raises NotImplementedError where Amaranth's simulator elaborates a black box: it would leave it out."""
    frame = sys._getframe()
    while frame is not None:  # neither it nor the Verilog back end passes a platform to tell by
        if frame.f_globals.get("__name__", "").startswith("amaranth.sim"):
            raise NotImplementedError(
                f"{what} is a black box that Amaranth's simulator would silently leave out; "
                "simulate designs with memory channels as Verilog (nearkv_sim.cocotb.runner)"
            )
        frame = frame.f_back
