"""A model's rows in several tiers, and the same calls held against the reference where that is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from nearkv import tiers
from nearkv.check import CheckTally
from nearkv.errors import ArgumentError

from .reference_rows import ReferenceRows
from .rows import RowShape, RowStore, Scoring

if TYPE_CHECKING:
    from nearkv.device import Device

_KINDS = ("torch", "host", "device", "file")


def tiers_of(spec: str, device: Device | None) -> tuple[list[tiers.Tier], list[int]]:
    """Tiers as a command line names them, and the rows that each but the last keeps.

    Parameters
    ----------
    spec : "torch=16,host=64,device": kinds (torch, on a GPU where there is one, host, device, file), each but
        the last with the newest rows of each sequence and layer that it keeps.
    device : for the tier of that kind.

    Raises
    ------
    ArgumentError : for anything else.
    """
    parts = [part.partition("=") for part in spec.split(",")]
    kinds = [kind for kind, _, _ in parts]
    counted = all(count.isdigit() for _, _, count in parts[:-1]) and not parts[-1][1]
    if not counted or len(set(kinds)) != len(kinds) or any(kind not in _KINDS for kind in kinds):
        raise ArgumentError(
            f"tiers={spec!r}: must be like torch=16,host=64,device: {', '.join(_KINDS)}, each once, and "
            "the rows of all but the last"
        )
    if "device" in kinds and device is None:
        raise ArgumentError(f"tiers={spec!r}: there is no device to have a tier on")
    found: list[tiers.Tier] = []
    for kind in kinds:
        if kind == "device" and device is not None:
            found.append(tiers.DeviceTier(device))
        elif kind == "file":
            found.append(tiers.FileTier())
        else:
            near = "cuda" if kind == "torch" and torch.cuda.is_available() else "cpu"
            found.append(tiers.TensorTier(kind, device=near))
    return found, [int(count) for _, _, count in parts[:-1]]


class TieredRows(RowStore):
    """Rows in tiers, the newest ones nearest.

    Parameters
    ----------
    spec, device : as `tiers_of` has them.
    shape : of the model's rows.
    dtype, kv_format : as `RowStore` has them.
    check : hold every call against the reference, over a copy of the rows on the host.

    Members
    -------
    tally : what the comparison came to.
    """

    def __init__(
        self,
        spec: str,
        device: Device | None,
        shape: RowShape,
        dtype: str,
        kv_format: str | None = None,
        *,
        check: bool = True,
    ) -> None:
        super().__init__(dtype, kv_format)
        if shape.latent:
            raise ArgumentError("tiers hold K and V rows of their own, not latents; use DeviceRows")
        self._given = (spec, device, shape)
        own, rows = tiers_of(spec, device)
        self.cache = tiers.TieredCache(
            own,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dtype=kv_format or dtype,
            policy=tiers.NewestRows(*rows),
        )
        self.sequences: list[tiers.TieredSequence] = []
        self.tally = CheckTally()
        self.calls = 0
        self._own = ReferenceRows(dtype, kv_format) if check else None

    def _append(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        assert v is not None
        if not self.sequences:
            self.sequences = [self.cache.sequence() for _ in range(k.shape[0])]
        self.cache.append(self.sequences, layer=layer, k=k, v=v)
        if self._own is not None:
            self._own._append(layer, k, v)

    def _attend(self, layer: int, q: Tensor, visible: Tensor | None, scoring: Scoring) -> Tensor:
        out: Tensor = self.cache.attend(
            self.sequences,
            layer=layer,
            q=q,
            scale=scoring.scale,
            window=scoring.window,
            visible=visible,
            sinks=scoring.sinks,
            softcap=scoring.softcap,
        )
        self.calls += 1
        if self._own is not None:
            start = time.perf_counter()
            wanted = self._own._attend(layer, q, visible, scoring)
            self.tally.calls += 1
            self.tally.equal += bool(torch.equal(out.view(torch.int32), wanted.view(torch.int32)))
            self.tally.seconds += time.perf_counter() - start
        return out

    def read(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """See `RowStore.read`; for rows of 16 bits.

        Raises
        ------
        ArgumentError : for narrow rows.
        """
        if self.narrow:
            raise ArgumentError(f"rows of {self.form.name} in tiers are read as codes: TieredCache.read")
        held = [self.cache.read(sequence, layer=layer) for sequence in self.sequences]
        k, v = (
            torch.stack([x for x in part if x is not None]).view(self.torch_dtype)
            for part in zip(*((rows.k, rows.v) for rows in held), strict=True)
        )
        return k, v

    def rows(self, layer: int) -> int:
        """See `RowStore.rows`."""
        return self.cache.length(self.sequences[0], layer) if self.sequences else 0

    @property
    def batch(self) -> int:
        """See `RowStore.batch`."""
        return len(self.sequences)

    def crop(self, rows: int) -> None:
        """See `RowStore.crop`."""
        for sequence in self.sequences:
            self.cache.crop(sequence, rows)
        if self._own is not None:
            self._own.crop(rows)

    def select(self, indices: Sequence[int]) -> None:
        """See `RowStore.select`."""
        self.sequences = self.cache.select(self.sequences, indices)
        if self._own is not None:
            self._own.select(indices)

    def reset(self) -> None:
        """See `RowStore.reset`."""
        for sequence in self.sequences:
            self.cache.free(sequence)
        self.sequences = []
        if self._own is not None:
            self._own.reset()

    def fresh(self) -> Self:
        """See `RowStore.fresh`; it has tiers of its own."""
        spec, device, shape = self._given
        kv_format = self.form.name if self.narrow else None
        return type(self)(spec, device, shape, self.dtype, kv_format, check=self._own is not None)

    def fork(self) -> Self:
        """See `RowStore.fork`.

        Raises
        ------
        ArgumentError : always; `select` copies sequences within a batch.
        """
        raise ArgumentError("rows in tiers have no fork apart from their batch; repeat sequences in it")
