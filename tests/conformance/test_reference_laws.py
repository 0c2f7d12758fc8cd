"""What order-free means: merges obey their laws; rows, splits, blocks, batches and padding change no bit."""

import random

import oracle
import pytest
import torch
from contract_cases import OUTPUTS, Case, Sizes, random_case, random_cases, result_codes, seed_of_run
from hypothesis import given, settings
from hypothesis import strategies as st
from nearkv.reference import Partial, State, attention, finish, merge
from nearkv.reference.binned import binned_sum, merge_states
from nearkv.reference.elements import ZERO_EXPONENT
from nearkv.reference.rows import Rows
from nearkv_hw.abi.memory import LANE_NAN, LANE_NEGATIVE_INFINITY, LANE_POSITIVE_INFINITY
from nearkv_hw.abi.numerics import MAX_ROWS, TOP_NONE

# --- States

limbs = st.integers(-(2**53), 2**53)
tops = st.one_of(st.integers(-3, 3), st.integers(-(2**18), 2**18))
states = st.one_of(st.just((TOP_NONE, 0, 0)), st.tuples(tops, limbs, limbs))


def state_of(*plain):
    return State.from_planes(*zip(*plain, strict=True))


def plain_of(state):
    return list(zip(state.top.tolist(), state.high.tolist(), state.low.tolist(), strict=True))


@given(states, states, states)
@settings(deadline=None)
def test_merge_is_associative(first, second, third):
    a, b, c = state_of(first), state_of(second), state_of(third)
    assert plain_of(merge_states(merge_states(a, b), c)) == plain_of(merge_states(a, merge_states(b, c)))


@given(states, states)
@settings(deadline=None)
def test_merge_is_commutative_and_as_the_contract_says(first, second):
    merged = plain_of(merge_states(state_of(first), state_of(second)))
    assert merged == plain_of(merge_states(state_of(second), state_of(first)))
    plain = [oracle.EMPTY if s[0] == TOP_NONE else s for s in (first, second)]
    expected = oracle.merge(*plain)
    assert merged == [(TOP_NONE, 0, 0) if expected[0] is None else expected]


@given(states)
@settings(deadline=None)
def test_empty_state_is_the_identity(state):
    assert plain_of(merge_states(state_of(state), State.empty((1,)))) == [state]


terms = st.tuples(st.sampled_from((1, -1)), st.integers(2**28, 2**30 - 1), st.integers(-400, 400))
near = st.tuples(st.sampled_from((1, -1)), st.integers(2**28, 2**30 - 1), st.integers(-70, -10))
zeros = st.just((1, 0, ZERO_EXPONENT))


@given(st.lists(st.one_of(terms, near, zeros), max_size=40))
@settings(deadline=None)
def test_sum_of_terms_is_the_merge_of_their_states(drawn):
    planes = torch.tensor(drawn, dtype=torch.int64).reshape(-1, 3)
    total = binned_sum(planes[:, 1], planes[:, 2], planes[:, 0], width=30, dim=0)
    expected = oracle.EMPTY
    for sign, m, e in drawn:
        expected = oracle.merge(expected, oracle.term(int(sign < 0), m, e))
    plain = (int(total.top), int(total.high), int(total.low))
    assert plain == ((TOP_NONE, 0, 0) if expected[0] is None else expected)


def test_top_does_not_fall_when_terms_cancel():
    significand = torch.tensor([3 << 28, 3 << 28, 1 << 29])
    sign, exponent = torch.tensor([1, -1, 1]), torch.tensor([200, 200, 0])
    total = binned_sum(significand, exponent, sign, width=30, dim=0)
    assert (int(total.top), int(total.high), int(total.low)) == (7, 0, 0)


# --- Finishing states as they may travel, with limbs far larger than one term's


@given(st.lists(states, min_size=1, max_size=6), tops, st.integers(1, 2**54), st.integers(0, 2**54))
@settings(deadline=None, max_examples=200)
def test_finish_of_any_state(numerators, top, high, low):
    partial = Partial.from_planes(
        ([top], [high], [low]), tuple([plane] for plane in zip(*numerators, strict=True))
    )
    want = oracle.Partial((top, high, low), [], False, [set() for _ in numerators])
    want.numerators = [oracle.EMPTY if s[0] == TOP_NONE else s for s in numerators]
    for name, dtype in OUTPUTS.items():
        for v_scale in (None, -0.37, 1e-38, 3e38):
            factor = None if v_scale is None else torch.tensor([v_scale])
            exact = None if factor is None else factor.item()
            assert result_codes(finish(partial, dtype, factor)) == oracle.finish(want, name, exact)


# --- Whole calls

