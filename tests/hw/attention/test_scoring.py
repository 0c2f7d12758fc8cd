# amaranth: UnusedElaboratable=no
"""Scoring: rows become the contract's weights and denominators, in order; sinks, dropped rows, NaN; rate."""

import cocotb
import pytest
from amaranth.lib import data
from attention_golden import (
    biased_score,
    capped_score,
    float32,
    float32_bits,
    merge,
    score_of,
    score_of_sink,
    term,
    weight_of,
)
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.numerics import SCORE_LIMIT
from nearkv_hw.arithmetic.binned import empty_top
from nearkv_hw.arithmetic.score import DOT_TOP_BITS, Factor
from nearkv_hw.arithmetic.weight import Weight
from nearkv_hw.attention.array import row_dots
from nearkv_hw.attention.scoring import (
    SCORE_QUEUE_ROWS,
    WEIGHT_SLOTS,
    Scoring,
    Sight,
    denominator_read,
    opening,
    query_parameters,
)
from nearkv_hw.attention.shape import BLOCK_ROWS, PASSES, RowBlock
from nearkv_hw.interfaces import State
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSource, cycle, random, start, value


@pytest.mark.rtl
@pytest.mark.parametrize(("queries", "pipes", "rows"), [(4, 1, 1), (4, 2, 1), (1, 1, 1), (2, 1, 4)])
def test_scoring(queries, pipes, rows):
    scoring = Scoring(queries=queries, pipes=pipes, rows=rows)
    figures = {"queries": queries, "pipes": pipes, "rows": rows, "read_cycles": scoring.read_cycles}
    run(scoring, module=__file__, parameters=figures)


@pytest.mark.parametrize("pipes", [0, 3, 1.0])
def test_pipes_are_checked(pipes):
    with pytest.raises(ValueError, match=f"pipes must divide queries=4, not {pipes}"):
        Scoring(queries=4, pipes=pipes)


def test_rows_are_checked():
    with pytest.raises(ValueError, match="rows must be 1 or 4, not 2"):
        Scoring(queries=4, pipes=1, rows=2)


def random_factor(rng):
    """(float32 bits, the normalised factor)."""
    bits = float32_bits(rng.choice([0.0, 1.0, -1.0, rng.uniform(-2, 2)]))
    return bits, factor_of(bits)


def factor_of(bits):
    """A float32 as a pass has it."""
    sign, m, e = float32(bits)
    shift = 24 - m.bit_length() if m else 0
    return {"significand": m << shift, "exponent": e - shift if m else 0, "negative": sign}


def random_dot(rng):
    special = rng.random() < 0.1
    return {
        "top": rng.choice([empty_top(DOT_TOP_BITS), 0, 0, 1, 1]),
        "high": rng.randrange(-64, 64) if rng.random() < 0.8 else rng.randrange(-(1 << 40), 1 << 40),
        "low": rng.randrange(-(1 << 40), 1 << 40),
        **{name: int(special and rng.random() < 0.3) for name in ("nan", "positive", "negative")},
    }


