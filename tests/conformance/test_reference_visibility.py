"""Visible rows: windows, causality, ranges and trees against steps that have only the rows they see."""

import pytest
import torch
from contract_cases import seed_of_run
from nearkv.reference import decode_attention, finish, merge

bf16 = torch.bfloat16
AT_5, MIXED = torch.tensor([5]), torch.tensor([0, 4, 5, 6, 7, 5])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(seed_of_run())


def one_hot_rows(rows, query_rows=None):
    """q that scores every row alike, and V rows e_j: each result lane is the weight of a row."""
    shape = (1, 1, 4) if query_rows is None else (1, query_rows, 1, 4)
    k = torch.randn(1, rows, 1, 4).to(bf16)
    return torch.zeros(shape, dtype=bf16), k, torch.eye(rows).view(1, rows, 1, rows).to(bf16)


def random_rows(rows, query_rows, batch=1):
    q = torch.randn(batch, query_rows, 4, 8).to(bf16)
    return q, *(torch.randn(batch, rows, 2, 8).to(bf16) for _ in range(2))


def seen(weights):
    """Which rows a result over one-hot rows has in it."""
    return [j for j, weight in enumerate(weights.flatten().tolist()) if weight]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"window": 4}, [2, 3, 4, 5]),  # A1
        ({"window": 1}, [5]),  # A3
        ({"window": 6}, [0, 1, 2, 3, 4, 5]),
        ({"window": 1 << 22}, [0, 1, 2, 3, 4, 5]),
        ({"window": 2, "kept_rows": 1}, [0, 4, 5]),
        ({"window": 2, "kept_rows": 5}, [0, 1, 2, 3, 4, 5]),
        ({"window": 3, "query_positions": torch.tensor([3])}, [1, 2, 3]),
        ({"causal": True, "query_positions": torch.tensor([2])}, [0, 1, 2]),
        ({"query_positions": torch.tensor([2])}, [0, 1, 2, 3, 4, 5]),
        ({"window": 2, "kept_rows": 5, "query_positions": torch.tensor([3])}, [0, 1, 2, 3]),
        ({"window": 2, "query_positions": torch.tensor([9])}, []),
        ({"ranges": [(0, 2), (4, 5)]}, [0, 1, 4]),
        ({"ranges": [(0, 3), (1, 4), (2, 2)]}, [0, 1, 2, 3]),
        ({"ranges": [[(5, 6)]]}, [5]),
        ({"ranges": []}, []),
        ({"ranges": [(0, 4)], "window": 3}, [3]),
        ({"ranges": [(0, 4)], "visible": torch.tensor([[0, 1, 1, 0, 1, 1]]).bool()}, [1, 2]),
        ({"pages": torch.tensor([[[True, False]]]), "page_rows": 4}, [0, 1, 2, 3]),
        ({"pages": torch.tensor([[[False, True]]]), "page_rows": 4, "window": 3}, [4, 5]),
        ({"window": 2, "query_positions": AT_5, "row_positions": MIXED}, [1, 2, 5]),
    ],
)  # fmt: skip
def test_one_query_row(options, rows):
    assert seen(decode_attention(*one_hot_rows(6), scale=1.0, **options)) == rows


def test_a7_several_query_rows_are_the_last():
    result = decode_attention(*one_hot_rows(6, 2), scale=1.0, causal=True)
    assert [seen(row) for row in result[0]] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("alibi", [False, True])
def test_a5_a_chunk_is_its_steps(window, alibi):
    """Row t of a chunk has the bits of a decode step when token t is the last."""
    q, k, v = random_rows(9, 5)
    options = {"scale": 0.4, "window": window, "kept_rows": 1 if window else 0}
    options["alibi_slopes"] = torch.tensor([0.5, 0.3, 0.1, 0.01]) if alibi else None
    chunk = decode_attention(q, k, v, causal=True, **options)
    for t in range(5):
        rows = 5 + t
        assert torch.equal(chunk[:, t], decode_attention(q[:, t], k[:, :rows], v[:, :rows], **options))


def test_more_query_rows_than_rows():
    """Query rows before the first row see nothing."""
    out, lse = decode_attention(*one_hot_rows(2, 3), scale=1.0, causal=True, return_lse=True)
    assert [seen(row) for row in out[0]] == [[], [0], [0, 1]]
    assert lse[0, 0].item() == -torch.inf


def test_ranges_of_each_sequence():
    q, k, v = one_hot_rows(4)
    q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
    result = decode_attention(q, k, v, scale=1.0, ranges=[[(0, 1), (3, 4)], []])
    assert [seen(one) for one in result] == [[0, 3], []]


