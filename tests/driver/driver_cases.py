"""What the driver's tests share: seeded rows, the reference's answer, and ports that misbehave."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from nearkv.cache import KVCache
from nearkv.device import Device
from nearkv.reference import decode_attention
from nearkv.sequences import Sequence as Handle
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_sim.model import ModelPort
from nearkv_sim.port import Access, Program, Read, ReadResult

Context = tuple[torch.Tensor, torch.Tensor]


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Normally distributed elements."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def context(
    rows: int, kv_heads: int, head_dim: int, value_dim: int, *, seed: int, dtype: torch.dtype = torch.float16
) -> Context:
    """k and v of one sequence."""
    return (
        values(rows, kv_heads, head_dim, seed=seed, dtype=dtype),
        values(rows, kv_heads, value_dim, seed=seed + 1, dtype=dtype),
    )


def filled(cache: KVCache, contexts: Sequence[Context], layer: int = 0) -> list[Handle]:
    """New sequences with these rows."""
    handles = []
    for k, v in contexts:
        handles.append(cache.sequence())
        cache.append(handles[-1], layer=layer, k=k, v=v)
    return handles


def expected(q: torch.Tensor, contexts: Sequence[Context], **options) -> torch.Tensor:
    """The reference's answer for a batch whose sequences have different lengths."""
    return torch.cat(
        [decode_attention(q[i : i + 1], k[None], v[None], **options) for i, (k, v) in enumerate(contexts)]
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality of bit patterns: NaN equals itself, -0 is not 0."""
    kind = torch.int32 if first.dtype == torch.float32 else torch.int16
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(kind), second.contiguous().view(kind)
    )


def memory_image(device: Device, tenant: int = 0) -> np.ndarray:
    """Every byte that a tenant may see of the device's first extents."""
    extents = min(device.config.extents, 8)
    base = tenant * device.config.aperture_bytes
    addresses = base + np.arange(0, extents * EXTENT_BYTES, LINE_BYTES, dtype=np.uint64)
    (result,) = device._port.run([Read(addresses)])
    return result.data[result.access == Access.DATA]


class TamperingPort:
    """A model device whose answers a function may change before the driver sees them.

    Parameters
    ----------
    change : called with each program and its results; what it returns is the answer.
    overrides : fields of the configuration.
    """

    kind = "model"

    def __init__(self, change: Callable[[Program, list[ReadResult]], list[ReadResult]], **overrides) -> None:
        self._port = ModelPort(configure("small", **overrides))
        self.config = self._port.config
        self.change = change

    def run(self, program: Program) -> list[ReadResult]:
        return self.change(program, self._port.run(program))

    @property
    def link_bytes(self) -> int:
        return self._port.link_bytes

    def start_wave(self, path) -> None:
        self._port.start_wave(path)

    def close(self) -> None:
        self._port.close()


def same_answers(one, other, sequences, **call):
    """Whether two caches answer a call alike, log-sum-exp included; of each sequence both caches' handles."""
    results = [
        cache.attend(handles, return_lse=True, **call)
        for cache, handles in zip((one, other), zip(*sequences, strict=True), strict=True)
    ]
    return all(same_bits(a, b) for a, b in zip(*results, strict=True))


def same_rows(tiered, plain, sequences, layers):
    """Whether a tiered cache and a plain one hold the same codes of each sequence."""
    for (of_tiered, of_plain), layer in product(sequences, range(layers)):
        if tiered.length(of_tiered, layer):
            rows, wanted = tiered.read(of_tiered, layer=layer), plain.read_codes(of_plain, layer=layer)
            if not all(
                torch.equal(own, area.codes) for own, area in zip((rows.k, rows.v), wanted, strict=True)
            ):
                return False
    return True
