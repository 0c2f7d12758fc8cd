"""Error correction beside the data: an extended Hamming code over every 64-bit word of a line.

A word has seven check bits and a parity bit. The bits of a word and its check bits have positions 1 to 71,
check bits those that are powers of two; check bit k is the parity of all positions with bit k set, so that
the syndrome of a single flipped bit is its position. The eighth bit is the parity of all 71. One flipped bit
in a word is corrected, two are found. A line that was never written, zeros with check bits of zero, is
correct.
"""

from functools import reduce
from operator import xor

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS

WORD_BITS = 64
CHECK_BITS = 8
WORDS = LINE_BITS // WORD_BITS
LINE_CHECK_BITS = WORDS * CHECK_BITS
_SYNDROME_BITS = CHECK_BITS - 1
_POSITIONS = [p for p in range(1, 1 << _SYNDROME_BITS) if p & (p - 1)][:WORD_BITS]
"""The positions of a word's bits."""
_MASKS = [sum(1 << bit for bit, p in enumerate(_POSITIONS) if p >> k & 1) for k in range(_SYNDROME_BITS)]
"""The bits of a word that each check bit covers."""


def line_check(line):
    """The check bits of a line, word i's from bit 8 i up; a value without registers."""
    return Cat(_word_check(line[i * WORD_BITS : (i + 1) * WORD_BITS]) for i in range(WORDS))


def _word_check(word):
    checks = [(word & mask).xor() for mask in _MASKS]
    return Cat(*checks, reduce(xor, checks, word.xor()))


class EccDecoder(wiring.Component):
    """Corrects a line per cycle.

    Members
    -------
    line, check : In : a line as it came from memory, and its check bits.
    corrected_line : Out : the line, corrected; what was in memory where it cannot be.
    corrected : Out : bits were corrected in at least one word (of the line or its check bits).
    uncorrectable : Out : at least one word cannot be corrected.

    Latency is `latency_cycles`, throughput one line per cycle; nothing waits.
    """

    latency_cycles = 2

    line: In(LINE_BITS)
    check: In(LINE_CHECK_BITS)
    corrected_line: Out(LINE_BITS)
    corrected: Out(1)
    uncorrectable: Out(1)

    def elaborate(self, platform):
        m = Module()
        line = Signal(LINE_BITS, reset_less=True)
        m.d.sync += line.eq(self.line)
        words, corrected, uncorrectable = [], [], []
        for i in range(WORDS):
            kept = self.check[i * CHECK_BITS : (i + 1) * CHECK_BITS]
            fresh = _word_check(self.line[i * WORD_BITS : (i + 1) * WORD_BITS])
            syndrome = Signal(_SYNDROME_BITS, name=f"syndrome_{i}", reset_less=True)
            odd = Signal(name=f"odd_{i}", reset_less=True)
            differ = kept ^ fresh
            # the parity bit covers the check bits as they were kept
            m.d.sync += [syndrome.eq(differ), odd.eq(differ.xor())]
            flips = Signal(1 << _SYNDROME_BITS, name=f"flips_{i}")
            m.d.comb += flips.eq(Const(1) << syndrome)
            word = line[i * WORD_BITS : (i + 1) * WORD_BITS]
            words.append(word ^ Mux(odd, _of_word(flips), 0))
            beyond = syndrome > _POSITIONS[-1]
            corrected.append(odd & ~beyond)
            uncorrectable.append((odd & beyond) | (~odd & syndrome.any()))
        spoilt = Cat(uncorrectable).any()
        m.d.sync += [
            self.corrected_line.eq(Cat(words)),
            self.corrected.eq(Cat(corrected).any() & ~spoilt),
            self.uncorrectable.eq(spoilt),
        ]
        return m


def _of_word(positions):
    """A word's bits among the positions: what lies between the powers of two."""
    runs = [positions[(1 << k) + 1 : 1 << (k + 1)] for k in range(1, _SYNDROME_BITS)]
    return Cat(runs)[:WORD_BITS]
