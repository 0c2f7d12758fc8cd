"""The tier on a nearkv device: rows in a KV cache, in whatever order they came, and partials by its units."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from nearkv.reference import Partial, merge
from nearkv.rows import Context
from nearkv.sequences import Sequence

from .tier import Asked, Geometry, Key, Positions, TensorTier, Tier

if TYPE_CHECKING:
    from nearkv.cache import KVCache
    from nearkv.device import Device

_REBUILD_SHARE = 0.5
"""Of places without a row, from which a sequence is written anew."""
_MOST_RUNS = 256
"""Jobs of a query row with slopes, on average: from there on the host works it out."""


class DeviceTier(Tier):
    """Rows on a device, and attention where they are.

    A row that goes leaves its place empty, which no call sees; a sequence with too many of those is written
    anew, and one whose last rows go is cropped.

    Parameters
    ----------
    device : an open device.
    name, capacity_bytes : as `Tier` has them.
    page_rows, tenant : of the cache that is made there.
    """

    def __init__(
        self,
        device: Device,
        name: str = "device",
        *,
        capacity_bytes: int | None = None,
        page_rows: int = 16,
        tenant: int = 0,
    ) -> None:
        super().__init__(name, capacity_bytes)
        self._device = device
        self._page_rows = page_rows
        self._tenant = tenant
        self._caches: dict[int, tuple[int, KVCache]] = {}
        """By layer, or one; with what their heads' tables were when they were made."""
        self._handles: dict[Key, Sequence] = {}
        self._positions: dict[Key, Positions] = {}
        self._rows = 0

    def open(self, geometry: Geometry) -> None:
        """See `Tier.open`: the cache is made."""
        super().open(geometry)
        if not geometry.heads.needed:
            self._caches[0] = 0, self._made({})

    @property
    def caches(self) -> list[KVCache]:
        """Where the rows are: one cache for all layers, or one for each whose heads have scales or
        codebooks."""
        return [cache for _, cache in self._caches.values()]

    def positions(self, key: Key) -> Positions:
        """See `Tier.positions`."""
        return self._positions.get(key, np.empty(0, np.int64))

    def put(self, key: Key, rows: Context, positions: Positions) -> None:
        """See `Tier.put`: rows travel with the next call."""
        if not len(positions):
            return
        self._cache(key[1]).append_async(
            self._handle(key), layer=0, k=rows.k, v=rows.v, k_scales=rows.k_scales, v_scales=rows.v_scales
        )
        self._positions[key] = np.concatenate([self.positions(key), positions])
        self._rows += len(positions)
        self.bytes_in += len(positions) * self.geometry.row_bytes

    def get(self, key: Key, positions: Positions) -> Context:
        """See `Tier.get`."""
        places = self._places(key, positions)
        k, v = self._cache(key[1]).read_codes(self._handle(key), layer=0)
        of_v = (None, None) if v is None else (v.codes, v.scales)
        return Context(k.codes, of_v[0], k.scales, of_v[1]).at(places)

    def remove(self, key: Key, positions: Positions) -> None:
        """See `Tier.remove`."""
        held = self._positions[key]
        held[self._places(key, positions)] = -1
        self._rows -= len(positions)
        self.bytes_out += len(positions) * self.geometry.row_bytes
        alive = np.flatnonzero(held >= 0)
        if not len(alive):
            self.drop(key)
            return
        kept = int(alive[-1]) + 1
        if kept < len(held):
            self._cache(key[1]).crop(self._handle(key), kept)
            self._positions[key] = held = held[:kept]
        if len(alive) < _REBUILD_SHARE * len(held):
            self._rebuild(key, held[alive])

    def copy(self, key: Key, sequence: int) -> None:
        """See `Tier.copy`: pages are shared."""
        if key in self._positions:
            fork = self._cache(key[1]).fork(self._handle(key))
            self._handles[sequence, key[1]] = fork
            self._positions[sequence, key[1]] = self._positions[key].copy()
            self._rows += int((self._positions[key] >= 0).sum())

    def drop(self, key: Key) -> None:
        """See `Tier.drop`."""
        if key in self._positions:
            self._rows -= int((self._positions.pop(key) >= 0).sum())
        if key in self._handles:
            self._cache(key[1]).free(self._handles.pop(key))

    def partial(self, layer: int, sequences: Many[int], asked: Asked) -> Partial:
        """See `Tier.partial`."""
        keys = [(sequence, layer) for sequence in sequences]
        own = [self.positions(key) for key in keys]
        if asked.slopes is not None:
            return self._biased(keys, own, asked)
        seen = np.zeros((*asked.seen.shape[:2], max(map(len, own))), np.bool_)
        for index, positions in enumerate(own):
            shown = asked.seen[index][:, np.maximum(positions, 0)] & (positions >= 0)
            seen[index, :, : len(positions)] = shown
        # a query row each, since the device would have several of them stand last in its own order
        query_rows = asked.q.shape[1]
        result = self._cache(layer).attend(
            [self._handle(key) for key in keys for _ in range(query_rows)],
            layer=0,
            q=asked.q.cpu().flatten(0, 1),
            scale=asked.scale,
            softcap=asked.softcap,
            sinks=asked.sinks,
            visible=torch.from_numpy(seen.reshape(len(keys) * query_rows, seen.shape[2])),
            partial=True,
        )
        return result.reshaped(asked.q.shape[:2])

    @property
    def rows(self) -> int:
        """See `Tier.rows`."""
        return self._rows

    def close(self) -> None:
        """See `Tier.close`."""
        for cache in self.caches:
            cache.close()
        self._caches, self._handles, self._positions, self._rows = {}, {}, {}, 0

    def _biased(self, keys: list[Key], own: list[Positions], asked: Asked) -> Partial:
        """`partial` with slopes. A device takes a row to stand where its place says; so rows that stand
        equally far from there are a job's, and those that stand elsewhere another's."""
        assert asked.query is not None
        assert asked.held is not None
        query_rows, width = asked.q.shape[1], max(map(len, own))
        jobs: list[tuple[int, int]] = []
        masks: list[npt.NDArray[np.bool_]] = []
        for index, positions in enumerate(own):
            shown = asked.seen[index][:, np.maximum(positions, 0)] & (positions >= 0)
            shift = asked.held[index][np.maximum(positions, 0)] - np.arange(len(positions))
            for one in np.unique(shift[shown.any(axis=0)]).tolist():
                mask = np.zeros((query_rows, width), np.bool_)
                mask[:, : len(positions)] = shown & (shift == one)
                jobs.append((index, one))
                masks.append(mask)
        query = np.array([asked.query[index] - one for index, one in jobs], np.int64).reshape(-1, query_rows)
        if len(jobs) > _MOST_RUNS * len(keys) or query.min(initial=0) < 0:
            return self._on_host(keys, own, asked)
        result = self._on_host(keys, [np.empty(0, np.int64)] * len(keys), asked)  # the sinks
        if not jobs:
            return result
        places = [index for index, _ in jobs]
        visible = np.concatenate(masks)[:, : max(len(own[index]) for index in places)]
        part = (
            self._cache(keys[0][1])
            .attend(
                [self._handle(keys[index]) for index in places for _ in range(query_rows)],
                layer=0,
                q=asked.q.cpu()[places].flatten(0, 1),
                scale=asked.scale,
                softcap=asked.softcap,
                alibi_slopes=asked.slopes,
                visible=torch.from_numpy(visible),
                query_positions=torch.from_numpy(query.reshape(-1, 1)),
                partial=True,
            )
            .reshaped((len(jobs), query_rows))
        )
        nth = [places[:at].count(index) for at, index in enumerate(places)]
        for turn in range(max(nth) + 1):
            now = [at for at, own_turn in enumerate(nth) if own_turn == turn]
            result = merge(result, part.at(now).spread([places[at] for at in now], len(keys)))
        return result

    def _on_host(self, keys: list[Key], own: list[Positions], asked: Asked) -> Partial:
        """The partial of these rows, read back, and of the sinks."""
        host = TensorTier("host")
        host.open(self.geometry)
        for key, positions in zip(keys, own, strict=True):
            held = positions[positions >= 0]
            if len(held):
                host.put(key, self.get(key, held), held)
        return host.partial(keys[0][1], [key[0] for key in keys], replace(asked, q=asked.q.cpu()))

    def _cache(self, layer: int) -> KVCache:
        """The cache of a layer's rows."""
        heads = self.geometry.heads
        if not heads.needed:
            return self._caches[0][1]
        changes, cache = self._caches.get(layer, (-1, None))
        if cache is None or changes != heads.changes(layer):
            if cache is not None:  # of sequences without rows, and other tables
                cache.close()
                self._handles = {key: one for key, one in self._handles.items() if key[1] != layer}
            cache = self._made({name: table[None] for name, table in heads.of(layer).items()})
            self._caches[layer] = heads.changes(layer), cache
        return cache

    def _made(self, tables: dict[str, Any]) -> KVCache:
        geometry, form = self.geometry, self.geometry.form
        return self._device.kv_cache(
            layers=1,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            value_dim=geometry.value_dim,
            dtype=form.k,
            value_dtype=form.v,
            latent=form.v is None,
            page_rows=self._page_rows,
            tenant=self._tenant,
            **tables,
        )

    def _handle(self, key: Key) -> Sequence:
        """The sequence of the device's cache; every sequence and layer has one of its own."""
        if key not in self._handles:
            self._handles[key] = self._cache(key[1]).sequence()
        return self._handles[key]

    def _places(self, key: Key, positions: Positions) -> npt.NDArray[np.int64]:
        held = self._positions[key]
        order = np.argsort(held, kind="stable")
        found: npt.NDArray[np.int64] = order[np.searchsorted(held, positions, sorter=order)]
        return found

    def _rebuild(self, key: Key, positions: Positions) -> None:
        """Write a sequence anew, with these rows alone."""
        rows, before = self.get(key, positions), self.bytes_in
        self.drop(key)
        self.put(key, rows, positions)
        self.bytes_in = before
