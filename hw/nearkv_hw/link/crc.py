"""CRC-16 of a flit as parities.

A square over GF(2) only spreads a polynomial: P(x)^16 = P(x^16). So what is a multiple of P(x^16), which has
the taps of P between words of 16 bits, can be left out, and 32 words become 16 by exclusive ors of whole
words; so do the 32 bytes of those with P(x^8), and their halves with P(x^4). Of the 64 bits left each bit of
the CRC is a parity. That is less wiring than parities of the whole flit, and a simulator's words stay whole.
"""

from operator import xor

from amaranth.hdl import Cat, Signal

from ..abi.flits import CRC_BITS, FLIT_BITS, crc_column, crc_masks
from ..common.trees import reduce_tree

_FOLDS = 3
FOLDED_BITS = FLIT_BITS >> _FOLDS


def folded(m, flit):
    """64 bits with the CRC of a flit's 512, worked out in module `m` without registers."""
    if len(flit) != FLIT_BITS:
        raise ValueError(f"a flit has {FLIT_BITS} bits, not {len(flit)}")
    bits = flit
    for fold in range(_FOLDS):
        width = len(bits) // (2 * CRC_BITS)
        words = [bits[n * width : (n + 1) * width] for n in range(2 * CRC_BITS)]
        lower = [Signal(width, name=f"crc_fold{fold}_{n}") for n in range(CRC_BITS)]
        for n, word in enumerate(lower):
            # y^(16 + i) mod P(y) has y^n where x^(i + 16) mod P(x) has x^n
            high = [words[CRC_BITS + i] for i in range(CRC_BITS) if crc_column(i) >> n & 1]
            m.d.comb += word.eq(reduce_tree([words[n], *high], xor))
        bits = Cat(lower)
    return bits


def crc_of(bits):
    """The CRC of a flit from the bits that `folded` made of it."""
    return Cat(reduce_tree([bits[i] for i in range(len(bits)) if mask >> i & 1], xor) for mask in crc_masks())
