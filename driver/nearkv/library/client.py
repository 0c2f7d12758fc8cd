"""A host's side of shared prefixes: finds them, uses them for its sequences, and merges what they come to."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nearkv_hw.abi.memory import RowLayout

from nearkv import host_attention
from nearkv.arguments import positions_of, row_bounds, tree_of, visible_of
from nearkv.errors import DtypeError, LinkError
from nearkv.heads import HeadTables
from nearkv.prefixes import tokens_of
from nearkv.quantise.formats import CacheFormat
from nearkv.reference import Partial, merge
from nearkv.rows import Context
from nearkv.tenant import Tenant

from .messages import (
    Array,
    form_fields,
    head_arrays,
    partial_of,
    raise_failure,
    rows_arrays,
    rows_of,
)

Answer = tuple[dict[str, Any], list[Array]]
_NAMED = ("address", "generation", "prefix_rows", "cache")


@dataclass(frozen=True)
class SharedPrefix:
    """A handle of a prefix that hosts share; `KVCache.publish` and `find_prefix` make it with `shared=True`.

    Members
    -------
    address, generation : of the library's prefix, which together name it for good.
    rows : how many it has.
    cache : which rows they are, as the library knows them.
    """

    address: int
    generation: int
    rows: int
    cache: str

    @property
    def fields(self) -> dict[str, Any]:
        """The handle as a message says it."""
        return dict(zip(_NAMED, (self.address, self.generation, self.rows, self.cache), strict=True))

    @classmethod
    def of(cls, message: dict[str, Any]) -> SharedPrefix:
        """The handle that a message names."""
        return cls(*(message[name] for name in _NAMED))


class SharedRows:
    """The first rows of one sequence, which lie in the library for as long as this is held.

    Members
    -------
    prefix : whose rows they are.
    rows : how many, whole pages.
    seen : of each layer, how many of them are still seen; fewer once they were released.
    """

    def __init__(self, owner: SharedPrefixes, prefix: SharedPrefix, rows: int, seen: list[int]) -> None:
        self._owner = owner
        self._held = True
        self.prefix = prefix
        self.rows = rows
        self.seen = seen

    def another(self) -> SharedRows:
        """The same rows for another sequence; StalePrefixError when the prefix is no longer there."""
        return self._owner.hold(self.prefix, self.rows, list(self.seen))

    def let_go(self) -> None:
        """The sequence ends. Once the server is gone there is nothing to let go."""
        if self._held:
            self._held = False
            with suppress(LinkError):
                self._owner.ask("let_go", self.prefix.fields)


class SharedPrefixes:
    """The prefixes that a cache shares with other hosts' caches of the same rows.

    Parameters
    ----------
    tenant, layout, form, layers, kv_heads, heads : of the cache.
    """

    def __init__(
        self,
        tenant: Tenant,
        layout: RowLayout,
        form: CacheFormat,
        layers: int,
        kv_heads: int,
        heads: HeadTables,
    ) -> None:
        self._tenant = tenant
        self._form = form
        self._layers = layers
        self._heads = heads
        self._value_dim = layout.value_dim
        self._page_rows = layout.page_rows
        self._kind = {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
            "page_rows": layout.page_rows,
            "form": form_fields(form),
        }

    def ask(self, operation: str, request: dict[str, Any], arrays: Many[Array] = ()) -> Answer:
        """What the library answers; the errors that it says are raised."""
        answer, results = self._tenant.ask({"library": operation, **request}, list(arrays))
        raise_failure(answer)
        return answer, results

    def publish(self, rows: Callable[[int], Context], tokens: object, salt: bytes) -> SharedPrefix:
        """Have the library keep rows, which `rows` returns of each layer, as those of these tokens."""
        kind, tables = self._described()
        assert kind is not None  # what has rows knows its heads
        found, count = self.find(tokens, salt)
        wanted = tokens_of(tokens)
        if found is not None and found.rows == count == len(wanted):
            return found
        number = self.ask("begin", kind, tables)[0]["number"]
        try:
            for layer in range(self._layers):
                present, areas = rows_arrays(rows(layer).areas)
                self.ask("append", {"number": number, "layer": layer, "areas": present}, areas)
        except BaseException:
            with suppress(LinkError):
                self.ask("publish", {"number": number})
            raise
        return SharedPrefix.of(self.ask("publish", {"number": number}, _content(wanted, salt))[0])

    def find(self, tokens: object, salt: bytes) -> tuple[SharedPrefix | None, int]:
        """The shared prefix that begins with most of these tokens, and with how many; (None, 0) if none."""
        kind, tables = self._described()
        if kind is None:
            return None, 0
        answer, _ = self.ask("find", kind, [*_content(tokens_of(tokens), salt), *tables])
        return (SharedPrefix.of(answer), answer["found"]) if answer else (None, 0)

    def hold(self, prefix: SharedPrefix, rows: int, seen: list[int] | None = None) -> SharedRows:
        """Use a prefix's first rows, those of whole pages, for a sequence.

        Raises
        ------
        StalePrefixError : when the prefix is no longer there.
        """
        rows -= rows % self._page_rows
        self.ask("hold", prefix.fields)
        return SharedRows(self, prefix, rows, [rows] * self._layers if seen is None else seen)

    def read(self, shared: SharedRows, layer: int) -> Context:
        """The rows of a layer that are still seen."""
        request = {**shared.prefix.fields, "layer": layer, "rows": shared.seen[layer]}
        answer, arrays = self.ask("read", request)
        k, k_scales, v, v_scales = rows_of(answer["areas"], arrays)
        assert k is not None
        return Context(k, v, k_scales, v_scales)

    def attend(
        self,
        uses: Many[SharedRows | None],
        lengths: list[int],
        *,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        kept_rows: int = 0,
        rows: Any = None,
        visible: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
        query_positions: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Partial:
        """The partial of a checked call's shared rows, those of sequences of so many rows in all; sinks are
        for the others' partial."""
        whole = np.array(lengths, np.int64)
        wide = q.unsqueeze(1) if q.dim() == 3 else q
        query_rows = wide.shape[1]
        shown = visible_of(visible, len(lengths), query_rows if q.dim() == 4 else None, whole)
        own_tree = tree_of(tree, query_rows, whole)
        placed = query_positions is not None or own_tree is not None
        positions = positions_of(query_positions, query_rows, whole)
        if own_tree is not None:  # what a tree's rows see of the others is all that the library has to know
            shown = host_attention.seen(
                whole,
                query_rows,
                window=window,
                kept_rows=kept_rows,
                rows=rows,
                visible=shown,
                tree=(positions, own_tree),
            )
            window, kept_rows, rows = None, 0, None
        begin, end = row_bounds(whole, None, rows)
        result = Partial.empty(tuple(wide.shape[:-1]), self._value_dim)
        groups: dict[tuple[SharedPrefix, int], list[int]] = {}
        for index, use in enumerate(uses):
            if use is not None and use.seen[layer]:
                groups.setdefault((use.prefix, use.seen[layer]), []).append(index)
        for (prefix, seen), group in groups.items():
            own = [seen] * len(group) if placed else [lengths[index] for index in group]
            tensors: dict[str, torch.Tensor] = {}
            if shown is not None:
                tensors["visible"] = torch.from_numpy(shown[group][:, :, : max(own)].copy())
            if placed:
                tensors["query_positions"] = torch.from_numpy(positions[group])
            if alibi_slopes is not None:
                tensors["alibi_slopes"] = alibi_slopes.detach().cpu()
            if "visible" in tensors and not placed and tensors["visible"].shape[1] == 1:
                tensors["visible"] = tensors["visible"][:, 0]
            request = {
                **prefix.fields,
                "layer": layer,
                "seen": seen,
                "lengths": own,
                "rows": None if rows is None else [[int(begin[i]), int(end[i])] for i in group],
                "bf16": q.dtype == torch.bfloat16,
                "tensors": list(tensors),
                "options": {"scale": scale, "softcap": softcap, "window": window, "kept_rows": kept_rows},
            }
            queries = wide[group].detach().cpu().contiguous().view(torch.int16).numpy()
            _, arrays = self.ask("attend", request, [queries, *(t.numpy() for t in tensors.values())])
            result = merge(result, partial_of(arrays).spread(group, len(lengths)))
        return (result if q.dim() == 4 else result.reshaped((len(lengths),))).to(q.device)

    def _described(self) -> tuple[dict[str, Any] | None, list[Array]]:
        """What the cache's rows are; None while it is not known what its heads have in common."""
        tables = head_arrays(self._heads, self._form, self._layers)
        if tables is None:
            return None, []
        return {**self._kind, "tables": list(tables)}, list(tables.values())


def _content(tokens: Array, salt: bytes) -> list[Array]:
    """What names a prefix in a message."""
    if not isinstance(salt, bytes):
        raise DtypeError(f"salt must be bytes, not {type(salt).__name__}")
    return [tokens, np.frombuffer(salt, np.uint8)]
