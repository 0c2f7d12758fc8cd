"""What all rows of a KV head have in common, layer by layer: its scales and its codebooks, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.formats import LUT_ENTRIES
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.memory import HEAD_SCALE
from nearkv_sim.port import Write

from .codec import span
from .errors import ArgumentError, DtypeError, OutOfMemoryError, ShapeError
from .quantise.formats import CacheFormat
from .tenant import Tenant

SCALES_BYTES = HEAD_SCALE.width // 8
"""Of a head's scales."""


@dataclass(frozen=True)
class GivenHeads:
    """What a cache's heads have in common, as far as it is given.

    Members
    -------
    layers, kv_heads : of the cache.
    scales, books : of "k" and "v" where the format has them, float32 [layers, kv_heads] and float16
        [layers, kv_heads, 16]; zeros where they are still to be found.
    known : by name ("k_scale", "v_lut", ...) whether it was given.
    found : by name whether it is known in each layer, of a cache that was there before; else None.
    """

    layers: int
    kv_heads: int
    scales: dict[str, torch.Tensor]
    books: dict[str, torch.Tensor]
    known: dict[str, bool]
    found: dict[str, list[bool]] | None = None

    @classmethod
    def checked(
        cls, form: CacheFormat, layers: int, kv_heads: int, given: dict[str, torch.Tensor | None]
    ) -> GivenHeads:
        """From arguments by name ("k_scale", "v_scale": float32; "k_lut", "v_lut": float16 [..., 16]),
        [kv_heads] for all layers alike or [layers, kv_heads]; None where they are to be found.

        Raises
        ------
        ArgumentError, ShapeError, DtypeError : for what does not fit the format.
        """
        found = cls(layers, kv_heads, {}, {}, {})
        for part, row in (("k", form.k), ("v", form.v)):
            has = {"scale": row is not None and row.head_scale, "lut": row is not None and row.form.codebook}
            for what, kind, shape in (("scale", torch.float32, ()), ("lut", torch.float16, (LUT_ENTRIES,))):
                name, values = f"{part}_{what}", given.get(f"{part}_{what}")
                if not has[what]:
                    if values is not None:
                        raise ArgumentError(
                            f"{name} belongs to {'a scale per head' if what == 'scale' else 'lut4'}; "
                            f"{part.upper()} of this cache has none"
                        )
                    continue
                wanted = (layers, kv_heads, *shape)
                kept = found.scales if what == "scale" else found.books
                found.known[name] = values is not None
                kept[part] = (
                    torch.zeros(wanted, dtype=kind)
                    if values is None
                    else _checked(name, values, kind, wanted)
                )
        return found


