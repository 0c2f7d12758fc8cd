"""A KV cache over several tiers: a policy puts rows somewhere, and each tier computes its part of a call."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from nearkv import host_attention
from nearkv.arguments import (
    Rows,
    finite_scale,
    placed,
    positions_of,
    queries_of,
    sinks_of,
    slopes_of,
    tree_of,
    visible_of,
    whole_number,
)
from nearkv.errors import ArgumentError, ClosedError, DtypeError, UnknownHandleError
from nearkv.formats import Blocks, Dtype, Pair, chosen_format
from nearkv.reference import Partial, log_sum_exp, merge
from nearkv.results import FORMS
from nearkv.rows import Context

from .heads import LayerHeads
from .policy import Move, Policy, RowView
from .rows import standing, stored_rows
from .telemetry import TierStats, prometheus
from .tier import Asked, Geometry, Key, Tier

_HIGH = 0.9
"""Of a tier's capacity: the mark above which rows go down."""


class TieredSequence:
    """A handle of a sequence of a `TieredCache`."""

    __slots__ = ("_owner", "lengths", "number")

    def __init__(self, owner: TieredCache, number: int, lengths: list[int]) -> None:
        self._owner: TieredCache | None = owner
        self.number = number
        self.lengths = lengths

    def __repr__(self) -> str:
        return f"<tiered sequence {self.number} with {max(self.lengths)} rows>"


