"""A trace from nothing: Poisson arrivals, lengths with a spread, and prefixes that requests share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import count

import numpy as np

from nearkv.arguments import whole_number
from nearkv.errors import ArgumentError

from .trace import BLOCK_TOKENS, MAX_TOKENS, Request, Trace


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What the requests are like.

    Parameters
    ----------
    requests : how many.
    rate : of arrivals, per second; times between them are exponential.
    prompt : mean tokens of a prompt, the shared ones not included.
    output : mean tokens of an answer.
    spread : of both lengths: 0 for all the same, 1 for exponential ones.
    prefixes : how many different beginnings there are; each request has one of them by chance, if any.
    prefix : tokens of each.
    block_tokens : tokens of a block; prefixes are shared by whole ones.
    seed : of the random numbers.

    Raises
    ------
    ArgumentError : what was given and what is allowed.
    """

    requests: int = 500
    rate: float = 1.0
    prompt: int = 4096
    output: int = 256
    spread: float = 1.0
    prefixes: int = 8
    prefix: int = 2048
    block_tokens: int = BLOCK_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output", "block_tokens"):
            whole_number(name, getattr(self, name), 1, MAX_TOKENS)
        for name in ("prefixes", "prefix", "seed"):
            whole_number(name, getattr(self, name), 0, MAX_TOKENS)
        if not 0 < self.rate < float("inf"):
            raise ArgumentError(f"rate={self.rate!r}: must be above 0 requests per second")
        if not 0 <= self.spread <= 1:
            raise ArgumentError(f"spread={self.spread!r}: must be 0 (equal lengths) to 1 (exponential ones)")

    def trace(self) -> Trace:
        """The requests; the same seed gives the same ones."""
        random = np.random.default_rng(self.seed)
        arrivals = random.exponential(1 / self.rate, self.requests).cumsum()
        prompts = self._lengths(random, self.prompt)
        outputs = self._lengths(random, self.output)
        shared = self.prefix if self.prefixes else 0
        which = random.integers(max(1, self.prefixes), size=self.requests)
        beginning = shared // self.block_tokens
        names = count(self.prefixes * beginning)
        requests = []
        for at, own, output, chosen in zip(arrivals, prompts, outputs, which, strict=True):
            prompt = shared + int(own)
            blocks = [*range(int(chosen) * beginning, (int(chosen) + 1) * beginning)]
            blocks += [next(names) for _ in range(prompt // self.block_tokens - beginning)]
            requests.append(
                Request(
                    arrival_s=float(at - arrivals[0]), prompt=prompt, output=int(output), blocks=tuple(blocks)
                )
            )
        told = ", ".join(
            f"{name} {value:g}" for name, value in asdict(self).items() if name != "block_tokens"
        )
        return Trace(name=f"synthetic ({told})", requests=requests, block_tokens=self.block_tokens)

    def _lengths(self, random: np.random.Generator, mean: int) -> np.ndarray:
        """Lengths of at least 1: what is sure, and an exponential rest."""
        drawn = mean * (1 - self.spread) + random.exponential(mean * self.spread, self.requests)
        return np.clip(np.rint(drawn), 1, MAX_TOKENS // 4).astype(int)
