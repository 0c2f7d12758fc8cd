"""The binned sum (docs/numerics.md, section 2) as hardware: one accumulator and the alignment of its terms.

A top bin is an unsigned number here, counted from some bin far below as the owner likes; zero stands for
"empty". Every real top is at least two and not all ones, so that one subtraction, term top minus held top,
decides everything for empty states and zero terms, too.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi.numerics import BIN_BITS, LIMB_BITS, TOP_BITS

HELD_TOP_BITS = TOP_BITS
"""Bits of a top bin; bins of products and weights leave room for "empty"."""
OFFSET_BITS = BIN_BITS.bit_length() - 1
"""Bits of the leading one's offset in its bin."""


def empty_top(top_bits):
    """The signed top bin that stands for an empty state or a zero term where tops have signs."""
    return -(1 << top_bits - 1)


def raised(top, top_bits=HELD_TOP_BITS):
    """A signed top bin as a `BinnedAccumulator` has it: `empty_top` becomes zero."""
    return (top ^ 1 << top_bits - 1)[:top_bits]


def lowered(top):
    """The signed top bin that was `raised`."""
    return (top ^ 1 << len(top) - 1).as_signed()


class Select(data.Struct):
    """What becomes of two limbs under a new top: kept, moved down one bin, or (neither) dropped."""

    keep: 1
    down: 1


