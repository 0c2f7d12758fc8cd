"""What came of a trace: every request's times, what was where over time, and sums."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .trace import Trace

if TYPE_CHECKING:
    from .machine import Machine
    from .sequence import Running

Floats = npt.NDArray[np.float64]


_COLUMNS = ("began", "ended", "steps", "batch", "prompt", "waiting", "read", "sent")


def log_table(lines: array[float], tiers: int) -> dict[str, Floats]:
    """Columns of an engine's log by name.

    A line is a run of like steps: when it `began` and `ended`, how many `steps` of which `batch`, tokens of
    prompts, requests that are `waiting`, bytes `read` and `sent` over the devices' links; and for every tier,
    `used0`, `kept0` and so on, rows that running requests have and rows of kept blocks.
    """
    names = [*_COLUMNS, *(f"{what}{at}" for at in range(tiers) for what in ("used", "kept"))]
    values = np.frombuffer(lines, dtype=np.float64).reshape(-1, len(names)).T
    return dict(zip(names, values, strict=True))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one request.

    Parameters
    ----------
    number : its place in the trace.
    refused : why it can never be answered; nothing if it was answered.
    queued_s : from its arrival until it was admitted.
    first_token_s : from its arrival to its first token (TTFT).
    token_s : mean time of a token after the first (TPOT); 0 where there is one token.
    finished_s : from its arrival to its last token.
    hits : tokens of its prompt that were found, by tier.
    preemptions : how often it had to begin again.
    repeated : tokens that it worked on again after that.
    """

    number: int
    refused: str
    queued_s: float
    first_token_s: float
    token_s: float
    finished_s: float
    hits: tuple[int, ...]
    preemptions: int
    repeated: int

    @classmethod
    def of(cls, one: Running, refused: str) -> Outcome:
        """Of a request that has its last token, or is refused."""
        came, more = one.request.arrival_s, one.request.output - 1
        return cls(
            number=one.number,
            refused=refused,
            queued_s=0.0 if refused else one.admitted_s - came,
            first_token_s=0.0 if refused else one.first_s - came,
            token_s=(one.last_s - one.first_s) / more if more and not refused else 0.0,
            finished_s=0.0 if refused else one.last_s - came,
            hits=tuple(one.hits),
            preemptions=one.preemptions,
            repeated=one.repeated,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """A system's answer to a trace.

    Parameters
    ----------
    machine : the system.
    trace : the requests.
    outcomes : of every request, in the trace's order.
    log : what the engine did, a line for every run of like steps; see `log_table`.
    gaps : pairs: seconds between two tokens, and how many sequences had them.
    loaded : bytes of prefixes brought to where they are used, by tier that they came from.
    moved : bytes of prefixes that made room, by tier that they went to.
    """

    machine: Machine
    trace: Trace
    outcomes: Sequence[Outcome]
    log: dict[str, Floats]
    gaps: array[float]
    loaded: Sequence[float]
    moved: Sequence[float]

    @property
    def system(self) -> str:
        """Its name."""
        return self.machine.system

    @cached_property
    def answered(self) -> list[Outcome]:
        """Requests that were."""
        return [one for one in self.outcomes if not one.refused]

    @cached_property
    def first_token_s(self) -> Floats:
        """Time to first token of every request that was answered."""
        return np.array([one.first_token_s for one in self.answered])

    @cached_property
    def token_s(self) -> Floats:
        """Time per output token of every request that was answered with more than one."""
        several = [one for one in self.answered if self.trace.requests[one.number].output > 1]
        return np.array([one.token_s for one in several])

    def summary(self) -> dict[str, Any]:
        """Sums as plain values."""
        log, places = self.log, self.machine.places
        requests = [self.trace.requests[one.number] for one in self.answered]
        prompts = sum(one.prompt for one in requests)
        outputs = sum(one.output for one in requests)
        seconds = float(log["ended"][-1]) if len(log["ended"]) else 0.0
        lasted = log["ended"] - log["began"]
        hits = {
            place.name: sum(one.hits[at] for one in self.answered) / max(1, prompts)
            for at, place in enumerate(places)
        }
        return {
            "system": self.system,
            "requests": len(self.outcomes),
            "answered": len(self.answered),
            "refused": len(self.outcomes) - len(self.answered),
            "seconds": seconds,
            "requests_per_s": len(self.answered) / seconds if seconds else 0.0,
            "output_tokens": outputs,
            "output_tokens_per_s": outputs / seconds if seconds else 0.0,
            "prompt_tokens": prompts,
            "time_to_first_token_s": quantiles(self.first_token_s),
            "queued_s": quantiles(np.array([one.queued_s for one in self.answered])),
            "time_per_output_token_ms": quantiles(self.token_s * 1e3),
            "time_between_tokens_ms": self._gap_quantiles(),
            "hit_share": {**hits, "all": sum(hits.values())},
            "preemptions": sum(one.preemptions for one in self.answered),
            "repeated_tokens": sum(one.repeated for one in self.answered),
            "steps": int(log["steps"].sum()),
            "batch": {
                "mean": mean_over(lasted, log["batch"]),
                "max": float(log["batch"].max(initial=0.0)),
            },
            "kv_share_used": {
                place.name: {
                    "mean": mean_over(lasted, log[f"used{at}"]) / max(1, place.rows),
                    "max": float(log[f"used{at}"].max(initial=0.0)) / max(1, place.rows),
                }
                for at, place in enumerate(places)
            },
            "link_read_bytes": self.link_read_bytes,
            "link_written_bytes": self.link_written_bytes,
            "loaded_bytes": {place.name: self.loaded[at] for at, place in enumerate(places)},
            "moved_down_bytes": {place.name: self.moved[at] for at, place in enumerate(places)},
        }

    @property
    def link_read_bytes(self) -> float:
        """Over the devices' links to the GPUs."""
        return float(self.log["read"].sum())

    @property
    def link_written_bytes(self) -> float:
        """Over the devices' links from the GPUs."""
        return float(self.log["sent"].sum())

    def _gap_quantiles(self) -> dict[str, float]:
        pairs = np.frombuffer(self.gaps, dtype=np.float64).reshape(-1, 2)
        order = pairs[:, 0].argsort()
        seconds, counts = pairs[order, 0], pairs[order, 1].cumsum()
        if not len(seconds):
            return quantiles(seconds)
        at = {
            name: min(len(seconds) - 1, int(counts.searchsorted(share * counts[-1])))
            for name, share in _SHARES
        }
        found = {name: float(seconds[place]) * 1e3 for name, place in at.items()}
        return {"mean": float((pairs[:, 0] * pairs[:, 1]).sum() / counts[-1]) * 1e3, **found}

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for every request."""
        rows = []
        for one in self.outcomes:
            request = self.trace.requests[one.number]
            found = {place.name: one.hits[at] for at, place in enumerate(self.machine.places)}
            rows.append(
                {
                    "system": self.system,
                    "request": one.number,
                    "arrival_s": request.arrival_s,
                    "prompt_tokens": request.prompt,
                    "output_tokens": request.output,
                    "refused": one.refused,
                    "queued_s": one.queued_s,
                    "time_to_first_token_s": one.first_token_s,
                    "time_per_output_token_s": one.token_s,
                    "finished_s": one.finished_s,
                    **{f"hit_tokens_{name}": found.get(name, 0) for name in ("gpu", "device", "host", "ssd")},
                    "preemptions": one.preemptions,
                    "repeated_tokens": one.repeated,
                }
            )
        return rows


_SHARES = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))


def quantiles(values: Floats) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile; zeros where there is nothing."""
    if not len(values):
        return {"mean": 0.0, **{name: 0.0 for name, _ in _SHARES}}
    found = {name: float(np.quantile(values, share)) for name, share in _SHARES}
    return {"mean": float(values.mean()), **found}


def mean_over(lasted: Floats, values: Floats) -> float:
    """Mean over time."""
    whole = float(lasted.sum())
    return float((lasted * values).sum()) / whole if whole else 0.0
