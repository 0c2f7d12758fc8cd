"""Where the KV blocks of an engine's layers live: on one device for the process, or in host memory."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import nearkv
from nearkv.blocks import BlockCache
from nearkv.check import CheckTally

from .host_blocks import Blocks, CheckedBlocks, ReferenceBlocks
from .settings import REFERENCE, Settings

if TYPE_CHECKING:
    from nearkv.device import Device

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp16"}
"""The type of rows for each type of model, where settings name none."""


@dataclass(frozen=True)
class Place:
    """Where an attention layer's rows are: the store, and which of its layers."""

    blocks: Blocks
    layer: int
    dtype: torch.dtype


class Residence:
    """The stores of a process, made as its engines first write rows.

    Layers whose blocks are alike share a store. One whose layers are gone is closed before the next is made.

    Parameters
    ----------
    settings : where.

    Members
    -------
    settings : see above.
    device : the open device, None before the first rows and for the reference.
    tally : of checked calls.
    stores : the stores that there are.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device: Device | None = None
        self.tally = CheckTally()
        self._places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._stores: list[tuple[Blocks, list[weakref.ref[Any]]]] = []

    @property
    def stores(self) -> list[Blocks]:
        """The stores that there are."""
        return [blocks for blocks, _ in self._stores]

    def place(self, layer: Any, layers: Mapping[str, Any]) -> Place:
        """Where a layer's rows are.

        Parameters
        ----------
        layer : a vLLM attention layer.
        layers : all layers of the engine that have rows here, by name; needed once.
        """
        if layer not in self._places:
            self._drop_dead()
            self._add(layers)
        return self._places[layer]

    def close(self) -> None:
        """Close all stores and the device."""
        for blocks, _ in self._stores:
            blocks.close()
        self._stores.clear()
        self._places.clear()
        if self.device is not None:
            self.device.close()
            self.device = None

    def _add(self, layers: Mapping[str, Any]) -> None:
        alike: dict[tuple[int, ...], list[Any]] = {}
        for layer in layers.values():
            blocks, kv_heads, block_rows, _ = layer.kv_cache.shape
            shape = blocks, block_rows, kv_heads, layer.head_size, layer.head_size_v
            alike.setdefault((*shape,), []).append(layer)
        for (blocks, block_rows, kv_heads, head_dim, value_dim), own in alike.items():
            name = self.settings.dtype or _ELEMENTS[own[0].kv_cache.dtype]
            store = self._store(
                layers=len(own),
                kv_heads=kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=name,
                blocks=blocks,
                block_rows=block_rows,
            )
            self._stores.append((store, [weakref.ref(layer) for layer in own]))
            for index, layer in enumerate(own):
                self._places[layer] = Place(store, index, nearkv.codec.element_dtype(name))

    def _store(self, **shape: Any) -> Blocks:
        if self.settings.place == REFERENCE:
            return ReferenceBlocks(**shape)
        if self.device is None:
            self.device = nearkv.open(self.settings.place)
        blocks = BlockCache(self.device, **shape)
        if not self.settings.check:
            return blocks
        return CheckedBlocks(blocks, ReferenceBlocks(**shape), self.tally, self.settings.replays)

    def _drop_dead(self) -> None:
        dead = [store for store in self._stores if all(ref() is None for ref in store[1])]
        for blocks, _ in dead:
            blocks.close()
        self._stores = [store for store in self._stores if store not in dead]


_residence: Residence | None = None


def residence() -> Residence:
    """The process's residence, as the environment has it when it is first asked for.

    Raises
    ------
    ValueError : where NEARKV_VLLM is not set, or settings are none.
    """
    global _residence
    if _residence is None:
        settings = Settings.from_environment()
        if settings is None:
            raise ValueError("NEARKV_VLLM is not set: name a device (model, rtl, unix:PATH) or reference")
        _residence = Residence(settings)
        atexit.register(_residence.close)
    return _residence
