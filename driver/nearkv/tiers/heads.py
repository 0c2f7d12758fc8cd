"""What all rows of a KV head have in common, in whatever tiers they are: scales and codebooks, by layer."""

from __future__ import annotations

import torch

from nearkv.heads import GivenHeads
from nearkv.quantise.formats import CacheFormat
from nearkv.quantise.rows import Quantised


class LayerHeads:
    """Scales and codebooks of a tiered cache's heads: given at first, or found from a layer's first rows.

    Parameters
    ----------
    form : how rows are stored.
    layers, kv_heads : of the cache.
    given : by their names as `Device.kv_cache` has them.

    Members
    -------
    needed : whether the format has any.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError : for what does not fit the format.
    """

    def __init__(
        self, form: CacheFormat, layers: int, kv_heads: int, given: dict[str, torch.Tensor | None]
    ) -> None:
        checked = GivenHeads.checked(form, layers, kv_heads, given)
        self._tables = {f"{part}_scale": table.clone() for part, table in checked.scales.items()}
        self._tables |= {f"{part}_lut": table.clone() for part, table in checked.books.items()}
        self._known = {name: [known] * layers for name, known in checked.known.items()}
        self._changes = [0] * layers
        self.needed = bool(self._tables)

    def changes(self, layer: int) -> int:
        """How often something of a layer was learnt or forgotten."""
        return self._changes[layer]

    def of(self, layer: int, *, for_no_rows: bool = False) -> dict[str, torch.Tensor]:
        """What is known of a layer, by the names of `Device.kv_cache`, [kv_heads] or [kv_heads, 16]; with
        `for_no_rows` ones in place of what is not known yet, which no row has a part in."""
        found = {name: table[layer] for name, table in self._tables.items() if self._known[name][layer]}
        if for_no_rows:
            unknown = {name: torch.ones_like(table[layer]) for name, table in self._tables.items()}
            found = unknown | found
        return found

    def learn(self, layer: int, found: dict[str, Quantised]) -> list[str]:
        """Keep what a layer's first rows called for; returns the names of what is new."""
        new = []
        for part, rows in found.items():
            for name, table in ((f"{part}_scale", rows.head_scale), (f"{part}_lut", rows.codebook)):
                if table is not None and name in self._known and not self._known[name][layer]:
                    self._tables[name][layer] = table
                    self._known[name][layer] = True
                    new.append(name)
        self._changes[layer] += bool(new)
        return new

    def forget(self, layer: int, names: list[str]) -> None:
        """The rows that `learn` was told of are not there after all."""
        for name in names:
            self._known[name][layer] = False
        self._changes[layer] += bool(names)
