"""How fast a device is built, started and simulated."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from nearkv_sim import kind_and_preset

from nearkv.device import Device, open

_ROWS = 4096
_HEAD_DIM = 128
_GROUP = 4
_KV_HEADS = 2
_OPEN = """
import sys, time
from nearkv.device import open
started = time.perf_counter()
device = open(sys.argv[1])
print(time.perf_counter() - started)
device.close()
"""


def measure(spec: str, *, seconds: float, build: bool) -> list[dict[str, Any]]:
    """The results `sim.build_s` (where there is something to build), `sim.open_s` and the two rates.

    Parameters
    ----------
    spec : which device.
    seconds : how long attention streams.
    build : whether to build from nothing, without any cache.

    Raises
    ------
    ValueError : for an unknown device, before anything is built.
    """
    kind, _ = kind_and_preset(spec)
    figures: list[tuple[str, float, str]] = []
    if build and kind != "model":
        figures.append(("sim.build_s", _build_seconds(spec), "s"))
    with open(spec) as device:
        config = {"device": spec, **device.config.to_dict()}
        figures.append(("sim.open_s", _open_seconds(spec), "s"))
        cycles, lines = _stream(device, seconds)
    figures += [("sim.cycles_per_s", cycles, "cycles/s"), ("sim.lines_per_s", lines, "lines/s")]
    return [{"name": name, "value": value, "unit": unit, "config": config} for name, value, unit in figures]


def _open_seconds(spec: str, **environment: str) -> float:
    """Seconds that `open` takes in a new process, imports apart."""
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, spec],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _build_seconds(spec: str) -> float:
    """Seconds that the first `open` takes where nothing was ever built."""
    with tempfile.TemporaryDirectory(prefix="nearkv-bench-") as folder:
        return _open_seconds(spec, NEARKV_CACHE=folder, CCACHE_DISABLE="1")


def _stream(device: Device, seconds: float) -> tuple[float, float]:
    """Device cycles and lines per second of wall time over batches of long jobs."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, _ROWS, _KV_HEADS, _HEAD_DIM, generator=generator).to(torch.bfloat16)
    q = torch.randn(1, _KV_HEADS * _GROUP, _HEAD_DIM, generator=generator).to(torch.bfloat16)
    with device.kv_cache(layers=1, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM) as cache:
        sequence = cache.sequence()
        cache.append(sequence, layer=0, k=rows[0], v=rows[1])
        before, started = device.stats(), time.perf_counter()
        while time.perf_counter() - started < seconds:
            cache.attend([sequence], layer=0, q=q)
        elapsed, done = time.perf_counter() - started, device.stats() - before
    return done.cycles / elapsed, done.attention_lines / elapsed
