"""From a host address to the device's own, by the ranges that are in force."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ...abi.cxl import M2S_REQ
from ...abi.hdm import ADDRESS_BITS, GRANULARITY_SHIFT, MAX_GRANULARITY, UNIT_BITS, UNIT_SHIFT
from ...abi.lines import LINE_SHIFT
from ...common.pipeline import later, stage
from ...common.trees import one_hot_select
from .third import Third

LINE_BITS = M2S_REQ["address"].width
"""Bits of a host address of a line."""
_UNIT = UNIT_SHIFT - LINE_SHIFT
_CHUNK = GRANULARITY_SHIFT - LINE_SHIFT
_CHUNK_BITS = ADDRESS_BITS - GRANULARITY_SHIFT


class Range(data.Struct):
    """A range of host addresses, and where it leads; in 256 MiB where nothing else is said."""

    active: 1
    base: UNIT_BITS
    end: UNIT_BITS + 1  # the first one that is no longer in it
    device: UNIT_BITS  # where its part of the device's memory begins
    granularity: 3  # chunks of 256 * 2^granularity bytes
    fold: 3  # log2 of the ways, without their factor of three
    three: 1  # the ways have a factor of three


class Translated(data.Struct):
    """Where a host address leads."""

    hit: 1  # some range has it
    line: LINE_BITS  # of the device, by number


class Translate(wiring.Component):
    """Translates an address per cycle; never waits.

    Parameters
    ----------
    ranges : how many ranges there are. They must not overlap.

    Members
    -------
    ranges : In(Range) x ranges.
    i : In(stream(LINE_BITS), always_ready) : host addresses of lines.
    o : Out(stream(Translated), always_ready) : where they lead, `latency_cycles` later.

    Stages: which range has it; that range; distance from its base; chunk; a third of the chunk (2); place in
    the range's memory; in the device.
    """

    latency_cycles = 6 + Third.latency_cycles

    def __init__(self, *, ranges):
        if not isinstance(ranges, int) or ranges < 1:
            raise ValueError(f"ranges must be a positive integer, not {ranges!r}")
        super().__init__(
            {
                "ranges": In(Range).array(ranges),
                "i": In(stream.Signature(LINE_BITS, always_ready=True)),
                "o": Out(stream.Signature(Translated, always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()

        # 1: which range has it
        unit = self.i.payload[_UNIT:]
        found = [stage(m, r.active & (unit >= r.base) & (unit < r.end)) for r in self.ranges]
        line = stage(m, self.i.payload)

        # 2: that range; of them one at most
        chosen = data.View(Range, stage(m, one_hot_select(found, [r.as_value() for r in self.ranges])))
        hit = stage(m, Cat(found).any())
        line = stage(m, line)

        # 3: distance from its base
        distance = stage(m, Cat(line[:_UNIT], (line[_UNIT:] - chosen.base)[:UNIT_BITS]))
        device, granularity, fold, three = (
            stage(m, value) for value in (chosen.device, chosen.granularity, chosen.fold, chosen.three)
        )

        # 4: the chunk, without the low bits of its number that the ways' power of two takes
        within = stage(m, _below(m, distance[_CHUNK : _CHUNK + MAX_GRANULARITY], granularity))
        below = stage(m, distance[:_CHUNK])
        shift = Signal(range(11))
        m.d.comb += shift.eq(granularity + fold)
        chunk = stage(m, distance[_CHUNK:] >> shift)
        granularity, three, device = (stage(m, value) for value in (granularity, three, device))

        # 5, 6: a third of it
        m.submodules.third = third = Third(width=_CHUNK_BITS)
        m.d.comb += third.dividend.eq(chunk)
        chunk, within, below, granularity, three, device = (
            later(m, value, Third.latency_cycles)
            for value in (chunk, within, below, granularity, three, device)
        )

        # 7: place in the range's memory
        whole = Signal(_CHUNK_BITS)
        m.d.comb += whole.eq(Mux(three, third.quotient, chunk) << granularity)
        place = stage(m, Cat(below, whole[:MAX_GRANULARITY] | within, whole[MAX_GRANULARITY:]))
        device = stage(m, device)

        # 8: in the device
        m.d.comb += [
            self.o.payload.line.eq(stage(m, Cat(place[:_UNIT], (place[_UNIT:] + device)[:UNIT_BITS]))),
            self.o.payload.hit.eq(later(m, hit, self.latency_cycles - 2)),
        ]
        valid = self.i.valid
        for _ in range(self.latency_cycles):
            register = Signal()
            m.d.sync += register.eq(valid)
            valid = register
        m.d.comb += self.o.valid.eq(valid)
        return m


def _below(m, bits, count):
    """The lowest `count` bits, the others zero."""
    kept = Signal(len(bits))
    for i in range(len(bits)):
        m.d.comb += kept[i].eq(bits[i] & (count > i))
    return kept
