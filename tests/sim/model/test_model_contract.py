"""The model's own implementation of the contract, part by part, against the big-integer oracle."""

import random
from itertools import pairwise

import oracle
import pytest
import torch
from contract_cases import seed_of_run
from expected import FORMS
from nearkv_hw.abi.formats import ELEMENT_FORMATS, Special
from nearkv_hw.abi.numerics import TOP_NONE
from nearkv_sim.model import contract, finishing


def states(sums):
    """Sums as the oracle has them."""
    columns = (part.flatten().tolist() for part in (sums.top, sums.high, sums.low))
    return [(None if top == TOP_NONE else top, high, low) for top, high, low in zip(*columns, strict=True)]


def sums_of(some):
    """The oracle's states as sums."""
    rows = [(TOP_NONE if top is None else top, high, low) for top, high, low in some]
    return contract.Sums(*torch.tensor(rows, dtype=torch.int64).unbind(1))


@pytest.mark.parametrize("form", ELEMENT_FORMATS.values(), ids=lambda form: form.name)
def test_every_code_decodes(form):
    table = contract.decode_table(form).tolist()
    assert len(table) == 1 << form.bits
    for code, value in enumerate(table):
        element = form.decode(code)
        if element.special is Special.NAN:
            assert value != value
        else:
            infinite = element.special is Special.INFINITY
            magnitude = float("inf") if infinite else element.significand * 2.0**element.exponent
            assert value == (-magnitude if element.sign else magnitude)


def random_terms(rng, count):
    """Terms as a value sum has them: 29 bits, exponents of bf16, bins of weights near or far apart."""
    spread = rng.choice((0, 1, 3, 40, 2**18))
    terms = []
    for _ in range(count):
        m = rng.getrandbits(rng.randint(0, 29))
        terms.append((rng.random() < 0.5, m, rng.randint(-133, 120), rng.randint(-spread, spread)))
    return terms


def test_sums_of_terms_in_bins():
    rng = random.Random(seed_of_run())
    for _ in range(300):
        terms = random_terms(rng, rng.randint(1, 40))
        signed = [(-m if sign else m) * 2.0**e for sign, m, e, _ in terms]
        values = torch.tensor(signed, dtype=torch.float64)
        bins = torch.tensor([b for *_, b in terms])
        want = oracle.EMPTY
        for sign, m, e, b in terms:
            want = oracle.merge(want, oracle.term(sign, m, e + 32 * b))
        assert states(contract.binned_sum(values.clone(), 0, bins)) == [want]
        if not bins.any():
            assert states(contract.binned_sum(values, 0)) == [want]


def test_a_block_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="at most 1048576 terms, not 1048577"):
        contract.binned_sum(torch.ones(1, dtype=torch.float64).expand(contract.MAX_BLOCK_TERMS + 1), 0)


def test_merge_is_that_of_the_oracle_and_obeys_its_laws():
    rng = random.Random(seed_of_run())

    def draw():
        if rng.random() < 0.2:
            return oracle.EMPTY
        return rng.randint(-3, 3), rng.randint(-(2**50), 2**50), rng.randint(-(2**50), 2**50)

    a, b, c = ([draw() for _ in range(500)] for _ in range(3))
    first, second, third = sums_of(a), sums_of(b), sums_of(c)
    both = contract.merge(first, second)
    assert states(both) == [oracle.merge(x, y) for x, y in zip(a, b, strict=True)]
    assert states(contract.merge(second, first)) == states(both)
    regrouped = contract.merge(first, contract.merge(second, third))
    assert states(contract.merge(both, third)) == states(regrouped)
    assert states(contract.merge(first, contract.empty_sums(500))) == a


ONE = oracle.float32_code(1.0)


def bf16_code(number):
    """The bf16 code at or next below a number in magnitude."""
    return oracle.float32_code(number) >> 16


def attend_codes(q, k, v, factor, splits=(), form="bf16"):
    """The partial of one query over rows of codes, in blocks that end at `splits`."""
    table = contract.decode_table(ELEMENT_FORMATS[form])
    q, k, v = (table[torch.tensor(codes)][None] for codes in (q, k, v))
    bounds = [0, *splits, k.shape[1]]
    blocks = [
        contract.Block(k[:, a:b], v[:, a:b], torch.ones(1, b - a, dtype=torch.bool))
        for a, b in pairwise(bounds)
    ]
    return contract.attend(q[:, None], torch.tensor([factor]), v.shape[2], blocks)


def far_rows(rng, rows):
    """One-element keys, scores up to 2^11 or 2^24 apart, and two lanes of values of every size, and zeros."""
    largest = rng.choice((0x4480, 0x4B80))
    k = [[rng.getrandbits(1) << 15 | rng.randint(0x3F00, largest)] for _ in range(rows)]
    v = [[rng.choice((0, 0x8001, 1, rng.randint(1, 0x7F7F))) for _ in range(2)] for _ in range(rows)]
    return k, v


def expected(q, k, v, factor):
    """The oracle's partial of one query over rows of bf16 codes."""
    q, *rows = (oracle.decode_row("bf16", row) for row in (q, *k, *v))
    return oracle.attend(q, rows[: len(k)], rows[len(k) :], oracle.decode("fp32", factor))


