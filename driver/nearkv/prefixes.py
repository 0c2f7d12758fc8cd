"""Beginnings of prompts that later sequences share: found by tokens, checked, and reclaimed for others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.memory import LAYOUT_VERSION, PREFIX, PREFIX_MAGIC
from nearkv_sim.port import Fence, Operation

from .codec import one, record_line, span
from .errors import ArgumentError, DtypeError, StalePrefixError
from .recovery import FoundPrefix
from .sequences import Sequence, Sequences
from .table import PageTable
from .tenant import Tenant

Tokens = npt.NDArray[np.uint32]
_KEY_BYTES = 16
_WORD_BYTES = 4
_ADDRESS_BYTES = 8


@dataclass(frozen=True)
class Prefix:
    """A handle of a published prefix; `KVCache.publish` makes it.

    Members
    -------
    address : device address of its record.
    generation : which of all prefixes that ever were it is; no two of a tenant have the same.
    rows : how many it has.
    """

    address: int
    generation: int
    rows: int


@dataclass(eq=False)
class _Entry:
    """A prefix that is there.

    Members
    -------
    keys : of its tokens up to the end of each block, and up to the last token.
    used : when it was used last.
    """

    handle: Prefix
    root: bytes
    tokens: Tokens
    keys: list[bytes]
    tables: list[PageTable]
    used: int = 0


class Prefixes:
    """A cache's prefixes: records on the device, and an index of them on the host.

    A prefix has page tables of its own, which name the pages of the sequence that it was published from.

    Parameters
    ----------
    tenant, sequences : of the cache.
    parameters : of the cache, as far as they say what rows are.
    block_tokens : tokens of a block, whose keys are looked up.
    found : prefixes that an earlier session left.
    """

    def __init__(
        self,
        tenant: Tenant,
        sequences: Sequences,
        *,
        parameters: bytes,
        block_tokens: int,
        found: Many[FoundPrefix] = (),
    ) -> None:
        self._tenant = tenant
        self._sequences = sequences
        self._parameters = parameters
        self._block_tokens = block_tokens
        self._chain: list[_Entry] = []
        """As the device has them: the cache record names the first."""
        self._by_key: dict[bytes, list[_Entry]] = {}
        self._clock = 0
        self.hits = 0
        self.misses = 0
        self.reclaimed = 0
        self.pinned: set[Prefix] = set()
        """Those that `reclaim` leaves where they are."""
        for one_found in reversed(found):
            handle = Prefix(one_found.address, one_found.generation, len(one_found.tokens))
            keys = self._keys(one_found.root, one_found.tokens)
            self._insert(_Entry(handle, one_found.root, one_found.tokens, keys, one_found.tables))

    def __len__(self) -> int:
        return len(self._chain)

    def __iter__(self) -> Iterator[Prefix]:
        return iter([entry.handle for entry in self._chain])

    @property
    def tables(self) -> list[PageTable]:
        """The page tables of all prefixes."""
        return [table for entry in self._chain for table in entry.tables]

    def publish(self, sequence: Sequence, tokens: object, salt: bytes) -> Prefix:
        """Keep a sequence's first rows for others; see `KVCache.publish`."""
        wanted = tokens_of(tokens)
        tables = self._sequences.tables(sequence)
        rows = len(wanted)
        shortest = min(table.committed for table in tables)
        if not 1 <= rows <= shortest:
            raise ArgumentError(f"{rows} tokens: must be 1 to {shortest}, the rows that all layers have")
        for table in tables:
            begin, end = table.released
            if begin < min(rows, end):
                raise ArgumentError(
                    f"rows {begin} to {end} of layer {table.layer} were released; a prefix has all its rows"
                )
        root = self._root(salt)
        keys = self._keys(root, wanted)
        for entry in self._by_key.get(keys[-1], []):
            if entry.root == root and np.array_equal(entry.tokens, wanted):
                self._touch(entry)
                return entry.handle
        return self._write(sequence, root, wanted, keys)

    def find(self, tokens: object, salt: bytes) -> tuple[Prefix | None, int]:
        """The prefix that begins with most of these tokens, and with how many of them; (None, 0) if none."""
        wanted = tokens_of(tokens)
        root = self._root(salt)
        keys = self._keys(root, wanted)
        for key in (*reversed(keys), root):
            found = [
                (self._alike(entry, wanted), entry)
                for entry in self._by_key.get(key, [])
                if entry.root == root
            ]
            rows, best = max(found, key=lambda pair: pair[0], default=(0, None))
            if best is not None and rows:
                self._touch(best)
                self.hits += 1
                return best.handle, rows
        self.misses += 1
        return None, 0

    def tables_of(self, prefix: Prefix) -> list[PageTable]:
        """The page tables of a prefix; StalePrefixError when it is no longer there."""
        entry = self._entry(prefix)
        self._touch(entry)
        return entry.tables

    def drop(self, prefix: Prefix) -> None:
        """Forget a prefix; its pages are free once no sequence has them."""
        self._drop(self._entry(prefix))

    def reclaim(self, keep: Prefix | None = None) -> bool:
        """Forget the prefix that was not used for longest; False when there is none."""
        staying = self.pinned if keep is None else self.pinned | {keep}
        entry = min(
            (entry for entry in self._chain if entry.handle not in staying),
            key=lambda e: e.used,
            default=None,
        )
        if entry is None:
            return False
        self._drop(entry)
        self.reclaimed += 1
        return True

    def forget_pages(self, pages: set[int]) -> None:
        """Forget all prefixes that have one of these pages, whose content is lost."""
        for entry in list(self._chain):
            if any(not pages.isdisjoint(table.addresses().tolist()) for table in entry.tables):
                self._drop(entry)

    def close(self) -> None:
        """Forget all."""
        for entry in list(self._chain):
            self._drop(entry)

    def _entry(self, prefix: Prefix) -> _Entry:
        if not isinstance(prefix, Prefix):
            raise DtypeError(f"a prefix is what kv.publish() returned, not {type(prefix).__name__}")
        for entry in self._by_address(prefix.address):
            if entry.handle.generation == prefix.generation:
                return entry
        raise StalePrefixError(
            f"prefix {prefix.generation} is no longer there: it was dropped, or reclaimed for lack of memory"
        )

    def _by_address(self, address: int) -> Iterator[_Entry]:
        return (entry for entry in self._chain if entry.handle.address == address)

    def _alike(self, entry: _Entry, wanted: Tokens) -> int:
        """How many tokens both begin with."""
        shorter = min(len(entry.tokens), len(wanted))
        differ = np.flatnonzero(entry.tokens[:shorter] != wanted[:shorter])
        return int(differ[0]) if len(differ) else shorter

    def _write(self, sequence: Sequence, root: bytes, tokens: Tokens, keys: list[bytes]) -> Prefix:
        """Write a new prefix to the device, and then link it."""
        tenant = self._tenant
        generation = tenant.next_generation()
        tables = self._sequences.detached(sequence, len(tokens))
        try:
            address = tenant.arena.take(record_bytes(len(tables), len(tokens)))
        except BaseException:
            self._sequences.give_detached(tables)
            raise
        body = _body(tables, tokens)
        following = self._chain[0].handle.address if self._chain else 0
        entry = _Entry(Prefix(address, generation, len(tokens)), root, tokens, keys, tables)
        program: list[Operation] = [
            *self._sequences.table_writes(tables),
            tenant.write(one(address), self._header(entry, following)),
            tenant.write(span(address + LINE_BYTES, len(body)), body),
            Fence(),
            self._sequences.first_prefix(address),
        ]
        tenant.run(program)
        self._insert(entry)
        self._touch(entry)
        return entry.handle

    def _drop(self, entry: _Entry) -> None:
        tenant = self._tenant
        index = self._chain.index(entry)
        following = self._chain[index + 1].handle.address if index + 1 < len(self._chain) else 0
        if index:
            before = self._chain[index - 1]
            link: Operation = tenant.write(one(before.handle.address), self._header(before, following))
        else:
            link = self._sequences.first_prefix(following)
        nothing = np.zeros((1, LINE_BYTES), np.uint8)
        tenant.run([link, Fence(), tenant.write(one(entry.handle.address), nothing)])
        del self._chain[index]
        self.pinned.discard(entry.handle)
        for key in self._indexed(entry):
            self._by_key[key].remove(entry)
            if not self._by_key[key]:
                del self._by_key[key]
        self._sequences.give_detached(entry.tables)
        size = record_bytes(len(entry.tables), len(entry.tokens))
        tenant.retire(tenant.arena.give, entry.handle.address, size)

    def _insert(self, entry: _Entry) -> None:
        self._chain.insert(0, entry)
        for key in self._indexed(entry):
            self._by_key.setdefault(key, []).append(entry)

    def _indexed(self, entry: _Entry) -> list[bytes]:
        """The keys by which a prefix is found; one shorter than a block by what all begin with, too."""
        return [entry.root, *entry.keys] if len(entry.tokens) < self._block_tokens else entry.keys

    def _header(self, entry: _Entry, following: int) -> npt.NDArray[np.uint8]:
        return record_line(
            PREFIX,
            magic=PREFIX_MAGIC,
            version=LAYOUT_VERSION,
            rows=entry.handle.rows,
            generation=entry.handle.generation,
            root=int.from_bytes(entry.root, "little"),
            key=int.from_bytes(entry.keys[-1], "little"),
            next=following,
        )

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used = self._clock

    def _root(self, salt: bytes) -> bytes:
        if not isinstance(salt, bytes):
            raise DtypeError(f"salt must be bytes, not {type(salt).__name__}")
        return _hash(self._parameters, len(salt).to_bytes(8, "little"), salt)

    def _keys(self, root: bytes, tokens: Tokens) -> list[bytes]:
        """The key of each block's end, and of the last token; each covers all tokens before it."""
        keys, key = [], root
        data = tokens.astype("<u4").tobytes()
        size = self._block_tokens * _WORD_BYTES
        for begin in range(0, len(data), size):
            key = _hash(key, data[begin : begin + size])
            keys.append(key)
        return keys


def tokens_of(tokens: object) -> Tokens:
    """Token ids as an array.

    Raises
    ------
    DtypeError, ArgumentError : for what are no whole numbers of 32 bits.
    """
    found = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise DtypeError(f"tokens must be a list of integers, not {found.dtype} of shape {list(found.shape)}")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < 1 << 32:
        raise ArgumentError(f"tokens must be 0 to {(1 << 32) - 1}, got {found.min()} to {found.max()}")
    return found.astype(np.uint32)


def record_bytes(layers: int, rows: int) -> int:
    """Bytes of a prefix's record: a line, the addresses of its page tables, and its tokens."""
    return (1 + lines_of(layers * _ADDRESS_BYTES) + lines_of(rows * _WORD_BYTES)) * LINE_BYTES


def _body(tables: Many[PageTable], tokens: Tokens) -> npt.NDArray[np.uint8]:
    """What follows a record's first line."""
    parts = []
    for data in (np.array([table.address for table in tables], "<u8"), tokens.astype("<u4")):
        raw = data.view(np.uint8)
        lines = np.zeros((lines_of(len(raw)), LINE_BYTES), np.uint8)
        lines.reshape(-1)[: len(raw)] = raw
        parts.append(lines)
    return np.concatenate(parts)


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