class TieredCache:
    """Keys and values of many sequences in several tiers.

    New rows come into the first tier. Whatever the policy does with them, results have the bits of a cache in
    one place: every tier returns a partial of the rows that it has, and partials merge exactly.

    Parameters
    ----------
    tiers : from the nearest down; the last one should have no bound.
    layers, kv_heads, head_dim, value_dim, dtype, value_dtype, scale_dtype, scale_block, latent : as
        `Device.kv_cache` has them.
    k_scale, v_scale, k_lut, v_lut : likewise, for all tiers; found from a layer's first rows where not given.
    policy : where rows should be.
    moves_per_call_bytes : rows that `append` and `attend` move at most on their way; what is above its mark
        in a tier moves at once.

    Raises
    ------
    ArgumentError, DtypeError : for what is not allowed, or two tiers of one name.

    Examples
    --------
    >>> import nearkv, torch
    >>> from nearkv.tiers import DeviceTier, NewestRows, TensorTier, TieredCache
    >>> dev = nearkv.open("model")
    >>> kv = TieredCache(
    ...     [TensorTier("host"), DeviceTier(dev)], layers=1, kv_heads=1, head_dim=4, dtype="fp16",
    ...     policy=NewestRows(2),
    ... )
    >>> s = kv.sequence()
    >>> kv.append(s, layer=0, k=torch.zeros(5, 1, 4).half(), v=torch.ones(5, 1, 4).half())
    >>> kv.attend([s], layer=0, q=torch.zeros(1, 1, 4).half()).tolist()
    [[[1.0, 1.0, 1.0, 1.0]]]
    >>> [tier.rows for tier in kv.stats()]
    [2, 3]
    >>> dev.close()
    """

    def __init__(
        self,
        tiers: Many[Tier],
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Dtype = "bf16",
        value_dtype: Dtype | None = None,
        scale_dtype: Pair = None,
        scale_block: Blocks = None,
        latent: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_lut: torch.Tensor | None = None,
        v_lut: torch.Tensor | None = None,
        policy: Policy,
        moves_per_call_bytes: int = 1 << 20,
    ) -> None:
        if not tiers or len({tier.name for tier in tiers}) != len(tiers):
            raise ArgumentError(
                f"tiers {[tier.name for tier in tiers]}: must be one or more, of different names"
            )
        form = chosen_format(dtype, value_dtype, scale_dtype, scale_block, latent=latent)
        value_dim = head_dim if value_dim is None else value_dim
        whole_number("layers", layers, 1, 1 << 16)
        whole_number("kv_heads", kv_heads, 1, 1 << 16)
        given = {"k_scale": k_scale, "v_scale": v_scale, "k_lut": k_lut, "v_lut": v_lut}
        self.geometry = Geometry(
            layers,
            kv_heads,
            whole_number("head_dim", head_dim, 1, 1 << 10),
            whole_number("value_dim", value_dim, 1, 1 << 10),
            form,
            LayerHeads(form, layers, kv_heads, given),
        )
        self.policy = policy
        self.saturated = 0
        self._tiers = list(tiers)
        self._moves_bytes = whole_number("moves_per_call_bytes", moves_per_call_bytes, 0, 1 << 62)
        self._sequences: dict[int, TieredSequence] = {}
        self._made = 0
        self._waiting: dict[Key, list[Move]] = {}
        self._mass: dict[Key, npt.NDArray[np.float64]] = {}
        self._shares = np.zeros(len(self._tiers))
        self._calls = np.zeros(len(self._tiers), np.int64)
        self._queries = 0
        self._closed = False
        for tier in self._tiers:
            tier.open(self.geometry)

    # Life

    def close(self) -> None:
        """All rows go, from all tiers. A second call does nothing."""
        if not self._closed:
            self._closed = True
            for tier in self._tiers:
                tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sequence(self) -> TieredSequence:
        """A new, empty sequence."""
        self._check_open()
        self._made += 1
        made = TieredSequence(self, self._made, [0] * self.geometry.layers)
        self._sequences[made.number] = made
        return made

    def length(self, sequence: TieredSequence, layer: int = 0) -> int:
        """Rows of a sequence in a layer, in whatever tiers."""
        return self._known(sequence).lengths[self._layer(layer)]

    def free(self, sequence: TieredSequence) -> None:
        """End a sequence."""
        number = self._known(sequence).number
        for layer in range(self.geometry.layers):
            self._mass.pop((number, layer), None)
            self._waiting.pop((number, layer), None)
            for tier in self._tiers:
                tier.drop((number, layer))
        del self._sequences[number]
        sequence._owner = None

    def fork(self, sequence: TieredSequence) -> TieredSequence:
        """A new sequence with the same rows, in the same tiers."""
        of = self._known(sequence)
        made = self.sequence()
        made.lengths = list(of.lengths)
        for layer in range(self.geometry.layers):
            for tier in self._tiers:
                tier.copy((of.number, layer), made.number)
            if (of.number, layer) in self._mass:
                self._mass[made.number, layer] = self._mass[of.number, layer].copy()
        return made

    def crop(self, sequence: TieredSequence, rows: int) -> None:
        """Keep the first `rows` rows of every layer; a layer with fewer stays as it is.

        Raises
        ------
        ArgumentError : when no layer has so many.
        """
        of = self._known(sequence)
        whole_number("rows", rows, 0, max(of.lengths))
        for layer, length in enumerate(of.lengths):
            if length <= rows:
                continue
            key = of.number, layer
            for tier in self._tiers:
                gone = tier.positions(key)
                gone = gone[gone >= rows].copy()
                if len(gone):
                    tier.remove(key, gone)
            of.lengths[layer] = rows
            if key in self._mass:
                self._mass[key] = self._mass[key][:rows]
            self._plan(key, rows)

    def select(self, sequences: Many[TieredSequence], indices: Many[int]) -> list[TieredSequence]:
        """The sequences at these places of a list; as `KVCache.select`."""
        for index in indices:
            whole_number("index", index, 0, len(sequences) - 1)
        once: set[int] = set()
        chosen = []
        for index in indices:
            chosen.append(self.fork(sequences[index]) if index in once else sequences[index])
            once.add(index)
        for index, sequence in enumerate(sequences):
            if index not in once:
                self.free(sequence)
        return chosen

    # Rows

    def append(
        self,
        sequence: TieredSequence | Many[TieredSequence],
        *,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
    ) -> None:
        """Append rows to a sequence, or to several: k [rows, kv_heads, head_dim] and v, numbers, as
        `KVCache.append` has them; for a list of sequences [batch, rows, ...].

        Raises
        ------
        ShapeError, DtypeError, ArgumentError, UnknownHandleError, ClosedError : then nothing is appended.
        """
        one = isinstance(sequence, TieredSequence)
        sequences: Many[TieredSequence] = [sequence] if isinstance(sequence, TieredSequence) else sequence
        known = [self._known(own) for own in sequences]
        self._layer(layer)
        if len({own.number for own in known}) != len(known):
            raise ArgumentError(f"{[own.number for own in known]} names a sequence twice")
        stored = stored_rows(self.geometry, layer, k, v, None if one else len(known))
        self.saturated += sum(part.saturated for part in stored.values())
        count = stored["k"].codes.shape[1]
        parts = (stored["k"], stored.get("v"))
        areas = [area for part in parts for area in ((part.codes, part.scales) if part else (None, None))]
        learnt = self.geometry.heads.learn(layer, stored) if count else []
        for index, own in enumerate(known):
            begin = own.lengths[layer]
            own_k, own_k_scales, own_v, own_v_scales = (None if a is None else a[index] for a in areas)
            assert own_k is not None
            rows = Context(own_k, own_v, own_k_scales, own_v_scales)
            try:
                self._tiers[0].put((own.number, layer), rows, np.arange(begin, begin + count))
            except BaseException:
                if not index:
                    self.geometry.heads.forget(layer, learnt)
                raise
            own.lengths[layer] = begin + count
            self._plan((own.number, layer), begin + count)
        self.migrate(self._moves_bytes)

    def read(self, sequence: TieredSequence, *, layer: int) -> Context:
        """The rows of a sequence, as codes, from whatever tiers."""
        of, key = self._known(sequence), (sequence.number, self._layer(layer))
        length = of.lengths[layer]
        found: Context | None = None
        for tier in self._tiers:
            held = tier.positions(key)
            held = np.sort(held[held >= 0])
            if len(held):
                rows = tier.get(key, held)
                found = rows.zeros(length) if found is None else found
                found.put(held, rows)
        if found is None:
            raise ArgumentError(f"sequence {of.number} has no rows in layer {layer}")
        return found

    def attend(
        self,
        sequences: Many[TieredSequence],
        *,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        kept_rows: int = 0,
        rows: Rows | None = None,
        visible: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
        query_positions: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        return_lse: bool = False,
        partial: bool = False,
    ) -> Any:
        """Attention of each sequence's queries over its rows in all tiers; arguments, results and errors are
        those of `KVCache.attend`.
        """
        known = [self._known(own) for own in sequences]
        self._layer(layer)
        lengths = np.array([own.lengths[layer] for own in known], np.int64)
        form = self.geometry.form
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(form.name)
        queries_of(q, len(known), self.geometry.kv_heads, self.geometry.head_dim, kind)
        if out_dtype not in FORMS:
            raise DtypeError(f"out_dtype={out_dtype}: must be one of {', '.join(map(str, FORMS))}")
        if rows is not None and visible is not None:
            raise ArgumentError("give rows or visible, not both")
        wide = q if q.dim() == 4 else q.unsqueeze(1)
        several = q.shape[1] if q.dim() == 4 else None
        shown = visible_of(visible, len(known), several, lengths)
        own_tree = tree_of(tree, wide.shape[1], lengths)
        query = positions_of(query_positions, wide.shape[1], lengths)
        if query_positions is not None and own_tree is None:
            seen = placed(shown, wide.shape[1], window)
        else:
            seen = host_attention.seen(
                lengths,
                wide.shape[1],
                window=None if window is None else whole_number("window", window, 1, 1 << 62),
                kept_rows=whole_number("kept_rows", kept_rows, 0, 1 << 62),
                rows=rows,
                visible=shown,
                tree=None if own_tree is None else (query, own_tree),
            )
        asked = Asked(
            wide,
            seen,
            finite_scale(scale, self.geometry.head_dim),
            softcap,
            sinks_of(sinks, q.shape[-2]),
            slopes_of(alibi_slopes, q.shape[-2]),
            query,
            standing(lengths, query, own_tree is not None),
        )
        merged = self._merged(known, layer, asked)
        self._count_mass(known, layer, wide)
        self.migrate(self._moves_bytes)
        merged = merged if q.dim() == 4 else merged.reshaped((len(known),))
        if partial:
            return merged
        out = host_attention.finish(merged, out_dtype, self.head_scales(layer)[1])
        return (out, log_sum_exp(merged)) if return_lse else out

    def head_scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K's and V's scale per head of a layer; as `KVCache.head_scales`."""
        known = self.geometry.heads.of(self._layer(layer))
        return known.get("k_scale"), known.get("k_scale" if self.geometry.form.v is None else "v_scale")

    # Moves

    def migrate(self, budget_bytes: int | None = None) -> int:
        """Move rows that the policy has named, so many bytes of them at most; returns how many bytes moved.

        Rows of a tier that is above its mark move whatever the budget says: `append` waits for them.
        """
        moved = 0
        for key in list(self._waiting):
            moves = self._waiting[key]
            while moves:
                enough = budget_bytes is not None and moved >= budget_bytes
                if enough and not self._above(moves[0].source):
                    break
                moved += self._carry_out(key, moves.pop(0))
            if not moves:
                del self._waiting[key]
        return moved

    @property
    def waiting_rows(self) -> int:
        """Rows that are to move and have not yet."""
        return sum(len(move.positions) for moves in self._waiting.values() for move in moves)

    def stats(self) -> list[TierStats]:
        """The figures of every tier."""
        return [
            TierStats(
                name=tier.name,
                rows=tier.rows,
                used_bytes=tier.used_bytes,
                capacity_bytes=tier.capacity_bytes,
                bytes_in=tier.bytes_in,
                bytes_out=tier.bytes_out,
                calls=int(calls),
                hit_share=float(share / self._queries) if self._queries else 0.0,
            )
            for tier, share, calls in zip(self._tiers, self._shares, self._calls, strict=True)
        ]

    def prometheus(self) -> str:
        """The same in Prometheus's text format."""
        return prometheus(self.stats())

    # Below: parts of the above

    def _merged(self, known: Many[TieredSequence], layer: int, asked: Asked) -> Partial:
        """The merged partials of all tiers that have rows, or the sink."""
        numbers = [own.number for own in known]
        parts: list[tuple[int, Partial]] = []
        for index, tier in enumerate(self._tiers):
            has_rows = any(len(tier.positions((number, layer))) for number in numbers)
            if has_rows or not index:
                sinks = asked.sinks if not index else None
                own = replace(asked, sinks=sinks)
                parts.append((index, tier.partial(layer, numbers, own).to(asked.q.device)))
                self._calls[index] += has_rows
        merged = parts[0][1]
        for _, part in parts[1:]:
            merged = merge(merged, part)
        whole = log_sum_exp(merged)
        for index, part in parts:
            share = torch.nan_to_num((log_sum_exp(part).double() - whole.double()).exp(), 0.0, 0.0, 0.0)
            self._shares[index] += float(share.sum())
        self._queries += whole.numel()
        return merged

    def _count_mass(self, known: Many[TieredSequence], layer: int, q: torch.Tensor) -> None:
        """What the last query row makes of rows in the tiers that can say so; for policies alone."""
        for index, own in enumerate(known):
            key = own.number, layer
            mass = self._mass.get(key, np.zeros(0))
            if len(mass) < own.lengths[layer]:
                mass = np.concatenate([mass, np.zeros(own.lengths[layer] - len(mass))])
            for tier in self._tiers:
                scores = tier.scores(key, q[index, -1])
                if scores is not None and len(scores):
                    scale = self.geometry.head_dim**-0.5
                    weights = np.exp(np.minimum((scores - scores.max()) * scale, 0.0))
                    mass[tier.positions(key)] += weights / weights.sum()
            self._mass[key] = mass

    def _plan(self, key: Key, rows: int) -> None:
        """Ask the policy, and have its moves wait; a sequence's earlier ones are forgotten."""
        held = [np.sort(tier.positions(key)) for tier in self._tiers]
        held = [positions[positions >= 0] for positions in held]
        mass = self._mass.get(key, np.zeros(0))

        def mass_of(index: int) -> npt.NDArray[np.float64]:
            padded = np.concatenate([mass, np.zeros(max(rows - len(mass), 0))])
            found: npt.NDArray[np.float64] = padded[held[index]]
            return found

        full = [self._above(index) for index in range(len(self._tiers))]
        moves = list(self.policy.moves(RowView(rows, held, mass_of, full)))
        if moves:
            self._waiting[key] = moves
        else:
            self._waiting.pop(key, None)

    def _above(self, index: int) -> bool:
        tier = self._tiers[index]
        return tier.capacity_bytes is not None and tier.used_bytes > _HIGH * tier.capacity_bytes

    def _carry_out(self, key: Key, move: Move) -> int:
        """Move rows, those that are still there; returns their bytes."""
        source, target = self._tiers[move.source], self._tiers[move.target]
        here = source.positions(key)
        positions = move.positions[np.isin(move.positions, here)]
        if not len(positions) or source is target:
            return 0
        target.put(key, source.get(key, positions), positions)
        source.remove(key, positions)
        return len(positions) * self.geometry.row_bytes

    def _known(self, sequence: TieredSequence) -> TieredSequence:
        self._check_open()
        if not isinstance(sequence, TieredSequence):
            raise DtypeError(f"a sequence is what sequence() returned, not {type(sequence).__name__}")
        if sequence._owner is None:
            raise ClosedError(f"sequence {sequence.number} was freed")
        if sequence._owner is not self:
            raise UnknownHandleError(f"{sequence!r} belongs to another cache")
        return sequence

    def _layer(self, layer: int) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.geometry.layers:
            raise UnknownHandleError(f"layer={layer!r}: the cache has layers 0 to {self.geometry.layers - 1}")
        return layer

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the tiered cache is closed; make another one")
