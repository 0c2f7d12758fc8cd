"""What a token costs beside the device: a step on it and without it, and where the difference goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from nearkv_hw.abi import PRESETS
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from nearkv.cache import KVCache
from nearkv.device import open
from nearkv.hf import NAME, NearKVCache, attach, cache_argument, detach, nearkv_attention
from nearkv.hf.cache import NearKVLayer
from nearkv.hf.models import LoadedModel

from . import Progress, Quiet
from .figure import Figure

ROWS = 128
"""The context of the figures."""
_WARM = 2


class _Watch:
    """Processor time of this thread in some functions, of the outermost call where they call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return watched


def measure(
    loaded: LoadedModel, *, rows: int = ROWS, steps: int = 20, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """The figures of one decode step, medians of processor time on one core, as `nearkv bench` prints them.

    `plain_ms` is the model with transformers' own attention and cache, `step_ms` with both on the `model`
    device. `device_ms` is the simulated device, `driver_ms` what brings calls to it and results back,
    `integration_ms` what stands between model and driver; `integration` and `beside` are the last, and the
    last two together, as a part of the plain step.

    Parameters
    ----------
    loaded : a model, from `nearkv.hf.load`.
    rows : of the context before the first step.
    steps : that a median is over.
    progress : told of each of the two.

    Raises
    ------
    ValueError : for fewer than one row or step.
    """
    if rows < 1 or steps < 1:
        raise ValueError(f"rows and steps must be at least 1, not {rows} and {steps}")
    progress = progress or Quiet()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        progress.begin("plain")
        plain = _steps(loaded.model, DynamicCache(config=loaded.model.config), rows, steps, [])
        progress.begin("on the device")
        ours = _on_device(loaded.model, rows, steps)
    finally:
        torch.set_num_threads(threads)
    plain_s, (step_s, layer_s, cache_s, device_s) = plain[0], ours
    config = {"model": loaded.name, "rows": rows, "steps": steps}
    for figure in (
        Figure("plain_ms", plain_s * 1e3, "ms"),
        Figure("step_ms", step_s * 1e3, "ms"),
        Figure("device_ms", device_s * 1e3, "ms"),
        Figure("driver_ms", (cache_s - device_s) * 1e3, "ms"),
        Figure("integration_ms", (layer_s - cache_s) * 1e3, "ms"),
        Figure("integration", (layer_s - cache_s) / plain_s, ""),
        Figure("beside", (layer_s - device_s) / plain_s, ""),
    ):
        yield {"name": f"hf.{figure.name}", "value": figure.value, "unit": figure.unit, "config": config}


def _on_device(model: Any, rows: int, steps: int) -> list[float]:
    """Seconds of a step, and of it in the cache's layers and attention, in the driver and in the device."""
    layer, cache_calls, device_calls = _Watch(), _Watch(), _Watch()
    with ExitStack() as stack:
        capacity = max(PRESETS["small"].capacity_bytes, 1 << 28)
        device = stack.enter_context(open("model", capacity_bytes=capacity))
        cache = attach(model, device)
        stack.callback(detach, model)
        stack.callback(AttentionInterface.register, NAME, nearkv_attention)
        AttentionInterface.register(NAME, layer.over(nearkv_attention))
        for owner, name, watch in (
            (NearKVLayer, "update", layer),
            (KVCache, "append_attend", cache_calls),
            (KVCache, "append", cache_calls),
            (KVCache, "attend", cache_calls),
            (device._port, "run", device_calls),
        ):
            stack.enter_context(patch.object(owner, name, watch.over(getattr(owner, name))))
        return _steps(model, cache, rows, steps, [layer, cache_calls, device_calls])


@torch.inference_mode()
def _steps(
    model: Any, cache: DynamicCache | NearKVCache, rows: int, steps: int, watches: list[_Watch]
) -> list[float]:
    """Median seconds of a step, and of it under each watch."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, rows), generator=torch.Generator().manual_seed(1))
    options = {"use_cache": True, "logits_to_keep": 1, cache_argument(): cache}
    found: list[list[float]] = []
    logits = model(tokens, **options).logits
    for _ in range(_WARM + steps):
        before = [watch.seconds for watch in watches]
        start = time.thread_time()
        logits = model(logits.argmax(-1), **options).logits
        own = time.thread_time() - start
        found.append([own, *(watch.seconds - b for watch, b in zip(watches, before, strict=True))])
    return [median(each) for each in zip(*found[_WARM:], strict=True)]
