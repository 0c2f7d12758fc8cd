"""Error correction beside the data: an extended Hamming code over every 64-bit word of a line.

A word has seven check bits and a parity bit. The bits of a word and its check bits have positions 1 to 71,
check bits those that are powers of two; check bit k is the parity of all positions with bit k set, so that
the syndrome of a single flipped bit is its position. The eighth bit is the parity of all 71. One flipped bit
in a word is corrected, two are found. A line that was never written, zeros with check bits of zero, is
correct.
"""

from operator import xor

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.lines import LINE_BITS
from ..common.trees import reduce_tree

WORD_BITS = 64
CHECK_BITS = 8
WORDS = LINE_BITS // WORD_BITS
LINE_CHECK_BITS = WORDS * CHECK_BITS
_SYNDROME_BITS = CHECK_BITS - 1
_POSITIONS = [p for p in range(1, 1 << _SYNDROME_BITS) if p & (p - 1)][:WORD_BITS]
"""The positions of a word's bits."""
_BYTE_BITS = 8


def line_check(m, line):
    """The check bits of a line, word i's from bit 8 i up, worked out in module `m` without registers."""
    check = Signal(LINE_CHECK_BITS)
    words = (line[i * WORD_BITS : (i + 1) * WORD_BITS] for i in range(WORDS))
    m.d.comb += check.eq(Cat(_word_check(m, word) for word in words))
    return check


def _word_check(m, word):
    """A word's check bits: parities of positions by their place in a byte, then by their byte."""
    runs = [word[(1 << k) - k - 1 : (1 << k + 1) - k - 2] for k in range(_SYNDROME_BITS)]
    placed = Cat(Const(0, 1), *(part for run in runs for part in (Const(0, 1), run)))
    count = -(-(_POSITIONS[-1] + 1) // _BYTE_BITS)
    pieces = [Signal(_BYTE_BITS, name=f"byte_{at}") for at in range(count)]
    folded, parities = Signal(_BYTE_BITS), Signal(count)
    m.d.comb += [
        Cat(pieces).eq(placed),
        folded.eq(reduce_tree(pieces, xor)),
        parities.eq(Cat(piece.xor() for piece in pieces)),
    ]
    split = exact_log2(_BYTE_BITS)
    checks = [
        *(_parity_of(folded, k) for k in range(split)),
        *(_parity_of(parities, k) for k in range(_SYNDROME_BITS - split)),
    ]
    return Cat(*checks, reduce_tree([folded.xor(), *checks], xor))


def _parity_of(bits, k):
    """The parity of the bits whose index has bit k set."""
    return reduce_tree([bit for at, bit in enumerate(bits) if at >> k & 1], xor)


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
        fresh = line_check(m, self.line)
        words, corrected, uncorrectable = [], [], []
        for i in range(WORDS):
            kept = self.check[i * CHECK_BITS : (i + 1) * CHECK_BITS]
            syndrome = Signal(_SYNDROME_BITS, name=f"syndrome_{i}", reset_less=True)
            odd = Signal(name=f"odd_{i}", reset_less=True)
            differ = kept ^ fresh[i * CHECK_BITS : (i + 1) * CHECK_BITS]
            # the parity bit covers the check bits as they were kept
            m.d.sync += [syndrome.eq(differ), odd.eq(differ.xor())]
            word = line[i * WORD_BITS : (i + 1) * WORD_BITS]
            beyond = syndrome > _POSITIONS[-1]
            flips = odd & ~beyond
            words.append(word ^ (flips & _in_word(syndrome)) << _bit_of(syndrome))
            corrected.append(flips)
            uncorrectable.append((odd & beyond) | (~odd & syndrome.any()))
        spoilt = Cat(uncorrectable).any()
        m.d.sync += [
            self.corrected_line.eq(Cat(words)),
            self.corrected.eq(Cat(corrected).any() & ~spoilt),
            self.uncorrectable.eq(spoilt),
        ]
        return m


def _in_word(position):
    """Whether the position is a word's bit: one that is no power of two."""
    return (position & (position - 1)).any()


def _bit_of(position):
    """Which bit of its word a position is: positions start at 1 and skip the powers of two."""
    skipped = Const(3)
    for k in range(2, _SYNDROME_BITS):
        skipped = Mux(position[k:].any(), k + 2, skipped)
    return (position - skipped)[: exact_log2(WORD_BITS)]
