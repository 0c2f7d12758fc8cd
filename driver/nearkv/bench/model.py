"""How fast the model device attends, beside torch's own attention in the same process."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from nearkv_sim.model import kernels
from torch.nn.functional import scaled_dot_product_attention

from nearkv.device import open

from . import Progress, Quiet
from .figure import Figure

ROWS = 8192
"""The context of the figures without a length in their names."""
LENGTHS = (2048, ROWS, 32_768, 131_072)
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
_PART_ROWS = 4096
_ROW_BYTES = KV_HEADS * HEAD_DIM * 2 * 2
_WARM = 2
_SPARE_BYTES = 64 << 20
_NOTICED_BYTES = 256 << 20
"""Contexts from here on are large beside what a process's heap keeps for itself."""


@dataclass(frozen=True)
class _Times:
    """Of one call: wall time and the process's time on all cores, seconds."""

    wall: float
    cores: float


def measure(
    lengths: Sequence[int] = (ROWS,), *, repeats: int = 30, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """The figures of contexts of each length, as `nearkv bench` prints them.

    One sequence, 32 query heads over 8 KV heads, head_dim 128, bf16, from doorbell to result
    (`KVCache.attend`), on all cores; torch's attention gets the same rows in one contiguous tensor and its
    query heads folded into the query length, which is its fastest form. Calls alternate.

    Parameters
    ----------
    lengths : rows of the contexts.
    repeats : pairs of calls; figures are medians over them.
    progress : told of each length.
    """
    progress = progress or Quiet()
    for rows in lengths:
        progress.begin(f"{rows:,} rows")
        with _all_cores() as cores:
            for figure in _one_length(rows, repeats, progress):
                name = figure.name if rows == ROWS else f"rows{rows}.{figure.name}"
                config = {"rows": rows, "cores": cores, **figure.config}
                yield {"name": f"model.{name}", "value": figure.value, "unit": figure.unit, "config": config}


def _one_length(rows: int, repeats: int, progress: Progress) -> Iterator[Figure]:
    capacity = 1 << (rows * _ROW_BYTES + _SPARE_BYTES).bit_length()
    queries = torch.randn(
        1, KV_HEADS * GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    kernel, _ = kernels.choose(None)
    with open("model", kernel=kernel, capacity_bytes=capacity) as device:
        with device.kv_cache(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM) as kv:
            sequence = kv.sequence()
            progress.tell(f"{rows:,} rows: append")
            before = 0
            for k, v in _parts(rows):
                kv.append(sequence, layer=0, k=k, v=v)
                if not before:  # with what every process needs
                    _give_free_back()
                    before = _resident_bytes("VmRSS")

            def attend() -> torch.Tensor:
                out = kv.attend([sequence], layer=0, q=queries)
                assert isinstance(out, torch.Tensor)
                return out

            about = {"device": "model", "kernel": kernel, "q_heads": KV_HEADS * GROUP,
                     "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bf16"}  # fmt: skip
            _give_free_back()
            _forget_peak()
            attend()
            growth = _resident_bytes("VmHWM") - before
            progress.tell(f"{rows:,} rows: attend beside torch")
            yield from _beside_torch(rows, repeats, queries, attend, about)
            if before and rows * _ROW_BYTES >= _NOTICED_BYTES:
                yield Figure("memory_to_kv", growth / ((rows - _PART_ROWS) * _ROW_BYTES), "", about)


def _beside_torch(
    rows: int, repeats: int, queries: torch.Tensor, attend: Callable[[], torch.Tensor], about: dict[str, Any]
) -> Iterator[Figure]:
    k = torch.empty(1, KV_HEADS, rows, HEAD_DIM, dtype=torch.bfloat16)
    v = torch.empty_like(k)
    for part, (some_k, some_v) in enumerate(_parts(rows)):
        these = slice(part * _PART_ROWS, part * _PART_ROWS + len(some_k))
        k[0, :, these], v[0, :, these] = some_k.transpose(0, 1), some_v.transpose(0, 1)
    folded = queries.view(1, KV_HEADS, GROUP, HEAD_DIM)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(folded, k, v)

    difference = (attend().view(folded.shape) - sdpa().float()).abs().max()
    assert difference < 0.01, f"attention and torch's differ by {difference}"
    for _ in range(_WARM):
        attend(), sdpa()
    pairs = [(_timed(attend), _timed(sdpa)) for _ in range(repeats)]
    seconds = median(ours.wall for ours, _ in pairs)
    yield Figure("attend_ms", seconds * 1e3, "ms", about)
    yield Figure("sdpa_ms", median(theirs.wall for _, theirs in pairs) * 1e3, "ms", about)
    yield Figure("ratio_to_sdpa", median(ours.wall / theirs.wall for ours, theirs in pairs), "", about)
    yield Figure("rows_per_s", rows * KV_HEADS / seconds, "rows/s", about)
    # over all pairs: a call is about as short as the ticks in which processor time is counted
    busy = sum(ours.cores for ours, _ in pairs) / sum(ours.wall for ours, _ in pairs)
    yield Figure("busy_cores", busy, "cores", about)


def _timed(call: Callable[[], Any]) -> _Times:
    wall, cores = time.perf_counter(), time.process_time()
    call()
    return _Times(time.perf_counter() - wall, time.process_time() - cores)


def _parts(rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of a context, K and V [rows, kv_heads, head_dim], a few at a time."""
    for begin in range(0, rows, _PART_ROWS):
        generator = torch.Generator().manual_seed(begin)
        count = min(_PART_ROWS, rows - begin)
        k, v = torch.randn(2, count, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
        yield k, v


@contextmanager
def _all_cores() -> Iterator[int]:
    """Torch, and the model with it, on as many threads as this process has cores."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    try:
        yield cores
    finally:
        torch.set_num_threads(threads)


def _give_free_back() -> None:
    """Have the allocator give back what is free: rows on their way to the device leave it in pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim:
        trim(0)


def _resident_bytes(name: str) -> int:
    """A line of Linux's account of this process's memory; zero where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _forget_peak() -> None:
    """Have Linux count VmHWM from here on."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
