"""Continuous batching: requests that come and go between steps, each with as many rows as it has.

batcher = nearkv.hf.Batcher(model, nearkv.hf.attach(model, device))
first = batcher.add(ids, max_new_tokens=20)
batcher.step()
second = batcher.add(other_ids)
tokens = batcher.run()  # {first: [...], second: [...]}
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .attach import cache_argument
from .cache import NearKVCache

Choose = Callable[[Tensor], Tensor]
"""From logits [batch, vocabulary] to tokens [batch]."""


@dataclass
class _Request:
    number: int
    cache: NearKVCache
    waiting: Tensor
    """Tokens of the prompt that the model has not read, [rows]."""
    left: int
    tokens: list[int] = field(default_factory=list)


class Batcher:
    """Decodes requests together on one model, whose rows live wherever `cache` says.

    A step takes a piece of one waiting prompt in, and then brings every request whose prompt is in one token
    further, with one call of the model and, on a device, one doorbell for each layer. Nothing is padded.

    Parameters
    ----------
    model : from `nearkv.hf.attach` or `attach_store`.
    cache : what that returned; each request has a cache like it.
    prompt_rows : tokens of a prompt that a step takes in at most.
    max_batch : requests that decode together at most; others wait for their turn.
    choose : how a token comes of logits; the likeliest if not given.

    Raises
    ------
    ValueError : for limits below one.
    """

    def __init__(
        self,
        model: Any,
        cache: NearKVCache,
        *,
        prompt_rows: int = 128,
        max_batch: int = 64,
        choose: Choose = lambda logits: logits.argmax(-1),
    ) -> None:
        for name, given in (("prompt_rows", prompt_rows), ("max_batch", max_batch)):
            if given < 1:
                raise ValueError(f"{name} must be at least 1, not {given}")
        self._model = model
        self._cache = cache
        self._prompt_rows = prompt_rows
        self._max_batch = max_batch
        self._choose = choose
        self._stop: set[int] = _stop_tokens(model)
        self._open: list[_Request] = []
        self._done: dict[int, list[int]] = {}
        self._count = 0

    def add(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int = 20,
        after: NearKVCache | None = None,
    ) -> int:
        """A new request; returns its number.

        Parameters
        ----------
        ids : the prompt's tokens, int64 [rows] or [1, rows], at least one.
        max_new_tokens : tokens at most; a stop token of the model ends the request before.
        after : a cache with the rows that come before the prompt, of one sequence. It stays as it is: the
            request goes on from a fork of it.

        Raises
        ------
        ValueError : for an empty prompt, several prompts, or no tokens to make.
        """
        prompt = ids.reshape(-1) if ids.dim() == 1 or ids.shape[0] == 1 else ids
        if prompt.dim() != 1 or not prompt.numel():
            raise ValueError(f"ids must be one prompt of at least one token, not {list(ids.shape)}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if after is not None and after.store.batch > 1:
            raise ValueError(f"after has {after.store.batch} sequences; a request goes on from one")
        cache = self._cache.fresh() if after is None else after.fork()
        self._open.append(_Request(self._count, cache, prompt, max_new_tokens))
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> None:
        """End a request as it is; its rows are freed.

        Raises
        ------
        KeyError : when no request of that number is open.
        """
        found = next((request for request in self._open if request.number == number), None)
        if found is None:
            raise KeyError(f"request {number} is not open; there are {[r.number for r in self._open]}")
        self._close(found)

    @property
    def open(self) -> Collection[int]:
        """Numbers of the requests that are not done."""
        return [request.number for request in self._open]

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """One step: the tokens that came of it, by request."""
        started = [request for request in self._open if request.waiting.numel()]
        running = [request for request in self._open if not request.waiting.numel()][: self._max_batch]
        came: dict[int, int] = {}
        if running:
            logits = self._decode(running)
            came |= self._take(running, logits)
        if started:
            logits = self._read(started[0])
            if not started[0].waiting.numel():
                came |= self._take(started[:1], logits)
        return came

    def run(self) -> dict[int, list[int]]:
        """Steps until nothing is open; all tokens of every request since the last `run`."""
        while self._open:
            self.step()
        done, self._done = self._done, {}
        return done

    def _read(self, request: _Request) -> Tensor:
        """Take a piece of a prompt in; logits [1, vocabulary] after it."""
        piece, request.waiting = request.waiting.tensor_split([self._prompt_rows])
        first = request.cache.get_seq_length()
        positions = torch.arange(first, first + len(piece), device=piece.device)
        return self._call(piece[None], positions[None], request.cache)

    def _decode(self, running: list[_Request]) -> Tensor:
        """Logits [batch, vocabulary] after each request's last token."""
        stores = [request.cache.store for request in running]
        rows = [request.cache.get_seq_length() for request in running]
        device = self._model.device
        tokens = torch.tensor([[request.tokens[-1]] for request in running], device=device)
        positions = torch.tensor(rows, device=device)[:, None]
        joint = NearKVCache(type(stores[0]).together(stores), self._cache.shape)
        return self._call(tokens, positions, joint)

    def _call(self, tokens: Tensor, positions: Tensor, cache: NearKVCache) -> Tensor:
        named = {cache_argument(): cache}
        out = self._model(tokens, position_ids=positions, use_cache=True, logits_to_keep=1, **named)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _take(self, requests: list[_Request], logits: Tensor) -> dict[int, int]:
        came = {}
        for request, token in zip(requests, self._choose(logits).tolist(), strict=True):
            request.tokens.append(token)
            request.left -= 1
            came[request.number] = token
            if request.left == 0 or token in self._stop:
                self._close(request)
        return came

    def _close(self, request: _Request) -> None:
        request.cache.reset()
        self._open.remove(request)
        self._done[request.number] = request.tokens


def _stop_tokens(model: Any) -> set[int]:
    given = model.generation_config.eos_token_id
    return set() if given is None else set(given if isinstance(given, list) else [given])