class Query:
    """The golden's view of one query's pass."""

    def __init__(self, sink):
        self.denominator, self.nan = None, False
        if sink is None:
            return
        if sink >> 23 & 255 == 255:
            self.nan = sink != 0xFF800000
        else:
            self._add(score_of_sink(sink))

    def _add(self, score):
        p, n = weight_of(score)
        self.denominator = merge(self.denominator, term(0, p, n - 17))
        return p, n

    def row(self, dot, factor_bits, cap_bits, index, sight, position, slope_bits):
        """The weight of row `index`, or None."""
        distance = index - position
        if sight["causal"] and distance > 0:
            return None
        if sight["window"] and distance <= -sight["window"] and index >= sight["kept"]:
            return None
        infinite = dot["positive"] or dot["negative"]
        sign, m, _ = float32(factor_bits)
        up = dot["negative"] if sign else dot["positive"]
        undefined = dot["nan"] or (dot["positive"] and dot["negative"]) or (infinite and m == 0)
        if undefined or (infinite and not cap_bits):
            self.nan |= bool(undefined or up)
            return None
        state = None if dot["top"] == empty_top(DOT_TOP_BITS) else (dot["top"], dot["high"], dot["low"])
        score = score_of(state, factor_bits)
        if infinite:
            score = SCORE_LIMIT if up else -SCORE_LIMIT
        score = capped_score(score, cap_bits) if cap_bits else score
        return self._add(biased_score(score, distance, slope_bits))


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.7])
async def equals_the_contract(dut, idle):
    await start(dut)
    rng = random("passes", idle)
    queries, pipes, most = (parameters()[name] for name in ("queries", "pipes", "rows"))
    openings = StreamSource(dut, "openings", idle=idle, shape=opening(queries))
    reads = StreamSource(dut, "reads", idle=idle, shape=denominator_read(queries))
    edge = RisingEdge(dut.clk)
    slot = 0
    factors, caps, counts = [{}] * PASSES, [{}] * PASSES, [1] * PASSES
    sights = [{}] * PASSES
    capped = biased = 0
    blocks = StreamSource(dut, "blocks", idle=idle, shape=RowBlock)
    for turn in range(12):
        number = turn % PASSES
        count = counts[number] = rng.randint(1, queries)
        factor_bits, factors[number] = random_factor(rng)
        cap_bits = float32_bits(rng.uniform(0.1, 90)) if rng.random() < 0.4 else 0
        caps[number] = factor_of(cap_bits)
        capped = capped & ~(1 << number) | (cap_bits != 0) << number
        dut.factors.value = pack(data.ArrayLayout(Factor, PASSES), factors)
        dut.capped.value = capped
        dut.caps.value = pack(data.ArrayLayout(Factor, PASSES), caps)
        first_row = rng.choice([0, rng.randrange(1 << 22)])
        sights[number] = {
            "causal": rng.getrandbits(1),
            "window": rng.choice([0, rng.randint(1, 40)]),
            "kept": rng.choice([0, first_row + rng.randrange(9)]),
        }
        slopes = [float32_bits(rng.uniform(-1, 1)) if rng.getrandbits(1) else 0 for _ in range(queries)]
        has_slopes = rng.getrandbits(1)
        biased = biased & ~(1 << number) | has_slopes << number
        dut.biased.value = biased
        dut.sights.value = pack(data.ArrayLayout(Sight, PASSES), sights)
        positions = [first_row + rng.randrange(-9, 60) for _ in range(count)]
        for index, position in enumerate(positions):
            told = {"valid": 1, "number": number, "query": index, "position": position}
            told["slope"] = factor_of(slopes[index])
            dut.parameters.value = pack(query_parameters(queries), told)
            await edge
        dut.parameters.value = 0
        dut.counts.value = pack(data.ArrayLayout(queries.bit_length(), PASSES), counts)
        sinks = [
            rng.choice(
                [float32_bits(rng.uniform(-9, 9)), 0xFF800000, rng.choice([0x7F800000, 0x7FC00000, 0])]
            )
            for _ in range(queries)
        ]
        has_sinks = rng.getrandbits(1)
        openings.send([{"number": number, "sinks": has_sinks, "values": sinks}])
        await openings.drained()
        golden = [Query(sink if has_sinks else None) for sink in sinks[:count]]

        rows = [[random_dot(rng) for _ in range(queries)] for _ in range(rng.choice([0, 1, 5, 50]))]
        weights = [
            [
                query.row(
                    dots[index],
                    factor_bits,
                    cap_bits,
                    first_row + row,
                    sights[number],
                    positions[index],
                    slopes[index] if has_slopes else 0,
                )
                for index, query in enumerate(golden)
            ]
            for row, dots in enumerate(rows)
        ]
        # rows abreast come together: the first of them, its place in their line, how many they are
        abreast = rng.randrange(3) if most > 1 else 0
        place, together = rng.randrange(1 << abreast), []
        sizes, n = [], 0
        while n < len(rows):
            size = min(BLOCK_ROWS - place, len(rows) - n)  # a block ends with a line
            sizes.append({"index": first_row + n, "rows": size})
            end = n + size
            while n < end:
                count_here = min((1 << abreast) - place, end - n)
                together.append((n, place, count_here))
                n, place = n + count_here, 0
        blocks.send(sizes)
        await blocks.drained()
        sent = taken = weighed = shown = 0
        begun = cycle()
        show = False
        while shown < len(together) or show:
            here = sent < len(together) and sent - taken < SCORE_QUEUE_ROWS and rng.random() >= idle
            # a row's slot is used again only after it was shown
            here = here and sent - shown < WEIGHT_SLOTS
            dut.row_valid.value = int(here)
            row = {"number": rng.randrange(PASSES)}
            if here:
                first, place, count_here = together[sent]
                dots = [[random_dot(rng) for _ in range(queries)] for _ in range(most)]
                dots[place : place + count_here] = rows[first : first + count_here]
                row = {"dots": dots, "number": number}
                if most > 1:
                    row |= {"place": place, "rows": count_here - 1}
            dut.row.value = pack(row_dots(queries, most), row)
            sent += here
            before, show = show, shown < weighed
            dut.slot.value = (slot + shown) % WEIGHT_SLOTS
            if most > 1:
                dut.abreast.value = abreast
            await edge
            taken += value(dut.row_taken)
            if before:
                layout = data.ArrayLayout(data.ArrayLayout(Weight, queries), most)
                first, place, count_here = together[shown - 1]
                for block, got in enumerate(unpack(layout, value(dut.weights))):
                    row = (block << abreast) // most - place
                    if not 0 <= row < count_here:
                        continue
                    for weight, expected in zip(got, weights[first + row], strict=False):
                        if expected is None:
                            assert weight["significand"] == 0
                        else:
                            assert (weight["significand"], weight["exponent"]) == expected
            shown += show
            weighed += value(dut.row_weighed)
        slot += len(together)
        if idle == 0 and len(rows) == 50:  # one query per pipe and cycle
            per_row = min(count, queries // pipes)
            assert cycle() - begun <= len(together) * per_row + Scoring.weigh_cycles + 5

        # the end of the pass goes the way of the rows; what is asked for behind it is whole
        dut.row_valid.value = 1
        dut.row.value = pack(row_dots(queries, most), {"end": 1, "number": number})
        await edge
        dut.row_valid.value = 0
        while not value(dut.row_ended):
            await edge
        assert value(dut.row_ended) == 1 << number
        assert value(dut.row_taken)

        reads.send([{"number": number, "query": index} for index in range(count)])
        answers = []
        while len(answers) < count:
            await edge
            if value(dut.denominator_valid):
                state = unpack(State, value(dut.denominator))
                held = (state["top"], state["high"], state["low"]) if state["some"] else None
                answers.append((held, bool(value(dut.query_nan)), cycle()))
        for (held, nan, when), asked, query in zip(answers, reads.cycles[-count:], golden, strict=True):
            assert nan == query.nan
            assert nan or held == query.denominator
            # seen at the edge that ends the cycle in which it is there
            assert when - 1 - asked == parameters()["read_cycles"]
