"""The torch operator: opcheck, compiled and exported use, other devices, and the same bits as `attend`."""

import io

import pytest
import torch
from driver_cases import context, filled, same_bits, values
from nearkv import ops
from nearkv.errors import ArgumentError, ShapeError, UnknownHandleError
from torch._subclasses import FakeTensorMode


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
    torch.library.opcheck(torch.ops.nearkv.decode_attn, plain, {"softcap": 5.0})
    assert ops.session(kv) == plain[1]


def test_the_bits_of_attend(arguments):
    kv, handles, plain = arguments
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
    for options in ({}, {"window": 3}, {"sinks": sinks}, {"softcap": 2.0}):
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


class Step(torch.nn.Module):
    """An attention layer around the operator."""

    def __init__(self, session, layer, value_dim, scale):
        super().__init__()
        self.rest = (session, layer, value_dim, scale)

    def forward(self, q, slots, lengths):
        session, layer, value_dim, scale = self.rest
        out, lse = torch.ops.nearkv.decode_attn(q * 2, session, layer, slots, lengths, value_dim, scale)
        return out + 1, lse


@pytest.fixture
def step(arguments):
    """(module, its inputs)."""
    q, session, layer, slots, lengths, value_dim, scale = arguments[2]
    return Step(session, layer, value_dim, scale), (q, slots, lengths)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_one_graph(step, backend):
    module, inputs = step
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for (out, lse), inputs_now in (
        (module(*inputs), inputs),
        (module(*(x[:1] for x in inputs)), [x[:1] for x in inputs]),
    ):
        found = compiled(*inputs_now)
        assert same_bits(found[0], out)
        assert same_bits(found[1], lse)


def test_exported_and_read_again(step):
    """For batches of any size; the number of the cache is part of what is exported."""
    module, inputs = step
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(module, inputs, dynamic_shapes=({0: batch},) * 3)
    kept = io.BytesIO()
    torch.export.save(exported, kept)
    kept.seek(0)
    again = torch.export.load(kept).module()
    wider = tuple(torch.cat([x, x, x[:1]]) for x in inputs)
    for given in (inputs, wider):
        for found, expected in zip(again(*given), module(*given), strict=True):
            assert same_bits(found, expected)


def test_fake_tensors_of_a_gpu(step):
    """What a compiler sees of it where queries are on a GPU: results lie beside them, and nothing is run."""
    module, inputs = step
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs]
        out, lse = module(*fake)
    assert (out.device.type, out.shape, out.dtype) == ("cuda", (2, 4, 24), torch.float32)
    assert (lse.device.type, lse.shape, lse.dtype) == ("cuda", (2, 4), torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_queries_on_a_gpu(step):
    module, inputs = step
    found = module(*(x.cuda() for x in inputs))
    for one, expected in zip(found, module(*inputs), strict=True):
        assert one.device.type == "cuda"
        assert same_bits(one.cpu(), expected)


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
