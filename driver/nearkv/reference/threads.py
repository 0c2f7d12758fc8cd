"""Keeping small work on the calling thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ONE_THREAD_ELEMENTS = 1 << 23
"""Elements up to which work on a CPU stays on the calling thread: with less, waiting for other threads costs
more than they bring, and on busy cores many times as much."""


@contextmanager
def threads_for(elements: int, device: torch.device) -> Iterator[None]:
    """Keep torch on the calling thread inside, where `elements` on this device are few."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or elements > ONE_THREAD_ELEMENTS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
