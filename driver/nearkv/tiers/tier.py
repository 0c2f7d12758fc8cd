"""What a tier is, and those in memory of the host: tensors, on any torch device, and mapped files."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.formats import Format

from nearkv.host_attention import HostRows
from nearkv.quantise.formats import CacheFormat
from nearkv.reference import Partial
from nearkv.rows import Context

from .heads import LayerHeads

Positions = npt.NDArray[np.int64]
"""Which rows of a sequence something is, by their number; -1 for none."""
Key = tuple[int, int]
"""A sequence's number and a layer."""
_FIRST_ROWS = 64


@dataclass(frozen=True)
class Geometry:
    """What rows are: layers, KV heads, elements of a K and of a V row, how they are stored, and what the rows
    of a head have in common."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    form: CacheFormat
    heads: LayerHeads

    @property
    def areas(self) -> list[tuple[int, torch.dtype] | None]:
        """Of K codes, K scales, V codes and V scales: how many a row of a head has, and their type."""
        found: list[tuple[int, torch.dtype] | None] = []
        for form, dim in ((self.form.k, self.head_dim), (self.form.v, self.value_dim)):
            scale = None if form is None else form.scale_form
            found.append(None if form is None else (dim, _kept_as(form.form)))
            found.append(None if form is None or scale is None else (form.blocks(dim), _kept_as(scale)))
        return found

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all KV heads, codes and scales, without padding."""
        rows = [(self.form.k, self.head_dim)]
        rows += [] if self.form.v is None else [(self.form.v, self.value_dim)]
        bits = sum(dim * form.form.bits + 8 * form.scale_bytes(dim) for form, dim in rows)
        return self.kv_heads * -(-bits // 8)


def _kept_as(form: Format) -> torch.dtype:
    """The type in which codes are kept."""
    return torch.int16 if form.bits == 16 else torch.uint8


@dataclass(frozen=True)
class Asked:
    """One attention call, as far as every tier has to know it.

    Members
    -------
    q : [batch, query_rows, q_heads, head_dim].
    seen : who sees which row of each sequence, bool [batch, query_rows, rows].
    scale, softcap : of scores.
    sinks : float32 [q_heads] for the one tier that counts them, else None.
    slopes : float32 [q_heads] of ALiBi, or None.
    query, held : where query rows and rows stand, int64 [batch, query_rows] and [batch, rows]; for slopes.
    """

    q: torch.Tensor
    seen: npt.NDArray[np.bool_]
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None = None
    query: Positions | None = None
    held: Positions | None = None


class Tier(ABC):
    """A place for rows. Rows have no order in it: attention is a function of the set.

    Parameters
    ----------
    name : for telemetry.
    capacity_bytes : that its rows may take, or None for no bound.

    Members
    -------
    name, capacity_bytes : see above.
    bytes_in, bytes_out : that came and went, in rows without padding.
    """

    def __init__(self, name: str, capacity_bytes: int | None = None) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.bytes_in = 0
        self.bytes_out = 0

    def open(self, geometry: Geometry) -> None:
        """Make ready for rows of a cache; called once."""
        self.geometry = geometry

    @abstractmethod
    def positions(self, key: Key) -> Positions:
        """The rows of a sequence and layer that are here, in the tier's own order; -1 for places without."""

    @abstractmethod
    def put(self, key: Key, rows: Context, positions: Positions) -> None:
        """Take rows in."""

    @abstractmethod
    def get(self, key: Key, positions: Positions) -> Context:
        """Rows that are here, in this order."""

    @abstractmethod
    def remove(self, key: Key, positions: Positions) -> None:
        """Rows that are here go."""

    @abstractmethod
    def copy(self, key: Key, sequence: int) -> None:
        """Another sequence has the same rows, too."""

    @abstractmethod
    def drop(self, key: Key) -> None:
        """All rows of a sequence and layer go."""

    @abstractmethod
    def partial(self, layer: int, sequences: Many[int], asked: Asked) -> Partial:
        """The partial of the rows that are here; as the contract has it, whatever they are."""

    def scores(self, key: Key, q: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """How much a query [q_heads, head_dim] makes of each place, roughly; None where that is not known."""
        return None

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows that are here, those of all sequences and layers."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that are here, without padding."""
        return self.rows * self.geometry.row_bytes

    @abstractmethod
    def close(self) -> None:
        """All rows go."""


@dataclass
class _Held:
    """Rows of a sequence and layer: areas [capacity, kv_heads, ...] of which the first ones are used."""

    areas: list[torch.Tensor | None]
    positions: Positions
    used: int = 0


class TensorTier(Tier):
    """Rows in tensors, and attention by `nearkv.reference` where they are.

    Parameters
    ----------
    name, capacity_bytes : as `Tier` has them.
    device : of torch: "cpu", "cuda", ...
    """

    def __init__(
        self, name: str = "host", *, device: torch.device | str = "cpu", capacity_bytes: int | None = None
    ) -> None:
        super().__init__(name, capacity_bytes)
        self.device = torch.device(device)
        self._held: dict[Key, _Held] = {}
        self._rows = 0

    def positions(self, key: Key) -> Positions:
        """See `Tier.positions`."""
        held = self._held.get(key)
        return np.empty(0, np.int64) if held is None else held.positions[: held.used]

    def put(self, key: Key, rows: Context, positions: Positions) -> None:
        """See `Tier.put`."""
        held = self._held.get(key)
        count = len(positions)
        if held is None:
            held = self._held[key] = self._room(rows, max(_FIRST_ROWS, count), None)
        elif held.used + count > len(held.positions):
            held = self._held[key] = self._room(rows, max(2 * len(held.positions), held.used + count), held)
        for area, new in zip(held.areas, rows.areas, strict=True):
            if area is not None and new is not None:
                area[held.used : held.used + count] = new.to(area.device)
        held.positions[held.used : held.used + count] = positions
        held.used += count
        self._rows += count
        self.bytes_in += count * self.geometry.row_bytes

    def get(self, key: Key, positions: Positions) -> Context:
        """See `Tier.get`."""
        held = self._held[key]
        index = torch.from_numpy(self._places(held, positions))
        k, k_scales, v, v_scales = (
            None if area is None else area[index.to(area.device)].cpu() for area in held.areas
        )
        assert k is not None
        return Context(k, v, k_scales, v_scales)

    def remove(self, key: Key, positions: Positions) -> None:
        """See `Tier.remove`: the last rows take the places of those that go."""
        held = self._held[key]
        gone = self._places(held, positions)
        stay = held.used - len(gone)
        holes = np.sort(gone[gone < stay])
        movers = np.setdiff1d(np.arange(stay, held.used), gone, assume_unique=True)
        for area in held.areas:
            if area is not None:
                source = torch.from_numpy(movers).to(area.device)
                area[torch.from_numpy(holes).to(area.device)] = area[source]
        held.positions[holes] = held.positions[movers]
        held.used = stay
        self._rows -= len(gone)
        self.bytes_out += len(gone) * self.geometry.row_bytes
        if not stay:
            self._forget(key)

    def copy(self, key: Key, sequence: int) -> None:
        """See `Tier.copy`."""
        positions = self.positions(key).copy()
        if len(positions):
            before = self.bytes_in
            self.put((sequence, key[1]), self.get(key, positions), positions)
            self.bytes_in = before

    def drop(self, key: Key) -> None:
        """See `Tier.drop`."""
        if key in self._held:
            self._rows -= self._held[key].used
            self._forget(key)

    def partial(self, layer: int, sequences: Many[int], asked: Asked) -> Partial:
        """See `Tier.partial`."""
        own = [self.positions((sequence, layer)) for sequence in sequences]
        longest = max(map(len, own))
        seen = np.zeros((*asked.seen.shape[:2], longest), np.bool_)
        for index, positions in enumerate(own):
            seen[index, :, : len(positions)] = asked.seen[index][:, positions]
        rows = self._stacked(layer, sequences, longest)
        tables = self.geometry.heads.of(layer, for_no_rows=True)
        names = ("k_scale", "v_scale", "k_lut", "v_lut")
        result, _ = HostRows(self.geometry.form, *(tables.get(name) for name in names)).attend(
            asked.q.to(self.device),
            rows,
            torch.from_numpy(seen),
            scale=asked.scale,
            sinks=None if asked.sinks is None else asked.sinks.to(self.device),
            softcap=asked.softcap,
            alibi_slopes=asked.slopes,
            select_pages=None,
            page_rows=0,
            lengths=np.zeros(len(sequences), np.int64),
            value_dim=self.geometry.value_dim,
            **self._standing(own, longest, asked),
        )
        return result

    def _standing(self, own: list[Positions], longest: int, asked: Asked) -> dict[str, torch.Tensor]:
        """Where query rows and the rows that are here stand, for slopes."""
        if asked.slopes is None or asked.query is None or asked.held is None:
            return {}
        held = np.zeros((len(own), longest), np.int64)
        for index, positions in enumerate(own):
            held[index, : len(positions)] = asked.held[index][positions]
        shift = max(0, -int(asked.query.min(initial=0)))  # query rows before the first row
        return {
            "query_positions": torch.from_numpy(asked.query + shift).to(self.device),
            "row_positions": torch.from_numpy(held + shift).to(self.device),
        }

    def scores(self, key: Key, q: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """See `Tier.scores`: the largest q·k of any query head, of plain numbers alone."""
        held = self._held.get(key)
        k = None if held is None else held.areas[0]
        if held is None or k is None or self.geometry.form.k.form.bits != 16:
            return None
        numbers = k[: held.used].view(q.dtype).float()
        heads = q.to(numbers.device).float().view(self.geometry.kv_heads, -1, self.geometry.head_dim)
        found = torch.einsum("rhd,hgd->rhg", numbers, heads).flatten(1).amax(1)
        result: npt.NDArray[np.float64] = found.double().cpu().numpy()
        return result

    @property
    def rows(self) -> int:
        """See `Tier.rows`."""
        return self._rows

    def close(self) -> None:
        """See `Tier.close`."""
        for key in list(self._held):
            self.drop(key)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for rows."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def give(self, areas: list[torch.Tensor | None]) -> None:
        """Tensors that `allocate` made are not needed any more."""

    def _forget(self, key: Key) -> None:
        self.give(self._held.pop(key).areas)

    def _room(self, rows: Context, capacity: int, before: _Held | None) -> _Held:
        areas = [
            None if area is None else self.allocate((capacity, *area.shape[1:]), area.dtype)
            for area in rows.areas
        ]
        held = _Held(areas, np.full(capacity, -1, np.int64))
        if before is not None:
            held.used = before.used
            held.positions[: before.used] = before.positions[: before.used]
            for new, old in zip(areas, before.areas, strict=True):
                if new is not None and old is not None:
                    new[: before.used] = old[: before.used]
            self.give(before.areas)
        return held

    def _places(self, held: _Held, positions: Positions) -> npt.NDArray[np.int64]:
        """Where rows lie."""
        order = np.argsort(held.positions[: held.used])
        found: npt.NDArray[np.int64] = order[
            np.searchsorted(held.positions[: held.used], positions, sorter=order)
        ]
        return found

    def _stacked(self, layer: int, sequences: Many[int], longest: int) -> Context:
        """The rows of a batch, shorter ones filled up."""
        heads = self.geometry.kv_heads
        parts: list[torch.Tensor | None] = []
        for index, kind in enumerate(self.geometry.areas):
            if kind is None:
                parts.append(None)
                continue
            elements, dtype = kind
            shape = len(sequences), longest, heads, elements
            stacked = torch.zeros(shape, dtype=dtype, device=self.device)
            for place, sequence in enumerate(sequences):
                held = self._held.get((sequence, layer))
                area = None if held is None else held.areas[index]
                if held is not None and area is not None:
                    stacked[place, : held.used] = area[: held.used]
            parts.append(stacked)
        k, k_scales, v, v_scales = parts
        assert k is not None
        return Context(k, v, k_scales, v_scales)


class FileTier(TensorTier):
    """Rows in memory-mapped files, one for each area of a sequence and layer.

    Parameters
    ----------
    directory : where the files lie; a temporary one if not given.
    name, capacity_bytes : as `Tier` has them.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        name: str = "file",
        *,
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes=capacity_bytes)
        self._temporary = None if directory else tempfile.TemporaryDirectory(prefix="nearkv-rows-")
        self.directory = Path(directory or (self._temporary.name if self._temporary else "."))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._paths: dict[int, Path] = {}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorTier.allocate`: a file of its own."""
        number, name = tempfile.mkstemp(prefix=f"{self.name}-", suffix=".rows", dir=self.directory)
        os.close(number)
        kind = np.dtype(np.int16 if dtype == torch.int16 else np.uint8)
        tensor = torch.from_numpy(np.memmap(name, kind, "w+", shape=shape))
        self._paths[tensor.data_ptr()] = Path(name)
        return tensor

    def give(self, areas: list[torch.Tensor | None]) -> None:
        """See `TensorTier.give`: the files go."""
        for area in areas:
            if area is not None:
                self._paths.pop(area.data_ptr()).unlink()

    def close(self) -> None:
        """See `Tier.close`."""
        super().close()
        if self._temporary is not None:
            self._temporary.cleanup()
