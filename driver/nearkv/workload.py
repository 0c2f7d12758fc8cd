"""Batches of attention jobs over random rows: what `nearkv trace` and `nearkv bench` run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .arguments import one_of, whole_number
from .cache import KVCache
from .device import Device
from .quantise.formats import PRESETS
from .sequences import Sequence


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sequences of equal length, each attended by a new token; a job is one KV head of one sequence.

    Parameters
    ----------
    rows : of every sequence.
    kv_heads, group : KV heads, and query heads of each.
    batch : sequences.
    head_dim : elements of a K row and of a V row.
    dtype : a preset of `nearkv.quantise.PRESETS`.
    page_rows : rows of a page.
    """

    rows: int = 512
    kv_heads: int = 2
    group: int = 4
    batch: int = 4
    head_dim: int = 128
    dtype: str = "bf16"
    page_rows: int = 16

    def __post_init__(self) -> None:
        for name in ("rows", "kv_heads", "group", "batch"):
            whole_number(name, getattr(self, name), 1, 1 << 20)
        one_of("dtype", self.dtype, PRESETS)

    @property
    def jobs(self) -> int:
        """Jobs of a step."""
        return self.batch * self.kv_heads

    @property
    def lines(self) -> int:
        """Lines of K, V and their scales that a step needs, each counted once."""
        layout = PRESETS[self.dtype].layout(self.head_dim, self.head_dim, self.page_rows)
        pages, rest = divmod(self.rows, self.page_rows)
        return self.jobs * (pages * layout.lines(0, self.page_rows) + layout.lines(0, rest))

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values."""
        return asdict(self)

    def fill(self, device: Device) -> Filled:
        """Put the rows on a device that has room for them, one sequence's after the other's.

        The device is at rest before: what an earlier workload gave back is zero.
        """
        device.wait_for_scrub()
        generator = torch.Generator().manual_seed(self.rows)
        dtype = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        cache = device.kv_cache(
            layers=1,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_rows=self.page_rows,
        )

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, self.head_dim, generator=generator).to(dtype)

        sequences: list[Sequence] = []
        for _ in range(self.batch):
            sequence = cache.sequence()
            cache.append(
                sequence, layer=0, k=values(self.rows, self.kv_heads), v=values(self.rows, self.kv_heads)
            )
            sequences.append(sequence)
        queries = values(self.batch, self.kv_heads * self.group)
        return Filled(cache, sequences, queries)


@dataclass(frozen=True)
class Filled:
    """A workload whose rows are on a device; closing it gives their memory back."""

    cache: KVCache
    sequences: list[Sequence]
    queries: torch.Tensor

    def step(self) -> torch.Tensor:
        """One attention call over all sequences: float32 [batch, query heads, head_dim]."""
        return self.cache.attend(self.sequences, layer=0, q=self.queries)

    def close(self) -> None:
        """Free the rows."""
        self.cache.close()

    def __enter__(self) -> Filled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
