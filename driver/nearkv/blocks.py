"""Rows in blocks that a serving engine hands out: its block tables and slots, served by the device.

An engine that owns its KV blocks (vLLM and others with paged caches) says where each new row goes, a slot of
a block, and which blocks a sequence has. Here a block's rows lie in pages of device memory, once, however
many sequences name the block; a sequence is what the call at hand says it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import NO_SEQUENCE, table_bytes
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_sim.port import Operation

from .arguments import dense, whole_number
from .attention import Options
from .codec import one
from .errors import ArgumentError, OutOfMemoryError, ShapeError
from .table import PageTable

if TYPE_CHECKING:
    from .device import Device

Whole = npt.NDArray[np.int64]


@dataclass
class _Context:
    """A page table, and the blocks that the device's copy of it names: None where that is not known."""

    table: PageTable
    blocks: Whole | None = None


class BlockCache:
    """K and V rows of an engine's blocks, in device memory, and attention over its block tables.

    A block has memory on the device from its first row on, for good: an engine that uses it again overwrites
    its rows, and rows behind a sequence's length are never seen, whatever they hold. One thread at a time may
    use a device's caches.

    Parameters
    ----------
    device : an open device.
    layers, kv_heads, head_dim, value_dim, dtype, tenant : as `Device.kv_cache` has them; dtype is "bf16" or
        "fp16", and rows fill whole lines of 64 bytes.
    blocks : that the engine has in each layer.
    block_rows : rows of a block.

    Members
    -------
    blocks, block_rows : see above.
    cache : the KV cache that holds them, which has no sequences of its own.
    page_rows : rows of a page; a block is one page for each KV head, or several where block_rows is no power
        of two.

    Raises
    ------
    ArgumentError : for rows that share lines, or what `Device.kv_cache` refuses.

    Examples
    --------
    >>> import nearkv, torch
    >>> from nearkv.blocks import BlockCache
    >>> dev = nearkv.open("model")
    >>> kv = BlockCache(dev, layers=1, kv_heads=1, head_dim=32, dtype="fp16", blocks=8, block_rows=16)
    >>> rows = torch.ones(3, 1, 32).half()
    >>> kv.write([80, 81, 82], layer=0, k=rows, v=rows)
    >>> kv.attend([[5]], [3], layer=0, q=rows[:1]).unique()
    tensor([1.])
    >>> dev.close()
    """

    def __init__(
        self,
        device: Device,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: str = "bf16",
        blocks: int,
        block_rows: int,
        tenant: int = 0,
    ) -> None:
        self.blocks = whole_number("blocks", blocks, 1, 1 << 32)
        self.block_rows = whole_number("block_rows", block_rows, 4, 1 << 31)
        self.page_rows = self.block_rows & -self.block_rows
        self.cache = device.kv_cache(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            page_rows=self.page_rows,
            tenant=tenant,
        )
        layout, form = self.cache._layout, self.cache.format
        if form.k.form.bits != 16 or any(pitch % LINE_BYTES for pitch in layout.pitches if pitch):
            self.cache.close()
            raise ArgumentError(
                f"rows of {head_dim}/{layout.value_dim} {form.name} share lines with others; blocks hold "
                "rows of bf16 or fp16 that fill whole lines: head_dim and value_dim from "
                f"{LINE_BYTES // 2} on"
            )
        page_count = self.block_rows // self.page_rows
        self._pages = np.zeros((layers, self.blocks, kv_heads, page_count), np.uint64)
        """Device addresses of each block's pages, 0 before its first row."""
        self._contexts: list[dict[int, _Context]] = [{} for _ in range(layers)]

    def write(
        self, slots: Many[int] | torch.Tensor | Whole, *, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Put rows into slots; they travel with the layer's next `attend`.

        Parameters
        ----------
        slots : int [rows], block * block_rows + row in the block; below 0 for a row that goes nowhere.
        layer : which layer.
        k, v : [rows, kv_heads, head_dim] and [rows, kv_heads, value_dim] of the cache's type.

        Raises
        ------
        ArgumentError : for a slot that there is not, or that stands twice.
        ShapeError, DtypeError, ClosedError : as `KVCache.append`; nothing is written then.
        OutOfMemoryError : when the device has no room for a block.
        """
        cache = self.cache
        cache._open_sequences()
        whole_number("layer", layer, 0, cache.layers - 1)
        given = _whole(slots, 1, "slots")
        k = dense("k", k, (len(given), cache.kv_heads, cache.head_dim))
        v = dense("v", v, (len(given), cache.kv_heads, cache.value_dim))
        if (given < 0).any():
            kept = torch.from_numpy(given >= 0)
            given, k, v = given[given >= 0], k[kept], v[kept]
        if not len(given):
            return
        last = self.blocks * self.block_rows - 1
        if given.max() > last:
            raise ArgumentError(f"slot {given.max()}: the cache has slots 0 to {last}")
        if len(np.unique(given)) != len(given):
            raise ArgumentError("a slot stands twice: rows would have no order")
        coded = cache._coder.code(layer, k, v, None, None)
        block, row = np.divmod(given, self.block_rows)
        self._place(layer, np.unique(block))
        page, within = np.divmod(row, self.page_rows)
        base = np.ascontiguousarray(self._pages[layer, block, :, page].T)
        places = cache._writer.addresses.at(
            base, (given // self.page_rows).astype(np.intp), within.astype(np.uint64)
        )
        addresses, data = [], []
        for where, own in zip(places, coded.row_bytes(cache._layout), strict=True):
            if where is not None and own is not None:
                lines, _ = where.to_lines(own[0])
                addresses.append(where.addresses.reshape(-1))
                data.append(lines.reshape(-1, LINE_BYTES))
        cache._tenant.enqueue([cache._tenant.write(np.concatenate(addresses), np.concatenate(data))])

    def attend(
        self,
        block_tables: Many[Many[int]] | torch.Tensor | Whole,
        lengths: Many[int] | torch.Tensor | Whole,
        *,
        layer: int,
        q: torch.Tensor,
        places: Many[int] | None = None,
        **options: Unpack[Options],
    ) -> torch.Tensor:
        """Attention of each sequence's queries over its rows in a layer: one doorbell for the whole batch.

        Parameters
        ----------
        block_tables : int [batch, blocks]: the blocks of each sequence, as many as its length needs; what
            stands behind those does not matter.
        lengths : int [batch]: rows of each sequence.
        layer : which layer.
        q : [batch, q_heads, head_dim] or [batch, query_rows, q_heads, head_dim], as `KVCache.attend` has it.
        places : a number for each sequence, in place of its number in the batch. The device keeps a page
            table for each; a sequence that keeps its place from call to call has only what is new in it
            written.
        options : as `KVCache.attend` has them.

        Returns
        -------
        Tensor [batch, (query_rows,) q_heads, value_dim].

        Raises
        ------
        ArgumentError : for a block that there is not, or that no row was written to.
        ShapeError, DtypeError, ClosedError, DeviceError, AccessError, DeviceTimeoutError : as
            `KVCache.attend`.
        OutOfMemoryError : when there is no room for page tables.
        """
        cache = self.cache
        cache._open_sequences()
        whole_number("layer", layer, 0, cache.layers - 1)
        rows = _whole(lengths, 1, "lengths")
        contexts = [
            self._context(layer, place, blocks)
            for place, blocks in zip(
                self._places(places, len(rows)), self._blocks_of(layer, block_tables, rows), strict=True
            )
        ]
        tables = [context.table for context, _ in contexts]
        call = cache._calls.make(layer, q, tables, rows.tolist(), **options)
        program: list[Operation] = []
        for (context, blocks), length in zip(contexts, rows.tolist(), strict=True):
            program += self._update(context, layer, blocks, length)
        try:
            answer = cache._answer(call, tables, program)
        except BaseException:
            for context, _ in contexts:  # how far the program came is not known
                context.blocks = None
            raise
        assert isinstance(answer, torch.Tensor)
        return answer

    def read(
        self, block_table: Many[int] | torch.Tensor | Whole, length: int, *, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a sequence that the device holds: k [rows, kv_heads, head_dim] and v [rows, kv_heads,
        value_dim].

        Raises
        ------
        ArgumentError : as `attend`.
        AccessError : when a line is poisoned.
        """
        cache = self.cache
        cache._open_sequences()
        whole_number("layer", layer, 0, cache.layers - 1)
        (blocks,) = self._blocks_of(layer, _whole(block_table, 1, "block_table")[None], np.array([length]))
        table = self._new_table(layer, 0, max(len(blocks), 1))
        table.put(0, self._pages_of(layer, blocks))
        held = cache._reader.read(table, np.arange(length))
        assert held.v is not None
        assert cache.dtype is not None
        return held.k.view(cache.dtype), held.v.view(cache.dtype)

    @property
    def held_blocks(self) -> int:
        """Blocks that have memory on the device, all layers."""
        return int(np.count_nonzero(self._pages[:, :, 0, 0]))

    @property
    def closed(self) -> bool:
        """Whether this or the device was closed."""
        return self.cache.closed

    def close(self) -> None:
        """Give the device's memory back. A second call does nothing."""
        if self.cache.closed:
            return
        cache = self.cache
        cache._tenant.flush()
        cache._pages.give(self._pages[self._pages != 0])
        for contexts in self._contexts:
            for context in contexts.values():
                cache._tenant.arena.give(context.table.address, context.table.size_bytes)
            contexts.clear()
        cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<{self.blocks} blocks of {self.block_rows} rows, {self.held_blocks} held, over {self.cache!r}>"
        )

    # Below: parts of the above

    def _place(self, layer: int, blocks: Whole) -> None:
        """Give blocks memory that have none."""
        for block in blocks[self._pages[layer, blocks, 0, 0] == 0].tolist():
            own = self._pages[layer, block]
            try:
                own[:] = self.cache._pages.take(own.size).reshape(own.T.shape).T
            except OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"no room for block {block} of layer {layer}, the device holds {self.held_blocks} of "
                    f"{self.blocks} times {self.cache.layers}: give the engine fewer blocks, or open the "
                    "device with a larger capacity_bytes"
                ) from error

    def _blocks_of(self, layer: int, block_tables: Any, lengths: Whole) -> list[Whole]:
        """The blocks of each sequence, as many as its rows lie in."""
        if (lengths < 0).any() or (lengths > MAX_ROWS).any():
            raise ArgumentError(f"lengths={lengths.tolist()}: must be from 0 to {MAX_ROWS}")
        if len(block_tables) != len(lengths):
            raise ShapeError(f"{len(block_tables)} block tables, but {len(lengths)} lengths")
        found = []
        for given, length in zip(block_tables, lengths.tolist(), strict=True):
            table, count = _whole(given, 1, "a block table"), -(-length // self.block_rows)
            if len(table) < count:
                raise ArgumentError(
                    f"{length} rows need {count} blocks of {self.block_rows}; the block table has "
                    f"{len(table)}"
                )
            own = table[:count]
            if count and not 0 <= own.min() <= own.max() < self.blocks:
                raise ArgumentError(f"blocks {own.tolist()}: the cache has blocks 0 to {self.blocks - 1}")
            empty = own[self._pages[layer, own, 0, 0] == 0]
            if len(empty):
                raise ArgumentError(f"no row of layer {layer} was written to blocks {empty.tolist()}")
            found.append(own)
        return found

    def _places(self, places: Many[int] | None, batch: int) -> Many[int]:
        if places is None:
            return range(batch)
        if len(places) != batch or len(set(places)) != batch:
            raise ArgumentError(f"places={list(places)}: must be {batch} different numbers")
        return places

    def _context(self, layer: int, place: int, blocks: Whole) -> tuple[_Context, Whole]:
        """The context of a place, with room for these blocks."""
        wanted = max(len(blocks), 1)
        context = self._contexts[layer].get(place)
        pages = wanted * self._pages.shape[3]
        if context is not None and context.table.entries >= pages:
            return context, blocks
        arena = self.cache._tenant.arena
        entries = pages if context is None else max(pages, 2 * context.table.entries)
        table = self._new_table(layer, arena.take(table_bytes(self.cache.kv_heads, entries)), entries)
        if context is not None:
            self.cache._tenant.retire(arena.give, context.table.address, context.table.size_bytes)
        self._contexts[layer][place] = made = _Context(table)
        return made, blocks

    def _new_table(self, layer: int, address: int, entries: int) -> PageTable:
        return PageTable(
            address,
            entries,
            heads=self.cache.kv_heads,
            layer=layer,
            sequence=NO_SEQUENCE,
            cache=self.cache._sequences.record,
        )

    def _update(self, context: _Context, layer: int, blocks: Whole, length: int) -> list[Operation]:
        """The operations after which the device's page table names these blocks and so many rows."""
        table, tenant = context.table, self.cache._tenant
        same, known = 0, context.blocks
        if known is not None:
            both = min(len(known), len(blocks))
            differs = np.flatnonzero(known[:both] != blocks[:both])
            same = int(differs[0]) if len(differs) else both
        writes: list[Operation] = []
        pages = self._pages.shape[3]
        if same < len(blocks):
            table.put(same * pages, self._pages_of(layer, blocks[same:]))
            writes.append(tenant.write(*table.entry_lines(same * pages, len(blocks) * pages)))
        if known is None or table.committed != length:
            writes.append(tenant.write(one(table.address), table.header(length)))
        context.blocks, table.pages, table.committed = blocks, len(blocks) * pages, length
        return writes

    def _pages_of(self, layer: int, blocks: Whole) -> npt.NDArray[np.uint64]:
        """Addresses of the blocks' pages, [kv_heads, pages]."""
        found: npt.NDArray[np.uint64] = self._pages[layer, blocks].swapaxes(0, 1)
        return found.reshape(found.shape[0], -1)


def _whole(values: Any, dims: int, name: str) -> Whole:
    """Integers as an array of so many dimensions."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    found = np.asarray(values)
    if found.ndim != dims or (found.size and found.dtype.kind not in "iu"):
        raise ShapeError(f"{name} must be integers of {dims} dimensions, not {found.dtype} {found.shape}")
    return found.astype(np.int64)
