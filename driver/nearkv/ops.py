"""Decode attention as a torch operator, for code that cannot carry Python objects.

`torch.ops.nearkv.decode_attn` is a function of its arguments: rows below a sequence's `lengths` do not change
while it is in use, so a compiler may move or repeat it. A cache is named by a number, a sequence by its slot.

    session = nearkv.ops.session(kv)
    slots = torch.tensor([s.slot for s in sequences])
    out, lse = torch.ops.nearkv.decode_attn(q, session, layer, slots, lengths, kv.value_dim, scale)
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .cache import KVCache
from .errors import ArgumentError, ShapeError, UnknownHandleError

_sessions: WeakValueDictionary[int, KVCache] = WeakValueDictionary()
_numbers = count(1)


def session(cache: KVCache) -> int:
    """The number that stands for a cache in operators; the cache is not kept alive by it."""
    for number, known in _sessions.items():
        if known is cache:
            return number
    number = next(_numbers)
    _sessions[number] = cache
    return number


@torch.library.custom_op("nearkv::decode_attn", mutates_args=())
def decode_attn(
    q: Tensor,
    session: int,
    layer: int,
    sequences: Tensor,
    lengths: Tensor,
    value_dim: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch of sequences over their first rows in a layer, on the device that holds them.

    Parameters
    ----------
    q : [batch, q_heads, head_dim] of the cache's type, on any device of torch; it is all that is copied.
    session : from `nearkv.ops.session`.
    layer : which layer.
    sequences : int64 [batch], slots.
    lengths : int64 [batch], rows that each query sees: the first ones, at most those that are committed.
    value_dim : of the cache; an argument so that shapes are known without a device.
    scale : multiplies q·k before the softmax.
    window : rows that a query sees at most, the last of them its own; 0 for all.
    sinks : float32 [q_heads], or None.
    softcap : as in `KVCache.attend`; 0 for none.

    Returns
    -------
    float32 [batch, q_heads, value_dim] and natural-base log-sum-exp float32 [batch, q_heads], where q lies.

    Raises
    ------
    What `KVCache.attend` raises; UnknownHandleError for a session or slot that does not exist.
    """
    cache = _sessions.get(session)
    if cache is None:
        raise UnknownHandleError(
            f"session {session} stands for no cache; nearkv.ops.session(cache) gives one"
        )
    if value_dim != cache.value_dim:
        raise ArgumentError(f"value_dim={value_dim}: the cache has {cache.value_dim}")
    if window < 0:
        raise ArgumentError(f"window={window}: must be 0 (none) or more")
    batch = (q.shape[0],)
    if tuple(sequences.shape) != batch or tuple(lengths.shape) != batch:
        raise ShapeError(
            f"sequences {list(sequences.shape)} and lengths {list(lengths.shape)} must have q's batch, "
            f"{list(batch)}"
        )
    ends = [int(length) for length in lengths.tolist()]
    return cache.attend(
        [cache.sequence_at(int(slot)) for slot in sequences.tolist()],
        layer=layer,
        q=q,
        scale=scale,
        rows=[(max(end - window, 0) if window else 0, end) for end in ends],
        sinks=sinks,
        softcap=softcap or None,
        return_lse=True,
    )


@decode_attn.register_fake
def _(
    q: Tensor,
    session: int,
    layer: int,
    sequences: Tensor,
    lengths: Tensor,
    value_dim: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    queries = (q.shape[0], q.shape[1])
    return q.new_empty((*queries, value_dim), dtype=torch.float32), q.new_empty(queries, dtype=torch.float32)
