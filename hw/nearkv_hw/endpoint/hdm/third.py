"""A number divided by three, exactly, without a multiplier."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ...common.pipeline import stage

_SUMS = [(a + b) % 3 for b in range(4) for a in range(4)]
_QUOTIENTS = [(4 * above + digit) // 3 % 4 for digit in range(4) for above in range(4)]


class Third(wiring.Component):
    """Divides by three; never waits.

    In base 4 each digit weighs one modulo three, so the remainder that long division has before a digit is
    the sum of the digits above it, modulo three. All these sums come from a tree of prefixes; each digit of
    the quotient then follows from a digit and its remainder.

    Parameters
    ----------
    width : bits of the dividend, 2 or more.

    Members
    -------
    dividend : In(width).
    quotient : Out(width) : `latency_cycles` later.
    divides : Out(1) : with it, whether nothing remains.

    Stages: sums over 8 digits; sums over all, and the quotient's digits.
    """

    latency_cycles = 2

    def __init__(self, *, width):
        if not isinstance(width, int) or width < 2:
            raise ValueError(f"width must be an integer from 2 on, not {width!r}")
        self.width = width
        super().__init__({"dividend": In(width), "quotient": Out(width), "divides": Out(1)})

    def elaborate(self, platform):
        m = Module()
        padded = Cat(self.dividend, Const(0, 1)) if self.width % 2 else self.dividend
        digits = [padded[at : at + 2] for at in reversed(range(0, len(padded), 2))]  # the highest first
        sums = digits
        spans = [1 << level for level in range((len(digits) - 1).bit_length())]
        for span in spans[:3]:
            sums = [_sum(m, sums[i - span], s) if i >= span else s for i, s in enumerate(sums)]
        sums, digits = ([stage(m, s) for s in each] for each in (sums, digits))
        for span in spans[3:]:
            sums = [_sum(m, sums[i - span], s) if i >= span else s for i, s in enumerate(sums)]
        reduced = [_sum(m, s, Const(0, 2)) for s in sums]  # a digit of 3 may stand alone
        above = [Const(0, 2), *reduced[:-1]]
        quotient = [_table(m, _QUOTIENTS, Cat(a, d)) for a, d in zip(above, digits, strict=True)]
        m.d.comb += [
            self.quotient.eq(stage(m, Cat(reversed(quotient)))),
            self.divides.eq(stage(m, reduced[-1] == 0)),
        ]
        return m


def _sum(m, above, below):
    return _table(m, _SUMS, Cat(above, below))


def _table(m, entries, index):
    """A table of 16 entries of two bits each, one lookup of the hardware's own size."""
    found = Signal(2)
    bits = Const(sum(entry << 2 * i for i, entry in enumerate(entries)), 32)
    m.d.comb += found.eq(bits.word_select(index, 2))
    return found
