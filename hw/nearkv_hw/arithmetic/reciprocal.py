"""The reciprocal of a denominator: r = floor(2^61 / l), once per query (docs/numerics.md section 6)."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import DENOMINATOR_BITS, RECIPROCAL_BITS

QUOTIENT_BITS = RECIPROCAL_BITS - DENOMINATOR_BITS + 2
"""Bits of r: 2^31 itself when l is 2^30."""


class Reciprocal(wiring.Component):
    """Divider for r = floor(2^61 / l) with 2^30 <= l < 2^31, two quotient bits per cycle.

    Parameters
    ----------
    notice_cycles : how long before `o` is valid `soon` rises at the latest possible time, 0 to 15.

    Members
    -------
    i : In(stream(31)) : l. An l below 2^30 gives a number without meaning, after the same time.
    o : Out(stream(32)) : r, held until taken; the next l is taken only after that.
    soon : Out(1) : `o` is valid now or will be within `notice_cycles` cycles.

    Latency is 17 cycles (`latency_cycles`), throughput one quotient per 18 cycles (`interval_cycles`).
    """

    latency_cycles = QUOTIENT_BITS // 2 + 1
    interval_cycles = latency_cycles + 1

    def __init__(self, *, notice_cycles=0):
        if not isinstance(notice_cycles, int) or not 0 <= notice_cycles < QUOTIENT_BITS // 2:
            raise ValueError(
                f"notice_cycles must be an integer from 0 to {QUOTIENT_BITS // 2 - 1}, not {notice_cycles!r}"
            )
        self.notice_cycles = notice_cycles
        super().__init__(
            {
                "i": In(stream.Signature(DENOMINATOR_BITS)),
                "o": Out(stream.Signature(QUOTIENT_BITS)),
                "soon": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        steps = QUOTIENT_BITS // 2
        busy = Signal()
        left = Signal(range(steps + 1))
        divisor = Signal(DENOMINATOR_BITS, reset_less=True)
        divisor_3 = Signal(DENOMINATOR_BITS + 2, reset_less=True)
        remainder = Signal(DENOMINATOR_BITS, reset_less=True)
        quotient = Signal(QUOTIENT_BITS, reset_less=True)

        # Four times the remainder less 0, 1, 2 or 3 times l: three subtractions at once, the largest that
        # fits wins.
        shifted = Cat(0, 0, remainder)
        less = [Signal(len(shifted) + 1, name=f"less_{k}") for k in (1, 2, 3)]
        m.d.comb += [
            less[0].eq(shifted - divisor),
            less[1].eq(shifted - Cat(0, divisor)),
            less[2].eq(shifted - divisor_3),
            self.i.ready.eq(~busy),
            self.o.valid.eq(busy & (left == 0)),
            self.o.payload.eq(quotient),
            self.soon.eq(busy & (left <= self.notice_cycles)),
        ]
        fits = [~value[-1] for value in less]

        with m.If(~busy):
            with m.If(self.i.valid):
                m.d.sync += [
                    busy.eq(1),
                    left.eq(steps),
                    divisor.eq(self.i.payload),
                    divisor_3.eq(self.i.payload + Cat(0, self.i.payload)),
                    # What is left of 2^61 after the quotient bits that are certainly zero.
                    remainder.eq(1 << (RECIPROCAL_BITS - QUOTIENT_BITS)),
                ]
        with m.Elif(left == 0):
            m.d.sync += busy.eq(~self.o.ready)
        with m.Else():
            m.d.sync += [
                left.eq(left - 1),
                remainder.eq(Mux(fits[1], Mux(fits[2], less[2], less[1]), Mux(fits[0], less[0], shifted))),
                quotient.eq(Cat(Mux(fits[1], fits[2], fits[0]), fits[1], quotient)),
            ]
        return m
