"""Whether a decoder may be committed, and where its part of the device's memory lies."""

from amaranth.hdl import Module, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ...abi.hdm import MAX_GRANULARITY, THREE_WAYS, UNIT_BITS, WAYS
from ...common.pipeline import later, stage
from .third import Third


class Programmed(data.Struct):
    """What software has programmed of a decoder, in 256 MiB where nothing else is said."""

    base: UNIT_BITS
    size: UNIT_BITS
    skip: UNIT_BITS
    granularity: 4
    ways: 4


def factors(ways):
    """Whether the ways behind an encoding have a factor of three, and log2 of what else they have."""
    three = ways[THREE_WAYS.bit_length() - 1]
    return three, Mux(three, ways[:2], ways[:3])


class Check(wiring.Component):
    """Checks what is programmed against the decoders before it; never waits.

    A decoder is in order when its interleaving is one that there is, its range is not empty, begins where the
    one before ends or later and ends within the address space, every device of the set gets whole units of
    256 MiB of it, and its part of the memory, after what it skips, ends within the device.

    Parameters
    ----------
    capacity : the device's memory, in 256 MiB.

    Members
    -------
    programmed : In(Programmed).
    host_end, device_end : In : where the decoders before it end, in host addresses and in the device.
    ok : Out(1) : `latency_cycles` later.
    end : Out : where its range ends.
    device, device_after : Out : where its part of the device's memory begins and ends.

    Stages: range, and shares without the factor of three; a third of them (2); end in the device; verdict.
    """

    latency_cycles = 3 + Third.latency_cycles

    def __init__(self, *, capacity):
        if not isinstance(capacity, int) or not 1 <= capacity < 1 << UNIT_BITS:
            raise ValueError(f"capacity must be 1 to {(1 << UNIT_BITS) - 1} units, not {capacity!r}")
        self.capacity = capacity
        super().__init__(
            {
                "programmed": In(Programmed),
                "host_end": In(UNIT_BITS + 1),
                "device_end": In(UNIT_BITS + 1),
                "ok": Out(1),
                "end": Out(UNIT_BITS + 1),
                "device": Out(UNIT_BITS + 2),
                "device_after": Out(UNIT_BITS + 1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        given = self.programmed
        three, fold = factors(given.ways)
        limit = 1 << UNIT_BITS

        # 1: range, and shares without the factor of three
        end = stage(m, given.base + given.size)
        device = stage(m, self.device_end + given.skip)
        folded = stage(m, given.size >> fold)
        rest = stage(m, ((given.size >> fold) << fold)[:UNIT_BITS] != given.size)
        fine = stage(
            m,
            given.ways.matches(*WAYS)
            & (given.granularity <= MAX_GRANULARITY)
            & given.size.any()
            & (given.base >= self.host_end),
        )
        three = stage(m, three)

        # 2, 3: a third of them
        m.submodules.third = third = Third(width=UNIT_BITS)
        m.d.comb += third.dividend.eq(folded)
        end, device, folded, rest, fine, three = (
            later(m, value, Third.latency_cycles) for value in (end, device, folded, rest, fine, three)
        )

        # 4: end in the device
        after = stage(m, device + Mux(three, third.quotient, folded))
        whole = stage(m, ~rest & (~three | third.divides))
        inside = stage(m, end <= limit)
        end, device, fine = (stage(m, value) for value in (end, device, fine))

        # 5: verdict
        m.d.comb += [
            self.ok.eq(stage(m, fine & whole & inside & (after <= self.capacity))),
            self.end.eq(stage(m, end)),
            self.device.eq(stage(m, device)),
            self.device_after.eq(stage(m, after)),
        ]
        return m
