"""The torch operator: opcheck, compiled use, and the same bits as `attend`."""

import pytest
import torch
from driver_cases import context, filled, same_bits, values
from nearkv import ops
from nearkv.errors import ArgumentError, ShapeError, UnknownHandleError


@pytest.fixture
def arguments(model):
    """(cache, handles, arguments of the operator)."""
    kv = model.kv_cache(layers=2, kv_heads=2, head_dim=16, value_dim=24, dtype="fp16")
    handles = filled(kv, [context(n, 2, 16, 24, seed=n) for n in (9, 20)], layer=1)
    q = values(2, 4, 16, seed=3)
    slots = torch.tensor([handle.slot for handle in handles])
    return kv, handles, (q, ops.session(kv), 1, slots, torch.tensor([9, 20]), 24, 0.25)


def test_opcheck(arguments):
    kv, _, plain = arguments
    torch.library.opcheck(torch.ops.nearkv.decode_attn, plain)
    torch.library.opcheck(torch.ops.nearkv.decode_attn, plain, {"window": 4, "sinks": torch.zeros(4)})
    assert ops.session(kv) == plain[1]


def test_the_bits_of_attend(arguments):
    kv, handles, plain = arguments
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
    for options in ({}, {"window": 3}, {"sinks": sinks}):
        out, lse = torch.ops.nearkv.decode_attn(*plain, **options)
        own = kv.attend(handles, layer=1, q=plain[0], scale=0.25, return_lse=True, **options)
        assert same_bits(out, own[0])
        assert same_bits(lse, own[1])


def test_lengths_make_it_a_function(arguments):
    """Rows that are appended later do not change the result for the same lengths."""
    kv, handles, plain = arguments
    before, _ = torch.ops.nearkv.decode_attn(*plain)
    kv.append(handles, layer=1, k=values(2, 1, 2, 16, seed=5), v=values(2, 1, 2, 24, seed=6))
    after, _ = torch.ops.nearkv.decode_attn(*plain)
    assert same_bits(before, after)


def test_compiled_as_one_graph(arguments):
    _, _, (q, session, layer, slots, lengths, value_dim, scale) = arguments

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q, lengths):
        out, lse = torch.ops.nearkv.decode_attn(q, session, layer, slots, lengths, value_dim, scale)
        return out + 1, lse

    out, lse = torch.ops.nearkv.decode_attn(q, session, layer, slots, lengths, value_dim, scale)
    compiled = step(q, lengths)
    assert same_bits(compiled[0], out + 1)
    assert same_bits(compiled[1], lse)


def test_refused(arguments):
    _, _, (q, session, layer, slots, lengths, value_dim, scale) = arguments
    op = torch.ops.nearkv.decode_attn
    with pytest.raises(UnknownHandleError, match="session 0 stands for no cache"):
        op(q, 0, layer, slots, lengths, value_dim, scale)
    with pytest.raises(ArgumentError, match="value_dim=8: the cache has 24"):
        op(q, session, layer, slots, lengths, 8, scale)
    with pytest.raises(UnknownHandleError, match="slot 4"):
        op(q, session, layer, slots + 4, lengths, value_dim, scale)
    with pytest.raises(ArgumentError, match="end <= length"):
        op(q, session, layer, slots, lengths + 1, value_dim, scale)
    with pytest.raises(ShapeError, match="must have q's batch"):
        op(q, session, layer, slots[:1], lengths, value_dim, scale)
    with pytest.raises(ArgumentError, match="window=-1"):
        op(q, session, layer, slots, lengths, value_dim, scale, -1)