TREE = {0: [], 1: [0], 2: [0], 3: [1, 0], 4: [2, 0]}
"""Ancestors of five draft tokens: two branches behind one."""


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.3, 0.1, 0.01])])
def test_a_tree_is_its_branches(window, slopes):
    """Each token of a tree has the bits of a step over the context and its own branch."""
    context, tokens = 6, len(TREE)
    q, k, v = random_rows(context + tokens, tokens)
    tree = torch.zeros(tokens, tokens).bool()
    for token, ancestors in TREE.items():
        tree[token, [token, *ancestors]] = True
    depths = torch.tensor([context + len(ancestors) for ancestors in TREE.values()])
    options = {"scale": 0.4, "window": window, "alibi_slopes": slopes}
    found = decode_attention(q, k, v, tree=tree, query_positions=depths, **options)
    for token, ancestors in TREE.items():
        rows = [*range(context), *(context + a for a in reversed(ancestors)), context + token]
        assert torch.equal(found[:, token], decode_attention(q[:, token], k[:, rows], v[:, rows], **options))


def test_trees_of_each_sequence():
    q, k, v = one_hot_rows(4, 2)
    q, k, v = (x.expand(2, *x.shape[1:]) for x in (q, k, v))
    tree = torch.tensor([[[True, False], [False, True]], [[True, True], [True, True]]])
    result = decode_attention(q, k, v, scale=1.0, tree=tree)
    rows = [[seen(row) for row in one] for one in result]
    assert rows == [[[0, 1, 2], [0, 1, 3]], [[0, 1, 2, 3], [0, 1, 2, 3]]]


@pytest.mark.parametrize("variant", [{"window": 3}, {"window": 2, "kept_rows": 1}, {"causal": True}, {}])
def test_splits_with_positions_merge(variant):
    """Parts that know where their rows stand merge to the whole, sinks once; a window may leave one empty."""
    q, k, v = random_rows(10, 2)
    slopes, sinks = torch.tensor([0.5, 0.3, 0.1, 0.01]), torch.randn(4)
    options = {"scale": 0.4, "alibi_slopes": slopes, "softcap": 3.0, "query_positions": torch.tensor([8, 9])}
    whole = decode_attention(q, k, v, sinks=sinks, **options, **variant)
    parts = []
    for begin, end in ((0, 4), (4, 7), (7, 10)):
        own = dict(variant)
        if "kept_rows" in own:
            own["kept_rows"] = max(own["kept_rows"] - begin, 0)
        part = decode_attention(
            q, k[:, begin:end], v[:, begin:end], row_positions=torch.arange(begin, end), partial=True,
            sinks=sinks if begin == 4 else None, **options, **own,
        )  # fmt: skip
        parts.append(part)
    assert torch.equal(finish(merge(merge(parts[2], parts[0]), parts[1])), whole)


def test_positions_matter_by_their_distance_alone():
    q, k, v = random_rows(8, 3)
    options = {"scale": 0.4, "window": 4, "alibi_slopes": torch.tensor([0.5, 0.3, 0.1, 0.01])}
    far = (1 << 23) - 8
    here = decode_attention(q, k, v, **options)
    there = decode_attention(
        q,
        k,
        v,
        query_positions=torch.arange(far + 5, far + 8),
        row_positions=torch.arange(far, far + 8),
        **options,
    )
    assert torch.equal(here, there)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window counts rows, .*: at least 1, got 0"),
        ({"window": True}, ValueError, "got True"),
        (
            {"kept_rows": 1},
            ValueError,
            "kept_rows are first rows that a window leaves visible; got 1 with window None",
        ),
        ({"window": 2, "kept_rows": -1}, ValueError, "got -1 with window 2"),
        ({"ranges": [(0, 7)]}, ValueError, r"a range must keep 0 <= begin <= end <= 6, got \(0, 7\)"),
        ({"ranges": [(3, 2)]}, ValueError, r"got \(3, 2\)"),
        ({"ranges": [[(0, 1)], [(0, 1)]]}, ValueError, "ranges are of 2 sequences, the batch has 1"),
        ({"tree": torch.ones(2, 2)}, TypeError, "tree must be bool"),
        ({"tree": torch.ones(3, 3).bool()}, ValueError, r"for 2 query rows and batch 1, got \(3, 3\)"),
        (
            {
                "tree": torch.ones(2, 2).bool(),
                "query_positions": torch.arange(2),
                "row_positions": torch.arange(6),
            },
            ValueError,
            "the rows of a tree stand where its query rows do",
        ),
        ({"page_rows": 4}, ValueError, "page_rows needs pages"),
        ({"pages": torch.ones(1, 1, 2).bool()}, ValueError, "pages need page_rows, at least 1, got None"),
        ({"pages": torch.ones(1, 1, 2), "page_rows": 4}, TypeError, "pages must be bool"),
        (
            {"pages": torch.ones(1, 1, 3).bool(), "page_rows": 4},
            ValueError,
            r"pages must be \[batch, kv_heads, pages\] = \(1, 1, 2\), got \(1, 1, 3\)",
        ),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        decode_attention(*one_hot_rows(6, 2), scale=1.0, **options)


def test_a_tree_of_more_rows_than_there_are():
    with pytest.raises(ValueError, match="2 query rows are more than 1 rows"):
        decode_attention(*one_hot_rows(1, 2), scale=1.0, tree=torch.ones(2, 2).bool())
