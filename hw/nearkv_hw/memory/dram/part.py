"""A DRAM part behind a controller: a black box that the simulator fills in."""

from amaranth.hdl import ClockSignal, Instance, Module, ResetSignal
from amaranth.lib import wiring
from amaranth.lib.wiring import In
from amaranth.utils import exact_log2

from ...abi.dram import Refresh
from ..store import refuse_amaranth_simulator
from .pins import DramPins


class DramBox(wiring.Component):
    """The DRAM of one sub-channel, a black box `nearkv_dram` (SystemVerilog and C++).

    It keeps every line with its check bits and a poison bit, as far as something was written, and checks
    every command against every rule of the part. A command that breaks one ends the simulation with an error
    that names the rule, the banks, and both times.

    Reads and writes take effect in the order in which they are told. A line that was never written is zero,
    its check bits, too.

    Amaranth's own simulator ignores black boxes without a word, so elaboration there is an error.

    Parameters
    ----------
    channel, subchannel : which one it is, for messages, the timeline, and flips of bits.
    part : the part, a `DramPart` or a `Dram` that names one.
    density_gbit : its density.
    refresh : how it is refreshed.

    Members
    -------
    pins : In(DramPins) : commands and data.

    Latency of a read is `latency_cycles` exactly; throughput is one line per frame.
    """

    def __init__(self, *, channel, subchannel, part, density_gbit, refresh):
        pins = DramPins(part=part, density_gbit=density_gbit)
        self.part = part = pins.part
        if not isinstance(channel, int) or channel < 0:
            raise ValueError(f"channel must be a non-negative integer, not {channel!r}")
        if not isinstance(subchannel, int) or not 0 <= subchannel < part.subchannels:
            raise ValueError(f"subchannel must be from 0 to {part.subchannels - 1}, not {subchannel!r}")
        self.channel = channel
        self.subchannel = subchannel
        self.density_gbit = density_gbit
        self.refresh = Refresh(refresh)
        super().__init__({"pins": In(pins)})

    @property
    def latency_cycles(self):
        """Device cycles from a read to its line."""
        return self.part.frames(self.density_gbit, self.refresh).read_cycles

    def elaborate(self, platform):
        refuse_amaranth_simulator("the DRAM")
        m = Module()
        pins = self.pins
        rules = self.part.rules(self.density_gbit, self.refresh)
        m.submodules.dram = Instance(
            "nearkv_dram",
            p_CHANNEL=self.channel,
            p_SUBCHANNEL=self.subchannel,
            p_READ_CYCLES=self.latency_cycles,
            p_BANK_BITS=exact_log2(self.part.banks),
            p_ROW_BITS=len(pins.activate_row),
            p_COLUMN_BITS=len(pins.column_column),
            p_SET_BITS=len(pins.refresh_set),
            p_PART=self.part.dram.name,
            p_RULES=" ".join(f"{name}={value}" for name, value in sorted(rules.items())),
            i_clk=ClockSignal(),
            i_rst=ResetSignal(),
            **{
                f"{'i' if member.flow == wiring.Out else 'o'}_{name}": getattr(pins, name)
                for name, member in self.pins.signature.flip().members.items()
            },
        )
        return m
