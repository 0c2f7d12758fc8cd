"""Packs words into whole lines."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS


class Packer(wiring.Component):
    """Collects a plane's beats in a line; what no beat fills is zero.

    Parameters
    ----------
    word_bits : bits of a beat; a line holds a power of two of them.
    narrow : whether beats may be half as wide (`half`).

    Members
    -------
    push : In(1) : a beat is there. Only while `full` is clear or with `take`.
    data : In(word_bits) : the beat.
    half : In(1) : the beat's lower half alone counts; constant over a line. Only with `narrow`.
    last : In(1) : the beat is the plane's last.
    full : Out(1) : the line is complete.
    line : Out(512) : the line, while `full`.
    line_last : Out(1) : the line is the plane's last, while `full`.
    take : In(1) : the line has been taken.

    Latency is one cycle from the beat that completes a line (`latency_cycles`), throughput one beat per
    cycle.
    """

    latency_cycles = 1

    def __init__(self, *, word_bits, narrow=False):
        if not isinstance(word_bits, int) or word_bits < 2 or LINE_BITS % word_bits:
            raise ValueError(f"word_bits must divide a line of {LINE_BITS} bits, not {word_bits!r}")
        self.word_bits = word_bits
        self.narrow = narrow
        super().__init__(
            {
                "push": In(1),
                "data": In(word_bits),
                "half": In(1),
                "last": In(1),
                "full": Out(1),
                "line": Out(LINE_BITS),
                "line_last": Out(1),
                "take": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        # A word of the line is half a beat where halves may come: a whole beat then writes two neighbours.
        width = self.word_bits // 2 if self.narrow else self.word_bits
        words = [Signal(width, name=f"word_{k}", reset_less=True) for k in range(LINE_BITS // width)]
        # One bit per word says where the beat goes: nothing to decode between `push` and the words.
        place = Signal(len(words), init=1)
        complete = Signal()
        if self.narrow:
            here = [place[k] | (~self.half & place[k - 1] if k % 2 else 0) for k in range(len(words))]
            pieces = [self.data[:width], Mux(self.half, self.data[:width], self.data[width:])]
            following = Mux(self.half, Cat(0, place), Cat(0, 0, place))
        else:
            here = list(place)
            pieces = [self.data] * 2
            following = Cat(0, place)
        m.d.comb += [self.line.eq(Cat(words)), complete.eq(self.last | here[-1])]
        with m.If(self.push):
            m.d.sync += [
                place.eq(Mux(complete, 1, following)),
                self.full.eq(complete),
                self.line_last.eq(self.last),
            ]
            for k, word in enumerate(words):
                with m.If(here[k]):
                    m.d.sync += word.eq(pieces[k % 2])
                with m.Elif(place[0]):
                    m.d.sync += word.eq(0)
        with m.Elif(self.take):
            m.d.sync += self.full.eq(0)
        return m
