"""Long contexts have the reference's bits."""

import nearkv
import pytest
import torch


@pytest.mark.rtl
@pytest.mark.parametrize("rows", [1 << 14, pytest.param(1 << 22, marks=pytest.mark.slow)])
def test_rows_of_a_long_context(rtl_device, rows):
    """A small head, rows appended in parts, page size large enough for the table."""
    generator = torch.Generator().manual_seed(rows)
    k = torch.randn(rows, 1, 24, generator=generator).bfloat16()
    v = torch.randn(rows, 1, 8, generator=generator).bfloat16()
    q = torch.randn(1, 3, 24, generator=generator).bfloat16()
    with rtl_device.kv_cache(
        layers=1, kv_heads=1, head_dim=24, value_dim=8, dtype="bf16", page_rows=64
    ) as cache:
        sequence = cache.sequence()
        for part in range(0, rows, 1 << 17):
            end = part + (1 << 17)
            cache.append(sequence, layer=0, k=k[part:end], v=v[part:end])
        out = cache.attend([sequence], layer=0, q=q, scale=0.2)
    assert torch.equal(out, nearkv.reference.decode_attention(q, k[None], v[None], scale=0.2))


def test_131072_rows_on_the_model(model):
    """A head as models have them, several query heads, more pages than a table begins with."""
    rows = 131_072
    generator = torch.Generator().manual_seed(rows)
    k, v = torch.randn(2, rows, 1, 64, generator=generator).bfloat16()
    q = torch.randn(1, 2, 64, generator=generator).bfloat16()
    with model.kv_cache(layers=1, kv_heads=1, head_dim=64) as cache:
        sequence = cache.sequence()
        for part in range(0, rows, 1 << 14):
            end = part + (1 << 14)
            cache.append(sequence, layer=0, k=k[part:end], v=v[part:end])
        out = cache.attend([sequence], layer=0, q=q, scale=0.125)
        before = model.stats()
        window = cache.attend([sequence], layer=0, q=q, scale=0.125, window=100_001)
        lines = (model.stats() - before).attention_lines
    assert torch.equal(out, nearkv.reference.decode_attention(q, k[None], v[None], scale=0.125))
    seen = slice(rows - 100_001, rows)
    assert torch.equal(
        window, nearkv.reference.decode_attention(q, k[None, seen], v[None, seen], scale=0.125)
    )
    assert lines == 100_001 * 4
