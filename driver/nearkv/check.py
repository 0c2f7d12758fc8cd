"""Holding device results against the contract: every bit, from the host's own copy of the rows."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from .cache import KVCache
from .errors import ArgumentError, MismatchError, NearkvError
from .reference import Partial
from .replay import Case, bits_of, save
from .sequences import Sequence

Contexts = Many[tuple[torch.Tensor, torch.Tensor]]
"""The host's own (k, v) of each sequence: [rows, kv_heads, dim]."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to.

    Members
    -------
    equal : whether all bits are those of the contract.
    unequal, lanes : lanes that differ, of how many.
    replay : the file that holds the call, when bits differ.
    """

    equal: bool
    unequal: int
    lanes: int
    replay: Path | None = None

    @property
    def command(self) -> str | None:
        """The command that runs the call again."""
        return None if self.replay is None else f"nearkv replay {shlex.quote(str(self.replay))}"

    def require(self) -> None:
        """Raise a MismatchError, which names the command that replays the call, unless all bits are equal."""
        if not self.equal:
            how = "" if self.command is None else f"; see: {self.command}"
            raise MismatchError(f"{self.unequal} of {self.lanes} lanes differ from the contract{how}")


@dataclass
class CheckTally:
    """What the comparison of device and reference has come to, over many calls."""

    calls: int = 0
    equal: int = 0
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    """For each unequal call, the command that replays its first unequal query row; rows that a query sees
    with gaps, and narrow latents, have none."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as time of checking."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def case_of(
    cache: KVCache,
    *,
    q: torch.Tensor,
    contexts: Contexts,
    scale: float,
    ranges: Many[tuple[int, int]] | None = None,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    scales: Many[tuple[torch.Tensor | None, torch.Tensor | None]] | None = None,
    heads: dict[str, torch.Tensor] | None = None,
) -> Case:
    """A call on a cache as a `Case`.

    Parameters
    ----------
    cache : on which it ran.
    q : [batch, q_heads, head_dim].
    contexts : the host's own rows of each sequence: values, or codes of the cache's format.
    scale, sinks, out_dtype, softcap : as `KVCache.attend` was given them.
    ranges : (begin, end) of the rows that are seen; all when not given.
    scales : with codes, K's and V's scale codes [rows, kv_heads, blocks] of each sequence, or None.
    heads : with codes, k_scale, v_scale, k_lut and v_lut, those that there are.
    """
    lengths = tuple(int(k.shape[0]) for k, _ in contexts)
    if len(lengths) != q.shape[0]:
        raise ArgumentError(f"q is of {q.shape[0]} sequences, contexts are {len(lengths)}")
    pad = torch.nn.functional.pad

    def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([pad(x.cpu(), (0, 0, 0, 0, 0, max(lengths) - x.shape[0])) for x in parts])

    k, v = (stacked([context[part] for context in contexts]) for part in (0, 1))
    extras = {name: tensor.cpu() for name, tensor in (heads or {}).items()}
    for part, name in enumerate(("k_scales", "v_scales")):
        own = [pair[part] for pair in scales or () if pair[part] is not None]
        if own:
            extras[name] = stacked([one for one in own if one is not None])
    return Case(
        q=q.detach().cpu().contiguous(),
        k=k.detach(),
        v=v.detach(),
        lengths=lengths,
        ranges=tuple((0, length) for length in lengths) if ranges is None else tuple(ranges),
        scale=float(scale),
        sinks=None if sinks is None else sinks.detach().cpu().to(torch.float32),
        out_dtype=out_dtype,
        page_rows=cache.page_rows,
        device=cache.device_kind,
        config=cache.device_config,
        form=cache.format if k.dtype in (torch.uint8, torch.int16) else None,
        extras=extras,
        softcap=softcap,
    )


def attention(
    cache: KVCache,
    sequences: Many[Sequence],
    *,
    layer: int,
    case: Case,
    result: torch.Tensor,
    directory: Path | str = "replays",
) -> Verdict:
    """Hold a result of `KVCache.attend` against the contract.

    Parameters
    ----------
    cache, sequences, layer : where it came from; on unequal bits the device is asked again, for the partial.
    case : the call, from `case_of`.
    result : [batch, q_heads, value_dim], what the device answered.
    directory : where a replay file is written when bits differ.
    """
    expected = case.reference()
    assert isinstance(expected, torch.Tensor)
    unequal = int((bits_of(result.cpu()) != bits_of(expected)).sum())
    if not unequal:
        return Verdict(True, 0, expected.numel())
    partial: Partial | None
    try:
        partial = cache.attend(
            sequences,
            layer=layer,
            q=case.q,
            scale=case.scale,
            rows=case.ranges,
            sinks=case.sinks,
            softcap=case.softcap,
            partial=True,
        )
    except NearkvError:
        partial = None  # The device fails by now; the two results are what there is to keep.
    return Verdict(False, unequal, expected.numel(), record(case, result, expected, partial, directory))


def record(
    case: Case,
    device: torch.Tensor,
    reference: torch.Tensor,
    partial: Partial | None = None,
    directory: Path | str = "replays",
) -> Path:
    """Write a replay file of an unequal call into a directory, under a name of its own; returns its path."""
    names = (Path(directory) / f"unequal-{number}.npz" for number in count(1))
    path = next(name for name in names if not name.exists())
    save(path, case, device=device.cpu(), reference=reference.cpu(), partial=partial)
    return path
