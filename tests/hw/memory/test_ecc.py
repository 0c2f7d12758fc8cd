"""Error correction: one flipped bit of a word is corrected, two are found, words stand for themselves."""

import random
from itertools import combinations

from amaranth.hdl import Module, Signal
from amaranth.sim import Simulator
from nearkv_hw.abi.lines import LINE_BITS
from nearkv_hw.memory.ecc import CHECK_BITS, LINE_CHECK_BITS, WORD_BITS, WORDS, EccDecoder, line_check


def decode(lines, flips):
    """(line, corrected, uncorrectable) of each line after the bits of its `flips` were turned."""
    m = Module()
    m.submodules.decoder = decoder = EccDecoder()
    line, flip = Signal(LINE_BITS), Signal(LINE_BITS + LINE_CHECK_BITS)
    m.d.comb += [
        decoder.line.eq(line ^ flip[:LINE_BITS]),
        decoder.check.eq(line_check(m, line) ^ flip[LINE_BITS:]),
    ]
    found = []

    async def bench(ctx):
        for n in range(len(lines) + decoder.latency_cycles):
            if n >= decoder.latency_cycles:
                names = ("corrected_line", "corrected", "uncorrectable")
                found.append(tuple(ctx.get(getattr(decoder, name)) for name in names))
            if n < len(lines):
                ctx.set(line, lines[n])
                ctx.set(flip, sum(1 << bit for bit in flips[n]))
            await ctx.tick()

    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    return found


def word_of(bit):
    return bit // WORD_BITS if bit < LINE_BITS else (bit - LINE_BITS) // CHECK_BITS


def bits_of(word):
    data = range(word * WORD_BITS, (word + 1) * WORD_BITS)
    return [*data, *range(LINE_BITS + word * CHECK_BITS, LINE_BITS + (word + 1) * CHECK_BITS)]


def test_every_single_bit_is_corrected():
    rng = random.Random(7)
    flips = [[bit] for bit in range(LINE_BITS + LINE_CHECK_BITS)]
    lines = [rng.getrandbits(LINE_BITS) for _ in flips]
    assert decode(lines, flips) == [(line, 1, 0) for line in lines]


def test_every_pair_of_bits_of_a_word_is_found():
    rng = random.Random(8)
    flips = [list(pair) for pair in combinations(bits_of(rng.randrange(WORDS)), 2)]
    lines = [rng.getrandbits(LINE_BITS) for _ in flips]
    assert [(corrected, spoilt) for _, corrected, spoilt in decode(lines, flips)] == [(0, 1)] * len(flips)


def test_words_stand_for_themselves():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    flips = [[rng.choice(bits_of(word)) for word in range(WORDS) if rng.random() < 0.4] for _ in range(200)]
    lines = [rng.getrandbits(LINE_BITS) for _ in flips]
    assert decode(lines, flips) == [
        (line, int(bool(flip)), 0) for line, flip in zip(lines, flips, strict=True)
    ]


def test_what_was_never_written_is_correct():
    assert decode([0, 0], [[], []]) == [(0, 0, 0)] * 2
