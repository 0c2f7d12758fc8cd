"""The rules of llama.cpp's q8_0 and q4_0: float32 arithmetic in its order (ggml/src/ggml-quants.c)."""

from __future__ import annotations

import torch
from torch import Tensor


def q8_0(rows: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """d [..., blocks] as float32, int64 codes [..., dim] from -127 to 127, and what saturated (nothing)."""
    blocks = _blocks(rows, block)
    d = blocks.abs().amax(-1) / torch.tensor(127.0, device=rows.device)
    scaled = (blocks * _inverse(d)).double()
    codes = torch.where(scaled < 0, -(0.5 - scaled).floor(), (scaled + 0.5).floor())  # ties away from zero
    codes = _joined(codes, rows).to(torch.int64)
    return d, codes, torch.zeros_like(codes, dtype=torch.bool)


def q4_0(rows: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """d [..., blocks] as float32, int64 codes [..., dim] from -8 to 7, and what saturated.

    An element of the largest magnitude with the other sign would be 8, and is cut to 7.
    """
    blocks = _blocks(rows, block)
    size = blocks.abs()
    places = torch.arange(blocks.shape[-1], device=rows.device)
    first = places.where(size == size.amax(-1, keepdim=True), blocks.shape[-1]).amin(-1, keepdim=True)
    d = blocks.gather(-1, first).squeeze(-1) / torch.tensor(-8.0, device=rows.device)
    scaled = (blocks * _inverse(d)) + torch.tensor(8.5, device=rows.device)
    codes = _joined(scaled.floor(), rows).to(torch.int64)
    return d, codes.clamp(max=15) - 8, codes > 15


def _inverse(d: Tensor) -> Tensor:
    """1 / d per element of a block, 0 where d is 0 or so small that ggml leaves the result undefined."""
    inverse = torch.ones_like(d) / d
    return inverse.masked_fill(~inverse.isfinite(), 0.0).unsqueeze(-1)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows [..., dim] as [..., blocks, block], the last one filled up with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % block))
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // block, block)


def _joined(blocks: Tensor, rows: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : rows.shape[-1]]
