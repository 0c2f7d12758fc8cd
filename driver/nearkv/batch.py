"""One attention call as jobs see it: its queries, the row ranges of its sequences, and who sees what."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi import OutputForm
from nearkv_hw.abi.descriptor import (
    OPTION_ALIBI,
    OPTION_CAUSAL,
    OPTION_RANGES,
    OPTION_SELECT,
    OPTION_TREE,
)

from .arguments import Bounds


@dataclass(frozen=True)
class Sight:
    """Who sees what, beyond one range of rows for each sequence, and what becomes of scores.

    Members
    -------
    causal, window, kept : as in the attend extension.
    positions : of the first query row of each sequence, int64 [batch].
    ranges : of each sequence, rising and disjoint pairs, or None.
    tree : positions [batch, query_rows] and masks bool [batch, query_rows, query_rows], or None.
    softcap : float32 bits of C2, 0 for none.
    slopes : float32 bits of ALiBi slopes in base 2, [q_heads], or None.
    select_pages : pages to select, 0 for all.
    """

    causal: bool = False
    window: int = 0
    kept: int = 0
    positions: npt.NDArray[np.int64] | None = None
    ranges: Many[Many[tuple[int, int]]] | None = None
    tree: tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None = None
    softcap: int = 0
    slopes: npt.NDArray[np.uint32] | None = None
    select_pages: int = 0

    @property
    def options(self) -> int:
        """The extension's options that say this."""
        found = OPTION_CAUSAL if self.causal else 0
        found |= OPTION_TREE if self.tree is not None else 0
        found |= OPTION_RANGES if self.ranges is not None else 0
        found |= OPTION_ALIBI if self.slopes is not None else 0
        return found | (OPTION_SELECT if self.select_pages else 0)


@dataclass(frozen=True)
class Batch:
    """One attention call: q [batch, query_rows, q_heads, head_dim] over a row range of a page table each.

    Members
    -------
    q : bfloat16 or float16.
    layer : of all the tables.
    tables : device addresses of the page tables' headers, uint64 [batch].
    begin, end : the row ranges.
    factors : the float32 bits of the contract's c, of each KV head.
    output_scales : float32 bits of what multiplies results, of each KV head, 0 for none.
    sinks : float32 [q_heads], or None.
    form : what the device writes.
    denominators : whether the denominators are wanted too.
    sight : who sees what.
    parts : of each sequence that follow each other in the batch, each with a query row of its own.
    """

    q: torch.Tensor
    layer: int
    tables: npt.NDArray[np.uint64]
    begin: Bounds
    end: Bounds
    factors: tuple[int, ...]
    output_scales: tuple[int, ...]
    sinks: torch.Tensor | None
    form: OutputForm
    denominators: bool
    sight: Sight
    parts: int = 1