ROWS = ("k_scales", "v_scales")
VISIBILITY = {
    "visible", "causal", "window", "kept_rows", "ranges", "tree", "pages", "page_rows", "query_positions",
    "row_positions",
}  # fmt: skip


def picked(case, rows, sinks=True):
    """The case with some of its rows, in the given order."""
    options = {n: x[:, rows] if n in ROWS else x for n, x in case.options.items() if n not in VISIBILITY}
    if not sinks:
        options.pop("sinks", None)
    # All that was said of visibility, row by row, so that it does not change with what rows there are.
    seen, (query, held) = case.sees(), case.positions()
    by_query_row, by_head = seen.any(1), seen.any(2)
    assert torch.equal(by_query_row.unsqueeze(1) & by_head.unsqueeze(2), seen)
    options |= {"visible": by_query_row[..., rows], "pages": by_head[..., rows], "page_rows": 1}
    options |= {
        "query_positions": query if case.q.dim() == 4 else query[:, 0],
        "row_positions": held[:, rows],
    }
    v = None if case.v is None else case.v[:, rows]
    return Case(case.q, case.k[:, rows], v, options, case.v_scale, case.name)


def cases(count=60, largest=None):
    return random_cases(seed_of_run(), count, largest or Sizes(rows=24))


def test_order_of_rows_changes_nothing():
    rng = random.Random(seed_of_run())
    for case in cases():
        order = torch.tensor(rng.sample(range(case.k.shape[1]), case.k.shape[1]), dtype=torch.int64)
        assert case.partial().equal(picked(case, order).partial()), case.describe()


def test_any_split_merges_to_the_same_bits():
    rng = random.Random(seed_of_run())
    for case in cases():
        rows = case.k.shape[1]
        owner = [rng.randrange(3) for _ in range(rows)]
        with_sinks = rng.randrange(3)
        parts = []
        for part in range(3):
            mine = torch.tensor([r for r in range(rows) if owner[r] == part], dtype=torch.int64)
            parts.append(picked(case, mine, sinks=part == with_sinks).partial())
        rng.shuffle(parts)
        whole = case.partial()
        left = merge(merge(parts[0], parts[1]), parts[2])
        right = merge(parts[0], merge(parts[1], parts[2]))
        assert left.equal(whole), case.describe()
        assert right.equal(whole), case.describe()
        for dtype in OUTPUTS.values():
            assert result_codes(finish(left, dtype)) == result_codes(finish(whole, dtype))


@pytest.mark.parametrize("elements", [1, 400, 3000])
def test_blocks_of_rows_change_nothing(monkeypatch, elements):
    for case in cases(20, Sizes(rows=70, dims=(1, 16, 33))):
        whole = case.partial()
        with monkeypatch.context() as patch:
            patch.setitem(attention.BLOCK_ELEMENTS, "cpu", elements)
            assert case.partial().equal(whole), case.describe()


def test_one_row_beyond_a_block(monkeypatch):
    row = 2 * 8
    torch.manual_seed(seed_of_run())
    for rows in (0, 1, 31, 32, 33, 63, 64, 65):
        k, v = (torch.randn(1, rows, 1, 8).to(torch.bfloat16) for _ in range(2))
        case = Case(torch.randn(1, 2, 8).to(torch.bfloat16), k, v, {"scale": 0.4})
        whole = case.partial()
        with monkeypatch.context() as patch:
            patch.setitem(attention.BLOCK_ELEMENTS, "cpu", 32 * row)
            assert case.partial().equal(whole)


def test_blocks_keep_within_their_bound(monkeypatch):
    """No block makes more products than it may, and together they are all rows, once each."""
    ranges, honest = [], Rows.decode

    def recorded(held, begin, end):
        ranges.append((begin, end))
        return honest(held, begin, end)

    monkeypatch.setattr(Rows, "decode", recorded)
    k = torch.zeros(2, 3000, 2, 4, dtype=torch.bfloat16)
    monkeypatch.setitem(attention.BLOCK_ELEMENTS, "cpu", 10_000)
    Case(torch.zeros(2, 6, 4, dtype=torch.bfloat16), k, k, {"scale": 1.0}).partial()
    assert ranges[::2] == ranges[1::2]  # K and V
    assert max((end - begin) * 2 * 6 * 4 for begin, end in ranges) <= 10_000
    assert [r for begin, end in ranges[::2] for r in range(begin, end)] == list(range(3000))