def assert_partial(got, want):
    assert states(got.denominator) == [want.denominator]
    assert states(got.numerators) == want.numerators
    for form, name in FORMS.items():
        assert finishing.finish(got, form)[0, 0].tolist() == oracle.finish(want, name)


def test_weights_far_from_each_other():
    rng = random.Random(seed_of_run())
    for _ in range(60):
        k, v = far_rows(rng, rng.randint(1, 6))
        assert_partial(attend_codes([0x3F80], k, v, ONE), expected([0x3F80], k, v, ONE))


@pytest.mark.parametrize("distance", [0, 1, 500, 511, 512, 513, 543, 544, 545, 800, 1022, 1200])
def test_smallest_value_under_a_weight_so_much_larger(distance):
    """A lane with bf16's smallest value in a light row, and nothing in the heavy row beside it."""
    for heavy in (0, 31):
        k, v = [[bf16_code(heavy)], [bf16_code(heavy - distance)]], [[0, 0x3F80], [1, 0]]
        assert_partial(attend_codes([0x3F80], k, v, ONE), expected([0x3F80], k, v, ONE))


def test_scores_saturate():
    """S = 2^43 is the first that does not fit; codes are of 2^22, 2^23 and 2^24 and their neighbours."""
    for code in (0x4A80, 0x4AFF, 0x4B00, 0x4B01, 0x4B80):
        for sign in (0, 0x8000):
            k, v = [[sign | code]], [[0x3F80, 0xC000]]
            assert_partial(attend_codes([0x3F80], k, v, ONE), expected([0x3F80], k, v, ONE))
    # 2^43 again, from the smallest c: significands have to grow here, where they shrank above
    q, k, v, smallest = [0x6A80], [[0x6A80]], [[0x3F80]], 1
    assert_partial(attend_codes(q, k, v, smallest), expected(q, k, v, smallest))


def test_invisible_rows_do_not_matter():
    """Not even where an infinite query meets the zero, or a NaN, of an invisible row."""
    table = contract.decode_table(ELEMENT_FORMATS["bf16"])
    visible = torch.tensor([[True, False, False, True, False]])
    for q, k, v in (
        ([0x7F80], [0xBF80, 0, 0x7FC0, 0xBF00, 0x3F80], [1, 2, 3, 4, 5]),
        ([0x3F80], [0x3F80, 0x7FC0, 0x7F80, 0x3F00, 0xFF80], [0x3F80, 0x7FC0, 0x7F80, 0x4000, 0xFF80]),
    ):
        codes = torch.tensor([k, v])
        block = contract.Block(table[codes[:1, :, None]], table[codes[1:, :, None]], visible)
        got = contract.attend(table[torch.tensor([[q]])], torch.tensor([ONE]), 1, [block])
        want = expected(q, [[k[0]], [k[3]]], [[v[0]], [v[3]]], ONE)
        assert not got.query_nan.any()
        assert not got.lane_flags.any()
        assert_partial(got, want)


def test_blocks_do_not_matter():
    rng = random.Random(seed_of_run())
    k, v = far_rows(rng, 30)
    whole = attend_codes([0x3F80], k, v, oracle.float32_code(0.01))
    for splits in ((15,), (1, 2, 29), tuple(range(1, 30))):
        parts = attend_codes([0x3F80], k, v, oracle.float32_code(0.01), splits)
        assert states(parts.denominator) == states(whole.denominator)
        assert states(parts.numerators) == states(whole.numerators)


def test_flushing_subnormals_does_not_matter():
    """A process may have told its float unit to flush subnormals; bf16's smallest values stay."""
    k, v = [[0x0001], [0x8003], [0x3F80]], [[0x0001], [0x0002], [0x8001]]
    normal = attend_codes([0x7F00], k, v, oracle.float32_code(3.0))
    assert torch.set_flush_denormal(True)
    try:
        flushed = attend_codes([0x7F00], k, v, oracle.float32_code(3.0))
        contract.decode_table.cache_clear()
        decoded = attend_codes([0x7F00], k, v, oracle.float32_code(3.0))
    finally:
        torch.set_flush_denormal(False)
    assert states(flushed.numerators) == states(decoded.numerators) == states(normal.numerators)


def test_finish_rounds_like_the_oracle():
    """Lanes of every size over denominators of every size: ties, subnormals, overflow, signs."""
    rng = random.Random(seed_of_run())
    lanes = []
    for _ in range(3000):
        high = rng.choice((rng.getrandbits(8), rng.getrandbits(40))) * rng.choice((-1, 1))
        low = rng.choice((0, 1 << 31, rng.getrandbits(45))) * rng.choice((-1, 1))
        lanes.append((rng.randint(-6, 5), high, low))
    for _ in range(8):
        total = (rng.randint(-1, 1), rng.randint(1, 2**40), rng.randint(0, 2**50))
        want = oracle.Partial(total, lanes, False, [set() for _ in lanes])
        numerators = sums_of(lanes)[None, None]
        shape = numerators.top.shape
        got = contract.Partial(
            sums_of([total])[None],
            numerators,
            torch.zeros(1, 1, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.uint8),
        )
        for form, name in FORMS.items():
            assert finishing.finish(got, form)[0, 0].tolist() == oracle.finish(want, name)
