"""The HDM decoders of a running device, with everything that programs them behind one register port."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ...abi import DeviceConfig
from ...abi.hdm import DVSEC_RANGES, RANGE_WORD, RESET_WORD, UNIT_BITS, UNIT_SHIFT, WORD_BITS
from .decoders import Decoders, RegisterWrite
from .translate import LINE_BITS, Translated


class AddressMap(wiring.Component):
    """Host addresses to addresses of the device: what its decoders have, or the ranges of its DVSEC.

    The device's addresses are those of `abi.window`: apertures, each with its memory and its window. After
    reset the DVSEC's first range is all of them, at host address 0, so that a device decodes every address
    as one without decoders until it is programmed.

    Parameters
    ----------
    config : the device's configuration; it has `hdm_decoders`.
    lookups : addresses that are translated in a cycle.

    Members
    -------
    write : In(stream(RegisterWrite)) : writes of the capability's registers, and of those behind them
        (`abi.hdm.RESET_WORD`, `RANGE_WORD`). Not ready while a commit is checked.
    read_word : In : a register's offset / 4.
    read_data : Out(32) : its value a cycle later; zero of what is not the capability's.
    i, o : as of `Decoders`.

    Throughput is one address per cycle and lookup, `latency_cycles` later.
    """

    latency_cycles = Decoders.latency_cycles

    def __init__(self, *, config, lookups):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.units = config.address_bytes >> UNIT_SHIFT
        self._decoders = Decoders(decoders=config.hdm_decoders, capacity=self.units, lookups=lookups)
        super().__init__(
            {
                "write": In(stream.Signature(RegisterWrite)),
                "read_word": In(WORD_BITS),
                "read_data": Out(32),
                "i": In(stream.Signature(LINE_BITS, always_ready=True)).array(lookups),
                "o": Out(stream.Signature(Translated, always_ready=True)).array(lookups),
            }
        )

    def elaborate(self, platform):
        m = Module()
        written = self.write.payload
        accepted = self.write.valid & self.write.ready
        m.submodules.decoders = decoders = self._decoders
        for asked, told, theirs, found in zip(self.i, self.o, decoders.i, decoders.o, strict=True):
            wiring.connect(m, wiring.flipped(asked), theirs)
            wiring.connect(m, found, wiring.flipped(told))
        m.d.comb += [
            decoders.write.valid.eq(self.write.valid),
            decoders.write.payload.eq(written),
            self.write.ready.eq(decoders.write.ready),
            decoders.read_word.eq(self.read_word),
            self.read_data.eq(decoders.read_data),
            decoders.clear.eq(accepted & (written.word == RESET_WORD)),
        ]
        for n in range(DVSEC_RANGES):
            base = Signal(UNIT_BITS, name=f"base_{n}")
            size = Signal(UNIT_BITS, name=f"size_{n}", init=0 if n else self.units)
            m.d.comb += [
                decoders.dvsec[n].active.eq(size != 0),
                decoders.dvsec[n].base.eq(base),
                decoders.dvsec[n].size.eq(size),
            ]
            for word, register in enumerate((base, size), RANGE_WORD + 2 * n):
                with m.If(accepted & (written.word == word)):
                    m.d.sync += register.eq(written.data)
        return m
