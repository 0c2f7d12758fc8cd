"""The library's side of shared prefixes: a driver of a tenant of its own, beside the server of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from nearkv_sim.port import Port

from nearkv.errors import ArgumentError, NearkvError, OutOfMemoryError, StalePrefixError
from nearkv.prefixes import Prefix

from .client import SharedPrefix
from .messages import (
    Array,
    failure,
    form_arguments,
    partial_arrays,
    rows_arrays,
    rows_of,
)

if TYPE_CHECKING:
    from nearkv.cache import KVCache
    from nearkv.sequences import Sequence

Made = TypeVar("Made")
Answer = tuple[dict[str, Any], list[Array]]
_SHAPE = ("layers", "kv_heads", "head_dim", "value_dim", "page_rows")


class Library:
    """Holds prefixes for hosts of a served device, each in a cache of rows of one kind.

    A prefix that some host uses stays; of the others the one that was not used for longest goes when memory
    runs short. What a host uses, it no longer does once it is gone.

    Parameters
    ----------
    port : the device; whoever serves it sees to it that nobody else uses it during a call.
    tenant : whose memory the prefixes lie in; no host may use it.

    Members
    -------
    aperture : the tenant.

    Raises
    ------
    UnknownHandleError : for a tenant that the device has not.
    """

    def __init__(self, port: Port, tenant: int) -> None:
        from nearkv.device import Device  # late: it needs caches

        self.aperture = tenant
        self._device = Device(port)
        self._device.memory(tenant)  # the tenant's first extent is claimed, or there is none such
        self._caches: dict[bytes, KVCache] = {}
        """By what their rows are; the one that was used last stands last."""
        self._uses: Counter[tuple[int, Prefix, bytes]] = Counter()
        """How often a host uses a prefix of a cache."""
        self._begun: dict[tuple[int, int], tuple[bytes, Sequence]] = {}
        """Sequences in which hosts bring rows, by host and their number."""
        self._count = 0
        self._operations: dict[str, Callable[[int, dict[str, Any], list[Array]], Answer]] = {
            "begin": self._begin,
            "append": self._append,
            "publish": self._publish,
            "find": self._find,
            "hold": self._hold,
            "let_go": self._let_go,
            "attend": self._attend,
            "read": self._read,
        }

    @property
    def uses(self) -> int:
        """Uses of prefixes by hosts that are there: one for each sequence that begins with one."""
        return self._uses.total()

    @property
    def prefixes(self) -> list[Prefix]:
        """Those that are there."""
        return [prefix for cache in self._caches.values() for prefix in cache.prefixes]

    @property
    def caches(self) -> list[KVCache]:
        """One for each kind of rows; the one that was used last stands last."""
        return list(self._caches.values())

    def answer(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """What a host's request comes to; errors of nearkv travel in the answer.

        Raises
        ------
        KeyError, TypeError, ValueError : for what is no request.
        """
        try:
            return self._operations[request["library"]](host, request, arrays)
        except NearkvError as error:
            return failure(error), []
        except RuntimeError as error:  # torch's, of tensors that no driver sends
            raise ValueError(str(error)) from error

    def gone(self, host: int) -> None:
        """A host is gone: what it used and what it had begun is nobody's."""
        for use in [use for use in self._uses if use[0] == host]:
            del self._uses[use]
            self._unpin(*use[1:])
        for begun in [begun for begun in self._begun if begun[0] == host]:
            key, sequence = self._begun.pop(begun)
            self._caches[key].free(sequence)

    # Requests

    def _begin(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """A new sequence to bring a prefix's rows in."""
        key, cache = self._cache(request, arrays)
        sequence = self._with_room(cache, cache.sequence)
        self._count += 1
        self._begun[host, self._count] = key, sequence
        return {"number": self._count}, []

    def _append(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """A layer's rows of a sequence that was begun."""
        key, sequence = self._begun_by(host, request["number"])
        k, k_scales, v, v_scales = rows_of(request["areas"], arrays)
        if k is None:
            raise ArgumentError("rows without K")
        cache, of_k = self._caches[key], k
        self._with_room(
            cache,
            lambda: cache.append(
                sequence, layer=request["layer"], k=of_k, v=v, k_scales=k_scales, v_scales=v_scales
            ),
        )
        return {}, []

    def _publish(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """The rows that were brought are those of these tokens; without tokens, forget them."""
        key, sequence = self._begun_by(host, request["number"])
        del self._begun[host, request["number"]]
        cache = self._caches[key]
        try:
            if not len(arrays):
                return {}, []
            salt = bytes(arrays[1])
            prefix = self._with_room(cache, lambda: cache.publish(sequence, arrays[0], salt=salt))
        finally:
            cache.free(sequence)
        return _named(prefix, key), []

    def _find(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """The prefix that begins with most of these tokens."""
        key = _key(request, arrays[2:])
        cache = self._caches.get(key)
        if cache is None:
            return {}, []
        prefix, rows = cache.find_prefix(arrays[0], salt=bytes(arrays[1]))
        return ({}, []) if prefix is None else ({**_named(prefix, key), "found": rows}, [])

    def _hold(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """A host uses a prefix from here on."""
        prefix, key = self._prefix_of(request)
        cache = self._caches.get(key)
        if cache is None or prefix not in cache.prefixes:
            raise _stale(prefix)
        self._uses[host, prefix, key] += 1
        cache.pin_prefix(prefix, True)
        return {}, []

    def _let_go(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """One use of a prefix by a host ends."""
        prefix, key = self._used(host, request)
        self._uses[host, prefix, key] -= 1
        if not self._uses[host, prefix, key]:
            del self._uses[host, prefix, key]
            self._unpin(prefix, key)
        return {}, []

    def _attend(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """The partial of queries over rows of a prefix that their contexts begin with."""
        prefix, key = self._used(host, request)
        rest = iter([np.array(array) for array in arrays])
        kind = torch.bfloat16 if request["bf16"] else torch.float16
        q = torch.from_numpy(next(rest)).view(kind)
        tensors: dict[str, Any] = {name: torch.from_numpy(next(rest)) for name in request["tensors"]}
        rows = request["rows"]
        partial = self._caches[key].attend_prefix(
            prefix,
            layer=request["layer"],
            q=q,
            lengths=[int(length) for length in request["lengths"]],
            seen_rows=int(request["seen"]),
            rows=None if rows is None else [(int(begin), int(end)) for begin, end in rows],
            **request["options"],
            **tensors,
        )
        return {}, partial_arrays(partial)

    def _read(self, host: int, request: dict[str, Any], arrays: list[Array]) -> Answer:
        """A layer's first rows of a prefix."""
        prefix, key = self._used(host, request)
        rows = self._caches[key].read_prefix(prefix, layer=request["layer"], rows=int(request["rows"]))
        present, own = rows_arrays(rows.areas)
        return {"areas": present}, own

    # Below: parts of the above

    def _cache(self, request: dict[str, Any], tables: list[Array]) -> tuple[bytes, KVCache]:
        """The cache of rows of a kind, which is made where there is none."""
        key = _key(request, tables)
        cache = self._caches.pop(key, None)
        if cache is None:
            given = zip(request["tables"], tables, strict=True)
            options: dict[str, Any] = {name: torch.from_numpy(np.array(table)) for name, table in given}
            options |= form_arguments(request["form"]) | {name: request[name] for name in _SHAPE}
            cache = self._with_room(None, lambda: self._device.kv_cache(tenant=self.aperture, **options))
        self._caches[key] = cache
        return key, cache

    def _with_room(self, own: KVCache | None, make: Callable[[], Made]) -> Made:
        """What `make` returns; where a cache finds no memory even without its own prefixes, those of others
        go, of the cache that was not used for longest first.

        Raises
        ------
        OutOfMemoryError : when all that is left is in use.
        """
        while True:
            try:
                return make()
            except OutOfMemoryError:
                if not any(cache.reclaim_prefix() for cache in self._caches.values() if cache is not own):
                    raise

    def _begun_by(self, host: int, number: int) -> tuple[bytes, Sequence]:
        if (host, number) not in self._begun:
            raise ArgumentError(f"sequence {number} was not begun by this host")
        return self._begun[host, number]

    def _prefix_of(self, request: dict[str, Any]) -> tuple[Prefix, bytes]:
        named = SharedPrefix.of(request)
        prefix = Prefix(int(named.address), int(named.generation), int(named.rows))
        return prefix, bytes.fromhex(named.cache)

    def _used(self, host: int, request: dict[str, Any]) -> tuple[Prefix, bytes]:
        """A prefix that a host uses.

        Raises
        ------
        StalePrefixError : for one that it does not.
        """
        prefix, key = self._prefix_of(request)
        if not self._uses.get((host, prefix, key)):
            raise _stale(prefix)
        return prefix, key

    def _unpin(self, prefix: Prefix, key: bytes) -> None:
        if not any(use[1:] == (prefix, key) for use in self._uses):
            self._caches[key].pin_prefix(prefix, False)


def _key(request: dict[str, Any], tables: Many[Array]) -> bytes:
    """What tells rows of one kind from others: shape and format, and what their heads have in common."""
    shape = [request[name] for name in _SHAPE]
    said = repr((shape, form_arguments(request["form"]), request["tables"]))
    digest = blake2b(said.encode(), digest_size=32)
    for table in tables:
        digest.update(table.tobytes())
    return digest.digest()


def _named(prefix: Prefix, key: bytes) -> dict[str, Any]:
    return SharedPrefix(prefix.address, prefix.generation, prefix.rows, key.hex()).fields


def _stale(prefix: Prefix) -> StalePrefixError:
    return StalePrefixError(
        f"shared prefix {prefix.generation} is no longer there for this host: it was reclaimed for lack of "
        "memory, or this host does not use it any more; find it again, or publish it"
    )