def full_limbs(rows):
    """Equal rows that fill the upper limb of one lane and the lower of the other, against a closed form."""
    v = torch.tensor([255.0 * 2.0**24, -255.0 / 128], dtype=torch.float32)
    v = v.to(torch.bfloat16).view(1, 1, 1, 2)
    q = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    k = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    partial = Case(q, k.expand(1, rows, 1, 1), v.expand(1, rows, 1, 2), {"scale": 1.0}).partial()
    for j in range(2):
        sign, m, e = oracle.decode("bf16", int(v.view(torch.int16)[..., j]) & 0xFFFF)
        top, high, low = oracle.term(sign, m << 17, e - 17)
        planes = [int(plane[0, 0, j]) for plane in vars(partial.numerators).values()]
        assert planes == [top, rows * high, rows * low]
    assert torch.equal(finish(partial), v.view(1, 1, 2).float())


def test_many_equal_rows():
    full_limbs(1 << 16)


@pytest.mark.slow
def test_as_many_rows_as_a_context_holds():
    full_limbs(MAX_ROWS)


def test_batch_query_rows_and_heads_change_nothing():
    """Each query of a batch alone has the bits that it has in company."""
    for case in cases(30, Sizes(batch=4, query_rows=3, kv_heads=3, rows=12)):
        q = case.q if case.q.dim() == 4 else case.q.unsqueeze(1)
        batch, query_rows, q_heads, _ = q.shape
        kv_heads = case.k.shape[2]
        whole = finish(case.partial(), torch.float32, case.v_scale).reshape(batch, query_rows, q_heads, -1)
        rng = random.Random(len(whole))
        b, t, head = rng.randrange(batch), rng.randrange(query_rows), rng.randrange(q_heads)
        h = head // (q_heads // kv_heads)
        options = dict(case.options)
        for name in ROWS:
            if name in options:
                options[name] = options[name][b : b + 1, :, h : h + 1]
        for name in VISIBILITY & set(options):
            del options[name]
        options["visible"] = case.sees()[b : b + 1, h, t]
        if "sinks" in options:
            options["sinks"] = options["sinks"][head : head + 1]
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][head : head + 1]
        query, held = case.positions()
        options |= {"query_positions": query[b : b + 1, t], "row_positions": held[b]}
        if "k_scale" in options:
            options["k_scale"] = options["k_scale"][h : h + 1]
        v_scale = None if case.v_scale is None else case.v_scale[h : h + 1]
        for name in ("k_lut", "v_lut"):
            if name in options:
                options[name] = options[name][h : h + 1]
        rows = [None if x is None else x[b : b + 1, :, h : h + 1] for x in (case.k, case.v)]
        alone = Case(q[b : b + 1, t, head : head + 1], *rows, options)
        result = finish(alone.partial(), torch.float32, v_scale)
        assert result_codes(result) == result_codes(whole[b, t, head]), case.describe()


def test_masking_a_row_is_removing_it():
    for case in cases():
        seen = case.sees()
        kept = seen.flatten(0, 2).any(0).nonzero().flatten()
        assert picked(case, kept).partial().equal(case.partial()), case.describe()


def test_padding_of_the_head_dimension_changes_nothing():
    for case in cases():
        if "k_scales" in case.options:
            continue
        q, k = (torch.nn.functional.pad(x, (0, 7)) for x in (case.q, case.k))
        if torch.isfinite(case.q.float()).all():  # an infinity meets no zero that was not there
            padded = Case(q, k, case.v, case.options)
            assert padded.partial().equal(case.partial()), case.describe()


def test_lanes_are_independent():
    for case in cases():
        if "v_scales" in case.options or case.v is None:
            continue
        whole, lane = case.partial(), case.v.shape[3] - 1
        alone = Case(case.q, case.k, case.v[..., lane:], case.options).partial()
        assert result_codes(finish(alone)) == result_codes(finish(whole)[..., lane:]), case.describe()


def test_strides_change_nothing():
    """Queries, rows and masks as slices of larger tensors."""
    for case in cases(20):
        wide_q = torch.cat([case.q, case.q], dim=-1)[..., : case.q.shape[-1]]
        wide_k = torch.stack([case.k, case.k], dim=-1)[..., 0]
        wide_v = None if case.v is None else torch.cat([case.v, case.v], dim=1)[:, : case.v.shape[1]]
        assert Case(wide_q, wide_k, wide_v, case.options).partial().equal(case.partial()), case.describe()


@given(rng=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_flags_merge_by_or(rng):
    case = random_case(rng, Sizes(rows=3))
    partial = case.partial()
    every = LANE_NAN | LANE_POSITIVE_INFINITY | LANE_NEGATIVE_INFINITY
    flags = torch.full_like(partial.lane_flags, every)
    other = Partial(partial.denominator, partial.numerators, partial.query_nan, flags)
    assert bool((merge(partial, other).lane_flags == every).all())
    empty = Partial.empty(tuple(partial.query_nan.shape), flags.shape[-1])
    assert merge(partial, empty).equal(partial)
    assert merge(empty, partial).equal(partial)