class HeadTables:
    """Scales and codebooks of a cache's heads: given when it is made, or found from a layer's first rows.

    Parameters
    ----------
    tenant : in whose memory the tables lie.
    given : what is known from the beginning.
    at : where the tables lie already, scales and codebooks; by default they are made.

    Members
    -------
    head_scales, codebooks : device addresses, 0 where the cache has none.
    changes : how often something was learnt or forgotten.

    Raises
    ------
    OutOfMemoryError : when there is no room.
    """

    def __init__(self, tenant: Tenant, given: GivenHeads, at: tuple[int, int] | None = None) -> None:
        self._tenant = tenant
        self._layers = given.layers
        self._kv_heads = given.kv_heads
        self._scales = {part: tensor.clone() for part, tensor in given.scales.items()}
        self._books = {part: tensor.clone() for part, tensor in given.books.items()}
        self._known = given.found or {name: [known] * given.layers for name, known in given.known.items()}
        scales, books = bool(self._scales), bool(self._books)
        heads = given.layers * given.kv_heads
        self.changes = 0
        self._scale_lines = lines_of(heads * SCALES_BYTES) if scales else 0
        self._book_lines = heads if books else 0
        if at is not None:
            self.head_scales, self.codebooks = at
            return
        self.head_scales = tenant.arena.take(self._scale_lines * LINE_BYTES) if scales else 0
        try:
            self.codebooks = tenant.arena.take(self._book_lines * LINE_BYTES) if books else 0
        except OutOfMemoryError:
            self.give()
            raise
        tenant.run(self.writes())

    def give(self) -> None:
        """The tables' memory is free again."""
        for address, lines in (
            (self.head_scales, self._scale_lines),
            (getattr(self, "codebooks", 0), self._book_lines),
        ):
            if address:
                self._tenant.arena.give(address, lines * LINE_BYTES)

    def scale(self, part: str, layer: int) -> torch.Tensor | None:
        """The scale per head of "k" or "v", float32 [kv_heads]; None where there is none or none is known."""
        if part not in self._scales or not self._known[f"{part}_scale"][layer]:
            return None
        return self._scales[part][layer]

    def codebook(self, part: str, layer: int) -> torch.Tensor | None:
        """The codebook of "k" or "v", float16 [kv_heads, 16]; None where there is none or none is known."""
        if part not in self._books or not self._known[f"{part}_lut"][layer]:
            return None
        return self._books[part][layer]

    def codebook_line(self, layer: int, kv_head: int) -> int:
        """Device address / 64 of a head's codebooks."""
        return self.codebooks // LINE_BYTES + layer * self._kv_heads + kv_head

    def missing(self, part: str, layer: int) -> str | None:
        """What of "k" or "v" is not known yet in a layer, by its name as an argument."""
        names = [name for name, known in self._known.items() if name[0] == part and not known[layer]]
        return names[0] if names else None

    def learn(self, part: str, layer: int, scale: torch.Tensor | None, book: torch.Tensor | None) -> None:
        """Keep what a layer's first rows called for; `writes` brings it to the device."""
        self.changes += 1
        if part in self._scales and scale is not None:
            self._scales[part][layer] = scale
            self._known[f"{part}_scale"][layer] = True
        if part in self._books and book is not None:
            self._books[part][layer] = book
            self._known[f"{part}_lut"][layer] = True

    def forget(self, parts: Iterable[str], layer: int) -> None:
        """The rows that `learn` was told of are not there after all."""
        self.changes += 1
        for part in parts:
            for name in (f"{part}_scale", f"{part}_lut"):
                if name in self._known:
                    self._known[name][layer] = False

    def writes(self) -> list[Write]:
        """The operations that write the tables."""
        found = []
        if self._scale_lines:
            values = np.zeros((self._layers, self._kv_heads, 2), np.float32)
            for index, part in enumerate("kv"):
                values[..., index] = self._scales[part].numpy() if part in self._scales else 1.0
                if part in self._scales:
                    values[~np.array(self._known[f"{part}_scale"]), :, index] = 0.0
            found.append(self._write(self.head_scales, self._scale_lines, values))
        if self._book_lines:
            books = np.zeros((self._layers, self._kv_heads, 2, LUT_ENTRIES), np.float16)
            for index, part in enumerate("kv"):
                if part in self._books:
                    books[:, :, index] = self._books[part].numpy()
            found.append(self._write(self.codebooks, self._book_lines, books))
        return found

    def _write(self, address: int, lines: int, values: npt.NDArray[np.floating]) -> Write:
        data = np.zeros((lines, LINE_BYTES), np.uint8)
        raw = values.reshape(-1).view(np.uint8)
        data.reshape(-1)[: len(raw)] = raw
        return self._tenant.write(span(address, lines), data)


def _checked(name: str, values: object, kind: torch.dtype, wanted: tuple[int, ...]) -> torch.Tensor:
    """What was given, for every layer."""
    if not isinstance(values, torch.Tensor) or values.dtype != kind:
        found = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise DtypeError(f"{name} must be a {kind} tensor, not {found}")
    if tuple(values.shape) not in (wanted, wanted[1:]):
        raise ShapeError(
            f"{name} has shape {list(values.shape)}, must have {list(wanted[1:])} or {list(wanted)}"
        )
    values = values.detach().cpu()
    if kind == torch.float32 and not bool((values.isfinite() & (values > 0)).all()):
        raise ArgumentError(f"{name} must be finite and above 0, got {values.tolist()}")
    return values.expand(wanted)
