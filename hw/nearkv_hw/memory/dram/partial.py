"""Writes of some bytes of a line, where error correction covers whole words: read, merge, write."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ...abi.lines import LINE_BITS, LINE_BYTES
from ...interfaces import LINE_ADDRESS_BITS
from ..backend import fabric_access


def whole_access(slot_bits):
    """A read, or a write of a whole line. With `merge` set a read's data belongs to a partial write."""
    return data.StructLayout(
        {
            "data": LINE_BITS,
            "line": LINE_ADDRESS_BITS,
            "slot": slot_bits,
            "merge": 1,
            "write": 1,
            "poison": 1,
        }
    )


class PartialWrites(wiring.Component):
    """Turns writes of some bytes into a read and a write of the whole line.

    A partial write leaves a line's poison, or one that could not be corrected poisoned.

    Parameters
    ----------
    slot_bits : width of the accesses' slots.

    Members
    -------
    i : In(stream(fabric_access)) : accesses; what follows a partial write waits for it.
    o : Out(stream(whole_access)) : accesses of whole lines.
    read : In(1), read_data, read_poison : In : the answer to a read with `merge`.

    Everything else passes in the same cycle.
    """

    def __init__(self, *, slot_bits):
        super().__init__(
            {
                "i": In(stream.Signature(fabric_access(slot_bits))),
                "o": Out(stream.Signature(whole_access(slot_bits))),
                "read": In(1),
                "read_data": In(LINE_BITS),
                "read_poison": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        asked, out = self.i.payload, self.o.payload
        merged, poison = Signal(LINE_BITS, reset_less=True), Signal(reset_less=True)
        reads, waits, writes = Signal(), Signal(), Signal()
        mask = Cat(asked.enable[i].replicate(8) for i in range(LINE_BYTES))
        m.d.comb += [
            reads.eq(asked.write & asked.partial & ~writes),
            self.o.valid.eq(self.i.valid & ~waits),
            self.i.ready.eq(self.o.ready & ~waits & ~reads),
            out.line.eq(asked.line),
            out.slot.eq(asked.slot),
            out.merge.eq(reads),
            out.write.eq(asked.write & ~reads),
            out.poison.eq(asked.poison | (writes & poison)),
            out.data.eq(Mux(writes, merged, asked.data)),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += [waits.eq(reads), writes.eq(0)]
        with m.If(self.read):
            m.d.sync += [
                merged.eq((self.read_data & ~mask) | (asked.data & mask)),
                poison.eq(self.read_poison),
                waits.eq(0),
                writes.eq(1),
            ]
        return m
