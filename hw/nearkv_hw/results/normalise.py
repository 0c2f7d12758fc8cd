"""The value of a binned sum with its leading one in a fixed place: trunc_31 of numerator and denominator."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import BIN_BITS, LIMB_BITS, NUMERATOR_KEPT_BITS, TOP_BITS
from ..interfaces import State

VALUE_BITS = LIMB_BITS + BIN_BITS + 1
"""Bits of H * 2^W + L, signed."""
SHIFT_BITS = 7

_STAGE_SHIFTS = ((64, 32), (16, 8), (4, 2, 1))


class Normalise(wiring.Component):
    """Carries a state's limbs together and shifts the magnitude until bit 30 is its leading one.

    The value's magnitude, truncated to 31 bits, is significand * 2^(32 * top + 25 - shift); a short one is
    shifted left, which changes no value.

    Members
    -------
    step : In(5) : bit k loads the registers of stage k.
    state : In(State) : taken with step[0].
    significand : Out(31), shift : Out(7) : as above; the significand is zero for an empty state and for a sum
        of zero.
    negative : Out(1) : the sum is below zero.
    some, top : Out : the state's own.

    Latency is 5 cycles (`latency_cycles`), throughput one state per cycle.
    """

    latency_cycles = 2 + len(_STAGE_SHIFTS)

    def __init__(self):
        super().__init__(
            {
                "step": In(self.latency_cycles),
                "state": In(State),
                "significand": Out(NUMERATOR_KEPT_BITS),
                "shift": Out(SHIFT_BITS),
                "negative": Out(1),
                "some": Out(1),
                "top": Out(signed(TOP_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        stages = self.latency_cycles
        top = [Signal(signed(TOP_BITS), name=f"top_{k}", reset_less=True) for k in range(stages)]
        some = [Signal(name=f"some_{k}", reset_less=True) for k in range(stages)]
        negative = [Signal(name=f"negative_{k}", reset_less=True) for k in range(1, stages)]
        value = Signal(signed(VALUE_BITS), reset_less=True)
        magnitude = Signal(VALUE_BITS - 1, reset_less=True)
        for k in range(stages):
            with m.If(self.step[k]):
                m.d.sync += [
                    top[k].eq(top[k - 1] if k else self.state.top),
                    some[k].eq(some[k - 1] if k else self.state.some),
                ]

        with m.If(self.step[0]):
            low = self.state.low
            carried = Cat(
                low[:BIN_BITS], (self.state.high + low[BIN_BITS:].as_signed())[: VALUE_BITS - BIN_BITS]
            )
            m.d.sync += value.eq(Mux(self.state.some, carried, 0))
        with m.If(self.step[1]):
            m.d.sync += [
                magnitude.eq(Mux(value[-1], -value, value)),
                negative[0].eq(value[-1]),
            ]

        shifted, shift = magnitude, None
        ahead = sum(sum(shifts) for shifts in _STAGE_SHIFTS)
        for index, shifts in enumerate(_STAGE_SHIFTS):
            bits = []
            wide = shifted
            for by in shifts:
                ahead -= by
                zero = Signal(name=f"zero_{by}")
                m.d.comb += zero.eq(~wide[-by:].any())
                moved = Mux(zero, Cat(Const(0, by), wide[:-by]), wide)
                kept = min(len(wide), NUMERATOR_KEPT_BITS + ahead)
                narrow = Signal(kept, name=f"moved_{by}")
                m.d.comb += narrow.eq(moved[-kept:])
                bits.append(zero)
                wide = narrow
            register = Signal(len(wide), name=f"shifted_{index}", reset_less=True)
            done = Cat(*reversed(bits)) if shift is None else Cat(*reversed(bits), shift)
            shift = Signal(len(done), name=f"shift_{index}", reset_less=True)
            with m.If(self.step[2 + index]):
                m.d.sync += [register.eq(wide), shift.eq(done), negative[1 + index].eq(negative[index])]
            shifted = register
        m.d.comb += [
            self.significand.eq(shifted),
            self.shift.eq(shift),
            self.negative.eq(negative[-1]),
            self.some.eq(some[-1]),
            self.top.eq(top[-1]),
        ]
        return m
