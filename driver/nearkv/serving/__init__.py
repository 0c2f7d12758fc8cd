"""Serving: a request trace replayed against GPUs and devices, on the step times of `nearkv.estimate`."""

from __future__ import annotations

from nearkv.estimate import Setup

from .engine import Engine, Report
from .machine import Machine, Serving, machine, systems
from .result import Outcome, Result
from .synthetic import Synthetic
from .trace import Request, Trace, read

__all__ = [
    "Engine",
    "Machine",
    "Outcome",
    "Request",
    "Result",
    "Serving",
    "Synthetic",
    "Trace",
    "machine",
    "read",
    "simulate",
    "systems",
]


def simulate(
    setup: Setup,
    trace: Trace,
    system: str,
    serving: Serving | None = None,
    report: Report = lambda done, total: None,
) -> Result:
    """Replay a trace against one system.

    Parameters
    ----------
    setup : model, GPUs and devices; `batch` is how many sequences run together at most, `context` the longest
        request, prompt and answer, that is accepted.
    trace : the requests.
    system : one of `systems(setup)`.
    serving : how the engine serves; `Serving()` if not given.
    report : told how many requests are answered or refused, and of how many.

    Raises
    ------
    ArgumentError : no such system, no room for the weights, or values that do not go together.

    Examples
    --------
    >>> from nearkv.estimate import Setup
    >>> from nearkv.serving import Synthetic, simulate
    >>> setup = Setup(model="llama-3.1-8b", context=131072, batch=256)
    >>> result = simulate(setup, Synthetic(requests=20, seed=1).trace(), "gpu+controller")
    >>> result.summary()["answered"]
    20
    """
    serving = serving or Serving()
    return Engine(machine(setup, system, serving), trace, serving, report).run()