class TermAligner(wiring.Component):
    """Cuts a term into limbs and aligns them: one per cycle, `latency_cycles` after it came; never waits.

    Parameters
    ----------
    significand_bits : bits of the significand, at most 64; bits below a term's lower limb are cut off.

    Members
    -------
    significand : In : the term's magnitude with its leading one at the top, or zero.
    offset : In : the leading one's position in its bin.
    select : In(Select) : where the limbs go.
    high, low : Out : the aligned limbs, as magnitudes.
    """

    latency_cycles = 1

    def __init__(self, *, significand_bits):
        if not isinstance(significand_bits, int) or not 1 <= significand_bits <= 2 * BIN_BITS:
            raise ValueError(f"significand_bits must be 1 to {2 * BIN_BITS}, not {significand_bits!r}")
        self.significand_bits = significand_bits
        super().__init__(
            {
                "significand": In(significand_bits),
                "offset": In(OFFSET_BITS),
                "select": In(Select),
                "high": Out(BIN_BITS),
                "low": Out(BIN_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        limbs = Signal(2 * BIN_BITS)
        pad = 2 * BIN_BITS - self.significand_bits
        m.d.comb += limbs.eq(Cat(Const(0, pad), self.significand) >> ~self.offset)
        aligned = Signal(2 * BIN_BITS, reset_less=True)
        m.d.sync += aligned.eq(
            (limbs & self.select.keep.replicate(2 * BIN_BITS))
            | (limbs[BIN_BITS:] & self.select.down.replicate(BIN_BITS))
        )
        m.d.comb += [self.low.eq(aligned[:BIN_BITS]), self.high.eq(aligned[BIN_BITS:])]
        return m


class BinnedAccumulator(wiring.Component):
    """Binned sums in two stages: the top bin is updated first, the limbs `limb_delay_cycles` later.

    One addition per cycle, to any state, the same or another; both stages read, change and write a state
    within one cycle, so that no addition waits for another. Between the stages the owner aligns the
    addend's limbs as `select` says. A cycle without an addition reads a state.

    Parameters
    ----------
    states : states that are kept.
    top_bits : bits of a top bin, `empty_top` included.
    limb_bits : bits of a limb.
    addend : shape of the addend's limbs.
    limb_delay_cycles : cycles from the top stage to the limb stage, at least 1.

    Members
    -------
    add : In : top stage: an addition (else nothing changes).
    first : In : top stage: the state was empty, whatever is kept; there is no other way to clear it.
    address : In : top stage: which state.
    top : In : top stage: the addend's top bin, or zero.
    held_top : Out : top stage: the state's top bin before the addition, or zero.
    select : Out(Select) : what becomes of the addend's limbs, one cycle after the top stage.
    limb_add, limb_address : In : limb stage: as `add` and `address`.
    negative : In : limb stage: subtract the limbs.
    high, low : In : limb stage: the aligned limbs.
    held_high, held_low : Out : limb stage: the state's limbs before the addition.
    """

    def __init__(
        self, *, states, top_bits=HELD_TOP_BITS, limb_bits=LIMB_BITS, addend=BIN_BITS, limb_delay_cycles=2
    ):
        if not isinstance(states, int) or states < 1:
            raise ValueError(f"states must be a positive integer, not {states!r}")
        if not isinstance(top_bits, int) or top_bits < 3:
            raise ValueError(f"top_bits must be an integer of at least 3, not {top_bits!r}")
        if not isinstance(limb_bits, int) or limb_bits <= BIN_BITS:
            raise ValueError(f"limb_bits must be an integer above {BIN_BITS}, not {limb_bits!r}")
        if not isinstance(limb_delay_cycles, int) or limb_delay_cycles < 1:
            raise ValueError(f"limb_delay_cycles must be a positive integer, not {limb_delay_cycles!r}")
        self.states = states
        self.top_bits = top_bits
        self.limb_bits = limb_bits
        self.addend = Shape.cast(addend)
        self.limb_delay_cycles = limb_delay_cycles
        super().__init__(
            {
                "add": In(1),
                "first": In(1),
                "address": In(range(states)),
                "top": In(top_bits),
                "held_top": Out(top_bits),
                "select": Out(Select),
                "limb_add": In(1),
                "limb_address": In(range(states)),
                "negative": In(1),
                "high": In(self.addend),
                "low": In(self.addend),
                "held_high": Out(signed(limb_bits)),
                "held_low": Out(signed(limb_bits)),
            }
        )

    @property
    def latency_cycles(self):
        """Cycles from an addition's top stage until the state holds it."""
        return self.limb_delay_cycles + 1

    def elaborate(self, platform):
        m = Module()
        held = self._kept(m, "tops", self.held_top, self.address, self.add)
        before = Signal(self.top_bits)
        above = Signal(self.top_bits)
        rises = Signal()
        m.d.comb += [
            before.eq(Mux(self.first, 0, self.held_top)),
            above.eq(self.top - before),
            # a carry chain of its own: the loop waits for no test of all of `above`
            rises.eq(self.top > before),
            held.eq(Mux(rises, self.top, before)),
        ]
        select = Signal(Select, reset_less=True)
        state = Signal(Select, reset_less=True)
        m.d.sync += [
            select.keep.eq(rises | (above == 0)),
            select.down.eq(above.all()),
            state.keep.eq(~rises),
            state.down.eq(above == 1),
        ]
        m.d.comb += self.select.eq(select)
        for _ in range(self.limb_delay_cycles - 1):
            delayed = Signal(Select, reset_less=True)
            m.d.sync += delayed.eq(state)
            state = delayed

        high = self._kept(m, "highs", self.held_high, self.limb_address, self.limb_add)
        low = self._kept(m, "lows", self.held_low, self.limb_address, self.limb_add)
        m.d.comb += [
            high.eq(self._sum(self._if(state.keep, self.held_high), self.high)),
            low.eq(
                self._sum(
                    self._if(state.keep, self.held_low) | self._if(state.down, self.held_high), self.low
                )
            ),
        ]
        return m

    def _if(self, bit, limb):
        """The limb's bits, or zero."""
        return limb.as_unsigned() & bit.replicate(self.limb_bits)

    def _sum(self, state, addend):
        """The state's limb plus or minus the addend, modulo the limb's width; one carry chain."""
        if addend.shape().signed:
            return state + addend.as_unsigned()
        return state + (addend ^ self.negative.replicate(self.limb_bits)) + self.negative

    def _kept(self, m, name, held, address, enable):
        """Storage for one part of every state: drives `held`, returns what is written under `enable`."""
        value = Signal.like(held, name=f"{name}_next")
        if self.states == 1:
            register = Signal.like(held, name=name, reset_less=True)
            with m.If(enable):
                m.d.sync += register.eq(value)
            m.d.comb += held.eq(register)
            return value
        m.submodules[name] = storage = memory.Memory(shape=held.shape(), depth=self.states, init=[])
        read, write = storage.read_port(domain="comb"), storage.write_port()
        m.d.comb += [
            read.addr.eq(address),
            held.eq(read.data),
            write.addr.eq(address),
            write.data.eq(value),
            write.en.eq(enable),
        ]
        return value
