"""Blocks of elements along a row, which share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def block_peaks(rows: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block of `block` elements [..., blocks]; NaN where a block has one."""
    short = -rows.shape[-1] % block
    padded = torch.nn.functional.pad(rows.abs(), (0, short))
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // block, block).amax(-1)


def spread(plane: Tensor, block: int | None, dim: int) -> Tensor:
    """What is said of blocks, said of elements."""
    return plane.repeat_interleave(block or max(dim, 1), dim=-1)[..., :dim]
