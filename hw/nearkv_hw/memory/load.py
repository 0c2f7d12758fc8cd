"""How loaded a slice of the memory is, by what waits in its queues."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..interfaces import DevLoad

WINDOW_CYCLES = 64
"""A load is of so many cycles: some 80 ns, less than a host's round trip, and more than a turn of the bus."""


class LoadMeter(wiring.Component):
    """Averages what a memory takes, what waits in its queues, and how often the fabric finds no room there.

    Attention alone makes the load optimal, not more: the memory is put to use, and the host's accesses have
    their share (`DeviceConfig.fabric_share`) and places of their own, so a host need not ask for less.
    Overload is what delays the fabric's accesses before they have a place.

    Parameters
    ----------
    places : accesses that the queues hold, at least 1.

    Members
    -------
    taken : In(range(3)) : accesses that the memory took, of unit and fabric. It can take one per cycle.
    waiting : In(range(places + 1)) : accesses in the queues, of both.
    refused : In(1) : an access of the fabric finds no room.
    load : Out(DevLoad) : of the last whole window of `WINDOW_CYCLES`: optimal from a quarter of the places,
        or of the accesses that the memory can take; moderate overload from a quarter of the cycles with an
        access refused, severe overload from three quarters; else light.

    A window's load is there `latency_cycles` after the window's last cycle. It does not depend on how it was
    before.
    """

    latency_cycles = 2

    def __init__(self, *, places):
        if not isinstance(places, int) or places < 1:
            raise ValueError(f"places must be a positive integer, not {places!r}")
        self.places = places
        super().__init__(
            {
                "taken": In(range(3)),
                "waiting": In(range(places + 1)),
                "refused": In(1),
                "load": Out(DevLoad),
            }
        )

    def elaborate(self, platform):
        m = Module()
        cycle, ends = Signal(range(WINDOW_CYCLES)), Signal()
        m.d.sync += [cycle.eq(cycle + 1), ends.eq(cycle == WINDOW_CYCLES - 1)]
        sums = []
        for value, most in ((self.taken, 2), (self.waiting, self.places), (self.refused, 1)):
            total = Signal(range(most * WINDOW_CYCLES + 1))
            m.d.sync += total.eq(Mux(ends, 0, total) + value)
            sums.append(total)
        taken, waiting, refused = sums
        with m.If(ends):
            m.d.sync += self.load.eq(DevLoad.LIGHT)
            for enough, load in (
                (taken >= WINDOW_CYCLES // 4, DevLoad.OPTIMAL),
                (waiting >= self.places * WINDOW_CYCLES // 4, DevLoad.OPTIMAL),
                (refused >= WINDOW_CYCLES // 4, DevLoad.MODERATE_OVERLOAD),
                (refused >= WINDOW_CYCLES * 3 // 4, DevLoad.SEVERE_OVERLOAD),
            ):
                with m.If(enough):
                    m.d.sync += self.load.eq(load)
        return m
