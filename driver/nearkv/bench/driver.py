"""What the driver costs on the host: calls, pages, prefixes, and memory, apart from what the device takes."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_sim.port import Port, Program, ReadResult

from nearkv.allocator import Extents, Pages
from nearkv.cache import KVCache
from nearkv.device import open

from .figure import Figure

_LAYERS, _KV_HEADS, _HEAD_DIM, _GROUP, _PAGE_ROWS = 4, 8, 128, 4, 16
_BATCH = 8
_ROWS = 256
_PREFIX_TOKENS = 4096
_PAGES = 1 << 16
_LONG_ROWS = 1 << 20
_CHUNK = 1 << 16


class TimedPort:
    """A port that knows how long it took.

    Members
    -------
    seconds : in `run`, in all.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self.seconds = 0.0

    def run(self, program: Program) -> list[ReadResult]:
        """See `Port.run`."""
        started = time.perf_counter()
        try:
            return self._port.run(program)
        finally:
            self.seconds += time.perf_counter() - started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


def measure(spec: str, *, repeats: int) -> Iterator[Figure]:
    """The figures `driver.*`; each is a median.

    Parameters
    ----------
    spec : which device.
    repeats : of each measured call.
    """
    with open(spec) as device:
        timed = TimedPort(device._port)
        device.wrap_port(lambda port: timed)
        config = {"device": spec, "layers": _LAYERS, "kv_heads": _KV_HEADS, "head_dim": _HEAD_DIM}
        with device.kv_cache(
            layers=_LAYERS,
            kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            dtype="bf16",
            page_rows=_PAGE_ROWS,
        ) as kv:
            yield from _calls(kv, timed, repeats, config)
            yield from _prefixes(kv, repeats, config)
    yield from _pages(repeats)
    yield from _memory(config={"device": spec, "rows": _LONG_ROWS, "page_rows": _PAGE_ROWS})


def _calls(kv: KVCache, timed: TimedPort, repeats: int, config: dict[str, Any]) -> Iterator[Figure]:
    """Appends and attention of a batch, one row and one token each."""
    sequences = [kv.sequence() for _ in range(_BATCH)]
    rows = torch.randn(_BATCH, _ROWS, _KV_HEADS, _HEAD_DIM).bfloat16()
    kv.append(sequences, layer=0, k=rows, v=rows)
    row = rows[:, :1]
    q = torch.randn(_BATCH, _GROUP * _KV_HEADS, _HEAD_DIM).bfloat16()
    with_batch = {**config, "batch": _BATCH, "rows": _ROWS}

    def append() -> None:
        kv.append(sequences, layer=0, k=row, v=row)

    def append_later() -> None:
        kv.append_async(sequences, layer=0, k=row, v=row)

    def attend() -> None:
        kv.attend(sequences, layer=0, q=q)

    def attend_later() -> None:
        kv.attend_async(sequences, layer=0, q=q).wait()

    for name, call in (("appends_per_s", append), ("async_appends_per_s", append_later)):
        seconds = _median(call, repeats)
        yield Figure(f"driver.{name}", _BATCH / seconds, "rows/s", with_batch)
    for name, call in (
        ("append_overhead_us", append),
        ("attend_overhead_us", attend),
        ("async_attend_overhead_us", attend_later),
    ):
        yield Figure(f"driver.{name}", 1e6 * _overhead(call, timed, repeats), "us", with_batch)


def _prefixes(kv: KVCache, repeats: int, config: dict[str, Any]) -> Iterator[Figure]:
    """Forks of a long prompt, and looking one up."""
    prompt = kv.sequence()
    rows = torch.zeros(_PREFIX_TOKENS, _KV_HEADS, _HEAD_DIM).bfloat16()
    for layer in range(_LAYERS):
        kv.append(prompt, layer=layer, k=rows, v=rows)
    tokens = torch.randint(0, 50_000, (_PREFIX_TOKENS,))
    kv.publish(prompt, tokens)
    other = tokens.flip(0)
    with_tokens = {**config, "tokens": _PREFIX_TOKENS}

    def hit() -> None:
        kv.free(kv.sequence_like(tokens)[0])

    def fork() -> None:
        kv.free(kv.fork(prompt))

    def miss() -> None:
        kv.find_prefix(other)

    for name, call in (("prefix_hit_us", hit), ("prefix_miss_us", miss), ("fork_us", fork)):
        yield Figure(f"driver.{name}", 1e6 * _median(call, repeats), "us", with_tokens)


def _pages(repeats: int) -> Iterator[Figure]:
    """Pages taken and given back, by the allocator alone."""
    page_bytes = 2 * _PAGE_ROWS * 2 * _HEAD_DIM
    extents = Extents(
        lambda runs: [True] * len(runs), extents=_PAGES * page_bytes // EXTENT_BYTES * 2, channels=4
    )
    pages = Pages(extents, page_bytes, [0] * 4)

    def both() -> None:
        pages.give(pages.take(_PAGES))

    config = {"pages": _PAGES, "page_bytes": page_bytes}
    yield Figure("driver.pages_per_s", _PAGES / _median(both, max(repeats // 10, 3)), "pages/s", config)


def _memory(config: dict[str, Any]) -> Iterator[Figure]:
    """What the host keeps of a million rows of one KV head, and how much of the memory lies idle."""
    with open("model", capacity_bytes=1 << 32) as device:
        with device.kv_cache(
            layers=1, kv_heads=1, head_dim=_HEAD_DIM, dtype="bf16", page_rows=_PAGE_ROWS
        ) as kv:
            kept = _held_by(kv)
            fragmentation = device.memory().fragmentation
    yield Figure("driver.host_bytes_per_row", kept / _LONG_ROWS, "bytes/row", config)
    yield Figure("driver.host_bytes_per_million_rows", kept * 1e6 / _LONG_ROWS, "bytes", config)
    yield Figure("driver.fragmentation", fragmentation, "ratio", config)


def _held_by(kv: KVCache) -> int:
    """Bytes that Python and numpy hold more once a long context is there."""
    chunk = torch.zeros(_CHUNK, 1, _HEAD_DIM).bfloat16()
    sequence = kv.sequence()
    kv.append(sequence, layer=0, k=chunk[:1], v=chunk[:1])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for begin in range(1, _LONG_ROWS, _CHUNK):
            part = chunk[: min(_CHUNK, _LONG_ROWS - begin)]
            kv.append(sequence, layer=0, k=part, v=part)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _median(call: Callable[[], None], repeats: int) -> float:
    """Median seconds of a call, after one that warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _overhead(call: Callable[[], None], timed: TimedPort, repeats: int) -> float:
    """Median seconds of a call that are not the port's: the driver's own."""
    call()
    seconds = []
    for _ in range(repeats):
        in_port, started = timed.seconds, time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started - (timed.seconds - in_port))
    return statistics.median(seconds)
